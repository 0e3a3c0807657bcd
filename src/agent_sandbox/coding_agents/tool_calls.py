"""Tool calls of coding agents, and the answers to them.

An event is the JSON document that a coding agent writes to its hook before it calls a tool. It is decoded without the module `json`, which
takes longer to load than a decision takes.
"""

from __future__ import annotations

from agent_sandbox._fast.values import TYPE_CHECKING, dataclass

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

LARGEST_EVENT = 64 << 20  # bytes: more than a program writes into one file, and less than the memory of a small machine
_BLANKS = " \t\n\r"


class BadEvent(Exception):
    """The event cannot be understood. The call is refused."""


@dataclass(frozen=True)
class AgentCall:
    """A tool call of a coding agent. `directory` is the directory of its session, which chooses the project.

    `server` is the MCP server of the tool, where the program names it apart from the tool.
    """

    tool: str
    input: Mapping[str, Any]
    directory: str
    server: str = ""

    def text(self, key: str) -> str:
        """Return a text of the input. Raises `BadEvent` if it has none of this name."""
        value = self.input.get(key)
        if not isinstance(value, str):
            raise BadEvent(f"the tool {self.tool} came without its {key}")
        return value


@dataclass(frozen=True)
class Rewrite:
    """Call the tool with this input, in which the command runs in the sandbox."""

    input: Mapping[str, Any]


@dataclass(frozen=True)
class AskPerson:
    """Ask the person; if they agree, call the tool with this input."""

    input: Mapping[str, Any]
    why: str


@dataclass(frozen=True)
class Refuse:
    """Do not call the tool. `why` is for the model: it says what to do instead."""

    why: str


@dataclass(frozen=True)
class Leave:
    """Give no answer: the program's own permission rules decide."""


Answer = Rewrite | AskPerson | Refuse | Leave


@dataclass(frozen=True)
class HookReply:
    """The output and the exit code of a hook."""

    output: str = ""
    error: str = ""
    code: int = 0


def read_call(data: bytes, event: str, *, directory: str = "") -> AgentCall:
    """Read the tool call of an event with this name. `directory` replaces the directory of the event. Raises `BadEvent`."""
    document = _decoded(data)
    if not isinstance(document, dict):
        raise BadEvent("the event is not a JSON object")
    name, tool, given = document.get("hook_event_name"), document.get("tool_name"), document.get("tool_input")
    if name != event:
        raise BadEvent(f"the event is {name!r}, not {event!r}" if isinstance(name, str) else "the event has no name")
    if not isinstance(tool, str) or not tool:
        raise BadEvent("the event names no tool")
    if not isinstance(given, dict):
        raise BadEvent(f"the input of the tool {tool} is not an object")
    place = directory or document.get("cwd")
    if not isinstance(place, str) or not place.startswith("/"):
        raise BadEvent("the event names no directory")
    server = context.get("server_name") if isinstance(context := document.get("mcp_context"), dict) else ""
    return AgentCall(tool, given, place, server if isinstance(server, str) else "")


def _decoded(data: bytes) -> Any:
    """Decode JSON. A name that occurs twice in an object is refused: two programs may read two values."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise BadEvent("the event is not UTF-8") from None
    start = len(text) - len(text.lstrip(_BLANKS))
    try:
        value, end = _scan(text, start)
    except (StopIteration, ValueError, RecursionError):  # broken, a huge number, or nested too deeply
        raise BadEvent("the event is not JSON") from None
    if text[end:].strip(_BLANKS):
        raise BadEvent("the event is followed by other text")
    return value


class _Settings:
    """The settings that the interpreter's decoder of JSON reads from its owner."""

    strict = True
    object_hook = None
    array_hook = None  # of Python 3.15
    parse_float = float
    parse_int = int
    memo: Mapping[str, str] = {}

    @staticmethod
    def parse_constant(name: str) -> Any:
        raise ValueError(name)

    @staticmethod
    def object_pairs_hook(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        members = dict(pairs)
        if len(members) != len(pairs):
            raise ValueError("a name occurs twice")
        return members


def _scan(text: str, start: int) -> tuple[Any, int]:
    try:
        from _json import make_scanner  # the decoder of `json`, in C
    except ImportError:  # an interpreter that has it in Python only
        from json import JSONDecoder

        decoder = JSONDecoder(object_pairs_hook=_Settings.object_pairs_hook, parse_constant=_Settings.parse_constant)
        value, end = decoder.raw_decode(text, start)
        return value, end
    value, end = make_scanner(_Settings)(text, start)  # type: ignore[arg-type]  # any object with these attributes
    return value, end
