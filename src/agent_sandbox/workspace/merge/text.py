"""Merge two versions of a text with a common base, line by line.

*Ours* is the sandbox's version, *theirs* is the real one now. A change of one side alone is taken, and the same change on both sides is
taken once. Where both changed the same lines, or lines that touch, there is a conflict: a value with all three versions, never a guess.
Lines end with a newline and are otherwise bytes: a carriage return before it is part of the line, and the last line may lack the newline.

Where each line occurs once, the result equals git's, conflicts included. Where lines repeat, an edit has several shortest readings, and
ours may differ from git's: then one of the two may see a conflict that the other does not.

Content with a NUL is not text, and content that is too large is not searched. Such a file is one conflict as a whole, unless only one side
changed it.
"""

from __future__ import annotations

from collections.abc import Iterator

from agent_sandbox._fast.values import dataclass
from agent_sandbox.workspace.merge.edits import STEPS, Edit, find_edits

MOST_BYTES = 8 << 20
MOST_LINES = 400_000
Lines = tuple[bytes, ...]


@dataclass(frozen=True)
class Labels:
    """The names of the sides behind conflict markers."""

    ours: str = "sandbox"
    base: str = "base"
    theirs: str = "real"


@dataclass(frozen=True)
class TextConflict:
    """Lines that both sides changed, and their base; `base` is None if it is not known."""

    base: Lines | None
    ours: Lines
    theirs: Lines


Piece = Lines | TextConflict


@dataclass(frozen=True)
class Merged:
    """The text in pieces. `why` says why the whole text is one conflict; it is empty if lines were merged."""

    pieces: tuple[Piece, ...]
    why: str = ""

    @property
    def conflicts(self) -> tuple[TextConflict, ...]:
        """The pieces that both sides changed."""
        return tuple(piece for piece in self.pieces if isinstance(piece, TextConflict))

    def text(self) -> bytes:
        """Return the merged text. Raises ValueError while there are conflicts."""
        if self.conflicts:
            raise ValueError("a text with conflicts has to be resolved first")
        return b"".join(line for piece in self.pieces if isinstance(piece, tuple) for line in piece)

    def ours(self) -> bytes:
        """Return the text with the sandbox's side of every conflict."""
        return b"".join(line for piece in self.pieces for line in (piece.ours if isinstance(piece, TextConflict) else piece))

    def theirs(self) -> bytes:
        """Return the text with the real side of every conflict."""
        return b"".join(line for piece in self.pieces for line in (piece.theirs if isinstance(piece, TextConflict) else piece))

    def with_markers(self, labels: Labels | None = None) -> bytes:
        """Return the text with the usual markers around every conflict, the base between both sides.

        A side without a newline at its end gets one: a marker needs a line of its own.
        """
        named = labels or Labels()
        return b"".join(line for piece in self.pieces for line in (_marked(piece, named) if isinstance(piece, TextConflict) else piece))


def _marked(conflict: TextConflict, labels: Labels) -> Iterator[bytes]:
    end = b"\r\n" if _ends_with_carriage_return(conflict) else b"\n"
    yield b"<<<<<<< " + labels.ours.encode() + end
    yield from _ended(conflict.ours, end)
    if conflict.base is not None:
        yield b"||||||| " + labels.base.encode() + end
        yield from _ended(conflict.base, end)
    yield b"=======" + end
    yield from _ended(conflict.theirs, end)
    yield b">>>>>>> " + labels.theirs.encode() + end


def _ended(lines: Lines, end: bytes) -> Iterator[bytes]:
    for line in lines:
        yield line if line.endswith(b"\n") else line + end


def _ends_with_carriage_return(conflict: TextConflict) -> bool:
    lines = [line for line in (*conflict.ours, *conflict.theirs) if line.endswith(b"\n")]
    return bool(lines) and all(line.endswith(b"\r\n") for line in lines)


