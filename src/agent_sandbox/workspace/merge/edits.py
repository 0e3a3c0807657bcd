"""The edits that turn one list of lines into another, found in bounded time.

Lines are numbered first, so that comparing two lines compares two integers. Myers' algorithm finds the shortest list of edits: for each
number of edits it computes how far each diagonal reaches. That is quadratic in the number of edits, which the author of the files chooses,
so there is a budget. A stretch beyond it is divided at lines that occur once on both sides and in the same order. A stretch without such a
line counts as replaced as a whole: correct, but not the shortest.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import pairwise

from agent_sandbox._fast.values import dataclass

STEPS = 1_500_000  # of the search, for one comparison: about a second
_MOST_EDITS = 1_000  # in one stretch; memory grows with its square
_DIVISIONS = 40  # times that each line may be examined for a place to divide


@dataclass(frozen=True)
class Edit:
    """One edit: `old[old_from:old_to]` became `new[new_from:new_to]`. At least one unchanged line separates two edits."""

    old_from: int
    old_to: int
    new_from: int
    new_to: int


def find_edits(old: Sequence[bytes], new: Sequence[bytes], *, steps: int = STEPS) -> list[Edit]:
    """Return the edits from `old` to `new`, in order. Insertions and removals stand as far down as they can."""
    numbers: dict[bytes, int] = {}
    before = [numbers.setdefault(line, len(numbers)) for line in old]
    after = [numbers.setdefault(line, len(numbers)) for line in new]
    pairs = _Search(before, after, steps).matches()
    return _slide_down(before, after, _edits_between(pairs, len(before), len(after)))


class _Search:
    """The search for pairs of unchanged lines. A loop over stretches, not a recursion: the file decides how deep they nest."""

    def __init__(self, old: list[int], new: list[int], steps: int) -> None:
        self._old, self._new, self._left = old, new, steps
        self._division = _DIVISIONS * (len(old) + len(new))  # budget for dividing when the search is given up

    def matches(self) -> list[tuple[int, int]]:
        """Return pairs of positions, increasing on both sides."""
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
    """Return where a diagonal is entered with one more edit: an inserted or a removed line."""
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
    """Return the longest run, in the same order on both sides, of lines that occur once on each side."""
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
    """Move each insertion and removal down over lines that equal its first, and join it with the edit it meets.

    It is unknowable which of several equal lines was inserted. Two sides that made the same edit must not differ in that.
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
