"""Control groups, version 1 and 2: find the hierarchies, make one group per run, and remove groups that outlived their keeper.

A cgroup limits all processes of a run together, counts their total usage, and kills them at one stroke. Machines differ: one v2 tree, v1
with a tree per controller, or both ("hybrid", where v2 has no controllers but can still kill a whole group at once). `find` is pure;
`offer` examines a directory and enables its controllers where that is permitted. `probes.control_group` tries which limits work here.

A run's cgroup is one directory in each hierarchy that the run needs. A limit that cannot be enforced is left out and named in `missing`;
the caller decides whether that is acceptable. A `Cgroup` with no directories is a valid value that does nothing. The name of a cgroup names
its keeper, so that a later start can tell an abandoned cgroup from a cgroup in use, without a registry that could be lost.

Used between fork and exec by a small single-threaded process, so everything is plain reads and writes. The first `join` after a pause can
take 15 ms, because the kernel waits for all CPUs before it moves a process: join ahead of time where that matters.
"""

from __future__ import annotations

import os
import select
import time

from agent_sandbox._fast.contexts import suppress
from agent_sandbox._fast.values import TYPE_CHECKING, dataclass, field
from agent_sandbox.kernel import mountinfo, usage
from agent_sandbox.kernel.mountinfo import Mount

if TYPE_CHECKING:
    import signal
    from collections.abc import Iterable, Iterator, Mapping
else:
    import _signal as signal  # without the enumerations of `signal`

PREFIX = "agent-sandbox-"
LIMITING = frozenset({"memory", "pids"})  # the controllers that limit a run
_USED = LIMITING | {"cpuacct", "freezer"}  # also the v1 controllers that count a run's CPU time and freeze it
_PATIENCE = 1.0  # seconds for killed processes to die, and for zombies to go
_PAUSE = 0.002
_SOCKET_PART, _LEAST_SOCKETS = 4, 8 << 20  # v1: buffers of TCP and UDP get a quarter of the memory on top; TCP comes to a halt below 4 MiB
_LARGEST_REQUEST = 1 << 20  # bytes; the kernel's largest indivisible allocation is well below
_MOST_DIRECTORIES = 5000  # examined in one sweep


@dataclass(frozen=True)
class Hierarchy:
    """One cgroup tree. On v1, `controllers` are those of the tree. On v2 `controllers` is empty, because each directory has its own."""

    version: int
    controllers: frozenset[str]
    top: str
    own: str  # the caller's cgroup, or `top` if that is outside the mounted part

    @property
    def places(self) -> tuple[str, ...]:
        """The directories to create a cgroup in, best first.

        The first is the caller's own cgroup, the second the one above it, or the top on v1. On v2 a cgroup with processes in it, as the
        caller's, cannot give controllers to its children, unless it is the root ("no internal processes", cgroups(7)).
        """
        other = self.top if self.version == 1 or self.own == self.top else os.path.dirname(self.own)
        return (self.own,) if other == self.own else (self.own, other)


def find(proc_self_cgroup: str, mounts: Iterable[Mount]) -> tuple[Hierarchy, ...]:
    """Return the useful hierarchies, v2 first, from the text of /proc/self/cgroup and the mounts; empty if none is mounted."""
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
    """Return the hierarchies that this process sees now; empty if /proc cannot be read."""
    try:
        return find(read("/proc/self/cgroup"), mountinfo.read())
    except (OSError, ValueError):
        return ()


def group_name(keeper: int, unique: str) -> str:
    """Return a cgroup name for a keeper: pid namespace, pid and start time, which together identify one process for good.

    `unique` distinguishes several cgroups of one keeper. Raises ProcessLookupError if there is no such process.
    """
    stat = usage.read_stat(keeper)
    if stat is None:
        raise ProcessLookupError(f"no process {keeper}")
    return f"{PREFIX}{_pid_namespace()}-{keeper}-{stat.started}-{unique}"


def is_forgotten(name: str) -> bool:
    """Return whether this is the name of a cgroup that we made, for a keeper that is gone now.

    False for a name from another pid namespace, because the keeper is invisible from here.
    """
    words = name.removeprefix(PREFIX).split("-", 3)
    if not name.startswith(PREFIX) or len(words) < 4 or not all(word.isdecimal() for word in words[:3]):
        return False
    namespace, keeper, started = (int(word) for word in words[:3])
    if namespace != _pid_namespace():
        return False
    stat = usage.read_stat(keeper)
    return stat is None or stat.started != started


