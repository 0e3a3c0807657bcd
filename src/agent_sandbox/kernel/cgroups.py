"""Control groups, version 1 and 2: find the hierarchies, make one group per run, and remove groups that outlived their keeper.

A group limits a whole crowd of processes, counts their total usage, and kills them at one stroke. Which controllers work
here is found out by a live try.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress

from agent_sandbox._fast.values import dataclass, field
from agent_sandbox.kernel import mountinfo, usage
from agent_sandbox.kernel.mountinfo import Mount

PREFIX = "agent-sandbox-"
LIMITING = frozenset({"memory", "pids"})  # what a run is limited by
_USED = LIMITING | {"cpuacct", "freezer"}  # and, on v1, counted and stopped by


@dataclass(frozen=True)
class Hierarchy:
    """One tree. `controllers` is what v1 attached to it; on v2 that differs from directory to directory and is asked there."""

    version: int
    controllers: frozenset[str]
    top: str
    own: str  # the caller's cgroup, or `top` where that lies outside of what is mounted

    @property
    def places(self) -> tuple[str, ...]:
        """Directories to create a cgroup in, the best first.

        v1 nests anywhere. On v2 a cgroup that holds processes, as the caller's does, cannot give controllers to its children ("no internal
        processes", cgroups(7)), unless it is the root; a sibling of the caller can have them.
        """
        other = self.top if self.version == 1 or self.own == self.top else os.path.dirname(self.own)
        return (self.own,) if other == self.own else (self.own, other)


def find(proc_self_cgroup: str, mounts: Iterable[Mount]) -> tuple[Hierarchy, ...]:
    """The hierarchies of use to us, v2 first; empty when none is mounted. Takes the text of /proc/self/cgroup and the mounts."""
    seen = mountinfo.visible(mounts)
    found = []
    for line in proc_self_cgroup.splitlines():
        number, _, rest = line.partition(":")
        names, colon, path = rest.partition(":")
        if not colon:
            continue
        if number == "0" and not names:
            version, controllers = 2, frozenset[str]()
            mount = next((each for each in seen if each.fstype == "cgroup2"), None)
        else:
            version, controllers = 1, frozenset(names.split(","))
            if not controllers & _USED:
                continue
            mount = next((each for each in seen if each.fstype == "cgroup" and controllers <= set(each.super_options)), None)
        if mount is not None:
            found.append(Hierarchy(version, controllers, mount.target, _own_directory(mount, path)))
    return tuple(sorted(found, key=lambda hierarchy: -hierarchy.version))


def here() -> tuple[Hierarchy, ...]:
    """The hierarchies as this process sees them now; empty where /proc cannot be read."""
    try:
        return find(read("/proc/self/cgroup"), mountinfo.read())
    except (OSError, ValueError):
        return ()


def group_name(keeper: int, unique: str) -> str:
    """A name for a cgroup of this keeper: pid namespace, pid and start time, which together name one process for good.

    `unique` tells several cgroups of one keeper apart. Raises ProcessLookupError when there is no such process.
    """
    stat = usage.read_stat(keeper)
    if stat is None:
        raise ProcessLookupError(f"no process {keeper}")
    return f"{PREFIX}{_pid_namespace()}-{keeper}-{stat.started}-{unique}"


def is_forgotten(name: str) -> bool:
    """Whether a name is ours and its keeper is gone. Not when it was made in another pid namespace: from here nobody can tell."""
    words = name.removeprefix(PREFIX).split("-", 3)
    if not name.startswith(PREFIX) or len(words) < 4 or not all(word.isdecimal() for word in words[:3]):
        return False
    namespace, keeper, started = (int(word) for word in words[:3])
    if namespace != _pid_namespace():
        return False
    stat = usage.read_stat(keeper)
    return stat is None or stat.started != started


def offer(hierarchy: Hierarchy, place: str) -> tuple[frozenset[str] | None, str]:
    """The controllers that a cgroup made in `place` would have (None when no process could enter it), and why not all that limit."""
    if hierarchy.version == 1:
        return hierarchy.controllers, ""
    # A process may be moved only by who may write cgroup.procs of the common ancestor, which is `place` itself for child and sibling alike.
    if not os.access(f"{place}/cgroup.procs", os.W_OK, effective_ids=True):
        return None, f"{place} is not delegated to this user"
    offered = LIMITING & _words(f"{place}/cgroup.controllers")
    why = ""
    for controller in sorted(offered - _words(f"{place}/cgroup.subtree_control")):
        try:
            write(f"{place}/cgroup.subtree_control", f"+{controller}")
        except OSError as error:
            why = f"{place} cannot pass on its {controller} controller: {error.strerror}"
    enabled = LIMITING & _words(f"{place}/cgroup.subtree_control")
    if offered != LIMITING:
        why = why or f"{place} has no {' and no '.join(sorted(LIMITING - offered))} controller"
    return enabled, why


def write(path: str, value: str) -> None:
    """Write a value to a cgroup's file, in the one call that the kernel wants. The file is never created."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, value.encode())
    finally:
        os.close(descriptor)


