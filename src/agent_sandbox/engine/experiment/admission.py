"""How many attempts run at once: no more than the machine has processors and memory for. The others wait.

Each attempt gets a hard limit of memory, so that all that run at once together never need more than was available when they were admitted.
Without a limit of the user's own, the memory is shared equally. If there is too little even for one, the experiment is refused.
"""

from __future__ import annotations

import os

from agent_sandbox._fast.values import dataclass
from agent_sandbox.errors import PolicyError, RuntimeUnavailable

LEAST_BYTES = 128 << 20  # of one attempt: less is enough for nothing but an empty program
_SPARED = 4  # one part of so many stays free for everybody else


@dataclass(frozen=True)
class Admission:
    """How many attempts run at once, and how much memory each may use; None if that is not known or not limited."""

    at_once: int
    memory_bytes: int | None


def admit(
    processors: int,
    available: int | None,
    *,
    wanted: int | None,
    ceiling: int | None,
    most: int | None = None,
    what: str = "attempt",
) -> Admission:
    """Return how many attempts run at once, and the memory of each. `what` is the word for an attempt in messages.

    `available` are the bytes of memory that are free now; None if unknown. `wanted` is the memory that the user gives each attempt,
    `ceiling` the limit of the policy, `most` the user's own limit on attempts at once. Raises `RuntimeUnavailable` if memory is short.
    """
    if most is not None and most < 1:
        raise PolicyError(f"at least one {what} must run at once, not {most}", hint="leave it out for as many as the machine can run")
    at_once = max(1, min(processors, most or processors))
    if available is None:
        return Admission(at_once, wanted or ceiling)
    usable = available - available // _SPARED
    need = min(each for each in (wanted or LEAST_BYTES, ceiling) if each is not None)
    if usable < min(need, LEAST_BYTES) or (wanted is not None and usable < need):
        raise RuntimeUnavailable(
            f"memory is short: each {what} needs {need >> 20} MiB, and {usable >> 20} MiB can be used without harm to other programs",
            missing=("memory",),
            hint=f"end other programs, or give each {what} less memory",
        )
    if wanted is not None:
        return Admission(max(1, min(at_once, usable // need)), need)
    at_once = max(1, min(at_once, usable // LEAST_BYTES))
    share = usable // at_once
    return Admission(at_once, share if ceiling is None else min(share, ceiling))


def processors() -> int:
    """Return the number of processors that this process may use, as far as its affinity and its cgroup's quota say."""
    here = len(os.sched_getaffinity(0))
    try:
        with open("/sys/fs/cgroup/cpu.max", encoding="ascii") as file:
            quota, period = file.read().split()
    except (OSError, ValueError):
        return here
    return max(1, min(here, int(quota) // int(period))) if quota.isdigit() and period.isdigit() and int(period) else here
