"""Claude Code: hook `PreToolUse`, as version 2.1 documents it and version 2.1.326 does it.

The answer is a JSON object on standard output. `permissionDecision: "allow"` with `updatedInput` calls the tool with another input and asks
nobody, "ask" shows the new input first, "deny" gives the reason to the model. No output leaves the call to the program's own rules. Exit
code 2 refuses with the text of standard error. The program goes on after any other exit code, a signal, or a timeout, unless the hook's
entry has `onFailure: "block"` (since 2.1.295); see `settings.claude`.
"""

from __future__ import annotations

from agent_sandbox._fast.encoding import as_json
from agent_sandbox._fast.values import TYPE_CHECKING
from agent_sandbox.coding_agents.contracts.base import Contract
from agent_sandbox.coding_agents.decide import SERVER, FileTool, HarmlessTool, NetworkTool, ShellTool, ToolKind
from agent_sandbox.coding_agents.tool_calls import AskPerson, HookReply, Leave, Refuse, Rewrite

if TYPE_CHECKING:
    from agent_sandbox.coding_agents.tool_calls import AgentCall, Answer

_EVENT = "PreToolUse"
_OURS = f"mcp__{SERVER}__"
_WRITE = "cat > {path} <<'END'"
_TOOLS: dict[str, ToolKind] = {
    "Bash": ShellTool(),
    "Monitor": ShellTool(),  # with a WebSocket instead of a command it is refused, for want of the command
    "Read": FileTool("cat -- {path}", "file_path"),
    "Write": FileTool(_WRITE, "file_path"),
    "Edit": FileTool("python3 - or sed -i on {path}", "file_path"),
    "MultiEdit": FileTool("python3 - or sed -i on {path}", "file_path"),
    "NotebookRead": FileTool("cat -- {path}", "notebook_path"),
    "NotebookEdit": FileTool("python3 - on {path}", "notebook_path"),
    "Glob": FileTool("find {path} -name PATTERN", "path"),
    "Grep": FileTool("grep -rn PATTERN {path}", "path"),
    "LS": FileTool("ls -la {path}", "path"),
    "WebFetch": NetworkTool("curl, for hosts that the sandbox may reach"),
    **dict.fromkeys(("Agent", "Task", "TaskCreate", "TaskGet", "TaskUpdate", "TaskList", "TaskOutput", "TaskStop"), HarmlessTool()),
    **dict.fromkeys(("BashOutput", "KillShell", "KillBash", "AgentOutputTool"), HarmlessTool()),
    **dict.fromkeys(("TodoWrite", "AskUserQuestion", "EnterPlanMode", "ExitPlanMode", "ToolSearch", "WebSearch"), HarmlessTool()),
    **dict.fromkeys(("StructuredOutput", "EndConversation", "ReportFindings", "ListAgents", "ScheduleWakeup"), HarmlessTool()),
}


def _rewrites() -> bool:
    return True  # every version with hooks does


def _is_ours(call: AgentCall) -> bool:
    """Whether a tool is of our MCP server. The name of another server may begin like ours; no tool of ours has two underscores."""
    return call.tool.startswith(_OURS) and "__" not in call.tool.removeprefix(_OURS)


def _reply(answer: Answer) -> HookReply:
    """Return the output for an answer."""
    match answer:
        case Rewrite(changed):
            return _decision("allow", "runs in the sandbox", updatedInput=changed)
        case AskPerson(changed, why):
            return _decision("ask", why, updatedInput=changed)
        case Refuse(why):
            return _decision("deny", why)
        case Leave():
            return HookReply()


def _decision(decision: str, why: str, **more: object) -> HookReply:
    facts = {"hookEventName": _EVENT, "permissionDecision": decision, "permissionDecisionReason": why, **more}
    return HookReply(as_json({"hookSpecificOutput": facts}))


# The program names the directory of the session in this variable; `cwd` in its events follows the commands of the agent.
CLAUDE = Contract(_EVENT, _TOOLS, "CLAUDE_PROJECT_DIR", _is_ours, _reply, _rewrites)
