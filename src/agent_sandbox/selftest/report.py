"""The results of the self-test: a table for people, and a document for programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from agent_sandbox._fast.values import dataclass
from agent_sandbox.cli.render.colours import Style
from agent_sandbox.cli.render.messages import shown
from agent_sandbox.selftest.probe import BOTH, Result

_WIDTH = 14  # of the status column


@dataclass(frozen=True)
class ProbeFacts:
    """The result of a probe for one box, with the promise it is about."""

    probe: str
    box: str
    status: Literal["pass", "fail", "inconclusive"]
    claim: str
    tried: str
    why: str | None
    reached: Mapping[str, str]
    shown: tuple[str, ...]
    unshown: tuple[str, ...]
    excused: bool
    remedies: tuple[str, ...]


def facts(results: Sequence[Result], remedies: Mapping[str, Sequence[str]]) -> tuple[ProbeFacts, ...]:
    """Return the results as values."""
    return tuple(
        ProbeFacts(
            result.probe.name,
            result.box,
            result.status,
            result.probe.claim,
            result.probe.tries,
            result.why or None,
            result.reached,
            result.shown,
            result.unshown,
            result.excused,
            tuple(remedies.get(result.probe.name, ())),
        )
        for result in results
    )


def table(results: Sequence[ProbeFacts], seconds: float) -> None:
    """Print a line per probe and a column per box; then each result that did not pass, with the attempt and the evidence."""
    style = Style.of_stdout()
    claims = {result.probe: result.claim for result in results}
    by_place = {(result.probe, result.box): result for result in results}
    boxes = [box for box in BOTH if any(result.box == box for result in results)]
    width = max(map(len, claims), default=0) + 2
    print(style.heading(f"{'':{width}}{''.join(f'{box:<{_WIDTH}}' for box in boxes)}").rstrip())
    for name, claim in claims.items():
        cells = [by_place.get((name, box)) for box in boxes]
        words = "".join(style.status(cell.status, _WIDTH) if cell else f"{'-':<{_WIDTH}}" for cell in cells)
        print(f"{name:<{width}}{words}{claim}")
    for result, boxes_of in _grouped(results):
        _explain(result, boxes_of, style)
    print(f"\n{style.heading(verdict(results, seconds))}")


def _grouped(results: Sequence[ProbeFacts]) -> list[tuple[ProbeFacts, list[str]]]:
    """Group equal results that did not pass, worst first, each with its boxes."""
    groups: dict[tuple[object, ...], tuple[ProbeFacts, list[str]]] = {}
    for result in results:
        if result.status != "pass":
            groups.setdefault((result.probe, result.status, result.why, *result.reached.items()), (result, []))[1].append(result.box)
    return sorted(groups.values(), key=lambda each: (each[0].excused, each[0].status))


def _explain(result: ProbeFacts, boxes: list[str], style: Style) -> None:
    print(f"\n{style.status(result.status, 0)} {result.probe} ({', '.join(boxes)}): {shown(result.why or '')}")
    print(f"  claimed  {result.claim}")
    print(f"  tried    {result.tried}")
    for way, seen in result.reached.items():
        print(f"  seen     {shown(way)}: {shown(seen)}")
    for remedy in result.remedies:
        print(f"  -> {shown(remedy)}")


def verdict(results: Sequence[ProbeFacts], seconds: float) -> str:
    """Return the overall result as one sentence."""
    counts = {status: sum(result.status == status for result in results) for status in ("pass", "fail", "inconclusive")}
    told = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    if any(result.status == "fail" or (result.status == "inconclusive" and not result.excused) for result in results):
        return f"Not everything that is promised was held or could be shown: {told}, in {seconds:.1f} s."
    return f"Everything that could be attacked here held: {told}, in {seconds:.1f} s."
