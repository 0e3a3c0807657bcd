"""Resource use of a guest where no cgroup measures it, read from /proc; and the resource limits (rlimits) of a process.

Init measures inside the guest's pid namespace, where /proc shows only the guest's processes, or is searched for them. The guest influences
everything read here: names are hostile, processes vanish between two reads, and there may be thousands of them. An ended process is left
out, one that keeps its living threads from being read counts as too large, and each pass reads a bounded number.

Not counted here: socket buffers, which `counters` counts. Not counted at all: data in pipes; memfds in flight through a socket, held by no
process; other kernel objects (watches, locks, directory entries); the CPU time of processes that live shorter than the time between two
passes and whose parent ignores SIGCHLD. A cgroup counts all of these.

Rlimits are an additional limit inside a cgroup, and the main limit without one. An rlimit binds one process, or for some kinds all
processes of a user in one user namespace. It stops a mistake of one process, not many processes together: totals are enforced by the
cgroup, or by init's watch. RLIMIT_AS is never used: Node.js and wasmtime reserve far more address space than they touch.
"""

from __future__ import annotations

import math
import os
import resource

from agent_sandbox._fast.contexts import suppress
from agent_sandbox._fast.values import TYPE_CHECKING, dataclass

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from typing import TypeVar

    T = TypeVar("T")

MOST_PROCESSES = 4096  # read in one pass
ATTEMPTS = 10  # at reading a process whose first thread has ended
MOST_ENTRIES = 500_000  # examined in one count of a tree
MOST_DEPTH = 128  # descriptors open at once while counting a tree
UNCOUNTABLE = 1 << 62  # size reported for a tree beyond these two bounds: above any limit
LONGEST_TABLE = 1 << 20  # bytes read of an ipc namespace table, thousands of rows; a longer table is UNCOUNTABLE too
INODE_BYTES = 1024  # kernel memory per tmpfs entry, even an empty one
SEMAPHORE_BYTES = 64  # kernel memory per semaphore
MESSAGE_BYTES = 48  # kernel memory per message, beyond its text

_TICKS = os.sysconf("SC_CLK_TCK")
# Not 0: if core_pattern is a program, the kernel starts it as root at any limit but 1 (core(5), do_coredump). A crash in a guest must not
# start a program on the host. The seccomp filter keeps the guest from changing this limit.
CORE_BYTES = 1
# The kernel also charges the next three to every user namespace above, so they use up the allowance of the guest's starter, even of root.
LOCKED_BYTES = 64 << 10  # enough for a key in gpg or ssh-agent; locked memory cannot be reclaimed
MESSAGE_QUEUE_BYTES = 128 << 10  # one queue of the usual size; a user commonly has 800 KiB
PENDING_SIGNALS = 1024  # timers included; a user commonly has 4 for each MiB of the machine's memory
MOST_OPEN_FILES = 1 << 20  # for processes that pass descriptors; the default of fs.nr_open, which no process can exceed


@dataclass(frozen=True)
class Stat:
    """The fields of /proc/PID/stat used here; times in clock ticks."""

    pid: int
    own_ticks: int  # user and system time of all threads, ended ones included
    reaped_ticks: int  # the same for the children it has waited for, and their children
    threads: int
    started: int  # since boot; pid and start time identify one process for good


def parse_stat(content: bytes) -> Stat:
    """Parse /proc/PID/stat. Raises ValueError. The process chooses its own name, so only the *last* parenthesis ends it."""
    before, _, after = content.rpartition(b")")
    fields = after.split()
    try:
        user, system, reaped_user, reaped_system = (int(field) for field in fields[11:15])
        pid = int(before.split(b" ", 1)[0])
        return Stat(pid, user + system, reaped_user + reaped_system, threads=int(fields[17]), started=int(fields[19]))
    except (ValueError, IndexError) as error:
        raise ValueError(f"not a /proc/PID/stat: {content[:200]!r}") from error


