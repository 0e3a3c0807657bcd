"""Namespaces and capabilities(7): user namespaces, the private mount namespace with its new root, the loopback device, dropped privileges.

The owner of each namespace matters. The mount, pid, network, ipc and uts namespaces belong to the user namespace in which they are made. As
root, that is the machine's user namespace; without root, an outer user namespace of ours. The guest then enters its own user namespace
*inside* the owner. So even a guest with every capability of its own user namespace has no power over its mounts, its network or its init.

Capabilities are dropped for good, with every way by which a program started later could regain them. A kept capability applies to the
process's user namespace. In a guest's own namespace it covers the guest's own ids, mounts and network, and has no effect on the host.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct

from agent_sandbox._fast.values import TYPE_CHECKING
from agent_sandbox.kernel import forks, syscalls
from agent_sandbox.kernel import syscalls as sc
from agent_sandbox.kernel.ids import FIRST_ID, IDS, write_maps

if TYPE_CHECKING:
    import socket
    from collections.abc import Collection
else:
    from agent_sandbox._fast import sockets as socket

HOSTNAME = "sandbox"
# Settings of /proc/sys/user, per guest; a user commonly has 128 instances.
BOUNDS = (("max_inotify_instances", 32), ("max_inotify_watches", 65536))
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1
# Named as in the headers without CAP_, in numeric order.
_NAMES = """
    CHOWN DAC_OVERRIDE DAC_READ_SEARCH FOWNER FSETID KILL SETGID SETUID SETPCAP LINUX_IMMUTABLE NET_BIND_SERVICE NET_BROADCAST NET_ADMIN
    NET_RAW IPC_LOCK IPC_OWNER SYS_MODULE SYS_RAWIO SYS_CHROOT SYS_PTRACE SYS_PACCT SYS_ADMIN SYS_BOOT SYS_NICE SYS_RESOURCE SYS_TIME
    SYS_TTY_CONFIG MKNOD LEASE AUDIT_WRITE AUDIT_CONTROL SETFCAP MAC_OVERRIDE MAC_ADMIN SYSLOG WAKE_ALARM BLOCK_SUSPEND AUDIT_READ
    PERFMON BPF CHECKPOINT_RESTORE
