"""Capabilities(7): drop them for good, with every way by which a program started later could regain them.

A kept capability applies to the process's user namespace. In a guest's own namespace it covers the guest's own ids, mounts and network,
and has no effect on the host.
"""

from __future__ import annotations

import errno
from collections.abc import Collection

from agent_sandbox.kernel import syscalls

# Named as in the headers without CAP_, in numeric order.
_NAMES = """
    CHOWN DAC_OVERRIDE DAC_READ_SEARCH FOWNER FSETID KILL SETGID SETUID SETPCAP LINUX_IMMUTABLE NET_BIND_SERVICE NET_BROADCAST NET_ADMIN
    NET_RAW IPC_LOCK IPC_OWNER SYS_MODULE SYS_RAWIO SYS_CHROOT SYS_PTRACE SYS_PACCT SYS_ADMIN SYS_BOOT SYS_NICE SYS_RESOURCE SYS_TIME
    SYS_TTY_CONFIG MKNOD LEASE AUDIT_WRITE AUDIT_CONTROL SETFCAP MAC_OVERRIDE MAC_ADMIN SYSLOG WAKE_ALARM BLOCK_SUSPEND AUDIT_READ
    PERFMON BPF CHECKPOINT_RESTORE
"""
NUMBERS = {name: number for number, name in enumerate(_NAMES.split())}

# The capabilities that package managers need as root of their own namespace: any owner, mode and id, file attributes, low ports.
# Not SYS_CHROOT, SYS_ADMIN or MKNOD: the seccomp filter refuses their calls. Not SETPCAP: with it, the set would not be final.
PACKAGE_MANAGER = frozenset(
    {"CHOWN", "DAC_OVERRIDE", "DAC_READ_SEARCH", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID", "NET_BIND_SERVICE", "SETFCAP"}
)

_NOROOT, _NO_SETUID_FIXUP, _KEEP_CAPS, _NO_CAP_AMBIENT_RAISE = 1 << 0, 1 << 2, 1 << 4, 1 << 6
_LOCKED = 1  # shift: the lock of each bit is the next higher bit


def drop_all() -> None:
    """Drop all capabilities of this thread. No program it executes can regain one, not even as user 0.

    Raises OSError (EPERM) without CAP_SETPCAP in the current user namespace; then nothing has changed.
    """
    _narrow_bounding_set(frozenset())
    syscalls.prctl(syscalls.PR_CAP_AMBIENT, syscalls.PR_CAP_AMBIENT_CLEAR_ALL)
    on = _NOROOT | _NO_SETUID_FIXUP | _NO_CAP_AMBIENT_RAISE
    syscalls.prctl(syscalls.PR_SET_SECUREBITS, on | (on | _KEEP_CAPS) << _LOCKED)  # KEEP_CAPS stays off and is locked
    syscalls.capset(0)


def keep_only(names: Collection[str]) -> None:
    """Limit this thread, and programs it executes as user 0 of its user namespace, to these capabilities.

    Other users have none: leaving user 0 drops them, and under no_new_privs they do not come back. A capability that the kernel is too old
    for is left out. Raises KeyError for an unknown name, and OSError (EPERM) without CAP_SETPCAP or if the thread itself lacks one.
    """
    numbers = frozenset(NUMBERS[name] for name in names)
    known = _narrow_bounding_set(numbers)
    syscalls.prctl(syscalls.PR_CAP_AMBIENT, syscalls.PR_CAP_AMBIENT_CLEAR_ALL)
    syscalls.capset(sum(1 << number for number in numbers if number < known))


def assert_at_most(names: Collection[str]) -> None:
    """Raise OSError (EPERM) if this thread has any other capability. A second check where a guest begins, to stop a mistake there."""
    left = syscalls.capget() & ~sum(1 << NUMBERS[name] for name in names)
    if left:
        raise OSError(errno.EPERM, f"capabilities are left: {left:#x}")


def _narrow_bounding_set(keep: frozenset[int]) -> int:
    """Drop all others and return the number of capabilities the kernel knows. Asks the kernel: /proc may not be mounted yet."""
    number = 0
    while True:
        try:
            syscalls.prctl(syscalls.PR_CAPBSET_READ if number in keep else syscalls.PR_CAPBSET_DROP, number)
        except OSError as error:
            if error.errno == errno.EINVAL:  # no such capability, and none with a higher number
                return number
            raise
        number += 1