def read_stat(pid: int, proc: str = "/proc") -> Stat | None:
    """Return the stat of one process, or None if there is no such process."""
    content = _read(f"{proc}/{pid}/stat")
    return parse_stat(content) if content else None


def processes(proc: str = "/proc") -> list[Stat]:
    """Return every process in `proc` except the caller."""
    return [stat for pid in _others(proc) if (stat := read_stat(pid, proc)) is not None]


def task_count(proc: str = "/proc") -> int:
    """Count processes and threads together, as a process limit does, without the caller."""
    return sum(stat.threads for stat in processes(proc))


class CpuMeter:
    """Measures the CPU time of all processes except the caller: living ones, those they reaped, and those the caller reaped.

    The result never decreases. Nothing counts twice: a living process or a zombie is in the list, a reaped process is in its reaper's
    total. An ended process whose parent ignores SIGCHLD is in neither, so the meter remembers the last reading of each process.
    """

    def __init__(self, proc: str = "/proc") -> None:
        self._proc = proc
        self._seen: dict[tuple[int, int], int] = {}
        self._ended = 0  # ticks of processes seen earlier and now gone
        self._most = 0.0

    def seconds(self) -> float:
        """Return the CPU time so far: the larger of the kernel's sums for reaped processes and the sum of the last reading of each process.

        Each total can miss some time, and neither counts too much. So no run is ended for time that it has not used.
        """
        stats = processes(self._proc)
        now = {(stat.pid, stat.started): stat.own_ticks for stat in stats}
        if len(stats) < MOST_PROCESSES:
            self._ended += sum(ticks for process, ticks in self._seen.items() if process not in now)
            self._seen = now
        else:
            self._seen.update(now)  # the pass was cut short: a missing process may still live and must not count as ended
        observed = (self._ended + sum(self._seen.values())) / _TICKS
        self._most = max(self._most, observed, _tree_seconds(stats))
        return self._most


def memory_bytes(proc: str = "/proc", *, private: Sequence[str | int] = ()) -> int:
    """Return the anonymous and shared memory of all processes except the caller, in RAM and in swap.

    A page that several processes share counts once. Page tables count, because they can be larger than the memory they map. System V
    segments, queues and semaphores count too.

    `private` lists tmpfs mounts, by path or descriptor, that only these processes write to: their content, and that of memfds, counts even
    if no process maps it. Mapped files of other filesystems do not count: the kernel can drop those pages, as it would in a cgroup.
    """
    return memory_and_largest(proc, private=private)[0]


def memory_and_largest(proc: str = "/proc", *, private: Sequence[str | int] = ()) -> tuple[int, int]:
    """Return what `memory_bytes` does, and the anonymous memory of the largest process, shared pages included: a copy counts as much."""
    processes = others(proc)
    measured = [read_live(process, _process_memory, nothing=(0, 0, 0), hidden=(UNCOUNTABLE, 0, 0)) for process in processes]
    held = sum(map(_used, private)) + _memfd_bytes(processes) + _segment_bytes(f"{proc}/sysvipc")
    queued = _semaphore_bytes(f"{proc}/sysvipc") + _message_bytes(f"{proc}/sysvipc")
    total = sum(own for own, _, _ in measured) + max(held, sum(shared for _, shared, _ in measured)) + queued
    return total, max((alone for _, _, alone in measured), default=0)


def disk_bytes(directory: int, *, most_entries: int = MOST_ENTRIES) -> int:
    """Return the bytes allocated below an open directory, on its own filesystem, counting a hard-linked file once.

    Never follows a symbolic link. A tree too large or too deep to count is `UNCOUNTABLE`: no program needs such a tree, and it could hide
    data from the limit. The tree may change during the count. Files that were deleted and are still open are not counted.
    """
    device = os.fstat(directory).st_dev
    linked: set[int] = set()
    total, left = 0, most_entries
    # (descriptor, names of directories still to enter). Depth first, so the open descriptors never outnumber the depth of the tree.
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
    """Open and return the next directory to enter; None at the end. Closes finished ones; skips names that are no directory any more."""
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


