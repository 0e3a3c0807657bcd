"""The departure of a guest: its last process is in the kernel for good, and the kernel still takes the memory of that process apart.

That takes longer than many programs run, and nobody needs to wait for it. A run is over once its output has ended and the kernel has marked
its last process as exiting. Such a process never returns to its program, starts no system call, and forks nothing. The mark, the exit code
and the list of the run's tasks are the kernel's own words. The list is read after the mark, so nothing can be started in between. A guest
can be late with its departure, and cannot feign it.

Python code on throw-away layers departs if nothing of its run is read or served afterwards (`Launch.leaves_nothing`) and a cgroup has its
counters. Any other run is over when init says that no process lives. The next run, and the end of the runtime, wait for the real end.
"""

from __future__ import annotations

import os
import select
import time
from contextlib import suppress

from agent_sandbox._fast.values import TYPE_CHECKING, dataclass
from agent_sandbox.kernel.cgroups import Cgroup, GroupUsage

if TYPE_CHECKING:
    from typing import Any

LARGEST = 64 << 20  # bytes of memory; a run that used more is waited for, because its memory is missed while the kernel frees it
_EXITING = 0x4  # PF_EXITING of the kernel: set before anything of the process is taken apart
_PARENT, _FLAGS, _THREADS, _EXIT_CODE = 1, 6, 17, 49  # fields of /proc/PID/stat, counted from the one behind the name
_LOOKS, _PAUSE = 8, 0.00003  # seconds; a guest closes its output some microseconds before it exits


@dataclass(frozen=True)
class Departed:
    """The end of a run that has departed: the wait status of its program, whether its scratch directory is full, and its counters.

    `process` is a pidfd of its last process, which becomes readable at the real end. Whoever gets a `Departed` closes it.
    """

    status: int
    full: bool
    used: GroupUsage
    process: int

    def report(self) -> dict[str, Any]:
        """Return the report that init would have sent. Its counters are those of the cgroup."""
        hit = ["disk"] if self.full else []
        return {"status": self.status, "reason": "exited", "hit": hit, "wall": 0.0, "cpu": 0.0, "memory": 0, "fuel": None}


def find_guest(cgroup: Cgroup, init: int) -> int:
    """Return the pid of a guest that waits for its program; 0 if it cannot be seen leaving, because something is not counted here."""
    others = cgroup.tasks() - {init} if cgroup.counts else ()
    return next(iter(others)) if len(others) == 1 else 0


def await_departure(cgroup: Cgroup, init: int, guest: int, scratch: str) -> Departed | None:
    """Return the departure of a run whose output has ended; None if it goes on, or if its end must be waited for.

    `guest` is what `find_guest` returned, `scratch` the path of its scratch directory.
    """
    try:
        for _ in range(_LOOKS):
            fields = _stat(guest)
            if int(fields[_PARENT]) != init:  # the guest has been collected, and its number is another's by now
                return None
            if int(fields[_FLAGS]) & _EXITING and fields[_THREADS] == b"1":
                return _departed(cgroup, init, guest, scratch, int(fields[_EXIT_CODE]))
            time.sleep(_PAUSE)
    except OSError:  # the guest has been collected, or this process may not look at it
        return None
    return None


def _departed(cgroup: Cgroup, init: int, guest: int, scratch: str, status: int) -> Departed | None:
    tasks = cgroup.tasks()  # not earlier: a process that is exiting forks no more, so nothing can be missing in this list
    if init not in tasks or tasks - {init, guest}:
        return None
    # To open this takes the same right as to read an exit code, for which the kernel otherwise shows 0; init hides itself as well as any
    # guest can. The guest cannot have exchanged the directory: a run that may write at the top does not depart.
    directory = os.open(f"/proc/{init}/root{scratch}", os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        space = os.fstatvfs(directory)
    finally:
        os.close(directory)
    if not os.WIFEXITED(status):  # killed: init may know why
        return None
    # Asked for the time of a process, the kernel brings its account up to date, and with it that of the cgroup.
    time.clock_gettime(~guest << 3 | 2)
    used = cgroup.usage()
    full = space.f_bavail * space.f_frsize < 65536 or space.f_ffree == 0
    return Departed(status, full, used, os.pidfd_open(guest)) if used.peak_memory_bytes <= LARGEST else None


def _stat(pid: int) -> list[bytes]:
    descriptor = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, 4096).rpartition(b")")[2].split()
    finally:
        os.close(descriptor)


def await_end(process: int) -> None:
    """Wait for the end of a process, given as a pidfd, and close the pidfd."""
    try:
        with suppress(OSError):  # no memory to wait with
            _await(process, None)
    finally:
        os.close(process)


def await_end_of(init: int, seconds: float) -> None:
    """Wait at most `seconds` for the end of an init that was killed. The kernel then kills all processes of its pid namespace."""
    if not init:
        return
    try:
        process = os.pidfd_open(init)
    except OSError:  # gone altogether
        return
    try:
        _await(process, seconds)
    finally:
        os.close(process)


def _await(process: int, seconds: float | None) -> bool:
    poller = select.poll()
    poller.register(process, select.POLLIN)
    return bool(poller.poll(None if seconds is None else seconds * 1000))
