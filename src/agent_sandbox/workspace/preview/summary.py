"""How much each file changes, one line for each.

The numbers stand before the name: a name may hold anything that can be printed, and would otherwise bring numbers of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from agent_sandbox.values import dataclass
from agent_sandbox.workspace.changes import Change, Kind
from agent_sandbox.workspace.preview.compare import Preview
from agent_sandbox.workspace.preview.rows import ADDED, FACT, HEADING, REMOVED, Cell, Row, ours
from agent_sandbox.workspace.visible import named

LETTERS = {Kind.ADDED: "A", Kind.DELETED: "D", Kind.RETYPED: "T", Kind.MODIFIED: "M", Kind.MODE: "m", Kind.OWNER: "o", Kind.XATTR: "x"}
_BARS = 30  # columns at most
_LEAST = 5


@dataclass(frozen=True)
class Measured:
    """A change and how much it is; `more` says that there is more than was counted."""

    change: Change
    name: str
    added: int = 0
    removed: int = 0
    sizes: str = ""  # of content that is no text
    more: bool = False


def measured(preview: Preview, name: str) -> Measured:
    """How much a change is, for the summary; the lines themselves are let go."""
    binary = preview.binary
    sizes = ""
    if binary is not None:
        before, after = preview.change.before, preview.change.after
        sizes = f"{before.size if before else 0:,} → {after.size if after else 0:,} bytes"
    return Measured(preview.change, name, preview.added, preview.removed, sizes, bool(preview.more_bytes or preview.unshown))


def summary(files: Sequence[Measured], columns: int) -> Iterator[Row]:
    """The rows, with bars in a scale that they share, and the total."""
    added = max((len(f"{each.added:,}") for each in files), default=1)
    removed = max((len(f"{each.removed:,}") for each in files), default=1)
    room = min(_BARS, max(_LEAST, columns // 3 - added - removed))
    most = max((each.added + each.removed for each in files), default=0)
    room = min(room, most)
    for each in files:
        plus, minus = _bars(each.added, each.removed, most, room)
        numbers = f"{LETTERS[each.change.kind]} {f'+{each.added:,}':>{added + 1}} {f'-{each.removed:,}':>{removed + 1}} "
        cells = (Cell(FACT, numbers), Cell(ADDED, "+" * plus), Cell(REMOVED, "-" * minus, pad=room - plus - minus + 1))
        yield Row((*cells, Cell(FACT, f"{named(each.name)}{_remarks(each)}")), between="")
    if files:
        lines = f"+{sum(each.added for each in files):,} -{sum(each.removed for each in files):,} lines"
        binaries = sum(bool(each.sizes) for each in files)
        others = f", {binaries:,} of them not text" if binaries else ""
        uncounted = "; more where it says so" if any(each.more for each in files) else ""
        yield ours(HEADING, f"# {len(files):,} {'change' if len(files) == 1 else 'changes'}{others}: {lines}{uncounted}")


def _remarks(each: Measured) -> str:
    remarks = [each.sizes] if each.sizes else []
    if each.change.inside:
        remarks.append(f"and {each.change.inside:,} below it")
    if each.change.renamed_from:
        remarks.append("renamed")
    if each.more:
        remarks.append("and more, not counted")
    return f" ({'; '.join(remarks)})" if remarks else ""


def _bars(added: int, removed: int, most: int, room: int) -> tuple[int, int]:
    """How many signs of each. A side that is not empty has one at least."""
    if most <= room:
        return added, removed
    plus = max(1, added * room // most) if added else 0
    minus = max(1, removed * room // most) if removed else 0
    return min(plus, room - minus) if minus else plus, minus
