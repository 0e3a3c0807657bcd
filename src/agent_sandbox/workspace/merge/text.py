"""Merge two versions of a text with a common base, line by line, and find the edits between two lists of lines, in bounded time.

*Ours* is the sandbox's version, *theirs* is the present real version. If one side alone made a change, the result has that change. If both
sides made the same change, the result has it once. Where both changed the same lines, or lines that touch, there is a conflict: a value
with all three versions, never a guess. Lines end with a newline and are otherwise bytes: a carriage return before the newline is part of
the line, and the last line may lack the newline.

If each line occurs once, the result equals git's, conflicts included. If lines repeat, several lists of edits are equally short, and we may
choose another list than git. Then git may report a conflict where we report none, or the other way round.

Content with a NUL is not text, and content that is too large is not searched. Such a file is one conflict as a whole, unless only one side
changed it.

Edits: lines are numbered first, so that comparing two lines compares two integers. Myers' algorithm finds the shortest list of edits: for
each number of edits it computes how far each diagonal reaches. That is quadratic in the number of edits, which the author of the files
chooses, so there is a budget. A stretch that exceeds the budget is divided at lines that occur once on each side, in the same order. If it
has no such line, the whole stretch counts as replaced, which is correct but not the shortest list.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import pairwise

from agent_sandbox._fast.values import dataclass

STEPS = 1_500_000  # of the search, for one comparison: about a second
_MOST_EDITS = 1_000  # in one stretch; memory grows with its square
_DIVISIONS = 40  # times that each line may be examined for a place to divide
MOST_BYTES = 8 << 20
MOST_LINES = 400_000
Lines = tuple[bytes, ...]


@dataclass(frozen=True)
class Edit:
    """One edit: `old[old_from:old_to]` became `new[new_from:new_to]`. At least one unchanged line separates two edits."""

    old_from: int
    old_to: int
    new_from: int
    new_to: int

    def __init__(self, old_from: int, old_to: int, new_from: int, new_to: int) -> None:
        values = self.__dict__  # written out, like `Change.__init__`, because there is one for each changed file
        values["old_from"], values["old_to"], values["new_from"], values["new_to"] = old_from, old_to, new_from, new_to


def find_edits(old: Sequence[bytes], new: Sequence[bytes], *, steps: int = STEPS) -> list[Edit]:
    """Return the edits from `old` to `new`, in order. Insertions and removals stand as far down as they can."""
    if not old or not new:  # a new file, or a removed one
        return [Edit(0, len(old), 0, len(new))] if old or new else []
    numbers: dict[bytes, int] = {}
    before = [numbers.setdefault(line, len(numbers)) for line in old]
    after = [numbers.setdefault(line, len(numbers)) for line in new]
    pairs = _Search(before, after, steps).matches()
    return _slide_down(before, after, _edits_between(pairs, len(before), len(after)))


class _Search:
    """Finds pairs of unchanged lines. It loops over stretches instead of recursing, because the file decides how deep stretches nest."""

    def __init__(self, old: list[int], new: list[int], steps: int) -> None:
        self._old, self._new, self._left = old, new, steps
        self._division = _DIVISIONS * (len(old) + len(new))  # budget for dividing when the search is given up

    def matches(self) -> list[tuple[int, int]]:
        """Return the positions of equal lines, as pairs (old, new) in increasing order."""
        matched: list[tuple[int, int]] = []
        pending = [(0, len(self._old), 0, len(self._new))]
        while pending:
            old_from, old_to, new_from, new_to = pending.pop()
            while old_from < old_to and new_from < new_to and self._old[old_from] == self._new[new_from]:
                matched.append((old_from, new_from))
                old_from, new_from = old_from + 1, new_from + 1
            while old_from < old_to and new_from < new_to and self._old[old_to - 1] == self._new[new_to - 1]:
                old_to, new_to = old_to - 1, new_to - 1
                matched.append((old_to, new_to))
            self._division -= old_to - old_from + new_to - new_from
            if old_from == old_to or new_from == new_to or self._division < 0:
                continue
            # A line that the other side lacks has no pair. Without such lines the search is shorter and just as exact.
            old = self._shared(self._old, old_from, old_to, set(self._new[new_from:new_to]))
            new = self._shared(self._new, new_from, new_to, set(self._old[old_from:old_to]))
            pairs = self._shortest(old, new)
            if pairs is not None:
                matched += pairs
                continue
            corners = [(old_from, new_from), *_anchors(self._old, self._new, old, new), (old_to, new_to)]
            if len(corners) > 2:
                pending += [(a, c, b, d) for (a, b), (c, d) in pairwise(corners)]
        return sorted(matched)

    @staticmethod
    def _shared(lines: list[int], start: int, stop: int, others: set[int]) -> list[int]:
        return [position for position in range(start, stop) if lines[position] in others]

    def _shortest(self, old: list[int], new: list[int]) -> list[tuple[int, int]] | None:
        """Return the pairs of the longest common subsequence of two lists of positions.

        Return None if that takes more steps than are left, or more than `_MOST_EDITS` edits.
        """
        a, b = [self._old[position] for position in old], [self._new[position] for position in new]
        furthest = {1: 0}
        trail: list[dict[int, int]] = []
        for edits in range(min(len(a) + len(b), _MOST_EDITS) + 1):
            self._left -= edits + 1
            if self._left < 0:
                return None
            trail.append(furthest.copy())
            for diagonal in range(-edits, edits + 1, 2):
                entered = x = _start(furthest, diagonal, edits)
                while x < len(a) and x - diagonal < len(b) and a[x] == b[x - diagonal]:
                    x += 1
                furthest[diagonal] = x
                self._left -= x - entered
                if x >= len(a) and x - diagonal >= len(b):
                    return [(old[i], new[j]) for i, j in _backtrack(trail, len(a), len(b))]
        return None


def _start(furthest: dict[int, int], diagonal: int, edits: int) -> int:
    """Return where the path with this number of edits enters a diagonal, in Myers' algorithm: after an inserted or a removed line."""
    if diagonal == -edits or (diagonal != edits and furthest[diagonal - 1] < furthest[diagonal + 1]):
        return furthest[diagonal + 1]
    return furthest[diagonal - 1] + 1


