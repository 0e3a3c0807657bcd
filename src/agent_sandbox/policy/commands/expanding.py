"""What the words of a command line come to, as far as its text tells: quotes, braces, variables that it sets, `$(echo …)`.

A field is one argument as the program would get it. Where the text does not tell, the field says so: its `text` is None.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise

from agent_sandbox.policy.commands.syntax import Part, Program, Substitution, Text, Variable, Word
from agent_sandbox.values import dataclass

MOST_FIELDS = 64  # that one word may become; `{1..100000}` is not written out
_LONGEST_BRACES, _MOST_BRACES = 1024, 32
_UNKNOWN = "\0"  # stands for any text; a NUL can be in no argument
_SPLIT = "\1"  # where an unquoted value falls apart into words
_EMPTY = "\2"  # quotes with nothing between them: an argument all the same
_MARKS = dict.fromkeys(map(ord, (_UNKNOWN, _SPLIT, _EMPTY)))  # removed from what is written: none of them can be in an argument
_QUOTED_AT = 0xF0000  # the plane in which quoted characters are kept apart while braces are looked for


@dataclass(frozen=True)
class Field:
    """One argument. `shown` is its text with `…` for what is unknown; `pattern` is whether a shell would look for files."""

    shown: str
    known: bool = True
    pattern: bool = False

    @property
    def text(self) -> str | None:
        """The argument, or None where not all of it is known."""
        return self.shown if self.known else None


Outputs = Callable[[Program], str | None]
Variables = Mapping[str, str | None]


def expand(word: Word, variables: Variables, output: Outputs) -> list[Field]:
    """The fields that a word becomes. `output` tells what a substituted program prints, if that is plain."""
    marked = "".join(_marked(part, variables, output) for part in word)
    found: list[Field] = []
    for text in _braces(marked):
        for piece in text.split(_SPLIT):
            if piece:
                found.append(_field(piece.replace(_EMPTY, "")))
    return found[:MOST_FIELDS]


def joined(word: Word, variables: Variables, output: Outputs) -> str | None:
    """A word where no splitting and no braces happen: an assigned value, the body of a document. None when not all is known."""
    text = "".join(_marked(part, variables, output) for part in word).replace(_SPLIT, " ").replace(_EMPTY, "")
    return None if _UNKNOWN in text else "".join(map(_plain, text))


def _field(marked: str) -> Field:
    shown = "".join(_plain(character) if character != _UNKNOWN else "…" for character in marked)
    return Field(shown, _UNKNOWN not in marked, _is_pattern(marked))


def _is_pattern(marked: str) -> bool:
    bracket = marked.find("[")
    return "*" in marked or "?" in marked or (bracket >= 0 and marked.find("]", bracket) > bracket + 1)


def _quoted(text: str) -> str:
    return "".join(chr(ord(character) + _QUOTED_AT) if ord(character) < 0x10000 else character for character in text)


def _plain(character: str) -> str:
    code = ord(character)
    return chr(code - _QUOTED_AT) if code >= _QUOTED_AT and code < _QUOTED_AT + 0x10000 else character


def _marked(part: Part, variables: Variables, output: Outputs) -> str:
    match part:
        case Text(text=text, quoted=quoted):
            return (_quoted(text) or _EMPTY) if quoted else text.translate(_MARKS)
        case Variable():
            return _variable(part, variables)
        case Substitution(program=program, quoted=quoted, pipe=pipe):
            printed = None if pipe else output(program)
            return _UNKNOWN if printed is None else _value(printed.rstrip("\n"), quoted)
        case _:  # arithmetic, which is not worked out
            return _UNKNOWN


def _variable(part: Variable, variables: Variables) -> str:
    if part.name == "IFS" and "IFS" not in variables:
        return _quoted(" ") if part.quoted else _SPLIT
    value = variables.get(part.name)
    if value is None:
        return _UNKNOWN
    if part.rest:
        value = _cut(value, part.rest)
    if "IFS" in variables and not part.quoted and value:
        return _UNKNOWN  # it falls apart where the text says, which is not worked out
    return _UNKNOWN if value is None else _value(value, part.quoted and part.name != "@")


def _cut(value: str, rest: str) -> str | None:
    """`${name:2:3}` and `${name:-…}` of what is known; None for other ways."""
    if rest.startswith((":-", ":=", ":+", ":?", "-", "=", "?")):
        return None if rest.startswith(":+") else value or None
    parts = rest.removeprefix(":").split(":")
    if not rest.startswith(":") or len(parts) > 2 or not all(each.strip().isdecimal() for each in parts):
        return None
    start = int(parts[0])
    return value[start : start + int(parts[1])] if len(parts) == 2 else value[start:]


def _value(text: str, quoted: bool) -> str:
    if quoted:
        return _quoted(text)
    return _SPLIT.join("".join(_quoted(piece) if piece not in "*?[" else piece for piece in word) for word in text.split())


def _braces(marked: str) -> list[str]:
    """`a{b,c}` as `ab` and `ac`; `{1..3}` likewise. Not quoted, and only so many."""
    if "{" not in marked:
        return [marked]
    if len(marked) > _LONGEST_BRACES or marked.count("{") > _MOST_BRACES:
        return [_UNKNOWN]
    waiting, found = [marked], list[str]()
    while waiting:
        text = waiting.pop()
        group = _first_group(text)
        if group is None:
            found.append(text)
            continue
        start, end, choices = group
        waiting += [text[:start] + choice + text[end:] for choice in reversed(choices)]
        if len(waiting) + len(found) > MOST_FIELDS:
            return [_UNKNOWN]
    return found


def _first_group(text: str) -> tuple[int, int, list[str]] | None:
    start = text.find("{")
    while start >= 0:
        level, commas, end = 0, [start], start
        for end in range(start, len(text)):
            character = text[end]
            level += (character == "{") - (character == "}")
            if character == "," and level == 1:
                commas.append(end)
            if level == 0:
                break
        if level == 0:
            commas.append(end)
            if len(commas) > 2:
                return start, end + 1, [text[one + 1 : other] for one, other in pairwise(commas)]
            if (numbers := _sequence(text[start + 1 : end])) is not None:
                return start, end + 1, numbers
        start = text.find("{", start + 1)
    return None


def _sequence(text: str) -> list[str] | None:
    first, dots, last = text.partition("..")
    if not dots or len(text) > 20:
        return None
    if ".." in last:  # with a step
        return [_UNKNOWN]
    if first.lstrip("-").isdecimal() and last.lstrip("-").isdecimal():
        low, high = int(first), int(last)
        step = 1 if low <= high else -1
        return [str(number) for number in range(low, high + step, step)] if abs(high - low) < MOST_FIELDS else [_UNKNOWN]
    if len(first) == len(last) == 1 and first.isalpha() and last.isalpha():
        step = 1 if first <= last else -1
        return [chr(code) for code in range(ord(first), ord(last) + step, step)][:MOST_FIELDS]
    return None
