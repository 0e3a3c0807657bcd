"""Where a run departs from the record of an earlier one. Pure: two records in, words out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from agent_sandbox.engine.records.record import Record
from agent_sandbox.engine.records.tape import Tape, first_difference
from agent_sandbox.values import dataclass

_SNIPPET = 40  # bytes that are shown of either side


@dataclass(frozen=True)
class Departure:
    """One difference. `what` is "input", "stdout", "stderr", "change", "exit" or "fuel"; `message` is for people."""

    what: str
    message: str


def departures(recorded: Record, now: Record) -> tuple[Departure, ...]:
    """All of them, what may have caused the others first; nothing when the two runs were the same."""
    return (
        *_inputs(recorded.inputs, now.inputs),
        *_stream("stdout", recorded.stdout, now.stdout),
        *_stream("stderr", recorded.stderr, now.stderr),
        *_changes(recorded.changes, now.changes),
        *_end(recorded, now),
    )


def _inputs(before: Mapping[str, str], after: Mapping[str, str]) -> Iterator[Departure]:
    for name in sorted(before.keys() & after.keys()):
        if before[name] != after[name]:
            yield Departure("input", f"the {name} has changed since the record was made")
    for name in sorted(before.keys() - after.keys()):
        yield Departure("input", f"the {name} was looked into, and is not now")
    for name in sorted(after.keys() - before.keys()):
        yield Departure("input", f"the {name} is looked into, and was not then")


def _stream(name: str, before: Tape, after: Tape) -> Iterator[Departure]:
    found = first_difference(before, after)
    if found is None:
        return
    at, exact = found
    if not exact or at >= max(len(before.beginning), len(after.beginning)):
        yield Departure(name, f"{name} differs from byte {at} on{'' if exact else ', or shortly after'}")
        return
    was, now = (tape.beginning[at : at + _SNIPPET] for tape in (before, after))
    yield Departure(name, f"{name} differs at byte {at}: it was {_shown(was)}, and is {_shown(now)}")


def _shown(piece: bytes) -> str:
    return repr(piece)[1:] if piece else "at its end"


def _changes(before: Mapping[str, str], after: Mapping[str, str]) -> Iterator[Departure]:
    for path in sorted(before.keys() | after.keys()):
        if path not in after:
            yield Departure("change", f"{path!r} was changed, and is not now")
        elif path not in before:
            yield Departure("change", f"{path!r} is changed, and was not then")
        elif before[path] != after[path]:
            yield Departure("change", f"{path!r} is changed in another way")


def _end(before: Record, after: Record) -> Iterator[Departure]:
    was, now = ((record.code_out, record.reason, record.limits_hit) for record in (before, after))
    if was != now:
        yield Departure("exit", f"it ended with {was[0]} ({was[1]}), and now with {now[0]} ({now[1]})")
    if before.fuel != after.fuel:
        yield Departure("fuel", f"it used {before.fuel} units of fuel, and now {after.fuel}")
