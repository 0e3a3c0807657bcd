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

from agent_sandbox._fast.functions import partial
from agent_sandbox.kernel import usage
from agent_sandbox.kernel.socket_memory import ALL, INTERNET, SocketMeter, netlink_bytes

TICK, QUIET_TICK = 0.05, 0.25  # seconds between two looks: while something moves, and while nothing does
MOST_NETLINK_BYTES = 32 << 20  # no program leaves so much unread
MOST_ORPHANS = 4096
PRESSURE, SHARE, STIR = 4, 8, 16  # parts of fs.file-max: counted above the first, ended above the second, looked at often above the third
GROWTH = 128  # part of fs.file-max: counted again when the machine has so many more
LONGEST_READING = 0.5  # seconds of processor time for one count: some 600,000 mappings
_PAUSE = 10  # times as long as a count took: at most a tenth of the time is spent on counting what does not grow
_MOST_MAPPINGS = 65530  # of a process: the kernel's default of vm.max_map_count
_PAGE = os.sysconf("SC_PAGE_SIZE")
_LONGEST_MOUNTINFO = 1 << 20


class CounterWatch:
    """Watches what a run takes of counters that the machine shares. Made by init, in the namespaces of the run."""

    def __init__(self, *, memory: int | None, alone: bool, proc: str = "/proc") -> None:
        """`memory` is the run's limit; `alone` says that no cgroup enforces it, so that all socket buffers count and looks are frequent."""
        self._proc = proc
        self._memory = memory
        self._alone = alone
        self._meter = SocketMeter(() if memory is None else ALL if alone else INTERNET)
        self._sockets_due = self._files_due = 0.0
        self._sockets_stir = False
        self._counted_at = 0  # the machine's open files when those of the run were last counted
        self.interval = TICK if alone else QUIET_TICK
        self.socket_bytes = 0  # at the last look

    def close(self) -> None:
        """Stop watching."""
        self._meter.close()

    def look(self) -> str:
        """Return what the run has used up: "memory", "share", or "" for nothing. Sets `interval`, the time until the next look."""
        used_up = ""
        if (began := time.monotonic()) >= self._sockets_due:
            used_up, self._sockets_stir = self._look_at_sockets()
            self._sockets_due = _rest(began)
        files, most = _files(f"{self._proc}/sys/fs/file-nr")
        if not used_up and files > most // PRESSURE and self._must_count(files, most):
            used_up = self._count_files(files, most)
        self.interval = TICK if self._sockets_stir or self._alone or files > most // STIR else QUIET_TICK
        return used_up

    def _must_count(self, files: int, most: int) -> bool:
        """Whether the run may have more files than at the last count: the machine has more, or enough time has passed."""
        return files > self._counted_at + most // GROWTH or time.monotonic() >= self._files_due

    def _count_files(self, files: int, most: int) -> str:
        began = time.monotonic()
        held = open_files(self._proc, enough=most // SHARE)
        self._counted_at, self._files_due = files, _rest(began)
        return "share" if held > most // SHARE else ""

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

    A file that several processes share counts for each of them. Descriptors first: they are counted at once. Mappings are estimated from
    the size of the memory if a process made itself unreadable, and if reading takes longer than `LONGEST_READING`: a program could make
    mappings of no file only to keep us busy. A process that nobody can read counts as one with the most mappings.
    """
    processes = usage.others(proc)
    most = int(usage.read_whole("/proc/sys/vm/max_map_count") or _MOST_MAPPINGS)
    total = sum(usage.read_live(process, _descriptors, nothing=0, hidden=most) for process in processes)
    uncounted = {b"00:00"} | _overlays(proc)  # the first: mappings of no file
    until = time.process_time() + LONGEST_READING
    for process in processes:
        if total > enough:
            break
        read = partial(_mapped_files, uncounted=uncounted, enough=enough - total, until=until, most=most)
        total += usage.read_live(process, read, nothing=0, hidden=most)
    return total


def _descriptors(directory: str) -> int | None:
    """Return the number of descriptors of a process; None if it has none, as after its end."""
    try:
        return os.stat(f"{directory}/fd").st_size or len(os.listdir(f"{directory}/fd")) or None  # the size is the number since Linux 6.2
    except OSError:
        return usage.descriptor_slots(directory) or None  # before that, of a process that made itself unreadable


def _overlays(proc: str) -> set[bytes]:
    """Return the devices of the overlays in this view, in the notation of /proc/PID/maps.

    A mapping of an overlay's file holds the file of the layer below, which the kernel opened for itself and does not count in fs.file-nr.
    """
    rows = (line.partition(b" - ") for line in usage.read_whole(f"{proc}/self/mountinfo", most=_LONGEST_MOUNTINFO).splitlines())
    devices = (mount.split()[2].split(b":") for mount, _, kind in rows if kind.startswith(b"overlay "))
    return {b"%02x:%02x" % (int(major), int(minor)) for major, minor in devices}


def _mapped_files(directory: str, *, uncounted: set[bytes], enough: int, until: float, most: int) -> int | None:
    """Return the number of mapped files of a process; None if it has no mapping at all, as after its end."""
    total = length = 0
    rest = b""
    try:
        fd = os.open(f"{directory}/maps", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return _estimate(directory, most) or None
    try:
        while total <= enough and (part := os.read(fd, 1 << 20)):
            if time.process_time() > until:
                return max(total, _estimate(directory, most))
            length += len(part)
            *lines, rest = (rest + part).split(b"\n")
            # The fourth word is the device. The program chooses the name at the end, which may look like anything.
            total += sum(line.split(b" ", 4)[3] not in uncounted for line in lines)
    except OSError:
        pass  # the process has gone
    finally:
        os.close(fd)
    return total if length else None


def _estimate(directory: str, most: int) -> int:
    return min(usage.process_size(directory) // _PAGE, most)


def _rest(began: float) -> float:
    """Return when a count that began then and has ended now is due again."""
    now = time.monotonic()
    return now + _PAUSE * (now - began)


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
