"""Probes: a probe is one promise in a sentence, and a function that attacks the promise in a box and returns the ways that got through.

The function plants decoys, lets an attempt run in a box, and looks from outside. It is called with the bare machine first; there the attack
must succeed, or the probe proves nothing. `judge` compares the findings on the bare machine with the findings in the sandbox.

A probe with `own_control` attacks the product itself, or one wall alone, and has no bare machine to compare with. So it also does the
honest deed, or the deed without the wall, and raises `NoAnswer` if that does not work.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

from agent_sandbox._fast.values import dataclass, field
from agent_sandbox.errors import SandboxError
from agent_sandbox.kernel.syscall_rules import numbers
from agent_sandbox.selftest.bench import DecoyBench
from agent_sandbox.selftest.boxes import Attempt, Box, Found

RUN, SDK, WASM, PRODUCT = "run", "sdk", "wasm", "product"
CHOSEN = CONTAINER, GVISOR, MICROVM = "container", "gvisor", "microvm"  # runtimes that are attacked, as that of the SDK, if they are named
BOTH = (RUN, SDK)
BOXES = (RUN, SDK, *CHOSEN, WASM, PRODUCT)  # in the order of the columns


Look = Callable[[DecoyBench, Any], Found]  # the second argument is a `Box`, or the `Product`


@dataclass(frozen=True)
class Probe:
    """One attack. `excuse` says why a machine may refuse it even without a sandbox; if empty, such a refusal is a fault of the probe.

    `rests_on` names rows of `doctor` whose remedies may help if the probe fails. With `own_control`, the probe shows itself that its attack
    can succeed.
    """

    name: str
    claim: str
    tries: str
    look: Look
    boxes: tuple[str, ...] = BOTH
    excuse: str = ""
    rests_on: tuple[str, ...] = ()
    own_control: bool = False


class Probes:
    """The probes of one subject, in source order."""

    def __init__(self, *rests_on: str) -> None:
        self.probes: list[Probe] = []
        self._rests_on = rests_on

    def probe(
        self, name: str, claim: str, tries: str, *, boxes: Iterable[str] = BOTH, excuse: str = "", own_control: bool = False
    ) -> Callable[[Look], Look]:
        """Return a decorator that registers a function as the probe of this name."""

        def register(look: Look) -> Look:
            self.probes.append(Probe(name, claim, tries, look, tuple(boxes), excuse, self._rests_on, own_control))
            return look

        return register


class WallAbsent(SandboxError):
    """This machine does not have the wall that a probe attacks, or the caller has not set it up."""


class Absent(str):
    """The message of a `WallAbsent`."""


Status = Literal["pass", "fail", "inconclusive"]
Seen = dict[str, Found | str]  # by the probe's name; a string is the error message of a probe that could not be tried


@dataclass(frozen=True)
class Result:
    """The result of a probe for one box.

    `shown` are the ways that got through without a sandbox, and did not get through in the sandbox. `unshown` are the ways that were
    refused in the sandbox and also without a sandbox, so they prove nothing. `excused` marks an inconclusive result for which this machine
    is the reason.
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
        """Whether this result makes the whole self-test fail."""
        return self.status == "fail" or (self.status == "inconclusive" and not self.excused)


def look(probes: Iterable[Probe], bench: DecoyBench, box: object, *, starting: Callable[[Probe], None] = lambda probe: None) -> Seen:
    """Run each probe in one box, and return its findings by its name. A probe that cannot run has its error message instead."""
    seen: Seen = {}
    for probe in probes:
        starting(probe)
        try:
            seen[probe.name] = probe.look(bench, box)
        except WallAbsent as error:
            seen[probe.name] = Absent(error.message)
        except (SandboxError, OSError) as error:
            seen[probe.name] = str(error)
        except Exception as error:  # a probe that breaks has shown nothing, and the others go on
            seen[probe.name] = f"{type(error).__name__}: {error}"
    return seen


def look_inside(
    box: AbstractContextManager[Box], probes: Sequence[Probe], bench: DecoyBench, *, starting: Callable[[Probe], None] = lambda probe: None
) -> Seen:
    """Enter a box, run a harmless attempt in it, and then each probe. Raises nothing: the other boxes are attacked all the same.

    If the box cannot be entered, used or left, only what got through is believed, and every other probe has the error message.
    """
    seen: Seen = {}
    try:
        with box as entered:
            entered.run(Attempt("files", "nothing"))
            seen |= look(probes, bench, entered, starting=starting)
    except Exception as error:  # also a mistake of ours: it has shown nothing
        kind = "" if isinstance(error, SandboxError | OSError) else f"{type(error).__name__}: "
        told = f"no sandbox of this kind can be used here: {kind}{error}"
        through = {name: found for name, found in seen.items() if isinstance(found, Found) and found.reached}
        return {**dict.fromkeys((probe.name for probe in probes), told), **through}
    return seen


def judge(probe: Probe, box: str, control: Found | str, found: Found | str) -> Result:
    """Judge a probe by its findings without a sandbox (`control`) and in a sandbox (`found`). Pure.

    The probe fails if any way got through in the sandbox. It passes only if a way got through without the sandbox.
    """
    if isinstance(found, Found) and found.reached:
        could = found.refused if probe.own_control else control.reached if isinstance(control, Found) else {}
        shown = tuple(way for way in could if way not in found.reached)
        return Result(probe, box, "fail", "it got through", dict(found.reached), shown)
    if isinstance(found, Absent):
        return Result(probe, box, "inconclusive", str(found), excused=True)
    if isinstance(found, str):
        return Result(probe, box, "inconclusive", f"it could not be tried: {found}")
    if probe.own_control:
        return Result(probe, box, "pass", "", {}, tuple(found.refused))
    if isinstance(control, str):
        return Result(probe, box, "inconclusive", f"it could not be tried without a sandbox: {control}")
    if not control.reached:
        why = probe.excuse or "the same attempt does not succeed without a sandbox either"
        return Result(probe, box, "inconclusive", why, excused=bool(probe.excuse))
    shown = tuple(control.reached)
    return Result(probe, box, "pass", "", {}, shown, tuple(way for way in found.refused if way not in control.reached))


def system_calls(*names: str) -> dict[str, int]:
    """Return the number of each of these system calls on this machine, by name."""
    table = numbers(os.uname().machine)
    return {name: table[name] for name in names}
