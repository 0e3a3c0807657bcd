"""What a guest uses, counted from /proc: the watcher's arithmetic where there is no cgroup.

Init runs this inside the guest's pid namespace, where /proc shows the guest's processes and nothing else. Everything read here is under the
guest's influence: names are hostile, processes vanish between two reads, and there may be thousands. A process that cannot be read is left
out, and each pass reads a bounded number.

Not seen: what is in pipes and socket buffers, memfds that no process holds because they are on their way through a socket, other objects
of the kernel's (watches, locks, directory entries), and the CPU time of processes that live shorter than the time between two passes and
whose parent ignores SIGCHLD. A cgroup sees all of these.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterable, Iterator, Sequence

from agent_sandbox._fast.values import dataclass

MOST_PROCESSES = 4096  # read in one pass
MOST_ENTRIES = 500_000  # looked at in one count of a tree
MOST_DEPTH = 128  # descriptors held open while counting a tree
UNCOUNTABLE = 1 << 62  # bytes of a tree with more or deeper entries than that: above any limit
LONGEST_TABLE = 1 << 20  # bytes read of a table of the ipc namespace; one with thousands of rows more is UNCOUNTABLE as well
INODE_BYTES = 1024  # what an entry of a tmpfs costs the kernel, be it empty
SEMAPHORE_BYTES = 64  # what each costs the kernel
MESSAGE_BYTES = 48  # what each costs beyond its text

_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Stat:
    """The fields of /proc/PID/stat that matter here; times in clock ticks."""

    pid: int
    own_ticks: int  # user and system time of all its threads, ended ones too
    reaped_ticks: int  # the same of the children it has waited for, and of theirs
    threads: int
    started: int  # since boot; with the pid, names one process for good


def parse_stat(content: bytes) -> Stat:
    """Parse /proc/PID/stat. The name is whatever the process chose, so only the *last* parenthesis ends it. Raises ValueError."""
    before, _, after = content.rpartition(b")")
    fields = after.split()
    try:
        user, system, reaped_user, reaped_system = (int(field) for field in fields[11:15])
        pid = int(before.split(b" ", 1)[0])
        return Stat(pid, user + system, reaped_user + reaped_system, threads=int(fields[17]), started=int(fields[19]))
    except (ValueError, IndexError) as error:
        raise ValueError(f"not a /proc/PID/stat: {content[:200]!r}") from error


def read_stat(pid: int, proc: str = "/proc") -> Stat | None:
    """The stat of one process, or None when there is no such process."""
    content = _read(f"{proc}/{pid}/stat")
    return parse_stat(content) if content else None


def processes(proc: str = "/proc") -> list[Stat]:
    """Every process in `proc` but the caller."""
    return [stat for pid in _others(proc) if (stat := read_stat(pid, proc)) is not None]


def task_count(proc: str = "/proc") -> int:
    """Processes and threads together, as a limit on processes counts them, without the caller."""
    return sum(stat.threads for stat in processes(proc))


def cpu_seconds(proc: str = "/proc") -> float:
    """CPU time of all processes but the caller: those alive, those they have reaped, and those the caller has reaped.

    Nothing counts twice: a process is alive or a zombie, and then in the list, or it was reaped, and then in its reaper's total. One whose
    parent ignores SIGCHLD is in neither; `CpuMeter` remembers those.
    """
    return _tree_seconds(processes(proc))


class CpuMeter:
    """CPU time so far, never going down, though processes come and go between calls."""

    def __init__(self, proc: str = "/proc") -> None:
        self._proc = proc
        self._seen: dict[tuple[int, int], int] = {}
        self._ended = 0  # ticks of processes seen once and now gone
        self._most = 0.0

    def seconds(self) -> float:
        """The larger of two counts that each miss something: what the kernel summed on reaping, and what was seen of each process.

        Both are at most the truth, so the larger one is too: a run is never ended for time it has not used.
        """
        stats = processes(self._proc)
        now = {(stat.pid, stat.started): stat.own_ticks for stat in stats}
        if len(stats) < MOST_PROCESSES:
            self._ended += sum(ticks for process, ticks in self._seen.items() if process not in now)
            self._seen = now
        else:
            self._seen.update(now)  # the pass was cut: what is missing may still live, and must not count as ended
        observed = (self._ended + sum(self._seen.values())) / _TICKS
        self._most = max(self._most, observed, _tree_seconds(stats))
        return self._most


def memory_bytes(proc: str = "/proc", *, private: Sequence[str | int] = ()) -> int:
    """Anonymous and shared memory of all processes but the caller, in RAM and in swap; pages that several share count once in all.
    With it their page tables, which can outweigh what they map, and what is in System V segments, queues and semaphores.

    `private` are tmpfs that only these processes write to, by path or descriptor: what is in them, and in memfds, is memory whether or not
    anybody maps it. Mapped files of other filesystems are not counted: the kernel can drop those pages, as it would in a cgroup.
    """
    pids = list(_others(proc))
    measured = [_process_memory(f"{proc}/{pid}") for pid in pids]
    held = sum(map(_used, private)) + _memfd_bytes(proc, pids) + _segment_bytes(f"{proc}/sysvipc")
    queued = _semaphore_bytes(f"{proc}/sysvipc") + _message_bytes(f"{proc}/sysvipc")
    return sum(own for own, _ in measured) + max(held, sum(shared for _, shared in measured)) + queued


def disk_bytes(directory: int, *, most_entries: int = MOST_ENTRIES) -> int:
    """Bytes allocated below an open directory, on its own filesystem, a hard-linked file once. Never follows a symbolic link.

    A tree too large or too deep to count is `UNCOUNTABLE`: nobody needs such a tree, but it would be a way to hide one. The tree may change
    meanwhile. Files that were deleted and are still open are not seen.
    """
    device = os.fstat(directory).st_dev
    linked: set[int] = set()
    total, left = 0, most_entries
    # (descriptor, names of directories still to enter): depth first, so that no more descriptors are open than the tree is deep.
    stack: list[tuple[int, list[str]]] = []
    try:
        descriptor: int | None = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=directory)
        while descriptor is not None:
            names: list[str] = []
            stack.append((descriptor, names))
            with os.scandir(descriptor) as entries:
                for entry in entries:
                    left -= 1
                    if left < 0:
                        return UNCOUNTABLE
                    try:
                        status = entry.stat(follow_symlinks=False)
                    except OSError:
                        continue
                    if status.st_dev != device or status.st_ino in linked:
                        continue
                    total += status.st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        names.append(entry.name)
                    elif status.st_nlink > 1:
                        linked.add(status.st_ino)
            if names and len(stack) >= MOST_DEPTH:
                return UNCOUNTABLE
            descriptor = _next_directory(stack)
        return total
    finally:
        for opened, _ in stack:
            os.close(opened)


def _next_directory(stack: list[tuple[int, list[str]]]) -> int | None:
    """Open the next directory to enter, closing those that are done. Names that are no directory any more are passed over."""
    while stack:
        parent, names = stack[-1]
        while names:
            try:
                return os.open(names.pop(), os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
            except OSError:
                continue
        os.close(stack.pop()[0])
    return None


def _tree_seconds(stats: list[Stat]) -> float:
    reaped = resource.getrusage(resource.RUSAGE_CHILDREN)
    ticks = sum(stat.own_ticks + stat.reaped_ticks for stat in stats)
    return ticks / _TICKS + reaped.ru_utime + reaped.ru_stime


def _used(tmpfs: str | int) -> int:
    try:
        space = os.statvfs(tmpfs)
    except OSError:
        return 0
    return (space.f_blocks - space.f_bfree) * space.f_frsize + (space.f_files - space.f_ffree) * INODE_BYTES


def _memfd_bytes(proc: str, pids: Iterable[int]) -> int:
    """What is in memfds that somebody has open, each once. One that is open only in a process closed to us is not seen."""
    seen: dict[tuple[int, int], int] = {}
    left = MOST_PROCESSES
    for pid in pids:
        try:
            for name in os.listdir(f"{proc}/{pid}/fd"):
                left -= 1
                if left < 0:
                    return sum(seen.values())
                path = f"{proc}/{pid}/fd/{name}"
                if os.readlink(path).startswith("/memfd:"):
                    status = os.stat(path)
                    seen[status.st_dev, status.st_ino] = status.st_blocks * 512
        except OSError:
            continue  # it has gone, or it is closed to us
    return sum(seen.values())


def _segment_bytes(tables: str) -> int:
    """System V shared memory of this ipc namespace, attached or not: the last two columns are what is in RAM and in swap."""
    return _table_bytes(f"{tables}/shm", 16, lambda row: int(row[14]) + int(row[15]))


def _semaphore_bytes(tables: str) -> int:
    """System V semaphores: sets live until somebody removes them, and in no process. The fourth column is how many are in one."""
    return _table_bytes(f"{tables}/sem", 4, lambda row: int(row[3]) * SEMAPHORE_BYTES)


def _message_bytes(tables: str) -> int:
    """System V messages nobody has fetched: bytes and number are the fourth and fifth column."""
    return _table_bytes(f"{tables}/msg", 5, lambda row: int(row[3]) + int(row[4]) * MESSAGE_BYTES)


def _table_bytes(path: str, columns: int, cost: Callable[[list[bytes]], int]) -> int:
    """What the rows of a table below /proc/sysvipc cost together."""
    content = _read(path, most=LONGEST_TABLE)
    if len(content) == LONGEST_TABLE:
        return UNCOUNTABLE
    rows = [line.split() for line in content.split(b"\n")[1:]]
    return sum(cost(row) for row in rows if len(row) >= columns)


def _process_memory(directory: str) -> tuple[int, int]:
    """Its anonymous memory with its page tables, and its part of the shared memory that is mapped."""
    status = _kilobytes(_read(f"{directory}/status"))
    tables = status.get(b"VmPTE", 0)
    rollup = _kilobytes(_read(f"{directory}/smaps_rollup"))
    if b"Pss_Anon" in rollup:
        return rollup[b"Pss_Anon"] + rollup.get(b"SwapPss", 0) + tables, rollup.get(b"Pss_Shmem", 0)
    # A process that made itself undumpable is closed to us, but not its status. There shared pages count in full: on the safe side.
    return status.get(b"RssAnon", 0) + status.get(b"VmSwap", 0) + tables, status.get(b"RssShmem", 0)


def _kilobytes(content: bytes) -> dict[bytes, int]:
    """Lines of the form `Name:   12 kB`, in bytes. The name of the process is on a line of its own and has no such form."""
    values = {}
    for line in content.split(b"\n"):
        name, _, value = line.partition(b":")
        words = value.split()
        if len(words) == 2 and words[1] == b"kB" and words[0].isdigit():
            values[name] = int(words[0]) * 1024
    return values


def _others(proc: str) -> Iterator[int]:
    """Process ids, without the caller's."""
    me = os.getpid()
    left = MOST_PROCESSES
    with os.scandir(proc) as entries:
        for entry in entries:
            if entry.name.isdecimal() and int(entry.name) != me:
                yield int(entry.name)
                left -= 1
                if left == 0:
                    return


def _read(path: str, *, most: int = 16384) -> bytes:
    """The content up to `most` bytes, or nothing when the process has gone or is closed to us."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    content = b""
    try:
        # More than one read: /proc gives a page or so at a time, however much is asked for.
        while len(content) < most and (part := os.read(descriptor, most - len(content))):
            content += part
        return content
    except OSError:
        return b""
    finally:
        os.close(descriptor)