def offer(hierarchy: Hierarchy, place: str) -> tuple[frozenset[str] | None, str]:
    """Return the controllers that a new cgroup in `place` would have, and the reason why a limiting controller is missing, or "".

    The controllers are None if this process is not permitted to move processes into such a cgroup.
    """
    if hierarchy.version == 1:
        return hierarchy.controllers, ""
    # Moving a process needs write access to cgroup.procs of the common ancestor, which is `place` itself for both a child and a sibling.
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
    """Write a value to a cgroup's file in a single call, as the kernel requires. Never creates the file. Raises OSError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, value.encode())
    finally:
        os.close(descriptor)


_SHORT = 2048  # bytes: the kernel returns about a page at a time, so less than half of one is all there is


def read(path: str) -> str:
    """Return the content of a cgroup's file; empty if this kernel has no such file or the cgroup is gone."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:  # no file object: it costs six more system calls, and every run reads these files
        content = part = os.read(descriptor, 65536)
        while len(part) >= _SHORT and (part := os.read(descriptor, 65536)):
            content += part
        return content.decode()
    except OSError:
        return ""
    finally:
        os.close(descriptor)


def _words(path: str) -> frozenset[str]:
    return frozenset(read(path).split())


def _pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def _own_directory(mount: Mount, path: str) -> str:
    """Return the directory where this mount shows the cgroup `path`.

    In a container the mount may show only a part of the tree. If the path lies outside that part (or contains "/.."), return the top.
    """
    root = mount.root.rstrip("/")
    if "/.." in path or not (path + "/").startswith(root + "/"):
        return mount.target
    return (mount.target + path[len(root) :]).rstrip("/")


@dataclass(frozen=True)
class Part:
    """The part of a run's cgroup in one hierarchy: its directory (`path`), and the cgroup that the keeper was in before (`home`)."""

    path: str
    home: str
    version: int
    controllers: frozenset[str]


