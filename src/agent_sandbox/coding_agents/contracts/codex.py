"""Codex: hook `PreToolUse`, as version 0.131 and later do it.

The answer is a JSON object with no unknown members. `updatedInput` counts only with `permissionDecision: "allow"`, and it must not change
anything of the input but the command. There is no "ask". Versions before 0.131 do not know "allow": they report a failed hook and run the
original command. For them the command is refused, and the reason holds the line to run instead. An answer of exit code 2 needs a text on
standard error. After any other exit code, a signal or a timeout the program goes on; see `settings.codex`.
"""

from __future__ import annotations

import os

from agent_sandbox._fast.encoding import as_json
from agent_sandbox._fast.values import TYPE_CHECKING
from agent_sandbox.coding_agents.contracts.base import Contract
from agent_sandbox.coding_agents.decide import SERVER, FileTool, HarmlessTool, NetworkTool, ShellTool, ToolKind
from agent_sandbox.coding_agents.tool_calls import AskPerson, HookReply, Leave, Refuse, Rewrite

if TYPE_CHECKING:
    from agent_sandbox.coding_agents.tool_calls import AgentCall, Answer

_EVENT = "PreToolUse"
_OURS = f"mcp__{SERVER}__"
FIRST_THAT_REWRITES = (0, 131)
_PARENTS = 8  # processes between the hook and the program: shells, and wrappers of people
_PATCH = FileTool("cat > FILE <<'END', or sed -i on a file")
_TOOLS: dict[str, ToolKind] = {
    "Bash": ShellTool(),
    "apply_patch": _PATCH,
    "Edit": _PATCH,
    "Write": _PATCH,
    "view_image": FileTool("file -- {path}", "path"),
    "web_fetch": NetworkTool("curl, for hosts that the sandbox may reach"),
    **dict.fromkeys(("update_plan", "web_search", "request_user_input", "get_goal", "create_goal", "update_goal"), HarmlessTool()),
    **dict.fromkeys(("spawn_agent", "send_input", "wait", "wait_agent", "close_agent", "resume_agent"), HarmlessTool()),
}


def _is_ours(call: AgentCall) -> bool:
    """Whether a tool is of our MCP server. The name of another server may begin like ours; no tool of ours has two underscores."""
    return call.tool.startswith(_OURS) and "__" not in call.tool.removeprefix(_OURS)


def _reply(answer: Answer) -> HookReply:
    """Return the output for an answer. A question is refused: the program has none, and takes the answer for a failed hook."""
    match answer:
        case Rewrite(changed):
            return _decision("allow", updatedInput=changed)
        case AskPerson():
            return _decision("deny", permissionDecisionReason="a person wants to be asked about this command, and this program cannot ask")
        case Refuse(why):
            return _decision("deny", permissionDecisionReason=why)
        case Leave():
            return HookReply()


def _decision(decision: str, **more: object) -> HookReply:
    return HookReply(as_json({"hookSpecificOutput": {"hookEventName": _EVENT, "permissionDecision": decision, **more}}))


def _rewrites() -> bool:
    """Whether the program that started this process is known to obey a rewritten command. False if it cannot be found."""
    version = _version_of(_program_above(os.getppid()))
    return version is not None and version >= FIRST_THAT_REWRITES


def _program_above(process: int) -> str:
    """Return the executable of the nearest process, from this one upwards, whose name begins with `codex`; empty if there is none."""
    for _ in range(_PARENTS):
        if process <= 1:
            break
        try:
            path = os.readlink(f"/proc/{process}/exe")
            with open(f"/proc/{process}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            break
        if os.path.basename(path).startswith("codex"):
            return f"/proc/{process}/exe"  # the file that runs, even if another has taken its name since
        process = int(fields[1])
    return ""


def _version_of(program: str) -> tuple[int, int] | None:
    """Ask a program for its version; None if it does not say. It prints its name and its version."""
    if not program:
        return None
    reader, writer = os.pipe()
    try:
        try:
            child = os.posix_spawn(
                program,
                ["codex", "--version"],
                {"HOME": os.devnull},  # it needs no settings to say that
                file_actions=[(os.POSIX_SPAWN_DUP2, writer, 1), (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0)],
            )
        except OSError:
            return None
        finally:
            os.close(writer)
        text = os.read(reader, 200)
        os.waitpid(child, 0)
    finally:
        os.close(reader)
    return _read_version(text.decode(errors="replace"))


def _read_version(text: str) -> tuple[int, int] | None:
    """Return the first two numbers of a version.

    >>> _read_version("codex-cli 0.131.0"), _read_version("codex-cli 0.140.0-alpha.2"), _read_version("codex")
    ((0, 131), (0, 140), None)
    """
    for word in text.split():
        parts = word.removeprefix("v").split(".")
        if len(parts) >= 2 and parts[0].isdecimal() and parts[1].isdecimal():
            return int(parts[0]), int(parts[1])
    return None


CODEX = Contract(_EVENT, _TOOLS, "", _is_ours, _reply, _rewrites)
