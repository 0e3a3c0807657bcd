"""The view of a fork: its own files, processes, terminals and network, given to it by the stagehand from outside.

A fork is a copy of a sleeping state in new namespaces. Its mount namespace begins as a copy of the session's. Here the overlays of the
state are mounted over those of the session, each with an upper layer of its own, and a /proc of the fork's pid namespace over the old one.

The code that runs in a fork until then is the program's: it may have been tampered with. So `verify` looks at the only process of the fork,
while it is stopped, before the program begins: it has no capabilities, and nothing that leads to another fork or to the session.
"""

from __future__ import annotations

import fcntl
import os
import signal
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from agent_sandbox.kernel import ids, namespaces
from agent_sandbox.kernel import syscalls as sc
from agent_sandbox.kernel.mount_steps import TERMINALS, seal_proc
from agent_sandbox.kernel.mount_tools import QUIET

_NS_GET_PARENT = 0xB702
_RESOLVE = sc.RESOLVE_BENEATH | sc.RESOLVE_NO_SYMLINKS | sc.RESOLVE_NO_MAGICLINKS
_STREAMS = 4  # the three streams, and the line to the host
_STOP_SECONDS = 5.0
_CAPABILITIES = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")


class UnsafeFork(OSError):
    """Raised if a fork has something that leads out of it, or is not as it was made."""


