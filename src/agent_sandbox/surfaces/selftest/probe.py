"""A probe: one promise in a sentence, and a function that attacks it in a box and tells what got through.

The function plants, lets an attempt run in the box it is given, and looks from outside. It is called with the bare machine first; there
it must find that the attack succeeds, or it proves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from agent_sandbox.surfaces.selftest.bench import Bench
from agent_sandbox.surfaces.selftest.boxes import Box
from agent_sandbox.values import dataclass, field

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
