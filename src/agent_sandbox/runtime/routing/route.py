"""Choose a runtime: the cheapest that gives every required guarantee and, as far as its text shows, can run the work.

Total and deterministic; the time it takes is bounded by the size of text that the readers accept. Where the text does not tell, the work
goes to a lighter runtime only if it can start again on a heavier one.
"""

from __future__ import annotations

from collections.abc import Iterable

from agent_sandbox.policy.guarantees import Guarantee
from agent_sandbox.readers.bounds import shown
from agent_sandbox.runtime.routing.fit import Fit, fit
from agent_sandbox.runtime.routing.model import COMMAND, Feature, Host, Permits, Reading, Route, Work

_BARRED_BY = {Feature.PROCESSES: "processes", Feature.SOCKETS: "network"}


def route(work: Work, requires: frozenset[Guarantee], permits: Permits, hosts: Iterable[Host]) -> Route:
    """Where the work is to run. Never a runtime that is unavailable or lacks a required guarantee."""
    reading = read(work)
    fits = [fit(host, work, requires, reading) for host in sorted(hosts, key=lambda host: (host.cost, host.name))]
    notes = _notes(reading, permits)
    for index, candidate in enumerate(fits):
        forward = _forward(candidate, fits[index + 1 :], work)
        if candidate.runs or (candidate.eligible and not candidate.lacks and forward is not None):
            return Route(candidate.host.name, shown(_why(candidate, work, reading)), _others(fits, candidate), forward, notes)
    if not (eligible := [each for each in fits if each.eligible]):
        return Route(None, shown(_why_none(fits, work)), _others(fits, None), None, notes)
    # Nothing fits well. What gives the guarantees is safe to try, and its own error tells the author more than a refusal to guess.
    least = min(eligible, key=lambda each: (len(each.lacks), len(each.doubts), each.host.cost, each.host.name))
    why = f"nothing else here gives what is required, although {(*least.lacks, *least.doubts)[0]}"
    return Route(least.host.name, shown(why), _others(fits, least), None, notes)


def read(work: Work) -> Reading:
    """What the text of the work shows. Languages that only whole runtimes take need no reading."""
    if work.language == "python":
        from agent_sandbox.runtime.routing.python import read_python

        return read_python(work.source)
    if work.language == "javascript":
        from agent_sandbox.runtime.routing.javascript import read_javascript

        return read_javascript(work.source)
    return Reading()


def explain(chosen: Route) -> tuple[str, ...]:
    """The decision in lines, for `--explain` and for people who look at a result."""
    lines = [f"runtime: {chosen.runtime or 'none'}: {chosen.why}"]
    lines += [f"passed over: {name}: {why}" for name, why in chosen.passed_over]
    if chosen.fall_forward is not None:
        lines.append(f"falls forward: to {chosen.fall_forward}, once, on a fresh clone, if something turns out to be missing")
    return (*lines, *(f"note: {note}" for note in chosen.notes))


def _forward(chosen: Fit, heavier: list[Fit], work: Work) -> str | None:
    if chosen.host.whole or not chosen.eligible or not work.repeatable:
        return None
    return next((each.host.name for each in heavier if each.runs), None)


def _why(chosen: Fit, work: Work, reading: Reading) -> str:
    if chosen.doubts:
        return f"the cheapest that may do, and it can start again elsewhere: {chosen.doubts[0]}"
    if work.language == COMMAND:
        return "the cheapest that gives every required guarantee and runs native programs"
    if chosen.host.whole:
        return f"the cheapest that gives every required guarantee and runs this {work.language}"
    used = ", ".join(sorted({name.partition(".")[0] for name in reading.modules})[:8])
    return f"the cheapest that gives every required guarantee and has what the code uses{f' ({used})' if used else ''}"


def _why_none(fits: list[Fit], work: Work) -> str:
    if not any(work.language in each.host.languages for each in fits):
        return f"no runtime here takes {'commands' if work.language == COMMAND else repr(work.language[:40])}"
    return "no runtime here is available, gives every required guarantee and takes this work"


def _others(fits: list[Fit], chosen: Fit | None) -> tuple[tuple[str, str], ...]:
    return tuple((each.host.name, shown(each.reason) or "costs more") for each in fits if each is not chosen)


def _notes(reading: Reading, permits: Permits) -> tuple[str, ...]:
    permitted = {Feature.PROCESSES: permits.processes, Feature.SOCKETS: permits.network}
    notes = [
        f"it {feature.value} ({reading.features[feature]}), but the policy allows no {_BARRED_BY[feature]}"
        for feature, allowed in permitted.items()
        if not allowed and feature in reading.features
    ]
    if reading.open_loop:
        notes.append(f"how long the loop at line {reading.open_loop} runs cannot be told from the text")
    return tuple(map(shown, notes))
