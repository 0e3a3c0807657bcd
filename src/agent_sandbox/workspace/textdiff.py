"""A change as text that can be read safely: a unified diff in git's form.

What a guest wrote is shown, never trusted. Every character that is not plainly visible is escaped: controls, escape sequences, carriage
returns, direction marks, zero-width and blank characters. Lines that go away are always shown in full; only additions are shortened, and
that is said. Nothing is read from configuration files of the project, so nothing in it can switch a diff off. No colours: surfaces add
them.

An escape such as \\x1b is not told apart from the same four characters in the text itself: both are harmless to show.
"""

from __future__ import annotations

import difflib
import os
from collections import Counter
from collections.abc import Sequence

from agent_sandbox.spelling import sha256
from agent_sandbox.values import dataclass
from agent_sandbox.workspace import beneath
from agent_sandbox.workspace.changes import Change, Kind
from agent_sandbox.workspace.layers import quote_target
from agent_sandbox.workspace.nodes import EntryType, Node

# Printable to Unicode, and yet nothing or only a blank is seen.
_BLANK = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u180b\u180c\u180d\u2800\u3164\uffa0") | frozenset(
    map(chr, (*range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0)))
)
_WORK = 50_000_000  # comparisons at worst; difflib is cubic when a guest wants it to be
_BITS = {EntryType.FILE: 0o100000, EntryType.SYMLINK: 0o120000, EntryType.DIRECTORY: 0o040000}


@dataclass(frozen=True)
class DiffLimits:
    """How much of a change is shown. Deleted lines are not subject to `lines` and `columns`."""

    bytes: int = 1 << 20  # of each side
    lines: int = 2_000  # added
    columns: int = 2_000  # of an added line


DEFAULT = DiffLimits()


def visible(text: str) -> str:
    """The text with everything that cannot be seen escaped; the result is printable. A tab is an arrow and blanks up to four columns."""
    if text.isprintable() and _BLANK.isdisjoint(text):
        return text
    return "".join(_shown(character) for character in text)


def _shown(character: str) -> str:
    if character.isprintable() and character not in _BLANK:
        return character
    code = ord(character)
    if character == "\t":
        return "→   "
    if 0xDC80 <= code <= 0xDCFF:  # a byte that is not UTF-8
        return f"\\x{code - 0xDC00:02x}"
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def unified_diff(
    change: Change, layers: int, *, machine_root: str = "/", relative_to: str = "/", limits: DiffLimits = DEFAULT
) -> list[str]:
    """The lines of a diff for one change. The old side is read from the machine, the new one from below the descriptor `layers`.

    Names are shown relative to `relative_to`, a directory that the change lies in.
    """
    name = visible(change.path.removeprefix(relative_to.rstrip("/")).lstrip("/"))
    lines = [f"diff --git a/{name} b/{name}", *_header(change)]
    if change.before and change.after and change.kind not in (Kind.MODIFIED, Kind.RETYPED):
        return lines
    old = _side(change.before, machine_root.rstrip("/") + change.path, None, limits)
    upper = f"{quote_target(change.target)}/upper/{change.path[len(change.target.rstrip('/')) + 1 :]}"
    new = _side(change.after, upper, layers, limits)
    if isinstance(old, str) or isinstance(new, str):
        return [*lines, *(f"{sign} {side}" for sign, side in (("old:", old), ("new:", new)) if isinstance(side, str))]
    if old == new:
        return lines
    if any(_is_binary(side) for side in (old, new)):
        return [*lines, f"Binary contents differ: {_summary(old)}, now {_summary(new)}"]
    lines += [f"--- {f'a/{name}' if change.before else '/dev/null'}", f"+++ {f'b/{name}' if change.after else '/dev/null'}"]
    return lines + _hunks(_split(old), _split(new), limits)


