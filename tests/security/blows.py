"""Kill -9, thousands of times, at random moments: rounds of supervisors under load, and after each a look at what is left.

The moments come from a seed; where they fall depends on the machine as well, so where each blow fell is counted, and a run whose blows hit
nothing alive, or always the same stage, does not pass for one that did.
"""

from __future__ import annotations

import heapq
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.leftovers import children, left_since, remove, traces
from tests.patience import stretched, until
from tests.security.victims import AT_A_TERMINAL, KINDS, Place, Supervisor, roles, start

AT_ONCE = 6  # supervisors in a round: three for each of two processors
GIVE_UP_SECONDS = 1.0  # on a helper that never appears
LOOK_AGAIN_SECONDS = 0.002
FIRST_MOMENTS = 0.05


@dataclass
class Tally:
    """Where the blows fell: who was hit, and in which stage it or its family was."""

    hits: Counter[tuple[str, str]] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    left: list[str] = field(default_factory=list)
    latest: list[str] = field(default_factory=list)  # the blows of the last round, for whoever has to find out what went wrong

    def count(self, supervisor: Supervisor, victim: str, stage: str, pid: int) -> None:
        self.hits[victim, stage] += 1
        self.latest.append(f"{time.monotonic():.3f} {supervisor.kind} {supervisor.pid}: {victim} {pid} {stage}")

    @property
    def kills(self) -> int:
        return self.hits.total()

    def victims(self) -> Counter[str]:
        totals: Counter[str] = Counter()
        for (victim, _), count in self.hits.items():
            totals[victim] += count
        return totals

    def __str__(self) -> str:
        parts = [f"{victim} {stage} {count}" for (victim, stage), count in sorted(self.hits.items())]
        return f"{self.kills} kills: " + ", ".join(parts)


@dataclass
class _Family:
    """A supervisor, whom of its family to strike next, and when: a pause after the blow before, or as soon as there is such a one."""

    supervisor: Supervisor
    plan: list[tuple[float, str]]
    until: float = 0.0
    struck: str = ""  # the latest
    fallen: set[int] = field(default_factory=set)  # zygotes that are struck, and may need a moment to fall

    @property
    def must_end(self) -> bool:
        """Whether the latest blow leaves a command nothing to go on with. It may do without a newborn, or one process of several, and make
        another zygote while nothing has run yet."""
        return self.struck not in ("", "guest", "newborn", "zygote") and not self.plan


def rain(kills: int, seed: int, top: Path, *, covered: Callable[[Tally], bool]) -> Tally:
    """Rounds of blows until there were so many and they have `covered` what they should. Where they fall depends on the machine, so that
    may take up to four times as many. Stops at the first round that leaves something. To be called under `adopting`."""
    moments = random.Random(seed)
    tally = Tally()
    number = 0
    while (tally.kills < kills or (not covered(tally) and tally.kills < 4 * kills)) and not tally.left:
        place = top / f"round-{number}"
        _round(moments, place, tally, offset=number * AT_ONCE)
        remove(place)
        number += 1
    return tally


def _round(moments: random.Random, top: Path, tally: Tally, *, offset: int) -> None:
    places = [Place.make(top / str(number)) for number in range(AT_ONCE)]
    watched = [path for place in places for path in place.temporary]
    before = traces(*watched, adopted=True)
    tally.latest.clear()
    families = []
    for number, place in enumerate(places):
        supervisor = start(KINDS[(offset + number) % len(KINDS)], place)
        tally.kinds[supervisor.kind] += 1
        families.append(_Family(supervisor, _planned(moments, supervisor)))
    _strike_all(families, moments, tally)
    for family in families:
        if family.must_end and not until(family.supervisor.ended):
            rest = roles(family.supervisor.pid)
            tally.left.append(f"supervisor {family.supervisor.pid} ({family.supervisor.kind}) goes on without its {family.struck}: {rest}")
        if family.supervisor.close():
            tally.count(family.supervisor, "supervisor", "at the end", family.supervisor.pid)
    tally.left += left_since(before, *watched, adopted=True)


