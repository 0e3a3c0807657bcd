"""The tools of the server as data: their names, descriptions, argument schemas and annotations.

A client shows this list to the model in every conversation, so every word costs. `tests/mcp/test_catalogue.py` bounds its size.
"""

from __future__ import annotations

from typing import Any

from agent_sandbox._fast.values import dataclass

Schema = dict[str, Any]
LONGEST_TEXT = 1 << 20  # characters of one argument
LANGUAGES = ("bash", "python", "javascript", "ruby")
INSTRUCTIONS = (
    "All tools work in one sandbox: a copy-on-write clone of this machine at the project directory. Run and change what you like; real "
    "files stay as they are until promote, which asks the user. Paths are relative to the project. There is no network unless the user "
    "opened hosts. When something is refused, say so to the user or use request; do not look for a way around it."
)


@dataclass(frozen=True)
class ToolEntry:
    """One tool. `reads` says that it changes nothing, `destroys` that it may remove something, `reaches_out` that it may use a network."""

    name: str
    description: str
    properties: Schema
    required: tuple[str, ...] = ()
    reads: bool = False
    destroys: bool = False
    reaches_out: bool = False

    @property
    def schema(self) -> Schema:
        """The JSON schema of the arguments. Unknown arguments are refused."""
        return {
            "type": "object",
            "properties": self.properties,
            **({"required": list(self.required)} if self.required else {}),
            "additionalProperties": False,
        }

    @property
    def listed(self) -> Schema:
        """The same schema without bounds that no sensible call reaches: a model pays for every word of it."""
        shown: Schema = _unbounded(self.schema)
        return shown


def _unbounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _unbounded(each) for name, each in value.items() if name not in ("maxLength", "maxItems")}
    return value


def _text(description: str = "", **more: object) -> Schema:
    return {"type": "string", "maxLength": LONGEST_TEXT, **({"description": description} if description else {}), **more}


def _number(description: str = "") -> Schema:
    return {"type": "number", "exclusiveMinimum": 0, **({"description": description} if description else {})}


def _whole(description: str = "", least: int = 1) -> Schema:
    return {"type": "integer", "minimum": least, **({"description": description} if description else {})}


def _texts(description: str = "") -> Schema:
    return {
        "type": "array",
        "items": {"type": "string", "maxLength": 4096},
        "maxItems": 200,
        **({"description": description} if description else {}),
    }


_PATH = _text("relative to the project, or absolute")
_NARROW: Schema = {
    "type": "object",
    "description": "tighten the policy for this call; nothing here can loosen it",
    "properties": {
        "network": {"type": "boolean", "description": "false: none"},
        "hosts": _texts("reach only these"),
        "commands": _texts("start only these programs"),
        "hide": _texts("paths"),
        "memory_mb": _whole(),
        "processes": _whole(),
    },
    "additionalProperties": False,
}
_WORK: Schema = {
    "command": _text("a bash command line"),
    "code": _text("instead of command: source text"),
    "language": {"enum": list(LANGUAGES), "description": "of code; default python"},
    "stdin": _text(),
    "cwd": _text("a directory; default: the project"),
    "timeout_seconds": _number("default 600"),
    "narrow": _NARROW,
}

