"""Processor time of a worker with every process that it starts, and of the kernel's own workers meanwhile.

Processor time hardly depends on what else the machine does. Rusage would not do: bubblewrap leaves before its children are waited for, so
that most of its time would be nobody's. A control group counts a whole tree of processes, and so does the kernel's task clock, which is
inherited by every child. Where a group can be made it is taken; the clock needs no privilege, and makes each fork a little dearer.

What the kernel does in threads of its own, such as taking namespaces apart, is counted in neither. It shows in those threads' own times,
as long as nobody else gives them work.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from agent_sandbox.kernel import cgroups
from agent_sandbox.kernel.cgroups import Hierarchy
from bench.peers import Missing

STILL_SECONDS, STILL_SHARE, LONGEST_REST = 0.2, 0.01, 3.0  # used up in so many seconds, of them: next to nothing; a pool fills within
OTHERS = 0.1  # of the subject's own time: what others may use before the kernel's workers cannot be told from theirs
_TICKS = os.sysconf("SC_CLK_TCK")
_KTHREADD = 2
_CALLS = {"x86_64": 298, "aarch64": 241}  # perf_event_open
_SOFTWARE, _TASK_CLOCK = 1, 1
_INHERIT, _EXCLUDE_KERNEL, _EXCLUDE_HV = 1 << 1, 1 << 5, 1 << 6
_ATTRIBUTES = 128  # bytes
_CLOSE_ON_EXEC = 8


class Meter(Protocol):
    """Counts the processor time of a process and of all that it starts from then on."""

    means: str

    def seconds(self) -> float:
        """Return the time so far, of living and of ended processes."""

    def close(self) -> None:
        """Stop counting. The processes have ended."""


def meter(pid: int) -> Meter:
    """Return a meter for a process that has not started another yet. Raises `Missing` with the reasons where nothing counts."""
    try:
        return ControlGroup(pid)
    except OSError as no_group:
        try:
            return TaskClock(pid)
        except OSError as no_clock:
            raise Missing(
                f"its processor time cannot be told: no control group ({no_group.strerror}), no task clock ({no_clock.strerror}); "
                "run it as root, under systemd-run --user --scope -p Delegate=yes, or with kernel.perf_event_paranoid=2"
            ) from no_clock


class ControlGroup:
    """A control group of its own. What we put below it for each run is counted with it."""

    means = "a control group for each subject"

    def __init__(self, pid: int) -> None:
        self._top, self._leaf = _make_group(f"bench-{os.getpid()}-{pid}")
        try:
            cgroups.write(f"{self._leaf}/cgroup.procs", str(pid))
        except OSError:
            self.close()
            raise

    def seconds(self) -> float:
        """Return what the kernel has charged to the group."""
        if text := cgroups.read(f"{self._top}/cpuacct.usage"):
            return int(text) / 1e9
        return (
            next(int(line.split()[1]) for line in cgroups.read(f"{self._top}/cpu.stat").splitlines() if line.startswith("usage_usec")) / 1e6
        )

    def close(self) -> None:
        """Remove the directories. One that still has a process in it stays, and is empty soon."""
        for path, _, _ in os.walk(self._top, topdown=False):
            with suppress(OSError):
                os.rmdir(path)


def _make_group(name: str) -> tuple[str, str]:
    """Make a group to read, and one in it to join: on version 2 a group with processes in it could give its children no limits."""
    hierarchies = cgroups.here()
    counting = next((each for each in hierarchies if "cpuacct" in each.controllers), None)
    if counting is not None:  # of its own: nothing else about a run changes
        os.mkdir(path := f"{counting.own}/{name}")
        return path, path
    unified = next((each for each in hierarchies if each.version == 2), None)
    if unified is None:
        raise OSError(0, "none is mounted")
    top = f"{_best_place(unified)}/{name}"
    os.mkdir(top)
    try:
        os.mkdir(f"{top}/worker")
    except OSError:
        os.rmdir(top)
        raise
    return top, f"{top}/worker"


def _best_place(unified: Hierarchy) -> str:
    """Return where a run would make its group: there it finds the same limits as ever."""
    offers = [(len(controllers), place) for place in unified.places if (controllers := cgroups.offer(unified, place)[0]) is not None]
    if not offers:
        raise OSError(0, "none is delegated to this user")
    return max(offers, key=lambda offer: offer[0])[1]


class TaskClock:
    """The kernel's clock of a task, which each child inherits. It counts the time in the kernel too, also where that cannot be profiled."""

    means = "the kernel's task clock, which every child inherits, since no control group can be made here"

    def __init__(self, pid: int) -> None:
        number = _CALLS.get(platform.machine())
        if number is None:
            raise OSError(0, f"not known for {platform.machine()}")
        flags = _INHERIT | _EXCLUDE_KERNEL | _EXCLUDE_HV
        attributes = struct.pack("=IIQQQQQ", _SOFTWARE, _ATTRIBUTES, _TASK_CLOCK, 0, 0, 0, flags).ljust(_ATTRIBUTES, b"\0")
        libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor = libc.syscall(number, attributes, pid, -1, -1, _CLOSE_ON_EXEC)
        if self._descriptor < 0:
            raise OSError(error := ctypes.get_errno(), os.strerror(error))

    def seconds(self) -> float:
        """Return the sum over all tasks that inherited it."""
        (nanoseconds,) = struct.unpack("=Q", os.read(self._descriptor, 8))
        return float(nanoseconds) / 1e9

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self._descriptor)


def settled(seconds: Callable[[], float]) -> float:
    """Return a count that no longer grows: the pool is full again, and what was left behind is gone. Waits a few seconds at most."""
    deadline = time.monotonic() + LONGEST_REST
    before = seconds()
    while True:
        time.sleep(STILL_SECONDS)
        now = seconds()
        if now - before < STILL_SECONDS * STILL_SHARE or time.monotonic() > deadline:
            return now
        before = now


class KernelWorkers:
    """The kernel's own threads, from now on."""

    def __init__(self) -> None:
        self._began = _kernel_threads()
        self._machine = _machine_seconds()

    def seconds(self, subject: float) -> tuple[float, str]:
        """Return the time that they used meanwhile, and why it may be somebody else's, or "". `subject` is what the subject used itself."""
        machine = _machine_seconds() - self._machine
        threads = _kernel_threads()
        if not threads:
            return 0.0, "the kernel's workers cannot be seen here"
        used = sum(spent - self._began.get(thread, 0.0) for thread, spent in threads.items())
        others = machine - subject - used
        if others > OTHERS * subject:
            return (
                used,
                f"others used {others / subject:.1f} times as much meanwhile, so that the kernel's workers cannot be told from theirs",
            )
        return used, ""


def _kernel_threads() -> dict[tuple[int, str], float]:
    """Return the seconds of each thread of the kernel, by its id and start. One that ends takes its time with it; few do."""
    found = {}
    for entry in os.scandir("/proc"):
        if not entry.name.isdecimal():
            continue
        with suppress(OSError, ValueError):  # it has ended
            fields = Path(entry.path, "stat").read_text().rpartition(")")[2].split()
            if int(fields[1]) == _KTHREADD:
                found[int(entry.name), fields[19]] = int(Path(entry.path, "schedstat").read_text().split()[0]) / 1e9
    return found


def _machine_seconds() -> float:
    """Return the processor time of everything on this machine, without what was idle or taken by the machine around it."""
    with open("/proc/stat", encoding="ascii") as lines:
        user, nice, system, _, _, irq, softirq = (int(word) for word in lines.readline().split()[1:8])
    return (user + nice + system + irq + softirq) / _TICKS
