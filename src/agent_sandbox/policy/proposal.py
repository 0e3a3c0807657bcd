"""A proposed policy: its settings, each with its reason, and their form as TOML.

Names come from guests and may be hostile. No name can end its line, its quotation marks or its comment: unprintable characters are escaped,
in strings as TOML escapes. A wildcard in a name is escaped to match itself. A name that would not read back identically is not written.
"""

from __future__ import annotations

from agent_sandbox._fast.values import TYPE_CHECKING, dataclass
from agent_sandbox.errors import PolicyError
from agent_sandbox.policy.files.document import Document
from agent_sandbox.policy.files.settings import BY_KEY
from agent_sandbox.policy.paths import Tree, parse
from agent_sandbox.policy.programs import check_name, covers, is_pattern

if TYPE_CHECKING:
    from typing import Any

    from agent_sandbox.policy.intents import NetworkIntent

_WILDCARDS = {character: f"[{character}]" for character in "*?["}
_LONGEST_COMMENT = 160


@dataclass(frozen=True)
class Asked:
    """One item of a proposed list, as written in a policy, and its reason."""

    text: str
    because: str


@dataclass(frozen=True)
class ProposedSetting:
    """One proposed setting and its reason. If its value is a list, each item may have its own reason."""

    key: str
    value: Any
    because: str = ""

    def parts(self) -> list[tuple[Any, str]]:
        """Return each item, or the whole value, with its reason."""
        items = self.value if isinstance(self.value, tuple) and self.value else (self.value,)
        return [(each.text, each.because) if isinstance(each, Asked) else (each, self.because) for each in items]


@dataclass(frozen=True)
class Proposal:
    """The proposed settings, the things left out and why, and remarks. `unknown` are settings about which nothing was learnt.

    `intents` are those of the file that is widened; none are learnt.
    """

    lines: tuple[ProposedSetting, ...]
    left_out: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    intents: tuple[NetworkIntent, ...] = ()

    def document(self) -> Document:
        """Return the proposal as a policy layer."""
        return Document(tuple((line.key, _plain(line.value)) for line in self.lines), "the policy that was learnt", self.intents)


def _plain(value: Any) -> Any:
    return tuple(each.text if isinstance(each, Asked) else each for each in value) if isinstance(value, tuple) else value


def pattern_of(path: str, home: str) -> str | None:
    """Return the pattern for exactly this file, or this directory and everything beneath it; None if no pattern can express it."""
    inside = path.startswith(home.rstrip("/") + "/") and home != "/"
    text = _literal(f"~{path[len(home.rstrip('/')) :]}" if inside else path)
    try:
        return text if _can_be_written(text) and parse(text, home=home) == Tree(path) else None
    except PolicyError:
        return None


def name_pattern(name: str) -> str | None:
    """Return the pattern that matches only the program of this name; None if no pattern can express it."""
    text = _literal(name)
    try:
        check_name(text)
    except PolicyError:
        return None
    return text if _can_be_written(text) and not is_pattern(text) and covers((text,), name) else None


def _literal(name: str) -> str:
    return "".join(_WILDCARDS.get(character, character) for character in name)


def _can_be_written(text: str) -> bool:
    """Return whether a text can be written into a policy file."""
    return "\\" not in text and not any(0xD800 <= ord(character) <= 0xDFFF for character in text)


def as_toml(proposal: Proposal, *, heading: tuple[str, ...] = ()) -> str:
    """Return the proposal as the text of a policy file, below heading comments."""
    output = [f"# {_comment(words)}".rstrip() for words in heading]
    section = ""
    for line in sorted(proposal.lines, key=lambda line: _ORDER[line.key]):
        table, _, key = line.key.rpartition(".")
        if table != section:
            output += ["", f"[{table}]"]
            section = table
        output += _setting(key, line)
    for intent in proposal.intents:
        from agent_sandbox.policy.intents import table_of  # few policies name intents

        output += ["", f"[intents.{_value(intent.name)}]"]
        output += [f"{key} = {_list(value) if isinstance(value, tuple) else _value(value)}" for key, value in table_of(intent)]
    return "\n".join(output).lstrip("\n") + "\n"


_ORDER = {key: place for place, key in enumerate(BY_KEY)}


def _setting(key: str, line: ProposedSetting) -> list[str]:
    why = f"  # {_comment(line.because)}" if line.because else ""
    if not isinstance(line.value, tuple) or not line.value:
        return [f"{key} = {_value(line.value)}{why}"]
    items = [
        f"  {_value(each.text)},  # {_comment(each.because)}" if isinstance(each, Asked) else f"  {_value(each)}," for each in line.value
    ]
    return [f"{key} = [{why}", *items, "]"]


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f'"{"".join(map(_character, value))}"'
    return "[]" if value == () else repr(value)


def _list(values: tuple[Any, ...]) -> str:
    return f"[{', '.join(map(_value, values))}]"


def _character(character: str) -> str:
    if character in '"\\':
        return f"\\{character}"
    code = ord(character)
    return character if character.isprintable() else f"\\u{code:04X}" if code < 0x10000 else f"\\U{code:08X}"


def _comment(text: str) -> str:
    shown = text if len(text) <= _LONGEST_COMMENT else f"{text[: _LONGEST_COMMENT - 1]}…"
    return "".join(each if each.isprintable() else f"\\u{ord(each):04x}" for each in shown)
