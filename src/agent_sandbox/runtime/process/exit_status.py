"""How a run ended, from what its init and its cgroup say of it, and what we had against it."""

from __future__ import annotations

import os
import select

from agent_sandbox._fast.values import TYPE_CHECKING
from agent_sandbox.kernel import cgroups
from agent_sandbox.runtime.base import Exit, ExitReason, Usage

if TYPE_CHECKING:
    from typing import Any


def exit_of(
    ended: dict[str, Any] | None, used: cgroups.Usage, *, full: bool, cut: bool, killed: str, fuel: int | None, wall: float
) -> Exit:
    """`ended` is what init says, unless it was killed itself. `full` are its layers, `cut` its output, `killed` is why we ended it, if we
    did, `fuel` its limit, and `wall` how long it took as seen from here."""
    hit = [*(ended["hit"] if ended else ()), *(["disk"] if full else [])]
    hit += sorted(used.hit.difference(hit))
    if cut:
        hit.append("output")
    status = ended["status"] if ended else 9
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
    reason = ExitReason(ended["reason"]) if ended else ExitReason.KILLED
    if reason is ExitReason.EXITED and number is not None:
        reason = ExitReason.SIGNALLED
    if used.oom_kills and (number == 9 or not ended) and reason in (ExitReason.SIGNALLED, ExitReason.KILLED):
        reason = ExitReason.OUT_OF_MEMORY
    if full:
        reason = ExitReason.DISK_LIMIT
    if reason is ExitReason.KILLED and killed and killed != "killed":
        reason = ExitReason(killed)
    burnt = ended["fuel"] if ended else None
    if reason is ExitReason.SIGNALLED and burnt is not None and fuel is not None and burnt >= fuel:
        reason = ExitReason.FUEL_LIMIT
        hit.append("fuel")
    if reason is ExitReason.CPU_LIMIT and "cpu" not in hit:
        hit.append("cpu")
    if reason is ExitReason.OUT_OF_MEMORY and "memory" not in hit:
        hit.append("memory")
    usage = Usage(
        # Init knows best when it ended the run; but one that ends by itself may do so before init has heard that it began.
        wall_seconds=ended["wall"] if ended and reason is ExitReason.TIMED_OUT else wall,
        cpu_seconds=used.cpu_seconds or (ended["cpu"] if ended else 0.0),
        peak_memory_bytes=used.peak_memory_bytes or (ended["memory"] if ended else 0),
        peak_processes=used.peak_processes,
        fuel=burnt,
    )
    return Exit(128 + number if number is not None else os.WEXITSTATUS(status), reason, number, tuple(hit), usage)


def await_end_of(init: int, seconds: float) -> None:
    """It was killed, and could not say that nothing of the guest lives; when it has gone, that is so. The kernel sees to it."""
    if not init:
        return
    try:
        handle = os.pidfd_open(init)
    except OSError:  # gone altogether
        return
    try:
        poller = select.poll()
        poller.register(handle, select.POLLIN)
        poller.poll(seconds * 1000)
    finally:
        os.close(handle)
