"""Counters that the whole machine shares and that no cgroup or rlimit divides: init watches the share of its run, and ends it above that.

    open files      fs.file-max bounds those of all users together. A limit for each process is none for thousands of them, and a mapping
                    keeps a file open without a descriptor.
    orphans         net.ipv4.tcp_max_orphans bounds the connections of all users that were closed with data still to send.
    netlink         the buffers of netlink sockets are charged to nobody.
    TCP and UDP     tcp_mem and udp_mem, as far as the cgroup does not charge them: see `socket_memory`.

A look at an idle run reads two short files. A run's own share is counted only if the machine's counter is high, or if the run has sockets.
What a program takes between two looks is not stopped. `docs/isolation.md` has the table of all counters.
"""

from __future__ import annotations

import os
import time
from itertools import pairwise

from agent_sandbox.kernel import usage
from agent_sandbox.kernel.socket_memory import ALL, INTERNET, SocketMeter, netlink_bytes

TICK, QUIET_TICK = 0.05, 0.25  # seconds between two looks: while something moves, and while nothing does
MOST_NETLINK_BYTES = 32 << 20  # no program leaves so much unread
MOST_ORPHANS = 4096
PRESSURE, SHARE, STIR = 4, 8, 16  # parts of fs.file-max: counted above the first, ended above the second, looked at often above the third
_MOST_MAPPINGS = 65530  # of one process: the default of vm.max_map_count
_PAGE = 4096
_PAUSE = 10  # times as long as a look took: at most a tenth of the time is spent on looking


class CounterWatch:
    """Watches what a run takes of counters that the machine shares. Made by init, in the namespaces of the run."""

    def __init__(self, *, memory: int | None, alone: bool, proc: str = "/proc") -> None:
        """`memory` is the run's limit; `alone` says that no cgroup enforces it, so that all socket buffers count and looks are frequent."""
        self._proc = proc
        self._memory = memory
        self._alone = alone
        self._meter = SocketMeter(() if memory is None else ALL if alone else INTERNET)
        self.interval = TICK if alone else QUIET_TICK
        self.socket_bytes = 0  # at the last look

    def close(self) -> None:
        """Stop watching."""
        self._meter.close()

    def look(self) -> str:
        """Return what the run has used up: "memory", "share", or "" for nothing. Sets `interval`, the time until the next look."""
        began = time.monotonic()
        files, most = _files(f"{self._proc}/sys/fs/file-nr")
        used_up, stirs = self._look_at_sockets()
        if not used_up and files > most // PRESSURE and open_files(self._proc, enough=most // SHARE) > most // SHARE:
            used_up = "share"
        stirs = stirs or self._alone or files > most // STIR
        self.interval = max(TICK if stirs else QUIET_TICK, _PAUSE * (time.monotonic() - began))
        return used_up

    def _look_at_sockets(self) -> tuple[str, bool]:
        """Return what is used up, and whether another look is due soon."""
        self.socket_bytes = 0
        there = _sockets(self._proc)
        if there["used"] <= 1:  # our own
            return "", False
        netlink = netlink_bytes(self._proc)
        self.socket_bytes = netlink + (self._meter.measure() if self._alone or there["inuse"] else 0)
        if netlink > MOST_NETLINK_BYTES or (self._memory is not None and self.socket_bytes > self._memory):
            return "memory", True
        if there["orphan"] > MOST_ORPHANS and self._meter.orphans() > MOST_ORPHANS:
            return "share", True
        return "", netlink > MOST_NETLINK_BYTES // STIR


def open_files(proc: str, *, enough: int) -> int:
    """Return how many files all processes but the caller hold open, by descriptors and by mappings. Stops counting above `enough`.

    A file that several processes share counts for each of them. Descriptors first: they are counted at once. The mappings of a process that
    made itself unreadable are estimated from the size of its memory.
    """
    pids = usage.others(proc)
    total = sum(_descriptors(f"{proc}/{pid}/fd") for pid in pids)
    for pid in pids:
        if total > enough:
            break
        total += _mapped_files(f"{proc}/{pid}", enough - total)
    return total


def _descriptors(directory: str) -> int:
    try:
        return os.stat(directory).st_size or len(os.listdir(directory))  # the size is the number since Linux 6.2
    except OSError:
        return 0


def _mapped_files(directory: str, enough: int) -> int:
    total = 0
    try:
        fd = os.open(f"{directory}/maps", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return _most_mappings(directory)
    try:
        while (part := os.read(fd, 1 << 20)) and total <= enough:
            total += part.count(b"\n") - part.count(b" 00:00 0")  # less those of no file
    except OSError:
        return total  # the process has gone
    finally:
        os.close(fd)
    return total


def _most_mappings(directory: str) -> int:
    return min(usage.process_size(directory) // _PAGE, _MOST_MAPPINGS)


def _sockets(proc: str) -> dict[str, int]:
    """Return the sockets of this network namespace: all that are `used`, and those `inuse` by TCP and UDP; and the machine's `orphan`s."""
    there = {"used": 0, "inuse": 0, "orphan": 0}
    for table in ("sockstat", "sockstat6"):
        words = usage.read_whole(f"{proc}/net/{table}").split()
        for name, value in pairwise(words):
            if (key := name.decode()) in there and value.isdigit():
                there[key] += int(value)
    return there


def _files(path: str) -> tuple[int, int]:
    """Return the number of open files of the machine, and the most that it allows."""
    words = usage.read_whole(path).split()
    return (int(words[0]), int(words[2])) if len(words) == 3 else (0, 1)