def others(proc: str = "/proc") -> list[str]:
    """Return the directories of all processes except the caller's, at most `MOST_PROCESSES`."""
    return [f"{proc}/{pid}" for pid in _others(proc)]


def read_live(process: str, read: Callable[[str], T | None], *, nothing: T, hidden: T) -> T:
    """Return what `read` finds in the directory of a process, or of one of its threads. `read` returns None if that shows nothing.

    /proc/PID shows the memory and descriptors of the first thread: none once that has ended, although others may go on and hold everything.
    `nothing` stands for a process that has ended or is ending, and `hidden` for one whose threads follow one another too fast to be read. A
    process that is ending shows nothing either, for as long as its threads take to end; but it starts no thread any more. A list of
    threads that are ending may lack some of them, so that a later one seems to have new ones: once or twice, not every time.
    """
    if (found := read(process)) is not None:
        return found
    seen: set[str] = set()
    follows = 0
    for _ in range(ATTEMPTS):
        if not _goes_on(process):
            return nothing
        with suppress(OSError):
            threads = os.listdir(f"{process}/task")
            follows += bool(seen) and not seen.issuperset(threads)
            seen.update(threads)
            for tid in reversed(threads):  # the newest has the longest to live
                if (found := read(f"{process}/task/{tid}")) is not None:
                    return found
    return hidden if follows > ATTEMPTS // 3 and _goes_on(process) else nothing


def _goes_on(process: str) -> bool:
    """Whether the first thread of a process has ended and others have not. In /proc/PID/stat, it is a zombie among several threads."""
    fields = _read(f"{process}/stat").rpartition(b")")[2].split()
    return fields[:1] == [b"Z"] and int(fields[17]) > 1


def process_size(directory: str) -> int:
    """Return the bytes of address space of a process, given by its directory below /proc; 0 if it has gone. Anybody may read this."""
    return _kilobytes(_read(f"{directory}/status")).get(b"VmSize", 0)


def descriptor_slots(directory: str) -> int:
    """Return the size of a process's table of descriptors, which is at least their number. Anybody may read this."""
    lines = (line.split() for line in _read(f"{directory}/status").split(b"\n"))
    return next((int(words[1]) for words in lines if words[:1] == [b"FDSize:"]), 0)


def read_whole(path: str, *, most: int = 16384) -> bytes:
    """Return the content of a file of /proc up to `most` bytes; empty if it cannot be read."""
    return _read(path, most=most)


def _used(tmpfs: str | int) -> int:
    try:
        space = os.statvfs(tmpfs)
    except OSError:
        return 0
    return (space.f_blocks - space.f_bfree) * space.f_frsize + (space.f_files - space.f_ffree) * INODE_BYTES


def _memfd_bytes(processes: Iterable[str]) -> int:
    """Return the bytes in open memfds, each counted once. Misses a memfd open only in a process that we may not read."""
    seen: dict[tuple[int, int], int] = {}
    none: list[str] = []
    left = MOST_PROCESSES
    for process in processes:
        for path in read_live(process, _descriptor_paths, nothing=none, hidden=none):
            left -= 1
            if left < 0:
                return sum(seen.values())
            with suppress(OSError):  # it has been closed
                if os.readlink(path).startswith("/memfd:"):
                    status = os.stat(path)
                    seen[status.st_dev, status.st_ino] = status.st_blocks * 512
    return sum(seen.values())


def _descriptor_paths(directory: str) -> list[str] | None:
    try:
        return [f"{directory}/fd/{name}" for name in os.listdir(f"{directory}/fd")] or None
    except OSError:
        return None  # it has gone, or we may not read it


def _segment_bytes(tables: str) -> int:
    """Return the System V shared memory of this ipc namespace, attached or not. The last two columns are bytes in RAM and in swap."""
    return _table_bytes(f"{tables}/shm", 16, lambda row: int(row[14]) + int(row[15]))


