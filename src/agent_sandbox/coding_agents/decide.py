"""Decide about a tool call: into the sandbox, directly, ask, or refuse.

Pure: the same call and the same lists always have the same answer. There is one world for the agent, the sandbox. Shell commands are
rewritten to run there; tools that open files on the machine itself are refused, with the command to use instead; tools that nobody knows
are refused.
"""

from __future__ import annotations

from agent_sandbox._fast.values import TYPE_CHECKING, dataclass
from agent_sandbox.coding_agents.shell_words import quote, unquote
from agent_sandbox.coding_agents.tool_calls import Answer, AskPerson, BadEvent, Leave, Refuse, Rewrite

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from agent_sandbox.coding_agents.rules import PersonRules
    from agent_sandbox.coding_agents.tool_calls import AgentCall

SERVER = "agent-sandbox"  # the name of our MCP server in the settings of every program


@dataclass(frozen=True)
class ShellTool:
    """A tool that runs a shell command, which is in this member of its input."""

    command: str = "command"


@dataclass(frozen=True)
class FileTool:
    """A tool that uses files of the machine. `instead` is a shell command; {path} in it is the member `path` of the input."""

    instead: str
    path: str = ""


@dataclass(frozen=True)
class NetworkTool:
    """A tool that reaches the network past the sandbox."""

    instead: str


@dataclass(frozen=True)
class HarmlessTool:
    """A tool that touches neither files nor programs nor hosts by itself. The program's own rules decide about it."""


ToolKind = ShellTool | FileTool | NetworkTool | HarmlessTool


def decide(
    call: AgentCall,
    tools: Mapping[str, ToolKind],
    rules: PersonRules,
    contain: Callable[[str], str],
    *,
    ours: bool = False,
    rewrites: bool = True,
) -> Answer:
    """Return the answer to a call. `contain` turns a command into one that runs in the sandbox. `ours`: the tool is of our MCP server.

    Without `rewrites`, the program ignores new inputs, and a command that would be rewritten is refused. Raises `BadEvent`.
    """
    if ours or rules.leaves(call.tool):
        return Leave()
    match tools.get(call.tool):
        case ShellTool(member):
            return _shell(call, member, rules, contain, rewrites)
        case FileTool(instead, path):
            return Refuse(
                f"{call.tool} would use the files of the machine; commands run in a sandbox, which has its own. "
                f"Use the shell tool, for example: {_filled(instead, call, path)}\n"
                f"or the tools read, write and edit of the MCP server {SERVER}, if it is connected."
            )
        case NetworkTool(instead):
            return Refuse(f"{call.tool} would reach the network outside of the sandbox. Use the shell tool: {instead}")
        case HarmlessTool():
            return Leave()
        case _:
            return Refuse(
                f"agent-sandbox does not know the tool {call.tool}, which may work outside of the sandbox. "
                f"A person can leave it to the program's own rules: tools = [{call.tool!r}] in ~/.config/agent-sandbox/coding-agents.toml"
            )


def _shell(call: AgentCall, member: str, rules: PersonRules, contain: Callable[[str], str], rewrites: bool) -> Answer:
    command = call.text(member)
    if "\0" in command:
        raise BadEvent("the command holds a zero byte")
    if rules.runs_directly(command):
        return Leave()
    inner = _inner(command, contain)  # the program, or the model, may repeat a command that was rewritten before
    changed = call.input if inner is not None else {**call.input, member: contain(command)}
    if rules.asks(command if inner is None else inner):
        return AskPerson(changed, "you asked to be asked about this command; it runs in the sandbox")
    if rewrites:
        return Rewrite(changed)
    if inner is not None:
        return Leave()
    return Refuse(f"this version of the program ignores what a hook rewrites. Run exactly this instead: {changed[member]}")


def _inner(command: str, contain: Callable[[str], str]) -> str | None:
    """Return the command inside of one that `contain` returned; None if it is, letter for letter, no such command."""
    inner = unquote(command.removeprefix(contain("").removesuffix(quote(""))))
    return inner if inner is not None and contain(inner) == command else None


def _filled(instead: str, call: AgentCall, path: str) -> str:
    named = call.input.get(path) if path else None
    return instead.replace("{path}", quote(named) if isinstance(named, str) and named and "\0" not in named else "FILE")
