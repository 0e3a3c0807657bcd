"""Where cgroups can be made: the mounted hierarchies and the caller's place in each.

Machines differ: one v2 tree, v1 with a tree for each controller, or both ("hybrid", where v2 has no controllers but can still kill a whole
group at once). `find` is pure; `offer` asks a directory, and enables what it may.

A cgroup's name says who made it, so that a later start can tell a forgotten one from one in use, without a registry that could be lost.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from agent_sandbox.kernel import accounting, mountinfo
from agent_sandbox.kernel.mountinfo import Mount
from agent_sandbox.values import dataclass

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


def name(keeper: int, unique: str) -> str:
    """A name for a cgroup of this keeper: pid namespace, pid and start time, which together name one process for good.

    `unique` tells several cgroups of one keeper apart. Raises ProcessLookupError when there is no such process.
    """
    stat = accounting.read_stat(keeper)
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
    stat = accounting.read_stat(keeper)
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