class ForkView:
    """The view of one fork, whose first process is `pid` for us. The current directory is the staging directory."""

    def __init__(self, pid: int, *, root: bool) -> None:
        """Open its namespaces. `root` says whether guests have a range of ids, or only that of the caller. Raises OSError."""
        self._pid = pid
        self._root = root
        self._ids = (os.geteuid(), os.getegid())

    def dress(self, place: str, targets: Sequence[str], overlays: Sequence[int]) -> None:
        """Show these detached overlays at their targets, and a /proc, /dev/pts and loopback device of its own. Raises OSError.

        `place` is an empty directory in which mounts may be made for a moment.
        """
        with self._namespaces("mnt", "pid", "net", "user") as (mounts, processes, network, users):
            _do_in_child(lambda: self._map_ids(users))
            _do_in_child(lambda: self._enter_and_mount(place, targets, overlays, mounts, processes, network))

    def verify(self, streams: Sequence[tuple[int, int]]) -> None:
        """Make sure that the fork is one process without power, without a way out, and with these streams. Raises `UnsafeFork`.

        `streams` are device and inode of the descriptors that it was given. It is stopped meanwhile, so nothing can change.
        """
        os.kill(self._pid, signal.SIGSTOP)
        try:
            self._await_stop()
            with suppress(FileNotFoundError):
                self._verify(streams)
                return
            raise UnsafeFork("it has gone")
        finally:
            os.kill(self._pid, signal.SIGCONT)

    @contextmanager
    def _namespaces(self, *names: str) -> Iterator[list[int]]:
        opened: list[int] = []
        try:
            for name in names:
                opened.append(os.open(f"/proc/{self._pid}/ns/{name}", os.O_RDONLY | os.O_CLOEXEC))
            yield opened
        finally:
            for fd in opened:
                os.close(fd)

    def _map_ids(self, users: int) -> None:
        """Map all ids of the session's user namespace to themselves. Only a process of that namespace may."""
        parent = fcntl.ioctl(users, _NS_GET_PARENT)
        sc.setns(parent, sc.CLONE_NEWUSER)
        uid, gid = self._ids
        uids, gids = (f"0 0 {ids.IDS}",) * 2 if self._root else (f"{uid} {uid} 1", f"{gid} {gid} 1")
        ids.write_maps(self._pid, uid_map=uids, gid_map=gids, deny_setgroups=False)

    def _enter_and_mount(
        self, place: str, targets: Sequence[str], overlays: Sequence[int], mounts: int, processes: int, network: int
    ) -> None:
        sc.setns(network, sc.CLONE_NEWNET)
        namespaces.raise_loopback()
        sc.setns(processes, sc.CLONE_NEWPID)  # of the next child
        _do_in_child(lambda: self._mount(place, targets, overlays, mounts))

    def _mount(self, place: str, targets: Sequence[str], overlays: Sequence[int], mounts: int) -> None:
        """In the fork's pid namespace, whose /proc only its members can mount."""
        sc.mount("proc", place, "proc", QUIET | sc.MS_NOEXEC)
        seal_proc(place, shared=False)
        proc = _detached(place)
        sc.mount("devpts", place, "devpts", sc.MS_NOSUID | sc.MS_NOEXEC, TERMINALS)
        terminals = _detached(place)
        top = os.open(f"/proc/{self._pid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        sc.setns(mounts, sc.CLONE_NEWNS)
        for target, mount in zip((*targets, "/proc", "/dev/pts"), (*overlays, proc, terminals), strict=True):
            below = sc.openat2(top, target.strip("/") or ".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, resolve=_RESOLVE)
            sc.move_mount_onto(mount, below)

    def _await_stop(self) -> None:
        until = time.monotonic() + _STOP_SECONDS
        while (state := self._fields("status")["State"].split()[0]) not in "Tt":
            if state in "ZX" or time.monotonic() > until:
                raise UnsafeFork("it has ended or cannot be stopped")
            time.sleep(0.0002)

    def _verify(self, streams: Sequence[tuple[int, int]]) -> None:
        status = self._fields("status")
        if [name for name in os.listdir(f"/proc/{self._pid}/root/proc") if name.isdigit()] != ["1"] or status["Threads"].strip() != "1":
            raise UnsafeFork("it has started processes or threads")
        if any(int(status[name], 16) for name in _CAPABILITIES):
            raise UnsafeFork("it has kept capabilities")
        given = [os.stat(f"/proc/{self._pid}/fd/{number}") for number in range(_STREAMS)]
        if [(each.st_dev, each.st_ino) for each in given] != [*streams]:
            raise UnsafeFork("it does not use the streams that it was given")
        shown = self._shown()
        for number in map(int, os.listdir(f"/proc/{self._pid}/fd")):
            if number >= _STREAMS:
                self._check(f"fd/{number}", shown)
        for name in ("cwd", "root"):
            self._check(name, shown)
        with open(f"/proc/{self._pid}/maps", encoding="utf-8", errors="replace") as maps:
            if any("w" in words[1] and words[1].endswith("s") for line in maps if (words := line.split(maxsplit=2))):
                raise UnsafeFork("the state has memory that it shares with other processes, such as mmap.mmap(-1, …)")

    def _shown(self) -> frozenset[int]:
        """Return the numbers of the mounts that it sees. One with another mount on its root is covered, and belongs to the session."""
        with open(f"/proc/{self._pid}/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
            rows = [(words[0], words[1], words[4]) for words in map(str.split, file)]
        places = {number: target for number, _, target in rows}
        covered = {parent for _, parent, target in rows if places.get(parent) == target and target != "/"}
        return frozenset(int(number) for number in places if number not in covered)

    def _check(self, name: str, shown: frozenset[int]) -> None:
        fd = os.open(f"/proc/{self._pid}/{name}", os.O_PATH | os.O_CLOEXEC)
        try:
            kind = stat.S_IFMT(os.fstat(fd).st_mode)
            if kind not in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFCHR) or mount_id(fd) not in shown:
                raise UnsafeFork(f"it has something of the session open: {os.readlink(f'/proc/{self._pid}/{name}')}")
        finally:
            os.close(fd)

    def _fields(self, name: str) -> Mapping[str, str]:
        return fields(f"/proc/{self._pid}/{name}")


def _detached(place: str) -> int:
    """Return a detached copy of what is mounted at `place`, with what is mounted in it, and unmount it there."""
    try:
        return sc.open_tree(place, sc.OPEN_TREE_CLONE | sc.AT_RECURSIVE)
    finally:
        sc.umount2(place, sc.MNT_DETACH)


def _do_in_child(work: Callable[[], object]) -> None:
    """Do something in a child, which may enter namespaces that its parent must not. Raises the child's OSError."""
    reading, writing = os.pipe2(os.O_CLOEXEC)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        except OSError as error:
            os.write(writing, f"{error.errno or 0} {error.strerror or error}".encode()[:4096])
        finally:
            os._exit(code)
    os.close(writing)
    try:
        said = os.read(reading, 4096).decode(errors="replace")
    finally:
        os.close(reading)
        status = os.waitpid(child, 0)[1]
    if said or status:
        number, _, why = (said or "0 a helper of the stagehand ended").partition(" ")
        raise OSError(int(number), why)


def mount_id(fd: int) -> int:
    """Return the number of the mount to which a descriptor leads."""
    return int(fields(f"/proc/self/fdinfo/{fd}")["mnt_id"])


def fields(path: str) -> dict[str, str]:
    """Return a file of /proc with a name and a value in each line."""
    with open(path, encoding="ascii", errors="replace") as file:
        return dict(line.split(":", 1) for line in file if ":" in line)
