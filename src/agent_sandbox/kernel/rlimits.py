"""Resource limits (rlimits) of a process: the second fence inside a cgroup, the first one without a cgroup.

An rlimit binds one process at a time, or for some kinds all processes of a user in one user namespace. It stops a mistake, not a crowd:
totals are enforced by the cgroup, or by init's watch, which measures with `usage`. RLIMIT_AS is never used: Node.js and wasmtime reserve
far more address space than they touch.
"""

from __future__ import annotations

import math
import resource

# Not 0: if core_pattern is a program, the kernel starts it as root at any limit but 1 (core(5), do_coredump). A crash in a guest must not
# start a program on the host. The seccomp filter keeps the guest from changing this limit.
CORE_BYTES = 1
# The kernel also charges the next three to every user namespace above, so they use up the allowance of the guest's starter, even of root.
LOCKED_BYTES = 64 << 10  # enough for a key in gpg or ssh-agent; locked memory cannot be reclaimed
MESSAGE_QUEUE_BYTES = 128 << 10  # one queue of the usual size; a user commonly has 800 KiB
PENDING_SIGNALS = 1024  # timers included; a user commonly has 4 for each MiB of the machine's memory
MOST_OPEN_FILES = 1 << 20  # for processes that pass descriptors; the default of fs.nr_open, which no process can exceed


def apply(
    *,
    open_files: int | None = None,
    processes: int | None = None,
    file_bytes: int | None = None,
    data_bytes: int | None = None,
    cpu_seconds: float | None = None,
) -> None:
    """Limit the calling process and its descendants. `None` leaves that limit unchanged.

    Soft and hard limit become equal and only go down. The present hard limit is never exceeded, so no capability is needed; without one the
    guest cannot raise the limit again. Call it inside the guest's user namespace: `processes` counts the tasks of this user *in* that
    namespace (Linux 5.14 and later; earlier, all tasks of the user on the machine). A limit set outside would be counted outside.

    `data_bytes` bounds the heap and private writable mappings of each process. Pass it only where no cgroup bounds memory.
    """
    _lower(resource.RLIMIT_CORE, CORE_BYTES)
    _lower(resource.RLIMIT_MEMLOCK, LOCKED_BYTES)
    _lower(resource.RLIMIT_MSGQUEUE, MESSAGE_QUEUE_BYTES)
    _lower(resource.RLIMIT_SIGPENDING, PENDING_SIGNALS)
    _lower(resource.RLIMIT_NICE, 0)
    _lower(resource.RLIMIT_RTPRIO, 0)
    for kind, value in (
        (resource.RLIMIT_NOFILE, open_files),
        (resource.RLIMIT_NPROC, processes),
        (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_DATA, data_bytes),
    ):
        if value is not None:
            _lower(kind, value)
    if cpu_seconds is not None:
        seconds = max(1, math.ceil(cpu_seconds))
        # Soft and hard differ by one second here: the soft limit sends SIGXCPU, which tells why the program ended; the hard limit sends
        # SIGKILL, which tells nothing but cannot be caught.
        _lower(resource.RLIMIT_CPU, seconds, hard=seconds + 1)


def make_room_for_descriptors(asked: int | None) -> int:
    """Raise the caller's limit on open files as far as allowed. Return the guest's limit: `asked`, capped at the old hard limit.

    The kernel bounds the descriptors in flight through unix sockets by *the sender's* limit, and counts those of all processes of the user
    together, in every namespace. A guest that sends itself its full share and never receives it would leave us, with the same user and the
    same limit, unable to pass a single descriptor.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (MOST_OPEN_FILES, MOST_OPEN_FILES) if hard < MOST_OPEN_FILES else (hard, hard))
    except (OSError, ValueError):  # only the machine's root may exceed the hard limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard if asked is None else min(asked, hard)


def _lower(kind: int, soft: int, *, hard: int | None = None) -> None:
    ceiling = resource.getrlimit(kind)[1]
    most = soft if hard is None else hard
    if ceiling != resource.RLIM_INFINITY:  # RLIM_INFINITY is -1, so min() would choose it
        soft, most = min(soft, ceiling), min(most, ceiling)
    resource.setrlimit(kind, (soft, most))