TOOLS = (
    ToolEntry(
        "run",
        "Run a bash command or code in the sandbox, and return exit code, output and the number of pending changes. Files that it changes "
        "stay in the sandbox for later calls. Programs end with the call.",
        _WORK,
        destroys=True,
        reaches_out=True,
    ),
    ToolEntry(
        "simulate",
        "Run the same on a throw-away copy of the sandbox, and return what it would do, each with a risk: files, programs, network "
        "requests. Nothing is kept.",
        _WORK,
        reads=True,
    ),
    ToolEntry(
        "read",
        "Read a text file.",
        {"path": _PATH, "offset": _whole("first line"), "limit": _whole("number of lines")},
        ("path",),
        reads=True,
    ),
    ToolEntry("list", "List a directory.", {"path": _PATH}, reads=True),
    ToolEntry(
        "write",
        "Create or replace a file, with the directories above it.",
        {"path": _PATH, "content": _text()},
        ("path", "content"),
        destroys=True,
    ),
    ToolEntry(
        "edit",
        "Replace text in a file. old must occur exactly once, unless all is true.",
        {"path": _PATH, "old": _text(minLength=1), "new": _text(), "all": {"type": "boolean"}},
        ("path", "old", "new"),
        destroys=True,
    ),
    ToolEntry(
        "diff",
        "Show the pending changes as a unified diff, with their digest and the protected kinds that promote will ask about.",
        {"only": _texts("paths or globs"), "attempt": _text("instead: an attempt of try")},
        reads=True,
    ),
    ToolEntry("snapshot", "Save the state of the sandbox's files, to roll back to.", {"label": _text(maxLength=100)}),
    ToolEntry(
        "rollback",
        "Return the sandbox's files to a snapshot; default: the last. The present state is kept as another snapshot.",
        {"to": _text("label or number")},
        destroys=True,
    ),
    ToolEntry(
        "try",
        "Try several approaches at once, each on its own copy of this sandbox, and compare them. check decides which pass. Nothing here "
        "changes; then diff and promote take attempt.",
        {
            "attempts": {
                "type": "object",
                "description": "a bash command for each name",
                "additionalProperties": _text(),
                "minProperties": 1,
                "maxProperties": 32,
            },
            "check": _text("a bash command that exits with 0 if the attempt is good"),
            "first": {"type": "boolean", "description": "stop when one passes"},
            "timeout_seconds": _number("of each attempt; default 600"),
        },
        ("attempts",),
    ),
    ToolEntry(
        "promote",
        "Make pending changes real in the project. The user is shown the diff and asked; if asking takes longer, call it again with the "
        "same arguments after the approval. All or nothing.",
        {
            "only": _texts("paths or globs"),
            "skip": _texts("paths or globs to leave out"),
            "drift": {"enum": ["refuse", "merge", "force"], "description": "where the real file has changed too; default refuse"},
            "expect": _text("the digest that diff returned", maxLength=64),
            "attempt": _text("instead: an attempt of try"),
        },
        destroys=True,
    ),
    ToolEntry(
        "intent",
        "Declare what you are about to do, by the name of an intent of the user's policy: from now on only what it opens can be reached. "
        "Without a name: take that back.",
        {"name": _text(maxLength=200)},
    ),
    ToolEntry(
        "request",
        "Ask the user for more than the policy allows, for a limited time: hosts, programs, hidden paths, limits.",
        {
            "hosts": _texts(),
            "programs": _texts(),
            "paths": _texts(),
            "memory_mb": _whole(),
            "timeout_seconds": _number(),
            "reason": _text(maxLength=500),
            "minutes": {"type": "number", "exclusiveMinimum": 0, "maximum": 1440, "description": "default 10"},
        },
        ("reason",),
    ),
    ToolEntry(
        "python",
        "Run Python in a session that keeps variables between calls and records every statement, so that rewind and inspect can go back. "
        "It sees the real project; files that it writes stay in the session. No network.",
        {"code": _text(), "timeout_seconds": _number("default 600"), "restart": {"type": "boolean"}, "session": _whole("a fork", 0)},
        ("code",),
        destroys=True,
    ),
    ToolEntry(
        "inspect",
        "Look at the state before a step of the python session: variables, an expression, a file. Without a step: the steps, and the "
        "present variables. Changes nothing.",
        {"step": _whole(), "expression": _text(), "file": _text(), "session": _whole(least=0)},
        reads=True,
    ),
    ToolEntry(
        "rewind",
        "Return the python session to the state before a step: all variables and files.",
        {"step": _whole(), "session": _whole(least=0)},
        ("step",),
        destroys=True,
    ),
    ToolEntry(
        "fork",
        "Start further python sessions from the state before a step, by default the present, to go on in several ways. Returns their "
        "numbers, for session. The session itself rests until its forks are closed.",
        {
            "step": _whole(),
            "count": {"type": "integer", "minimum": 1, "maximum": 8},
            "session": _whole(least=0),
            "close": {"type": "array", "items": _whole(), "description": "instead: end these forks"},
        },
    ),
)


def tools(*, forks: bool) -> tuple[ToolEntry, ...]:
    """Return the tools to offer. `forks` says whether sessions can be forked here; without it no tool speaks of that."""
    if forks:
        return TOOLS
    return tuple(
        ToolEntry(
            each.name,
            each.description,
            {name: schema for name, schema in each.properties.items() if name != "session"},
            each.required,
            each.reads,
            each.destroys,
            each.reaches_out,
        )
        for each in TOOLS
        if each.name != "fork"
    )
