"""The parts that the forms of a diff are made of: rows before they are printed, hunks, and the words that differ between two lines.

A row of guest content always begins with a sign (a blank, `-` or `+`), and no row of ours does. So no content can pass for a heading, the
start of a hunk or a remark.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from agent_sandbox._fast.values import dataclass
from agent_sandbox.workspace.escape import visible
from agent_sandbox.workspace.merge.edits import Edit, find_edits

TITLE, FACT, HUNK, NOTE, HEADING, WARNING = "title", "fact", "hunk", "note", "heading", "warning"  # ours
SAME, REMOVED, ADDED = "same", "removed", "added"  # the guest's
SIGNS = {SAME: " ", REMOVED: "-", ADDED: "+"}
BETWEEN = " │ "
AROUND = 3  # lines of context
_WORD = re.compile(r"\w+|\s+|[^\w\s]")
_LONGEST = 500  # characters; longer lines are not compared
_STEPS = 20_000

Marks = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Cell:
    """Text of one kind. `lead` is our prefix; `marks` are the stretches of `text` that differ from its counterpart."""

    kind: str
    text: str
    lead: str = ""
    marks: tuple[tuple[int, int], ...] = ()
    pad: int = 0  # blanks up to the next cell


@dataclass(frozen=True)
class Row:
    """One line of output. `path` is the file whose content it shows."""

    cells: tuple[Cell, ...]
    path: str = ""
    between: str = BETWEEN

    @property
    def plain(self) -> str:
        """The row as it is printed without colours."""
        return self.between.join(f"{cell.lead}{visible(cell.text)}{' ' * cell.pad}" for cell in self.cells)


def ours(kind: str, text: str) -> Row:
    """Return a row with a text of our own."""
    return Row((Cell(kind, text),))


def decoded(line: bytes) -> str:
    """Decode a line, without its newline. Bytes that are not UTF-8 become surrogate escapes."""
    return line.removesuffix(b"\n").decode(errors="surrogateescape")


@dataclass(frozen=True)
class Hunk:
    """Edits that stand close together, with the lines of context before the first and after the last."""

    old_from: int
    old_to: int
    new_from: int
    new_to: int
    edits: tuple[Edit, ...]

    def title(self, lines_before: int = 0) -> str:
        """Return the standard `@@` line that begins the hunk."""
        old = _range(self.old_from, self.old_to, lines_before)
        return f"@@ -{old} +{_range(self.new_from, self.new_to, lines_before)} @@"

    def stretches(self) -> Iterator[tuple[tuple[int, int], Edit | None]]:
        """Yield stretches of unchanged old lines, each with the edit that follows it; None after the last."""
        at = self.old_from
        for edit in self.edits:
            yield (at, edit.old_from), edit
            at = edit.old_to
        yield (at, self.old_to), None


def hunks(edits: Sequence[Edit], old_length: int) -> Iterator[Hunk]:
    """Yield the hunks of a list of edits, for a file with `old_length` old lines."""
    group: list[Edit] = []
    for edit in edits:
        if group and edit.old_from - group[-1].old_to > 2 * AROUND:
            yield _hunk(group, old_length)
            group = []
        group.append(edit)
    if group:
        yield _hunk(group, old_length)


def _hunk(group: list[Edit], old_length: int) -> Hunk:
    first, last = group[0], group[-1]
    before, after = min(AROUND, first.old_from), min(AROUND, old_length - last.old_to)
    return Hunk(first.old_from - before, last.old_to + after, first.new_from - before, last.new_to + after, tuple(group))


def _range(start: int, stop: int, offset: int) -> str:
    length = stop - start
    first = offset + start + 1 if length else offset + start
    return f"{first}" if length == 1 else f"{first},{length}"


def differing(old: str, new: str) -> tuple[Marks, Marks]:
    """Return the stretches of both lines that differ; none if too little is the same for that to help."""
    if max(len(old), len(new)) > _LONGEST:
        return (), ()
    before, after = _WORD.findall(old), _WORD.findall(new)
    edits = find_edits([_raw(word) for word in before], [_raw(word) for word in after], steps=_STEPS)
    gone = _stretches(before, [(edit.old_from, edit.old_to) for edit in edits])
    come = _stretches(after, [(edit.new_from, edit.new_to) for edit in edits])
    kept = len(old.strip()) - sum(stop - start for start, stop in gone)
    return (gone, come) if kept * 3 >= max(len(old.strip()), len(new.strip())) else ((), ())


def _raw(word: str) -> bytes:
    return word.encode(errors="surrogateescape")


def _stretches(words: list[str], edited: list[tuple[int, int]]) -> Marks:
    offsets = [0]
    for word in words:
        offsets.append(offsets[-1] + len(word))
    return tuple((offsets[start], offsets[stop]) for start, stop in edited if start < stop)
