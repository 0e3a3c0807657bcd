"""Gemini CLI: hook `BeforeTool`, as version 0.61 does it.

The answer is a JSON object with `decision` and `reason`; `hookSpecificOutput.tool_input` replaces the input of the tool. Its documentation
says that the two are merged; the program replaces, so the whole input is given. The program's own rules see the new input. Exit code 2
refuses with the text of standard error, and without a text it does not. The program goes on after exit code 1, a signal or a timeout; see
`settings.gemini`.
"""

from __future__ import annotations

from agent_sandbox._fast.encoding import as_json
from agent_sandbox._fast.values import TYPE_CHECKING
from agent_sandbox.coding_agents.contracts.base import Contract
from agent_sandbox.coding_agents.decide import SERVER, FileTool, HarmlessTool, NetworkTool, ShellTool, ToolKind
from agent_sandbox.coding_agents.tool_calls import AskPerson, HookReply, Leave, Refuse, Rewrite

if TYPE_CHECKING:
    from agent_sandbox.coding_agents.tool_calls import AgentCall, Answer

_EVENT = "BeforeTool"
_TOOLS: dict[str, ToolKind] = {
    "run_shell_command": ShellTool(),
    "read_file": FileTool("cat -- {path}", "file_path"),
    "read_many_files": FileTool("cat -- FILE…"),
    "write_file": FileTool("cat > {path} <<'END'", "file_path"),
    "replace": FileTool("python3 - or sed -i on {path}", "file_path"),
    "list_directory": FileTool("ls -la {path}", "dir_path"),
    "glob": FileTool("find {path} -name PATTERN", "dir_path"),
    "grep_search": FileTool("grep -rn PATTERN {path}", "dir_path"),
    "search_file_content": FileTool("grep -rn PATTERN {path}", "path"),
    "save_memory": FileTool("a file of the project"),
    "web_fetch": NetworkTool("curl, for hosts that the sandbox may reach"),
    **dict.fromkeys(("write_todos", "ask_user", "enter_plan_mode", "exit_plan_mode", "update_topic", "complete_task"), HarmlessTool()),
    **dict.fromkeys(("google_web_search", "get_internal_docs", "invoke_agent"), HarmlessTool()),
}


def _rewrites() -> bool:
    return True  # every version with hooks does


def _is_ours(call: AgentCall) -> bool:
    """Whether a tool is of our MCP server, whose name the program gives beside the tool's."""
    return call.server == SERVER and call.tool.startswith(f"mcp_{SERVER}_")


def _reply(answer: Answer) -> HookReply:
    """Return the output for an answer."""
    match answer:
        case Rewrite(changed):
            return _decision("allow", hookSpecificOutput={"hookEventName": _EVENT, "tool_input": changed})
        case AskPerson(changed, why):
            return _decision("ask", systemMessage=why, hookSpecificOutput={"hookEventName": _EVENT, "tool_input": changed})
        case Refuse(why):
            return _decision("deny", reason=why)
        case Leave():
            return HookReply()


def _decision(decision: str, **more: object) -> HookReply:
    return HookReply(as_json({"decision": decision, **more}))


GEMINI = Contract(_EVENT, _TOOLS, "GEMINI_PROJECT_DIR", _is_ours, _reply, _rewrites)