def _semaphore_bytes(tables: str) -> int:
    """Return the cost of System V semaphores. Sets belong to no process and live until removed; the fourth column is the set's size."""
    return _table_bytes(f"{tables}/sem", 4, lambda row: int(row[3]) * SEMAPHORE_BYTES)


def _message_bytes(tables: str) -> int:
    """Return the cost of unread System V messages. The fourth column is their bytes, the fifth their number."""
    return _table_bytes(f"{tables}/msg", 5, lambda row: int(row[3]) + int(row[4]) * MESSAGE_BYTES)


def _table_bytes(path: str, columns: int, cost: Callable[[list[bytes]], int]) -> int:
    """Return the summed cost of the rows of a table below /proc/sysvipc; `UNCOUNTABLE` if the table is too long."""
    content = _read(path, most=LONGEST_TABLE)
    if len(content) == LONGEST_TABLE:
        return UNCOUNTABLE
    rows = [line.split() for line in content.split(b"\n")[1:]]
    return sum(cost(row) for row in rows if len(row) >= columns)


def _process_memory(directory: str) -> tuple[int, int, int] | None:
    """Return a process's part of the anonymous memory and of the shared memory, and its anonymous memory alone; None if it has ended.

    In bytes. Its part is what it has if pages that processes share are divided among them; alone, all its pages count. So do page tables.
    """
    status = _kilobytes(_read(f"{directory}/status"))
    if b"VmSize" not in status:
        return None
    tables = status.get(b"VmPTE", 0)
    alone = status.get(b"RssAnon", 0) + status.get(b"VmSwap", 0) + tables
    rollup = _kilobytes(_read(f"{directory}/smaps_rollup"))
    if b"Pss_Anon" in rollup:
        return rollup[b"Pss_Anon"] + rollup.get(b"SwapPss", 0) + tables, rollup.get(b"Pss_Shmem", 0), alone
    # Of a process that made itself undumpable we may read only the status. It counts shared pages in full, which errs on the safe side.
    return alone, status.get(b"RssShmem", 0), alone


def _kilobytes(content: bytes) -> dict[bytes, int]:
    """Parse lines of the form `Name:   12 kB` into bytes. The process name has a line of its own, so it cannot forge another field."""
    values = {}
    for line in content.split(b"\n"):
        name, _, value = line.partition(b":")
        words = value.split()
        if len(words) == 2 and words[1] == b"kB" and words[0].isdigit():
            values[name] = int(words[0]) * 1024
    return values


def _others(proc: str) -> Iterator[int]:
    """Yield process ids, at most `MOST_PROCESSES`, without the caller's.

    If /proc is shared with the processes around our pid namespace, yield the caller's descendants: whoever loses its parent becomes a child
    of the namespace's first process, which is the caller.
    """
    me = os.getpid()
    if proc == "/proc" and (outer := _number_in(proc)) != me:
        yield from _descendants(proc, outer)
        return
    left = MOST_PROCESSES
    with os.scandir(proc) as entries:
        for entry in entries:
            if entry.name.isdecimal() and int(entry.name) != me:
                yield int(entry.name)
                left -= 1
                if left == 0:
                    return


def _number_in(proc: str) -> int:
    """Return the caller's process id as this /proc counts; its own if the link cannot be read."""
    try:
        return int(os.readlink(f"{proc}/self"))
    except (OSError, ValueError):
        return os.getpid()


def _descendants(proc: str, ancestor: int) -> list[int]:
    """Return the descendants of a process, at most `MOST_PROCESSES`, by the parents that /proc/PID/stat names."""
    children: dict[int, list[int]] = {}
    for name in os.listdir(proc):
        if name.isdecimal() and (content := _read(f"{proc}/{name}/stat")):
            children.setdefault(int(content.rpartition(b")")[2].split()[1]), []).append(int(name))
    found, waiting = list[int](), [ancestor]
    while waiting and len(found) < MOST_PROCESSES:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found[:MOST_PROCESSES]