def read(path: str) -> str:
    """The content of a cgroup's file, or nothing where this kernel has no such file or the cgroup is gone."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:  # not a file object: it would ask the kernel six more questions, and this is on the way of every run
        parts = []
        while part := os.read(descriptor, 65536):
            parts.append(part)
        return b"".join(parts).decode()
    except OSError:
        return ""
    finally:
        os.close(descriptor)


def _words(path: str) -> frozenset[str]:
    return frozenset(read(path).split())


def _pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def _own_directory(mount: Mount, path: str) -> str:
    """The directory of cgroup `path`. In a container the mount may show only a part of the tree, or the path lead out of it ("/..")."""
    root = mount.root.rstrip("/")
    if "/.." in path or not (path + "/").startswith(root + "/"):
        return mount.target
    return (mount.target + path[len(root) :]).rstrip("/")


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
    group = group_name(os.getpid() if keeper is None else keeper, unique)
    parts: list[Part] = []
    reasons: dict[str, str] = {}  # by controller; v1 comes last and has the last word
    for hierarchy in here() if hierarchies is None else hierarchies:
        if _adds_something(hierarchy, parts):
            part, reason = _make(hierarchy, group)
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
    offers = [(place, *offer(hierarchy, place)) for place in hierarchy.places]
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


_MOST_DIRECTORIES = 5000  # looked at in one sweep


def sweep(hierarchies: tuple[Hierarchy, ...]) -> int:
    """Remove the cgroups of keepers that no longer live, ending first what still runs in them. Returns how many directories went."""
    removed = 0
    for hierarchy in hierarchies:
        for path in list(_ours(hierarchy.top)):
            if is_forgotten(os.path.basename(path)):
                forgotten = Cgroup((Part(path, hierarchy.own, hierarchy.version, hierarchy.controllers),))
                with suppress(OSError):  # another user's, or another sweep was quicker
                    removed += forgotten.kill() and forgotten.remove()
    return removed


def probe(hierarchies: tuple[Hierarchy, ...], *, unique: str = "probe") -> Cgroup:
    """Try it: create a cgroup, limit it, put a process in, kill it there, remove it. Never raises.

    Two probes at once in one process need each a `unique`. Of the result, `enforces` and `missing` count; the cgroup itself is gone.
    """
    try:
        cgroup = create(memory_bytes=64 << 20, processes=16, unique=unique, hierarchies=hierarchies)
    except OSError as error:
        return Cgroup(missing=dict.fromkeys(("memory", "processes"), str(error)))
    problem = ""
    try:
        if cgroup.enforces:
            problem = _try_killing_in(cgroup)
    except OSError as error:
        problem = f"a process cannot be moved into {cgroup.parts[0].path}: {error.strerror}"
    if not cgroup.remove():
        problem = problem or "a cgroup cannot be removed again"
    if problem:
        return Cgroup(missing=dict.fromkeys(("memory", "processes"), problem))
    return Cgroup(enforces=cgroup.enforces, missing=cgroup.missing)


def _try_killing_in(cgroup: Cgroup) -> str:
    """Spawned, not forked: whoever asks may have threads. The shell waits for a line that never comes."""
    reading, writing = os.pipe()
    try:
        child = os.posix_spawn("/bin/sh", ["sh", "-c", "read line"], {}, file_actions=[(os.POSIX_SPAWN_DUP2, reading, 0)])
    except OSError:
        os.close(writing)
        raise
    finally:
        os.close(reading)
    try:
        cgroup.join(child)
        return "" if child in cgroup.members() and cgroup.kill() else "a process in a cgroup could not be killed"
    finally:
        os.close(writing)  # which ends the shell, should it still live
        with suppress(ChildProcessError):  # the application may have set SIGCHLD to be ignored
            os.waitpid(child, 0)


def _ours(top: str) -> Iterator[str]:
    """Directories with our prefix, wherever their makers stood in the tree. Does not look inside them."""
    left = _MOST_DIRECTORIES
    pending = [top]
    while pending and left > 0:
        directory = pending.pop()
        left -= 1
        try:
            with os.scandir(directory) as entries:
                children = [entry for entry in entries if entry.is_dir(follow_symlinks=False)]
        except OSError:
            continue
        for child in children:
            if child.name.startswith(PREFIX):
                yield child.path
            else:
                pending.append(child.path)