def merge_text(base: bytes | None, ours: bytes, theirs: bytes, *, steps: int = STEPS) -> Merged:
    """Merge two texts in bounded time, whatever they hold. Without a base every difference is a conflict."""
    if ours == theirs or theirs == base:
        return Merged((split_lines(ours),))
    if ours == base:
        return Merged((split_lines(theirs),))
    sides = tuple(side for side in (base, ours, theirs) if side is not None)
    if why := _not_for_lines(sides):
        return Merged((TextConflict(None if base is None else split_whole(base), split_whole(ours), split_whole(theirs)),), why)
    mine, yours = split_lines(ours), split_lines(theirs)
    if base is None:
        return Merged(tuple(_two_way(mine, yours, find_edits(mine, yours, steps=steps))))
    old = split_lines(base)
    pieces = _three_way(old, mine, yours, find_edits(old, mine, steps=steps), find_edits(old, yours, steps=steps))
    return Merged(tuple(_joined(pieces)))


def _not_for_lines(sides: tuple[bytes, ...]) -> str:
    if any(b"\0" in side for side in sides):
        return "it is not text"
    if any(len(side) > MOST_BYTES for side in sides) or any(side.count(b"\n") > MOST_LINES for side in sides):
        return "it is too large to be merged line by line"
    return ""


def split_lines(content: bytes) -> Lines:
    """Split at newlines only. Each line keeps its newline; the last may lack it."""
    *ended, last = content.split(b"\n")
    return (*(line + b"\n" for line in ended), last) if last else tuple(line + b"\n" for line in ended)


def split_whole(content: bytes) -> Lines:
    """Return the content as one piece that is not a line."""
    return (content,) if content else ()


def _two_way(mine: Lines, yours: Lines, edits: list[Edit]) -> Iterator[Piece]:
    at = 0
    for edit in edits:
        if edit.old_from > at:
            yield mine[at : edit.old_from]
        yield TextConflict(None, mine[edit.old_from : edit.old_to], yours[edit.new_from : edit.new_to])
        at = edit.old_to
    if at < len(mine):
        yield mine[at:]


@dataclass(frozen=True)
class _Region:
    """Base lines changed by edits that touch one another, and these edits, by side."""

    start: int
    stop: int
    ours: tuple[Edit, ...]
    theirs: tuple[Edit, ...]


def _three_way(old: Lines, mine: Lines, yours: Lines, our_edits: list[Edit], their_edits: list[Edit]) -> Iterator[Piece]:
    at = 0
    for region in _regions(our_edits, their_edits):
        yield old[at : region.start]
        at = region.stop
        before = old[region.start : region.stop]
        ours = _side(mine, region, region.ours) if region.ours else before
        theirs = _side(yours, region, region.theirs) if region.theirs else before
        if ours == theirs or not region.theirs:
            yield ours
        elif not region.ours:
            yield theirs
        else:
            yield TextConflict(before, ours, theirs)
    yield old[at:]


def _regions(our_edits: list[Edit], their_edits: list[Edit]) -> Iterator[_Region]:
    """Yield groups of edits that overlap or touch: an edit may depend on lines that the other side changed."""
    ordered = sorted([(edit, True) for edit in our_edits] + [(edit, False) for edit in their_edits], key=lambda each: _extent(each[0]))
    group: list[tuple[Edit, bool]] = []
    stop = 0
    for edit, own in ordered:
        if group and edit.old_from > stop:
            yield _region(group, stop)
            group = []
        stop = max(stop, edit.old_to) if group else edit.old_to
        group.append((edit, own))
    if group:
        yield _region(group, stop)


def _extent(edit: Edit) -> tuple[int, int]:
    return edit.old_from, edit.old_to


def _region(group: list[tuple[Edit, bool]], stop: int) -> _Region:
    return _Region(
        group[0][0].old_from,
        stop,
        tuple(edit for edit, own in group if own),
        tuple(edit for edit, own in group if not own),
    )


def _side(lines: Lines, region: _Region, edits: tuple[Edit, ...]) -> Lines:
    """Return one side's version of these lines of the base."""
    first, last = edits[0], edits[-1]
    return lines[first.new_from - (first.old_from - region.start) : last.new_to + (region.stop - last.old_to)]


def _joined(pieces: Iterator[Piece]) -> Iterator[Piece]:
    """Yield the pieces, with consecutive lines joined into one piece."""
    lines: list[bytes] = []
    for piece in pieces:
        if isinstance(piece, TextConflict):
            if lines:
                yield tuple(lines)
                lines = []
            yield piece
        else:
            lines += piece
    if lines:
        yield tuple(lines)
