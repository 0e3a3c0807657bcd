"""Namespace building blocks: user namespaces, the private mount namespace with its new root, a loopback device.

Ownership is the point. The mount, pid, network, ipc and uts namespaces belong to the user namespace in which they are made: the machine's
own as root, an outer one of ours without root. The guest then enters a user namespace of its own *inside* that one, so even a guest with
every capability of its namespace has none over its mounts, its network or its init.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct

from agent_sandbox.kernel import syscalls as sc
from agent_sandbox.kernel.ids import FIRST_ID, IDS, write_maps

INOTIFY_INSTANCES, INOTIFY_WATCHES = 32, 65536  # per guest; a user commonly has 128 instances
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1


def enter_own_user_namespace() -> None:
    """Without root: enter a user namespace that keeps our ids. This gives the right to make the other namespaces. Raises OSError."""
    uid, gid = os.geteuid(), os.getegid()
    sc.unshare(sc.CLONE_NEWUSER)
    write_maps("self", uid_map=f"{uid} {uid} 1", gid_map=f"{gid} {gid} 1", deny_setgroups=True)


def make_id_mapping() -> int:
    """As root: return a descriptor of an empty user namespace that maps ids 0… to FIRST_ID…, for idmapped mounts. Raises OSError."""
    ours, theirs = socket.socketpair()
    child = os.fork()
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
    """Limit the kernel objects of a guest that the kernel counts per user, so that it cannot use up its starter's allowance.

    `settings` is a descriptor of /proc/sys/user and is closed here. Lookups there refer to the user namespace of the caller. If it is
    read-only, as in most containers, the starter's limit stays.
    """
    for name, most in (("max_inotify_instances", INOTIFY_INSTANCES), ("max_inotify_watches", INOTIFY_WATCHES)):
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
    # pivot_root(".", ".") stacks the old root on the new one, so it needs no directory of its own (pivot_root(2)).
    os.chdir("r")
    sc.pivot_root(".", ".")
    sc.umount2(".", sc.MNT_DETACH)
    os.chdir("/")


def raise_loopback() -> None:
    """Bring up `lo`: programs expect to reach themselves at 127.0.0.1. It is the only interface of the namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        request = struct.pack("16sh22x", b"lo", 0)
        flags = struct.unpack("16sh22x", fcntl.ioctl(sock, SIOCGIFFLAGS, request))[1]
        fcntl.ioctl(sock, SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", flags | IFF_UP))
