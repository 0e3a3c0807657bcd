"""Hunks: edits that stand close together, with the lines around them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from agent_sandbox.values import dataclass
from agent_sandbox.workspace.merging.edits import Edit

AROUND = 3  # lines


@dataclass(frozen=True)
class Hunk:
    """A stretch of both sides, from the first line before the first edit to the last line after the last one."""

    old_from: int
    old_to: int
    new_from: int
    new_to: int
    edits: tuple[Edit, ...]

    def title(self, lines_before: int = 0) -> str:
        """The line that begins it, as every program writes it."""
        old = _range(self.old_from, self.old_to, lines_before)
        return f"@@ -{old} +{_range(self.new_from, self.new_to, lines_before)} @@"

    def stretches(self) -> Iterator[tuple[tuple[int, int], Edit | None]]:
        """What it is made of, in order: lines of the old side that stay, and what follows them, None after the last."""
        at = self.old_from
        for edit in self.edits:
            yield (at, edit.old_from), edit
            at = edit.old_to
        yield (at, self.old_to), None


def hunks(edits: Sequence[Edit], old_length: int) -> Iterator[Hunk]:
    """The hunks of a list of edits of a file with so many old lines."""
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