def _header(change: Change) -> list[str]:
    before, after = change.before, change.after
    lines: list[str] = []
    if before is None and after is not None:
        lines.append(f"new {after.type.value} mode {_mode(after)}")
    elif after is None and before is not None:
        lines.append(f"deleted {before.type.value} mode {_mode(before)}")
    elif before and after:
        if before.type is not after.type:
            lines.append(f"was a {before.type.value}, is a {after.type.value}")
        if before.mode != after.mode:
            lines += [f"old mode {_mode(before)}", f"new mode {_mode(after)}"]
        if (before.uid, before.gid) != (after.uid, after.gid):
            lines.append(f"owner {before.uid}:{before.gid} is now {after.uid}:{after.gid}")
    lines += [f"extended attribute {visible(name)} differs" for name in change.xattrs]
    if change.inside:
        lines.append(f"and {change.inside:,} entries below it")
    if change.masks_real:
        lines.append("a real file that was hidden from the sandbox is here")
    if change.unread:
        lines.append("not everything here could be read, so it is taken as changed")
    return lines


def _mode(node: Node) -> str:
    return f"{_BITS.get(node.type, 0) | node.mode:06o}"


def _side(node: Node | None, path: str, layers: int | None, limits: DiffLimits) -> bytes | str:
    """The bytes of one side, or a sentence why there are none to compare."""
    if node is None or node.type is EntryType.DIRECTORY:
        return b""
    if node.type is EntryType.SYMLINK:
        return os.fsencode(node.target)
    if node.type is not EntryType.FILE:
        return f"a {node.type.value}, which is not opened"
    try:
        # No link is followed on the machine's side either: the overlay did not, so what lies behind one is not what was changed.
        root = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC) if layers is None else layers
        try:
            descriptor = beneath.open_file(root, path.lstrip("/"), one_filesystem=layers is not None)
        finally:
            if layers is None:
                os.close(root)
        with open(descriptor, "rb") as file:
            content = file.read(limits.bytes + 1)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return content if len(content) <= limits.bytes else f"{node.size:,} bytes, too large to show"


def _is_binary(content: bytes) -> bool:
    """A single NUL does not hide a text: only what is mostly no text counts as binary."""
    text = content.decode(errors="surrogateescape")
    odd = sum(1 for character in text if not character.isprintable() and character not in "\t\n\r\f")
    return odd * 5 > len(text)


def _summary(content: bytes) -> str:
    return f"{len(content):,} bytes (sha256 {sha256(content).hexdigest()[:16]})"


def _split(content: bytes) -> list[str]:
    """Lines by newline alone: to `splitlines` a carriage return or a vertical tab would end one too. The last may lack its newline."""
    lines = content.decode(errors="surrogateescape").split("\n")
    ended = [line + "\n" for line in lines[:-1]]
    return ended + lines[-1:] if lines[-1] else ended


def _hunks(old: Sequence[str], new: Sequence[str], limits: DiffLimits) -> list[str]:
    lines: list[str] = []
    added = 0
    for group in _groups(old, new):
        first, last = group[0], group[-1]
        lines.append(f"@@ -{_range(first[1], last[2])} +{_range(first[3], last[4])} @@")
        for tag, old_from, old_to, new_from, new_to in group:
            if tag == "equal":
                lines += _marked(" ", old[old_from:old_to], None)
                continue
            lines += _marked("-", old[old_from:old_to], None)
            room = max(limits.lines - added, 0)
            added += new_to - new_from
            lines += _marked("+", new[new_from:new_to][:room], limits.columns)
            if new_to - new_from > room:
                lines.append(f"\\ {new_to - new_from - room:,} more added lines are not shown")
    return lines


def _groups(old: Sequence[str], new: Sequence[str]) -> list[list[tuple[str, int, int, int, int]]]:
    if not old or not new:
        return [[("replace", 0, len(old), 0, len(new))]]
    occurrences = Counter(new)
    if sum(occurrences[line] for line in old) * min(len(old), len(new)) > _WORK:
        return [[("replace", 0, len(old), 0, len(new))]]  # true, only not the shortest
    return [list(group) for group in difflib.SequenceMatcher(None, old, new, autojunk=False).get_grouped_opcodes(3)]


def _range(start: int, stop: int) -> str:
    length = stop - start
    return f"{start + 1 if length else start},{length}" if length != 1 else f"{start + 1}"


def _marked(sign: str, lines: Sequence[str], columns: int | None) -> list[str]:
    marked: list[str] = []
    for line in lines:
        text = visible(line.removesuffix("\n"))
        if columns is not None and len(text) > columns:
            text = f"{text[:columns]}… ({len(text) - columns:,} more characters)"
        marked.append(sign + text)
        if not line.endswith("\n"):
            marked.append("\\ No newline at end of file")
    return marked
