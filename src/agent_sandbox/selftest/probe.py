"""A probe: one promise in a sentence, and a function that attacks it in a box and tells what got through.

The function plants, lets an attempt run in the box it is given, and looks from outside. It is called with the bare machine first; there
it must find that the attack succeeds, or it proves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Literal

from agent_sandbox._fast.values import dataclass, field
from agent_sandbox.errors import SandboxError
from agent_sandbox.selftest.bench import Bench
from agent_sandbox.selftest.boxes import Box

RUN, SDK = "run", "sdk"
BOTH = (RUN, SDK)


@dataclass(frozen=True)
class Found:
    """What a probe saw: the ways that got through, with what was seen, and those that were refused, with the answer."""

    reached: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)


Look = Callable[[Bench, Box], Found]


@dataclass(frozen=True)
class Probe:
    """One attack. `excuse` says why a machine may refuse it even without a sandbox; without one, that is a fault of the probe.

    `rests_on` names rows of `doctor` whose remedies may help when it fails.
    """

    name: str
    claim: str
    tries: str
    look: Look
    boxes: tuple[str, ...] = BOTH
    excuse: str = ""
    rests_on: tuple[str, ...] = ()


class Registry:
    """The probes of one subject, in the order in which they are written."""

    def __init__(self, *rests_on: str) -> None:
        self.probes: list[Probe] = []
        self._rests_on = rests_on

    def probe(self, name: str, claim: str, tries: str, *, boxes: Iterable[str] = BOTH, excuse: str = "") -> Callable[[Look], Look]:
        """A decorator: this function is a probe."""

        def register(look: Look) -> Look:
            self.probes.append(Probe(name, claim, tries, look, tuple(boxes), excuse, self._rests_on))
            return look

        return register


Status = Literal["pass", "fail", "inconclusive"]
Seen = dict[str, Found | str]  # by the probe's name; words where it could not be tried


@dataclass(frozen=True)
class Result:
    """What a probe showed of one box.

    `shown` are the ways that get through without a sandbox and did not in it; `unshown` were refused here too, but would have been without
    a sandbox as well, so they prove nothing. `excused` is an inconclusive result for which this machine is the reason.
    """

    probe: Probe
    box: str
    status: Status
    why: str = ""
    reached: dict[str, str] = field(default_factory=dict)
    shown: tuple[str, ...] = ()
    unshown: tuple[str, ...] = ()
    excused: bool = False

    @property
    def bad(self) -> bool:
        """Whether the self-test as a whole has not passed because of it."""
        return self.status == "fail" or (self.status == "inconclusive" and not self.excused)


def look(probes: Iterable[Probe], bench: Bench, box: Box, *, starting: Callable[[Probe], None] = lambda probe: None) -> Seen:
    """Try each probe in one box. Whatever keeps one from being tried is told in its place, and never passes."""
    seen: Seen = {}
    for probe in probes:
        starting(probe)
        try:
            seen[probe.name] = probe.look(bench, box)
        except (SandboxError, OSError) as error:
            seen[probe.name] = str(error)
    return seen


def judge(probe: Probe, box: str, control: Found | str, found: Found | str) -> Result:
    """What follows. Pure. What got through is a failure, whatever else is known; nothing is passed that was not shown to be possible."""
    if isinstance(found, Found) and found.reached:
        return Result(probe, box, "fail", "it got through", dict(found.reached))
    if isinstance(found, str):
        return Result(probe, box, "inconclusive", f"it could not be tried: {found}")
    if isinstance(control, str):
        return Result(probe, box, "inconclusive", f"it could not be tried without a sandbox: {control}")
    if not control.reached:
        why = probe.excuse or "the same attempt does not succeed without a sandbox either"
        return Result(probe, box, "inconclusive", why, excused=bool(probe.excuse))
    shown = tuple(control.reached)
    return Result(probe, box, "pass", "", {}, shown, tuple(way for way in found.refused if way not in control.reached))