@dataclass(frozen=True)
class GroupUsage:
    """The total usage of a run. A value that no controller counts is zero. `hit` names which of "memory" and "processes" ran out."""

    cpu_seconds: float = 0.0
    peak_memory_bytes: int = 0
    peak_processes: int = 0
    oom_kills: int = 0
    hit: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Cgroup:
    """The cgroup of one run. `enforces` is a subset of {"memory", "processes", "sockets"}; `missing` has the reason for each absent limit.

    "sockets" means that the memory limit counts buffers of TCP and UDP, or on v1 that they have a limit of their own.
    """

    parts: tuple[Part, ...] = ()
    enforces: frozenset[str] = frozenset()
    missing: Mapping[str, str] = field(default_factory=dict)
    ahead: bool = False  # another process may have made it already, and moved members into it

    def join(self, pid: int = 0) -> None:
        """Move a process into the cgroup, by default the caller; its later forks are then inside, too. Raises OSError if that fails."""
        for part in self.parts:
            if not (self.ahead and str(pid) in read(f"{part.path}/cgroup.procs").split()):
                write(f"{part.path}/cgroup.procs", str(pid))

    def leave(self) -> None:
        """Move the caller back to its original cgroup, as far as permitted. A keeper does this after forking, to survive the run.

        Call it before entering another cgroup namespace: with v2's `nsdelegate` no process may leave that namespace's root.
        """
        for part in self.parts:
            with suppress(OSError):
                write(f"{part.home}/cgroup.procs", "0")

    def members(self) -> frozenset[int]:
        """Return the process ids inside, as seen from the caller's pid namespace."""
        return frozenset(int(word) for part in self.parts for word in read(f"{part.path}/cgroup.procs").split()) - {0}

    @property
    def counts(self) -> bool:
        """Whether processor time and memory are counted here for all processes together."""
        cpu = any(part.version == 2 or "cpuacct" in part.controllers for part in self.parts)
        return cpu and any("memory" in part.controllers for part in self.parts)

    def tasks(self) -> frozenset[int]:
        """Return the ids of all threads inside, as seen from the caller's pid namespace; empty if they cannot be listed."""
        for part in self.parts:
            return frozenset(map(int, read(f"{part.path}/{'tasks' if part.version == 1 else 'cgroup.threads'}").split()))
        return frozenset()

    def kill(self) -> bool:
        """Kill every process inside except the caller, which leaves first. Return True once all are dead, False after a second."""
        if os.getpid() in self.members():
            self.leave()
        for part in self.parts:
            with suppress(OSError):
                write(f"{part.path}/cgroup.kill", "1")  # v2 since Linux 5.14: done by the kernel, so no fork escapes
        deadline = time.monotonic() + _PATIENCE
        while self.members():
            if time.monotonic() > deadline:
                return False
            self._signal_members(deadline)
        return True

    def usage(self) -> GroupUsage:
        """Return the usage so far and the limits reached. Call it before `remove`.

        Memory counts as reached only if it ran out at *this* cgroup's limit. Touching the limit while the kernel can still free page cache
        is normal, and an out-of-memory kill of the whole machine is not the run's fault.
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
                most_processes = max(most_processes, _number(part, "pids.peak"))  # since Linux 6.1
                if _keyed(part, "pids.events", "max") > 0:
                    reached.add("processes")
        return GroupUsage(self.cpu_seconds(), peak, most_processes, kills, frozenset(reached))

    def memory_bytes(self) -> int:
        """Return the memory that is charged now; 0 if nothing counts it."""
        files = {1: "memory.usage_in_bytes", 2: "memory.current"}
        return max((_number(part, files[part.version]) for part in self.parts if "memory" in part.controllers), default=0)

    def cpu_seconds(self) -> float:
        """Return the processor time so far, also of processes not yet waited for; 0 if nothing counts it."""
        counts = [0.0]
        for part in self.parts:
            if part.version == 2:
                counts.append(_keyed(part, "cpu.stat", "usage_usec") / 1e6)
            elif "cpuacct" in part.controllers:
                counts.append(_number(part, "cpuacct.usage") / 1e9)
        return max(counts)

    def remove(self) -> bool:
        """Remove the directories, waiting briefly for zombies to go. Return True if none is left. Never removes anything below them."""
        left = [part.path for part in self.parts]
        deadline = time.monotonic() + _PATIENCE
        while left := [path for path in left if not gone(path)]:
            if time.monotonic() > deadline:
                return False
            time.sleep(_PAUSE)
        return True

    def _signal_members(self, deadline: float) -> None:
        """Send SIGKILL to all processes inside, and wait until they are dead or the deadline has passed."""
        freezers = [part.path for part in self.parts if "freezer" in part.controllers]
        handles: dict[int, int] = {}
        try:
            # Freezing keeps a fork bomb from outrunning this loop; SIGKILL takes effect on thawing.
            for path in freezers:
                write(f"{path}/freezer.state", "FROZEN")
            for pid in self.members():
                with suppress(OSError):
                    handles[pid] = os.pidfd_open(pid)
            # Signal only a pid listed before *and* after its pidfd was opened: it may have been reused by another process in between.
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
    ahead: bool = False,
) -> Cgroup:
    """Make a cgroup with these limits, as far as this machine permits. A limit that cannot be set raises nothing; `missing` names it.

    The memory limit includes swap where the kernel counts swap per cgroup. The cgroup belongs to the process `keeper`, by default the
    caller. Once the keeper is gone, a sweep may remove the cgroup. `unique` distinguishes several cgroups of one keeper. With `ahead`,
    the keeper makes this cgroup before its limits are known, so directories that are there already are used. Raises ProcessLookupError if
    there is no process `keeper`.
    """
    group = group_name(os.getpid() if keeper is None else keeper, unique)
    parts: list[Part] = []
    reasons: dict[str, str] = {}  # by controller; v1 comes last and overrides
    for hierarchy in here() if hierarchies is None else hierarchies:
        if _adds_something(hierarchy, parts):
            part, reason = _make(hierarchy, group, ahead=ahead)
            parts += [part] if part else []
            reasons |= dict.fromkeys(hierarchy.controllers or LIMITING, reason)
    enforces, missing = set(), {}
    for limit, controller, value in (("memory", "memory", memory_bytes), ("processes", "pids", processes)):
        if value is None:
            continue
        holder = next((part for part in parts if controller in part.controllers), None)
        if holder is None:
            missing[limit] = reasons.get(controller) or f"no {controller} controller is mounted here"
            if limit == "memory":
                missing["sockets"] = missing[limit]
            continue
        try:
            if limit == "memory":
                _limit_memory(holder, value)
                if why := _limit_sockets(holder, value):
                    missing["sockets"] = why
                else:
                    enforces.add("sockets")
            else:
                write(f"{holder.path}/pids.max", str(value))
            enforces.add(limit)
        except OSError as error:
            missing[limit] = f"the limit of {holder.path} cannot be set: {error.strerror}"
    return Cgroup(tuple(parts), frozenset(enforces), missing, ahead)


def _adds_something(hierarchy: Hierarchy, parts: list[Part]) -> bool:
    """Return whether a directory in this hierarchy would add a limit, a counter or a way to kill that the other parts lack.

    A v2 directory always does: it counts CPU time and can kill all its processes, even without limits.
    """
    wanted = LIMITING.difference(*(part.controllers for part in parts))
    if not any(os.path.exists(f"{part.path}/cgroup.kill") for part in parts):
        wanted |= {"freezer"}
    if not any(part.version == 2 for part in parts):
        wanted |= {"cpuacct"}
    return hierarchy.version == 2 or bool(hierarchy.controllers & wanted)


def _make(hierarchy: Hierarchy, name: str, *, ahead: bool) -> tuple[Part | None, str]:
    """Make a cgroup directory in that place of the hierarchy which offers the most controllers. With `ahead`, it may be there already.

    Return the directory, or None if none could be made; and the reason why a controller is missing, or "".
    """
    offers = [(place, *offer(hierarchy, place)) for place in hierarchy.places]
    reason = next((why for _, _, why in reversed(offers) if why), "")
    for place, controllers, _ in sorted(offers, key=lambda offer: -len(offer[1] or ())):
        if controllers is None:
            continue
        try:
            with suppress(*([FileExistsError] if ahead else [])):
                os.mkdir(f"{place}/{name}", 0o755)  # the usual mode of cgroups: init reads its own counters without privilege
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
    with suppress(FileNotFoundError, PermissionError):  # a kernel without swap accounting per cgroup has no such file
        write(f"{part.path}/{swap[0]}", swap[1])


def _limit_sockets(part: Part, memory: int) -> str:
    """Bound the buffers of TCP and UDP, which otherwise only the whole machine bounds. Return why that is not possible, or "".

    On v2 the memory limit counts them, unless the machine was started with that switched off. On v1 a counter of its own does, once it has
    a limit; it binds sockets that are made later. The kernel exceeds it by one packet for each connection.
    """
    if part.version == 2:
        return "the machine was started with cgroup.memory=nosocket" if "nosocket" in read("/proc/cmdline") else ""
    try:
        write(f"{part.path}/memory.kmem.tcp.limit_in_bytes", str(max(memory // _SOCKET_PART, _LEAST_SOCKETS)))
    except OSError as error:
        return f"socket buffers cannot be limited in {part.path}: {error.strerror}"
    return ""


def gone(path: str) -> bool:
    """Remove one cgroup directory. Return True if it is gone, False while a process is in it."""
    try:
        os.rmdir(path)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _memory(part: Part) -> tuple[int, int, bool]:
    """Return a cgroup's peak memory, its number of out-of-memory kills, and whether memory ran out at its own limit."""
    if part.version == 2:
        events = read(f"{part.path}/memory.events")
        return _number(part, "memory.peak"), _value(events, "oom_kill"), _value(events, "oom") > 0
    peak, killed = _number(part, "memory.max_usage_in_bytes"), _keyed(part, "memory.oom_control", "oom_kill")
    # Not memory.failcnt: newer kernels (seen on 6.18) leave it at 0. The peak stops at the limit or just below.
    return peak, killed, killed > 0 and _number(part, "memory.limit_in_bytes") - peak < _LARGEST_REQUEST


def _number(part: Part, file: str) -> int:
    text = read(f"{part.path}/{file}").strip()
    return int(text) if text.isdigit() else 0


def _keyed(part: Part, file: str, key: str) -> int:
    return _value(read(f"{part.path}/{file}"), key)


def _value(text: str, key: str) -> int:
    """Return the number after `key` in lines of keys and numbers; 0 if missing."""
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if name == key:
            return int(value)
    return 0


def sweep(hierarchies: tuple[Hierarchy, ...]) -> int:
    """Remove the cgroups of dead keepers, killing first whatever runs in them. Return the number of removed directories."""
    removed = 0
    for hierarchy in hierarchies:
        for path in list(_ours(hierarchy.top)):
            if is_forgotten(os.path.basename(path)):
                forgotten = Cgroup((Part(path, hierarchy.own, hierarchy.version, hierarchy.controllers),))
                with suppress(OSError):  # another user's, or already removed by another sweep
                    removed += forgotten.kill() and forgotten.remove()
    return removed


def _ours(top: str) -> Iterator[str]:
    """Yield the cgroup directories with our name prefix, anywhere in the tree, up to a maximum number. Does not look inside them."""
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