"""
CAPABILITIES = {name: number for number, name in enumerate(_NAMES.split())}

# The capabilities that package managers need as root of their own namespace: any owner, mode and id, file attributes, low ports.
# Not SYS_CHROOT, SYS_ADMIN or MKNOD: the seccomp filter refuses their calls. Not SETPCAP: with it, the set would not be final.
PACKAGE_MANAGER = frozenset(
    {"CHOWN", "DAC_OVERRIDE", "DAC_READ_SEARCH", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID", "NET_BIND_SERVICE", "SETFCAP"}
)
# The capabilities that an outer program may be given to make walls of its own for the guest: mounts, a root, namespaces, their ids.
OUTER_PROGRAM = PACKAGE_MANAGER | {"SETPCAP", "SYS_ADMIN", "SYS_CHROOT", "SYS_PTRACE"}

_NOROOT, _NO_SETUID_FIXUP, _KEEP_CAPS, _NO_CAP_AMBIENT_RAISE = 1 << 0, 1 << 2, 1 << 4, 1 << 6
_LOCKED = 1  # shift: the lock of each bit is the next higher bit


def enter_own_user_namespace() -> None:
    """Without root: enter a user namespace that keeps our ids. This gives the right to make the other namespaces. Raises OSError."""
    uid, gid = os.geteuid(), os.getegid()
    sc.unshare(sc.CLONE_NEWUSER)
    write_maps("self", uid_map=f"{uid} {uid} 1", gid_map=f"{gid} {gid} 1", deny_setgroups=True)


def make_id_mapping() -> int:
    """As root: return a descriptor of an empty user namespace that maps ids 0… to FIRST_ID…, for idmapped mounts. Raises OSError."""
    ours, theirs = socket.socketpair()
    child = forks.fork()
    if child == 0:
        try:
            ours.close()
            sc.unshare(sc.CLONE_NEWUSER)
            theirs.send(b"1")
            theirs.recv(1)  # until the other end closes. A mere pause() would outlive a parent that is killed meanwhile
        finally:
            os._exit(1)
    theirs.close()
    try:
        if not ours.recv(1):
            raise OSError(1, "cannot make a user namespace")
        whole = f"0 {FIRST_ID} {IDS}"
        write_maps(child, uid_map=whole, gid_map=whole, deny_setgroups=False)
        return os.open(f"/proc/{child}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        ours.close()
        os.waitpid(child, 0)


def bound_kernel_objects(settings: int) -> None:
    """Limit the kernel objects that the kernel counts per user, so that a guest cannot use up the allowance of the user who started it.

    `settings` is a descriptor of /proc/sys/user and is closed here. The files in it refer to the user namespace of the caller. If they are
    read-only, as in most containers, only that user's own limit applies.
    """
    for name, most in BOUNDS:
        try:
            fd = os.open(name, os.O_WRONLY | os.O_CLOEXEC, dir_fd=settings)
        except OSError:
            continue
        try:
            os.write(fd, str(most).encode())
        finally:
            os.close(fd)
    os.close(settings)


def enter_private_mounts() -> None:
    """Enter a new mount namespace without propagation to the host, with an empty tmpfs as current directory. Raises OSError."""
    sc.unshare(sc.CLONE_NEWNS)
    sc.mount("", "/", None, sc.MS_REC | sc.MS_PRIVATE)
    # Mounted over /sys, which is never part of a view, so it hides nothing that a plan needs.
    sc.mount("staging", "/sys", "tmpfs", sc.MS_NOSUID | sc.MS_NODEV, "size=256m,mode=700")
    os.chdir("/sys")


def enter_root() -> None:
    """Make `r`, below the current directory, the root of this mount namespace, and detach everything else."""
    # pivot_root(".", ".") stacks the old root on the new root, so the old root needs no directory of its own (pivot_root(2)).
    os.chdir("r")
    sc.pivot_root(".", ".")
    sc.umount2(".", sc.MNT_DETACH)
    os.chdir("/")


def enter_owned_mounts() -> None:
    """Enter a mount namespace that belongs to our own user namespace, so that its capabilities reach these mounts. Raises OSError.

    The mounts of the view stay as they are: the kernel locks what comes from the namespace around it, one and all.
    """
    sc.unshare(sc.CLONE_NEWNS)
    sc.mount("", "/", None, sc.MS_REC | sc.MS_PRIVATE)


def raise_loopback() -> None:
    """Bring up `lo`: programs expect to reach themselves at 127.0.0.1. It is the only interface of the namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        request = struct.pack("16sh22x", b"lo", 0)
        flags = struct.unpack("16sh22x", fcntl.ioctl(sock, SIOCGIFFLAGS, request))[1]
        fcntl.ioctl(sock, SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", flags | IFF_UP))


def drop_capabilities() -> None:
    """Drop all capabilities of this thread. No program it executes can regain one, not even as user 0.

    Raises OSError (EPERM) without CAP_SETPCAP in the current user namespace; then nothing has changed.
    """
    _narrow_bounding_set(frozenset())
    syscalls.prctl(syscalls.PR_CAP_AMBIENT, syscalls.PR_CAP_AMBIENT_CLEAR_ALL)
    on = _NOROOT | _NO_SETUID_FIXUP | _NO_CAP_AMBIENT_RAISE
    syscalls.prctl(syscalls.PR_SET_SECUREBITS, on | (on | _KEEP_CAPS) << _LOCKED)  # KEEP_CAPS stays off and is locked
    syscalls.capset(0)


def keep_capabilities(names: Collection[str]) -> None:
    """Limit this thread, and programs it executes as user 0 of its user namespace, to these capabilities.

    A process that leaves user 0 loses these capabilities, and under no_new_privs it does not regain them. A capability that the kernel is
    too old for is left out. Raises KeyError for an unknown name. Raises OSError (EPERM) if the thread lacks CAP_SETPCAP or one of these
    capabilities.
    """
    numbers = frozenset(CAPABILITIES[name] for name in names)
    known = _narrow_bounding_set(numbers)
    syscalls.prctl(syscalls.PR_CAP_AMBIENT, syscalls.PR_CAP_AMBIENT_CLEAR_ALL)
    syscalls.capset(sum(1 << number for number in numbers if number < known))


def assert_capabilities(names: Collection[str]) -> None:
    """Raise OSError (EPERM) if this thread has a capability that is not in `names`: a last check before a guest begins."""
    left = syscalls.capget() & ~sum(1 << CAPABILITIES[name] for name in names)
    if left:
        raise OSError(errno.EPERM, f"capabilities are left: {left:#x}")


def _narrow_bounding_set(keep: frozenset[int]) -> int:
    """Drop all capabilities except `keep` from the bounding set. Return the number of capabilities that the kernel knows.

    That number is found by asking the kernel, because /proc may not be mounted yet.
    """
    number = 0
    while True:
        try:
            syscalls.prctl(syscalls.PR_CAPBSET_READ if number in keep else syscalls.PR_CAPBSET_DROP, number)
        except OSError as error:
            if error.errno == errno.EINVAL:  # no such capability, and none with a higher number
                return number
            raise
        number += 1
