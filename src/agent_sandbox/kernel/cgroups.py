"""A cgroup for one run: limits that a whole crowd of processes cannot outrun, their total usage, and one stroke that ends them all.

A run's cgroup is one directory in each hierarchy that it needs (see `cgroup_tree`). What cannot be enforced is left out and named in
`missing`; whether that will do is for the caller to decide. A `Cgroup` with no directories is a valid value that does nothing.

Used between fork and exec by a small single-threaded process, so everything is plain reads and writes. The first `join` after a pause can
take 15 ms, because the kernel waits for all CPUs before it moves a process: join ahead of time where that matters.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Mapping
from contextlib import suppress

from agent_sandbox.kernel import cgroup_tree
from agent_sandbox.kernel.cgroup_tree import LIMITING, Hierarchy, find, here, read, write
from agent_sandbox.values import dataclass, field

__all__ = ["Cgroup", "Hierarchy", "Part", "Usage", "create", "find", "here"]

_PATIENCE = 1.0  # seconds for the killed to die, and for zombies to go
_PAUSE = 0.002
_LARGEST_REQUEST = 1 << 20  # bytes; what the kernel asks for at once and cannot ask for in smaller pieces is well below


@dataclass(frozen=True)
class Part:
    """A run's directory in one hierarchy, and the cgroup its keeper came from."""

    path: str
    home: str
    version: int
    controllers: frozenset[str]


@dataclass(frozen=True)
class Usage:
    """What all processes of a run used together, zero where no controller counts it; and which of "memory", "processes" ran out."""

    cpu_seconds: float = 0.0
    peak_memory_bytes: int = 0
    peak_processes: int = 0
    oom_kills: int = 0
    hit: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Cgroup:
    """`enforces` is a subset of {"memory", "processes"}; `missing` gives the reason for each that was asked for and is not in it."""

    parts: tuple[Part, ...] = ()
    enforces: frozenset[str] = frozenset()
    missing: Mapping[str, str] = field(default_factory=dict)

    def join(self, pid: int = 0) -> None:
        """Move a process in, by default the caller; what it forks from then on is in as well. Raises OSError: then it is not confined."""
        for part in self.parts:
            write(f"{part.path}/cgroup.procs", str(pid))

    def leave(self) -> None:
        """Move the caller back to where it came from, as far as it may. A keeper does so once it has forked: the run's end is not its own.

        Before it enters another cgroup namespace: with v2's `nsdelegate` no process may leave that namespace's root.
        """
        for part in self.parts:
            with suppress(OSError):
                write(f"{part.home}/cgroup.procs", "0")

    def members(self) -> frozenset[int]:
        """Process ids inside, as seen from the caller's pid namespace."""
        return frozenset(int(word) for part in self.parts for word in read(f"{part.path}/cgroup.procs").split()) - {0}

    def kill(self) -> bool:
        """End every process inside but the caller, which leaves first. True once none lives, False when some outlast a second of it."""
        if os.getpid() in self.members():
            self.leave()
        for part in self.parts:
            with suppress(OSError):
                write(f"{part.path}/cgroup.kill", "1")  # v2 since Linux 5.14: the kernel does it, and no fork escapes
        deadline = time.monotonic() + _PATIENCE
        while self.members():
            if time.monotonic() > deadline:
                return False
            self._signal_members(deadline)
        return True

    def usage(self) -> Usage:
        """What was used so far, and which limits were reached; read it before `remove`.

        Memory was reached only when it ran out at *this* cgroup's limit. A full limit that the kernel could make room under (page cache) is
        everyday, and a kill for want of memory on the whole machine is not the run's doing.
        """
        peak, kills, most_processes = 0, 0, 0
        reached = set()
        for part in self.parts:
            if "memory" in part.controllers:
                most, killed, ran_out = _memory(part)
                peak, kills = max(peak, most), kills + killed
                if ran_out:
                    reached.add("memory")
            if "pids" in part.controllers:
                most_processes = max(most_processes, _number(part, "pids.peak"))  # not there before Linux 6.1
                if _keyed(part, "pids.events", "max") > 0:
                    reached.add("processes")
        return Usage(self.cpu_seconds(), peak, most_processes, kills, frozenset(reached))

    def cpu_seconds(self) -> float:
        """Processor time used so far, also by processes that nobody has waited for; 0 where nothing counts it."""
        counts = [0.0]
        for part in self.parts:
            if part.version == 2:
                counts.append(_keyed(part, "cpu.stat", "usage_usec") / 1e6)
            elif "cpuacct" in part.controllers:
                counts.append(_number(part, "cpuacct.usage") / 1e9)
        return max(counts)

    def remove(self) -> bool:
        """Remove the directories, waiting shortly while zombies go. True when none is left. Never looks below them."""
        left = [part.path for part in self.parts]
        deadline = time.monotonic() + _PATIENCE
        while left := [path for path in left if not gone(path)]:
            if time.monotonic() > deadline:
                return False
            time.sleep(_PAUSE)
        return True

    def _signal_members(self, deadline: float) -> None:
        """Send SIGKILL to all inside and wait until they are dead, or until the deadline."""
        freezers = [part.path for part in self.parts if "freezer" in part.controllers]
        handles: dict[int, int] = {}
        try:
            # Freezing keeps a fork bomb from outrunning the loop; SIGKILL takes effect on thawing.
            for path in freezers:
                write(f"{path}/freezer.state", "FROZEN")
            for pid in self.members():
                with suppress(OSError):
                    handles[pid] = os.pidfd_open(pid)
            # Only who is listed before *and* after the handle was taken is signalled: the number may have passed to a stranger in between.
            for pid in self.members() & handles.keys():
                with suppress(OSError):
                    signal.pidfd_send_signal(handles[pid], signal.SIGKILL)
        finally:
            for path in freezers:
                write(f"{path}/freezer.state", "THAWED")
            for handle in handles.values():
                poll = select.poll()
                poll.register(handle, select.POLLIN)
                poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
                os.close(handle)


