"""One change in two columns, the old on the left and the new on the right. Long lines go on in the next row; none is cut for its length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest

from agent_sandbox.values import dataclass, replace
from agent_sandbox.workspace.preview.compare import DEFAULT, Limits, Preview
from agent_sandbox.workspace.preview.hunks import hunks
from agent_sandbox.workspace.preview.rows import ADDED, BETWEEN, HUNK, NOTE, REMOVED, SAME, SIGNS, WARNING, Cell, Row, decoded, ours
from agent_sandbox.workspace.preview.unified import NO_NEWLINE, closing, opening, paired_marks
from agent_sandbox.workspace.preview.words import Marks
from agent_sandbox.workspace.visible import escapes, width

NARROWEST = 40  # columns of both sides together
_GOES_ON = "↳"


@dataclass(frozen=True)
class _Line:
    """A line of one side, by its position in the file."""

    kind: str
    at: int
    text: str
    marks: Marks = ()
    more: int = 0  # characters that are not shown
    ended: bool = True

    @classmethod
    def of(cls, kind: str, at: int, content: bytes, marks: Marks = (), columns: int | None = None) -> _Line:
        text = decoded(content)
        more = max(0, len(text) - columns) if columns is not None else 0
        return cls(kind, at, text[:columns] if more else text, marks, more, content.endswith(b"\n"))


def side_by_side(preview: Preview, columns: int, *, relative_to: str = "/", limits: Limits = DEFAULT, words: bool = False) -> Iterator[Row]:
    """The rows of one change, in so many columns of a terminal."""
    yield from opening(preview, relative_to)
    layout = _Layout(preview, max(columns, NARROWEST))
    room = limits.added
    for hunk in hunks(preview.edits, len(preview.old)):
        yield ours(HUNK, hunk.title(preview.lines_before))
        shift = hunk.new_from - hunk.old_from
        for (start, stop), edit in hunk.stretches():
            for number in range(start, stop):
                line = _Line.of(SAME, number, preview.old[number])
                yield from layout.rows(line, replace(line, at=number + shift))
            if edit is None:
                continue
            gone, come = paired_marks(preview, edit) if words else ({}, {})
            shown = min(edit.new_to, edit.new_from + room)
            room -= shown - edit.new_from
            left = [_Line.of(REMOVED, at, preview.old[at], gone.get(at, ())) for at in range(edit.old_from, edit.old_to)]
            right = [_Line.of(ADDED, at, preview.new[at], come.get(at, ()), limits.columns) for at in range(edit.new_from, shown)]
            for old, new in zip_longest(left, right):
                yield from layout.rows(old, new)
            if shown < edit.new_to:
                yield ours(WARNING, f"\\ {edit.new_to - shown:,} more added lines are not shown (--all shows them)")
            shift = edit.new_to - edit.old_to
    yield from closing(preview)


class _Layout:
    def __init__(self, preview: Preview, columns: int) -> None:
        self._path = preview.change.path
        self._offset = preview.lines_before + 1
        self._digits = len(str(preview.lines_before + max(len(preview.old), len(preview.new))))
        self._text = max(1, (columns - len(BETWEEN)) // 2 - self._digits - 2)

    def rows(self, left: _Line | None, right: _Line | None) -> Iterator[Row]:
        """Two lines next to each other, in as many rows as the longer one takes."""
        for number, (old, new) in enumerate(zip_longest(self._pieces(left), self._pieces(right))):
            yield Row((self._cell(left, old, number), self._cell(right, new, number, last=True)), self._path)
        if right and right.more:
            yield ours(WARNING, f"\\ {right.more:,} more characters of the new line are not shown (--all shows them)")
        for line, side in ((left, "old"), (right, "new")):
            if line and not line.ended:
                yield ours(NOTE, f"{NO_NEWLINE} ({side})")

    def _cell(self, line: _Line | None, piece: tuple[int, int, int] | None, number: int, *, last: bool = False) -> Cell:
        if line is None or piece is None:
            return Cell(SAME, "") if last else Cell(SAME, "", " " * (self._digits + 2), pad=self._text)
        start, stop, taken = piece
        label = _GOES_ON if number else str(line.at + self._offset)
        marks = tuple((max(a, start) - start, min(b, stop) - start) for a, b in line.marks if a < stop and b > start)
        return Cell(
            line.kind, line.text[start:stop], f"{SIGNS[line.kind]}{label:>{self._digits}} ", marks, 0 if last else self._text - taken
        )

    def _pieces(self, line: _Line | None) -> Sequence[tuple[int, int, int]]:
        """Where a line is broken: start, end, and how many columns that takes."""
        if line is None:
            return ()
        text = line.text
        if text.isascii() and text.isprintable():  # the common case: a column for each character
            starts = range(0, len(text) or 1, self._text)
            return [(start, min(start + self._text, len(text)), min(self._text, len(text) - start)) for start in starts]
        pieces: list[tuple[int, int, int]] = []
        start = taken = 0
        for at, (character, escape) in enumerate(zip(text, escapes(text), strict=True)):
            wide = len(escape) or width(character)
            if taken + wide > self._text and taken:
                pieces.append((start, at, taken))
                start, taken = at, 0
            taken += wide
        return [*pieces, (start, len(text), min(taken, self._text))]