def _backtrack(trail: list[dict[int, int]], x: int, y: int) -> Iterator[tuple[int, int]]:
    for edits in range(len(trail) - 1, -1, -1):
        furthest = trail[edits]
        diagonal = x - y
        entered = _start(furthest, diagonal, edits) if edits else 0
        while x > entered:
            x, y = x - 1, y - 1
            yield x, y
        if not edits:
            return
        x = entered
        if diagonal == -edits or (diagonal != edits and furthest[diagonal - 1] < furthest[diagonal + 1]):
            y = x - diagonal - 1
        else:
            x, y = x - 1, x - diagonal


def _anchors(a: list[int], b: list[int], old: list[int], new: list[int]) -> list[tuple[int, int]]:
    """Return the longest list of lines that occur once on each side, in the same order. A line is given by its position on each side."""
    once_old, once_new = _unique(a, old), _unique(b, new)
    pairs = sorted((position, once_new[line]) for line, position in once_old.items() if line in once_new)
    tails: list[int] = []  # the smallest end of an increasing run of each length
    ends: list[int] = []
    before: list[int] = []
    for index, (_, position) in enumerate(pairs):
        length = bisect_left(tails, position)
        before.append(ends[length - 1] if length else -1)
        tails[length : length + 1] = [position]
        ends[length : length + 1] = [index]
    chain: list[tuple[int, int]] = []
    index = ends[-1] if ends else -1
    while index >= 0:
        chain.append(pairs[index])
        index = before[index]
    return chain[::-1]


def _unique(lines: list[int], positions: list[int]) -> dict[int, int]:
    last: dict[int, int] = {}
    repeated: set[int] = set()
    for position in positions:
        line = lines[position]
        if line in last:
            repeated.add(line)
        last[line] = position
    return {line: position for line, position in last.items() if line not in repeated}


def _edits_between(matches: list[tuple[int, int]], old_length: int, new_length: int) -> list[Edit]:
    edits: list[Edit] = []
    old_at = new_at = 0
    for old, new in (*matches, (old_length, new_length)):
        if old > old_at or new > new_at:
            edits.append(Edit(old_at, old, new_at, new))
        old_at, new_at = old + 1, new + 1
    return edits


def _slide_down(old: list[int], new: list[int], edits: list[Edit]) -> list[Edit]:
    """Move each insertion and removal down over lines that equal its first line, and join it with the edit that it meets.

    Nobody can know which of several equal lines was inserted. So that the same edit on both sides is recognised, it needs one fixed place.
    """
    result: list[Edit] = []
    pending = edits[::-1]
    while pending:
        edit = pending.pop()
        limit = pending[-1].old_from if pending else len(old)
        a, b, c, d = edit.old_from, edit.old_to, edit.new_from, edit.new_to
        if a == b:
            while b < limit and new[c] == new[d]:
                a, b, c, d = a + 1, b + 1, c + 1, d + 1
        elif c == d:
            while b < limit and old[a] == old[b]:
                a, b, c, d = a + 1, b + 1, c + 1, d + 1
        if pending and b == limit:
            following = pending.pop()
            pending.append(Edit(a, following.old_to, c, following.new_to))
        else:
            result.append(Edit(a, b, c, d))
    return result


@dataclass(frozen=True)
class Labels:
    """The names of the sides, as written after conflict markers."""

    ours: str = "sandbox"
    base: str = "base"
    theirs: str = "real"


@dataclass(frozen=True)
class TextConflict:
    """Lines that both sides changed differently, with the same lines of the base; `base` is None if it is not known."""

    base: Lines | None
    ours: Lines
    theirs: Lines


Piece = Lines | TextConflict


@dataclass(frozen=True)
class Merged:
    """The result of a text merge, in pieces. `why` says why the whole text is one conflict; it is empty if lines were merged."""

    pieces: tuple[Piece, ...]
    why: str = ""

    @property
    def conflicts(self) -> tuple[TextConflict, ...]:
        """The pieces in conflict."""
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
    """Split at newlines only, unlike `splitlines`. Each line keeps its newline; the last may lack it."""
    *ended, last = content.split(b"\n")
    lines = [line + b"\n" for line in ended]
    return (*lines, last) if last else tuple(lines)


def split_whole(content: bytes) -> Lines:
    """Return the content as a single piece, for content that is not merged by lines."""
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
    """A stretch of base lines, from `start` to `stop`, and the edits of both sides that change it."""

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
    """Yield groups of edits that overlap or touch. An edit may depend on neighbouring lines that the other side changed."""
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
    """Return one side's version of the base lines in a region. `lines` are all lines of that side, `edits` its edits in the region."""
    first, last = edits[0], edits[-1]
    return lines[first.new_from - (first.old_from - region.start) : last.new_to + (region.stop - last.old_to)]


def _joined(pieces: Iterator[Piece]) -> Iterator[Piece]:
    """Yield the pieces, with consecutive pieces of merged lines joined into one."""
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