def _read(path: str, *, most: int = 16384) -> bytes:
    """Return the content of a file up to `most` bytes; empty if it cannot be read, for example because the process has gone."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    content = b""
    try:
        # Several reads: /proc returns about a page at a time, whatever the buffer size.
        while len(content) < most and (part := os.read(descriptor, most - len(content))):
            content += part
        return content
    except OSError:
        return b""
    finally:
        os.close(descriptor)


def apply_rlimits(
    *,
    open_files: int | None = None,
    processes: int | None = None,
    file_bytes: int | None = None,
    data_bytes: int | None = None,
    cpu_seconds: float | None = None,
) -> None:
    """Limit the calling process and its descendants. `None` leaves that limit unchanged.

    Soft and hard limit become equal and only go down. The present hard limit is never exceeded, so no capability is needed. A guest without
    capabilities cannot raise the limit again. Call it inside the guest's user namespace: `processes` counts the tasks of this user *in*
    that namespace (Linux 5.14 and later; earlier, all tasks of the user on the machine). A limit that is set outside the namespace would
    count the user's tasks outside.

    `data_bytes` bounds the heap and private writable mappings of each process. Pass it only where no cgroup bounds memory.
    """
    for kind, soft, hard in limits(
        open_files=open_files, processes=processes, file_bytes=file_bytes, data_bytes=data_bytes, cpu_seconds=cpu_seconds
    ):
        _lower(kind, soft, hard)


def limits(
    *,
    open_files: int | None = None,
    processes: int | None = None,
    file_bytes: int | None = None,
    data_bytes: int | None = None,
    cpu_seconds: float | None = None,
) -> list[tuple[int, int, int]]:
    """Return the limits that `apply_rlimits` sets, those that every guest has included: kind, soft and hard limit."""
    wanted = (
        (resource.RLIMIT_CORE, CORE_BYTES),
        (resource.RLIMIT_MEMLOCK, LOCKED_BYTES),
        (resource.RLIMIT_MSGQUEUE, MESSAGE_QUEUE_BYTES),
        (resource.RLIMIT_SIGPENDING, PENDING_SIGNALS),
        (resource.RLIMIT_NICE, 0),
        (resource.RLIMIT_RTPRIO, 0),
        (resource.RLIMIT_NOFILE, open_files),
        (resource.RLIMIT_NPROC, processes),
        (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_DATA, data_bytes),
    )
    # Soft and hard differ by one second for processor time: the soft limit sends SIGXCPU, which tells why the program ended; the hard limit
    # sends SIGKILL, which tells nothing but cannot be caught.
    seconds = None if cpu_seconds is None else max(1, math.ceil(cpu_seconds))
    processor = [] if seconds is None else [(resource.RLIMIT_CPU, seconds, seconds + 1)]
    return [*((kind, most, most) for kind, most in wanted if most is not None), *processor]


def make_room_for_descriptors(asked: int | None) -> int:
    """Raise the caller's limit on open files as far as allowed. Return the guest's limit: `asked`, capped at the old hard limit.

    The kernel bounds the descriptors in flight through unix sockets by *the sender's* limit, and counts those of all processes of the user
    together, in every namespace. A guest can exhaust this bound: it sends descriptors to itself and never receives them. If we had the
    guest's limit, we could then pass no descriptor. So we raise our own limit if permitted.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (MOST_OPEN_FILES, MOST_OPEN_FILES) if hard < MOST_OPEN_FILES else (hard, hard))
    except (OSError, ValueError):  # only the machine's root may exceed the hard limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard if asked is None else min(asked, hard)


def _lower(kind: int, soft: int, most: int) -> None:
    ceiling = resource.getrlimit(kind)[1]
    if ceiling != resource.RLIM_INFINITY:  # RLIM_INFINITY is -1, so min() would choose it
        soft, most = min(soft, ceiling), min(most, ceiling)
    resource.setrlimit(kind, (soft, most))
