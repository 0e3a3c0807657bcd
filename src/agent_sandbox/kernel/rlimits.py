"""Resource limits of a process: the second fence inside a cgroup, and the first where there is none.

They bind one process at a time (or, for some, all processes of a user in one user namespace), so they bound a mistake, not a crowd: totals
are the cgroup's, or the watcher's in `accounting`. RLIMIT_AS is never used: Node.js and wasmtime reserve far more address space than they
touch.
"""

from __future__ import annotations

import math
import resource

# Not 0: a machine whose core_pattern is a program starts it, as root, at any limit but 1 (core(5) and do_coredump in the kernel). A crash
# in a guest must not start a program on the host; the filter keeps the guest from changing this limit.
CORE_BYTES = 1
# These three are also taken from what the starter of the guest may have, as root too: the kernel charges every user namespace above.
LOCKED_BYTES = 64 << 10  # enough for a key in gpg or ssh-agent; locked memory cannot be reclaimed
MESSAGE_QUEUE_BYTES = 128 << 10  # one queue of the usual size; a user commonly has 800 KiB
PENDING_SIGNALS = 1024  # timers included; a user commonly has 4 for each MiB of the machine's memory
MOST_OPEN_FILES = 1 << 20  # for who passes descriptors; fs.nr_open, which nobody can exceed, is this unless it was changed


def apply(
    *,
    open_files: int | None = None,
    processes: int | None = None,
    file_bytes: int | None = None,
    data_bytes: int | None = None,
    cpu_seconds: float | None = None,
) -> None:
    """Limit the calling process and all it starts. `None` leaves that limit as it is.

    Soft and hard become the same and can only go down: never above the present hard limit, so no capability is needed, and without one the
    guest cannot go back up. Call it inside the guest's user namespace: `processes` counts the tasks of this user *in* it (Linux 5.14 and
    later; before that all tasks of the user on the machine), and a limit set outside would be counted outside.

    `data_bytes` bounds heap and private writable mappings of each process; give it only where no cgroup bounds memory.
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
        # One second apart, against the rule: at the soft limit comes SIGXCPU, which says why the program ended; at the hard one SIGKILL,
        # which says nothing but cannot be caught.
        _lower(resource.RLIMIT_CPU, seconds, hard=seconds + 1)


def make_room_for_descriptors(asked: int | None) -> int:
    """Raise the caller's own limit on open files as far as it may go, and return the one for its guest: what was asked, at most the old.

    The kernel lets a user have as many descriptors on their way through unix sockets as *the sender's* limit says, and counts those of all
    processes of that user together, in every namespace. A guest that sends its full share to itself and never receives it would leave us,
    of the same user and with the same limit, unable to pass a single one.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (MOST_OPEN_FILES, MOST_OPEN_FILES) if hard < MOST_OPEN_FILES else (hard, hard))
    except (OSError, ValueError):  # above the hard limit is for the machine's root only
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard if asked is None else min(asked, hard)


def _lower(kind: int, soft: int, *, hard: int | None = None) -> None:
    ceiling = resource.getrlimit(kind)[1]
    most = soft if hard is None else hard
    if ceiling != resource.RLIM_INFINITY:  # which is -1, so min() would choose it
        soft, most = min(soft, ceiling), min(most, ceiling)
    resource.setrlimit(kind, (soft, most))
