"""How one list of lines became another: the edits, found in bounded time.

Lines are numbered first, so that comparing two is comparing two integers. The shortest list of edits is looked for as Myers does, by
following, for each number of edits, how far one gets on each diagonal. That is quadratic in the number of edits, and whoever writes the
files chooses that number; so there is a budget. A stretch beyond it is divided at lines that occur once on both sides and in the same
order, and what has no such line is called replaced as a whole: true, only not the shortest.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import pairwise

from agent_sandbox._fast.values import dataclass

STEPS = 1_500_000  # of the search, for one comparison: about a second
_MOST_EDITS = 1_000  # in one stretch; what is remembered grows with its square
_DIVISIONS = 40  # times that every line may be looked at for where to divide


@dataclass(frozen=True)
class Edit:
    """`old[old_from:old_to]` became `new[new_from:new_to]`. Between two edits there is at least one line that stayed."""

    old_from: int
    old_to: int
    new_from: int
    new_to: int


def find_edits(old: Sequence[bytes], new: Sequence[bytes], *, steps: int = STEPS) -> list[Edit]:
    """The edits that lead from one to the other, in order. What is inserted or removed stands as far down as it can."""
    numbers: dict[bytes, int] = {}
    before = [numbers.setdefault(line, len(numbers)) for line in old]
    after = [numbers.setdefault(line, len(numbers)) for line in new]
    kept = _Search(before, after, steps).matches()
    return _slide_down(before, after, _edits_between(kept, len(before), len(after)))


class _Search:
    """Finds pairs of lines that stayed. A loop over stretches, not a recursion: how they nest is the file's choice."""

    def __init__(self, old: list[int], new: list[int], steps: int) -> None:
        self._old, self._new, self._left = old, new, steps
        self._division = _DIVISIONS * (len(old) + len(new))  # what dividing may cost when the search is given up

    def matches(self) -> list[tuple[int, int]]:
        """Pairs of positions, increasing on both sides."""
        found: list[tuple[int, int]] = []
        pending = [(0, len(self._old), 0, len(self._new))]
        while pending:
            old_from, old_to, new_from, new_to = pending.pop()
            while old_from < old_to and new_from < new_to and self._old[old_from] == self._new[new_from]:
                found.append((old_from, new_from))
                old_from, new_from = old_from + 1, new_from + 1
            while old_from < old_to and new_from < new_to and self._old[old_to - 1] == self._new[new_to - 1]:
                old_to, new_to = old_to - 1, new_to - 1
                found.append((old_to, new_to))
            self._division -= old_to - old_from + new_to - new_from
            if old_from == old_to or new_from == new_to or self._division < 0:
                continue
            # A line that the other side has not is no pair of any: without those the search is short, and as exact.
            old = self._shared(self._old, old_from, old_to, set(self._new[new_from:new_to]))
            new = self._shared(self._new, new_from, new_to, set(self._old[old_from:old_to]))
            pairs = self._shortest(old, new)
            if pairs is not None:
                found += pairs
                continue
            corners = [(old_from, new_from), *_anchors(self._old, self._new, old, new), (old_to, new_to)]
            if len(corners) > 2:
                pending += [(a, c, b, d) for (a, b), (c, d) in pairwise(corners)]
        return sorted(found)

    @staticmethod
    def _shared(lines: list[int], start: int, stop: int, others: set[int]) -> list[int]:
        return [position for position in range(start, stop) if lines[position] in others]

    def _shortest(self, old: list[int], new: list[int]) -> list[tuple[int, int]] | None:
        """Pairs of the longest common sequence of two lists of positions; None when that takes more steps than are left."""
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
                    return [(old[i], new[j]) for i, j in _way_back(trail, len(a), len(b))]
        return None


def _start(furthest: dict[int, int], diagonal: int, edits: int) -> int:
    """Where a diagonal is entered with one more edit: an inserted line, or a removed one."""
    if diagonal == -edits or (diagonal != edits and furthest[diagonal - 1] < furthest[diagonal + 1]):
        return furthest[diagonal + 1]
    return furthest[diagonal - 1] + 1


def _way_back(trail: list[dict[int, int]], x: int, y: int) -> Iterator[tuple[int, int]]:
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
    """Lines that occur once on both sides: of them, the longest run that is in the same order."""
    once_old, once_new = _once(a, old), _once(b, new)
    pairs = sorted((position, once_new[line]) for line, position in once_old.items() if line in once_new)
    tails: list[int] = []  # the smallest end of an increasing run, by its length
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


def _once(lines: list[int], positions: list[int]) -> dict[int, int]:
    found: dict[int, int] = {}
    repeated: set[int] = set()
    for position in positions:
        line = lines[position]
        if line in found:
            repeated.add(line)
        found[line] = position
    return {line: position for line, position in found.items() if line not in repeated}


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

    Which of several equal lines was inserted nobody can tell. Two sides that did the same must not differ in it.
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
