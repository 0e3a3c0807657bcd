"""The results of the self-test: a table for people, and a document for programs."""

from __future__ import annotations

from typing import Any

from agent_sandbox.cli.render.colours import Style
from agent_sandbox.cli.render.messages import shown
from agent_sandbox.selftest.probe import BOTH, Probe, Result

_WIDTH = 14  # of the status column


def table(results: list[Result], remedies: dict[str, list[str]], seconds: float) -> None:
    """Print a line per probe and a column per box; then each result that did not pass, with the attempt and the evidence."""
    style = Style.of_stdout()
    probes: dict[str, Probe] = {result.probe.name: result.probe for result in results}
    by_place = {(result.probe.name, result.box): result for result in results}
    boxes = [box for box in BOTH if any(result.box == box for result in results)]
    width = max(map(len, probes), default=0) + 2
    print(style.heading(f"{'':{width}}{''.join(f'{box:<{_WIDTH}}' for box in boxes)}").rstrip())
    for name, probe in probes.items():
        cells = [by_place.get((name, box)) for box in boxes]
        words = "".join(style.status(cell.status, _WIDTH) if cell else f"{'-':<{_WIDTH}}" for cell in cells)
        print(f"{name:<{width}}{words}{probe.claim}")
    for result, boxes_of in _grouped(results):
        _explain(result, boxes_of, remedies.get(result.probe.name, []), style)
    print(f"\n{style.heading(verdict(results, seconds))}")


def _grouped(results: list[Result]) -> list[tuple[Result, list[str]]]:
    """Group equal results that did not pass, worst first, each with its boxes."""
    groups: dict[tuple[object, ...], tuple[Result, list[str]]] = {}
    for result in results:
        if result.status != "pass":
            groups.setdefault((result.probe.name, result.status, result.why, *result.reached.items()), (result, []))[1].append(result.box)
    return sorted(groups.values(), key=lambda each: (each[0].excused, each[0].status))


def _explain(result: Result, boxes: list[str], remedies: list[str], style: Style) -> None:
    print(f"\n{style.status(result.status, 0)} {result.probe.name} ({', '.join(boxes)}): {shown(result.why)}")
    print(f"  claimed  {result.probe.claim}")
    print(f"  tried    {result.probe.tries}")
    for way, seen in result.reached.items():
        print(f"  seen     {shown(way)}: {shown(seen)}")
    for remedy in remedies:
        print(f"  -> {shown(remedy)}")


def verdict(results: list[Result], seconds: float) -> str:
    """Return the overall result as one sentence."""
    counts = {status: sum(result.status == status for result in results) for status in ("pass", "fail", "inconclusive")}
    told = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    if any(result.bad for result in results):
        return f"Not everything that is promised was held or could be shown: {told}, in {seconds:.1f} s."
    return f"Everything that could be attacked here held: {told}, in {seconds:.1f} s."


def document(results: list[Result], remedies: dict[str, list[str]]) -> list[dict[str, Any]]:
    """Return the results as JSON values, for programs."""
    return [
        {
            "probe": result.probe.name,
            "box": result.box,
            "status": result.status,
            "claim": result.probe.claim,
            "tried": result.probe.tries,
            "why": result.why or None,
            "reached": result.reached,
            "shown": list(result.shown),
            "unshown": list(result.unshown),
            "excused": result.excused,
            "remedies": remedies.get(result.probe.name, []),
        }
        for result in results
    ]
