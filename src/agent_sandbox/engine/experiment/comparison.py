"""A comparison as text: the table, and the diffs of the attempts beside one another. Pure.

Names and numbers are ours. Text of a guest, such as a line of a diff, is escaped before it gets here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from agent_sandbox.engine.experiment.model import AttemptOutcome, Comparison, DiffSize
from agent_sandbox.workspace.escape import visible
from agent_sandbox.workspace.escape import width as width_of

_HEADINGS = ("", "attempt", "result", "tests", "score", "diff", "time", "cpu")
_NARROWEST = 20  # columns of one diff
_BETWEEN = " │ "


def table(comparison: Comparison) -> Iterator[str]:
    """Yield the lines of the table, the best attempt first. A star marks the winner."""
    rows = [_HEADINGS, *(_cells(result, comparison.winner) for result in comparison.results)]
    used = [column for column in range(len(_HEADINGS)) if column < 3 or any(row[column] for row in rows[1:])]
    widths = {column: max(_width(row[column]) for row in rows) for column in used}
    for row in rows:
        yield "  ".join(row[column] + " " * (widths[column] - _width(row[column])) for column in used).rstrip()


def _cells(result: AttemptOutcome, winner: str | None) -> tuple[str, ...]:
    tests, diff = result.tests, result.diff
    state = result.state if result.passed or not result.why else f"{result.state}: {_short(result.why)}"
    return (
        "*" if result.name == winner else "",
        result.name,
        visible(state),
        "" if tests is None else f"{tests.passed:,} passed, {tests.failed:,} failed (claimed)",
        "" if result.score is None else f"{result.score:g}",
        "" if result.live else _changes(diff),
        f"{result.seconds:.1f} s" if result.seconds else "",
        f"{result.cpu_seconds:.1f} s" if result.cpu_seconds else "",
    )


def _changes(diff: DiffSize) -> str:
    return f"{diff.files:,} {'file' if diff.files == 1 else 'files'} +{diff.added:,} -{diff.removed:,}" if diff.files else "no changes"


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:59]}…"


def beside(diffs: Mapping[str, Mapping[str, Sequence[str]]], columns: int) -> Iterator[str]:
    """Yield the diffs of attempts beside one another, file by file. `diffs` has the lines by attempt and by path.

    A line that is wider than its column goes on in the next row, after an arrow: nothing is left out.
    """
    names = [*diffs]
    if not names:
        return
    room = max(_NARROWEST, (columns - len(_BETWEEN) * (len(names) - 1)) // len(names))
    yield _row([[name] for name in names], room)[0]
    for path in dict.fromkeys(path for each in diffs.values() for path in each):
        yield ""
        yield f"── {visible(path)}"
        yield from _row([_wrapped(_body(diffs[name].get(path, ("(not changed)",))), room) for name in names], room)


def _body(lines: Sequence[str]) -> Sequence[str]:
    """Return a file's diff without its title. Lines of a guest begin with a sign, so none is mistaken for one."""
    return lines[1:] if lines and lines[0].startswith("diff --git ") else lines


def _row(cells: Sequence[Sequence[str]], room: int) -> list[str]:
    height = max(map(len, cells))
    filled = [[*cell, *([""] * (height - len(cell)))] for cell in cells]
    return [_BETWEEN.join(text + " " * max(0, room - _width(text)) for text in row).rstrip() for row in zip(*filled, strict=True)]


def _wrapped(lines: Iterable[str], room: int) -> list[str]:
    rows: list[str] = []
    for line in lines:
        rest, lead = line, ""
        while _width(lead + rest) > room:
            cut = _cut(rest, room - len(lead))
            rows.append(lead + rest[:cut])
            rest, lead = rest[cut:], "↳"
        rows.append(lead + rest)
    return rows


def _cut(text: str, room: int) -> int:
    """Return how many characters fit, at least one."""
    used = 0
    for index, letter in enumerate(text):
        used += width_of(letter)
        if used > room:
            return max(1, index)
    return len(text)


def _width(text: str) -> int:
    """Return the number of terminal columns of a printable text."""
    return len(text) if text.isascii() else sum(map(width_of, text))