def create(
    *,
    memory_bytes: int | None = None,
    processes: int | None = None,
    keeper: int | None = None,
    unique: str = "run",
    hierarchies: tuple[Hierarchy, ...] | None = None,
) -> Cgroup:
    """Make a cgroup with these limits, as far as this machine lets us. What it does not let us is no exception, but in `missing`.

    The memory limit includes swap where the kernel counts it for each cgroup. The cgroup is that of `keeper`, by default the caller: once
    that process is gone, a sweep may remove it. `unique` tells several of one keeper apart.
    """
    name = cgroup_tree.name(os.getpid() if keeper is None else keeper, unique)
    parts: list[Part] = []
    reasons: dict[str, str] = {}  # by controller; v1 comes last and has the last word
    for hierarchy in here() if hierarchies is None else hierarchies:
        if _adds_something(hierarchy, parts):
            part, reason = _make(hierarchy, name)
            parts += [part] if part else []
            reasons |= dict.fromkeys(hierarchy.controllers or LIMITING, reason)
    enforces, missing = set(), {}
    for limit, controller, value in (("memory", "memory", memory_bytes), ("processes", "pids", processes)):
        if value is None:
            continue
        holder = next((part for part in parts if controller in part.controllers), None)
        if holder is None:
            missing[limit] = reasons.get(controller) or f"no {controller} controller is mounted here"
            continue
        try:
            if limit == "memory":
                _limit_memory(holder, value)
            else:
                write(f"{holder.path}/pids.max", str(value))
            enforces.add(limit)
        except OSError as error:
            missing[limit] = f"the limit of {holder.path} cannot be set: {error.strerror}"
    return Cgroup(tuple(parts), frozenset(enforces), missing)


def _adds_something(hierarchy: Hierarchy, parts: list[Part]) -> bool:
    """Whether a directory there gives what the parts so far do not. v2 counts CPU time and kills, even where it limits nothing."""
    wanted = LIMITING.difference(*(part.controllers for part in parts))
    if not any(os.path.exists(f"{part.path}/cgroup.kill") for part in parts):
        wanted |= {"freezer"}
    if not any(part.version == 2 for part in parts):
        wanted |= {"cpuacct"}
    return hierarchy.version == 2 or bool(hierarchy.controllers & wanted)


def _make(hierarchy: Hierarchy, name: str) -> tuple[Part | None, str]:
    """A directory in the place of this hierarchy that offers most; and what stood in the way of more."""
    offers = [(place, *cgroup_tree.offer(hierarchy, place)) for place in hierarchy.places]
    reason = next((why for _, _, why in reversed(offers) if why), "")
    for place, controllers, _ in sorted(offers, key=lambda offer: -len(offer[1] or ())):
        if controllers is None:
            continue
        try:
            os.mkdir(f"{place}/{name}", 0o755)  # as cgroups are elsewhere: init reads its own counters without privilege
            return Part(f"{place}/{name}", hierarchy.own, hierarchy.version, controllers), reason
        except OSError as error:
            reason = f"a cgroup cannot be created in {place}: {error.strerror}"
    return None, reason


def _limit_memory(part: Part, value: int) -> None:
    if part.version == 2:
        write(f"{part.path}/memory.max", str(value))
        swap = ("memory.swap.max", "0")
    else:
        write(f"{part.path}/memory.limit_in_bytes", str(value))
        with suppress(OSError):
            write(f"{part.path}/memory.swappiness", "0")
        swap = ("memory.memsw.limit_in_bytes", str(value))
    with suppress(FileNotFoundError, PermissionError):  # a kernel that does not count swap for each cgroup has no such file
        write(f"{part.path}/{swap[0]}", swap[1])


def gone(path: str) -> bool:
    """Remove one directory; whether there is none any more. False while something lives in it."""
    try:
        os.rmdir(path)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _memory(part: Part) -> tuple[int, int, bool]:
    """The peak, how many processes were killed for want of memory, and whether it was this limit that they ran into."""
    if part.version == 2:
        events = read(f"{part.path}/memory.events")
        return _number(part, "memory.peak"), _value(events, "oom_kill"), _value(events, "oom") > 0
    peak, killed = _number(part, "memory.max_usage_in_bytes"), _keyed(part, "memory.oom_control", "oom_kill")
    # Not memory.failcnt: newer kernels (seen on 6.18) leave it at 0. The peak stops at the limit, or just below it.
    return peak, killed, killed > 0 and _number(part, "memory.limit_in_bytes") - peak < _LARGEST_REQUEST


def _number(part: Part, file: str) -> int:
    text = read(f"{part.path}/{file}").strip()
    return int(text) if text.isdigit() else 0


def _keyed(part: Part, file: str, key: str) -> int:
    return _value(read(f"{part.path}/{file}"), key)


def _value(text: str, key: str) -> int:
    """The number after `key` in a text of such lines; 0 where it is missing."""
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if name == key:
            return int(value)
    return 0