def _planned(moments: random.Random, supervisor: Supervisor) -> list[tuple[float, str]]:
    """Pauses and victims. The last is the supervisor, unless it has to end by itself because of the one struck before."""
    last = (moments.choice((moments.uniform(0.0, FIRST_MOMENTS), moments.uniform(0.0, 0.4))), "supervisor")
    if supervisor.on_the_command_line:
        at_a_terminal = supervisor.kind in AT_A_TERMINAL
        victim = moments.choice(
            ("terminal", "terminal", "zygote", "init") if at_a_terminal else ("supervisor", "newborn", "zygote", "init", "guest")
        )
        plan = [] if victim == "supervisor" else [_blow(moments, victim, moments.choice((0.3, 1.5)) if at_a_terminal else 0.06)]
    else:
        plan = [
            _blow(moments, moments.choice(("zygote", "init", "guest", "guest"))) for _ in range(moments.choice((0, moments.randint(2, 6))))
        ]
    # What a zygote kept its supervisor clears away; with both killed that is left to the next start, which is tried elsewhere. So there has
    # to be another one before the supervisor is struck, which the init of a new run shows.
    plan = [blow for each in plan for blow in ((each, _blow(moments, "init")) if each[1] == "zygote" else (each,))]
    return plan if supervisor.on_the_command_line and {victim for _, victim in plan} & {"terminal", "init"} else [*plan, last]


def _blow(moments: random.Random, victim: str, latest: float = 0.06) -> tuple[float, str]:
    return moments.uniform(0.0, latest), victim


def _strike_all(families: list[_Family], moments: random.Random, tally: Tally) -> None:
    now, give_up = time.monotonic(), stretched(GIVE_UP_SECONDS)
    agenda = [(now + family.plan[0][0], number) for number, family in enumerate(families)]
    for family in families:
        family.until = now + give_up
    heapq.heapify(agenda)
    while agenda:
        at, number = heapq.heappop(agenda)
        time.sleep(max(0.0, at - time.monotonic()))  # not waiting for anything: a random moment is what is tried
        family, now = families[number], time.monotonic()
        if family.supervisor.ended():
            continue
        hit = _strike(family, moments, tally)
        if not hit and now < family.until:
            heapq.heappush(agenda, (now + LOOK_AGAIN_SECONDS, number))
            continue
        _, victim = family.plan.pop(0)
        family.struck = victim if hit else family.struck
        family.until = now + give_up
        if family.plan:
            heapq.heappush(agenda, (now + family.plan[0][0], number))


def _strike(family: _Family, moments: random.Random, tally: Tally) -> bool:
    """Strike, if the one to be struck is there."""
    supervisor, victim = family.supervisor, family.plan[0][1]
    relatives = roles(supervisor.pid, without=family.fallen)
    if victim in ("supervisor", "terminal"):
        hit = supervisor.kill() if victim == "supervisor" else supervisor.hang_up()
        if hit:
            tally.count(supervisor, victim, _stage_of(relatives), supervisor.pid)
        return hit
    if victim not in relatives:
        return False
    chosen = moments.choice(relatives[victim])
    stage = _stage_of_helper(victim, chosen)
    hit = kill_relative(chosen, supervisor.pid)
    if hit:
        tally.count(supervisor, victim, stage, chosen)
        family.fallen.add(chosen)
    return hit


def kill_relative(pid: int, supervisor: int) -> bool:
    """Kill -9, if it still is one: its number may have passed to a stranger since it was looked up. Whether there was one to kill."""
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if not any(pid in relatives for relatives in roles(supervisor).values()):
            return False
        signal.pidfd_send_signal(handle, signal.SIGKILL)
    except ProcessLookupError:
        return False
    finally:
        os.close(handle)
    return True


def _stage_of(family: dict[str, list[int]]) -> str:
    """How far the furthest of a supervisor's runs is."""
    if "guest" in family:
        return "with guests"
    if "init" in family:
        return "building"
    return "with a zygote" if "zygote" in family else "alone"


def _stage_of_helper(role: str, pid: int) -> str:
    if role == "zygote":
        return "with runs" if children(pid) else "alone"
    if role == "init":
        return "with its guest" if children(pid) else "building"
    try:
        return "python" if Path(f"/proc/{pid}/comm").read_text().startswith("python") else "program"
    except OSError:
        return "ending"
