"""Give up the kernel's privileges for good: capabilities(7) of a process, and every way by which a program started later could regain them.

What is kept is kept against the user namespace the process is in. In a guest's own namespace a capability reaches the guest's own ids,
mounts and network; it means nothing on the host.
"""

from __future__ import annotations

import errno
from collections.abc import Collection

from agent_sandbox.kernel import syscalls

# Named as in the headers without CAP_, in the order of their numbers.
_NAMES = """
    CHOWN DAC_OVERRIDE DAC_READ_SEARCH FOWNER FSETID KILL SETGID SETUID SETPCAP LINUX_IMMUTABLE NET_BIND_SERVICE NET_BROADCAST NET_ADMIN
    NET_RAW IPC_LOCK IPC_OWNER SYS_MODULE SYS_RAWIO SYS_CHROOT SYS_PTRACE SYS_PACCT SYS_ADMIN SYS_BOOT SYS_NICE SYS_RESOURCE SYS_TIME
    SYS_TTY_CONFIG MKNOD LEASE AUDIT_WRITE AUDIT_CONTROL SETFCAP MAC_OVERRIDE MAC_ADMIN SYSLOG WAKE_ALARM BLOCK_SUSPEND AUDIT_READ
    PERFMON BPF CHECKPOINT_RESTORE
"""
NUMBERS = {name: number for number, name in enumerate(_NAMES.split())}

# What package managers need as root of their own namespace: any owner, mode and id, file attributes, low ports.
# Not SYS_CHROOT, SYS_ADMIN or MKNOD: the filter refuses what they are for. Not SETPCAP: with it, this would be no end.
PACKAGE_MANAGER = frozenset(
    {"CHOWN", "DAC_OVERRIDE", "DAC_READ_SEARCH", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID", "NET_BIND_SERVICE", "SETFCAP"}
)

_NOROOT, _NO_SETUID_FIXUP, _KEEP_CAPS, _NO_CAP_AMBIENT_RAISE = 1 << 0, 1 << 2, 1 << 4, 1 << 6
_LOCKED = 1  # the lock of each bit is the bit above it


def drop_all() -> None:
    """Afterwards this thread has no capability, and no program it executes can have one, not even as user 0.

    Raises OSError (EPERM) without CAP_SETPCAP in the current user namespace; nothing has changed then.
    """
    _narrow_bounding_set(frozenset())
    syscalls.prctl(syscalls.PR_CAP_AMBIENT, syscalls.PR_CAP_AMBIENT_CLEAR_ALL)
    on = _NOROOT | _NO_SETUID_FIXUP | _NO_CAP_AMBIENT_RAISE
    syscalls.prctl(syscalls.PR_SET_SECUREBITS, on | (on | _KEEP_CAPS) << _LOCKED)  # KEEP_CAPS: off, and locked so
    syscalls.capset(0)


def keep_only(names: Collection[str]) -> None:
    """Afterwards this thread, and what it executes as user 0 of its user namespace, has these capabilities at most.

    Other users have none: leaving user 0 gives them up, and under no_new_privs they do not come back. A capability that the kernel is too
    old for is left out; a name that is none is a KeyError. Raises OSError (EPERM) without CAP_SETPCAP, or when the thread lacks one itself.
    """
    numbers = frozenset(NUMBERS[name] for name in names)
    known = _narrow_bounding_set(numbers)
    syscalls.prctl(syscalls.PR_CAP_AMBIENT, syscalls.PR_CAP_AMBIENT_CLEAR_ALL)
    syscalls.capset(sum(1 << number for number in numbers if number < known))


def assert_at_most(names: Collection[str]) -> None:
    """Raise OSError (EPERM) when this thread has a capability besides these. Asked again where a guest begins: a mistake ends there."""
    left = syscalls.capget() & ~sum(1 << NUMBERS[name] for name in names)
    if left:
        raise OSError(errno.EPERM, f"capabilities are left: {left:#x}")


def _narrow_bounding_set(keep: frozenset[int]) -> int:
    """Drop the rest, and return how many capabilities the kernel knows. It is asked itself: /proc need not be there yet."""
    number = 0
    while True:
        try:
            syscalls.prctl(syscalls.PR_CAPBSET_READ if number in keep else syscalls.PR_CAPBSET_DROP, number)
        except OSError as error:
            if error.errno == errno.EINVAL:  # there is no such capability, and none beyond it
                return number
            raise
        number += 1
