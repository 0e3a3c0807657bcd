"""Loop devices: a regular file as a disk, for as long as anybody uses it.

A device is attached with "autoclear": the kernel detaches it when the last descriptor and the last mount of it are gone, however their
owners ended, so nothing is left by a kill. The device keeps the very description of the file that it was given, and with it the lock
(flock) that the caller took on it: that lock ends when the device is detached, not before.

Only `mount_detached` needs more of the kernel than Python has; a run, whose init mounts the device itself, does not load it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct

from agent_sandbox.values import dataclass

CONTROL, _DEVICES = "/dev/loop-control", "/sys/block"
LOOP_CTL_GET_FREE, LOOP_CONFIGURE, LOOP_GET_STATUS64 = 0x4C82, 0x4C0A, 0x4C05
LO_FLAGS_AUTOCLEAR = 4
_CONFIG = struct.Struct("=II 5Q 4I 160x 2Q 8Q")  # struct loop_config: a file, a block size, and a struct loop_info64
_STATUS = struct.Struct("=5Q 4I 160x 2Q")  # struct loop_info64
_PATIENCE = 64  # how often another may be faster in taking the device that was free
OPTIONS = "noinit_itable"  # the blocks of new inode tables are zero as they are: a reserved block of a file reads so


@dataclass(frozen=True)
class Loop:
    """An attached device. Whoever holds `fd` or a mount of it keeps it."""

    fd: int
    device: str


def attach(file: int) -> Loop:
    """Attach a file that is open for reading and writing to a free device. Raises OSError, ENOENT and the like where there are none."""
    control = os.open(CONTROL, os.O_RDWR | os.O_CLOEXEC)
    try:
        for _ in range(_PATIENCE):
            device = f"/dev/loop{fcntl.ioctl(control, LOOP_CTL_GET_FREE)}"
            fd = os.open(device, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.ioctl(fd, LOOP_CONFIGURE, _CONFIG.pack(file, 0, *[0] * 5, 0, 0, 0, LO_FLAGS_AUTOCLEAR, *[0] * 10))
                return Loop(fd, device)
            except OSError as error:
                os.close(fd)
                if error.errno != errno.EBUSY:
                    raise
    finally:
        os.close(control)
    raise OSError(errno.EBUSY, "every free loop device was taken by another")


def find(file: tuple[int, int]) -> Loop | None:
    """The device that this file, by its device and inode, is attached to. It stays so for as long as the answer is kept."""
    for name in os.listdir(_DEVICES):
        if name.startswith("loop") and os.path.exists(f"{_DEVICES}/{name}/loop"):
            try:
                fd = os.open(f"/dev/{name}", os.O_RDWR | os.O_CLOEXEC)
            except OSError:  # detached just now
                continue
            try:
                if backing(fd) == file:
                    return Loop(fd, f"/dev/{name}")
            except OSError:
                pass
            os.close(fd)
    return None


def backing(fd: int) -> tuple[int, int]:
    """Device and inode of the file behind an open loop device."""
    found = _STATUS.unpack(fcntl.ioctl(fd, LOOP_GET_STATUS64, bytes(_STATUS.size)))
    return found[0], found[1]


def mount_detached(device: str) -> int:
    """Mount the ext4 on a device nowhere, and return a descriptor of its top directory: it is unmounted when that and all it led to close.

    No programs, devices or setuid files of it count for anything. A journal that a power cut left is replayed. Raises OSError.
    """
    from agent_sandbox.kernel import syscalls as sc

    context = sc.fsopen("ext4")
    try:
        sc.fsconfig(context, sc.FSCONFIG_SET_STRING, "source", device)
        sc.fsconfig(context, sc.FSCONFIG_SET_FLAG, OPTIONS)
        sc.fsconfig(context, sc.FSCONFIG_CMD_CREATE)
        quiet = sc.MOUNT_ATTR_NOSUID | sc.MOUNT_ATTR_NODEV | sc.MOUNT_ATTR_NOEXEC | sc.MOUNT_ATTR_NOATIME
        mount = sc.fsmount(context, quiet)
    finally:
        os.close(context)
    try:
        return os.open(f"/proc/self/fd/{mount}/.", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    finally:
        os.close(mount)
