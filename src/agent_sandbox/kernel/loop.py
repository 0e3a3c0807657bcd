"""Loop devices, and the ballast file that limits how much of an image a sandbox may fill."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from contextlib import suppress
from io import FileIO

from agent_sandbox._fast.values import dataclass

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


FS_IOC_FIEMAP = 0xC020660B
_LAST = 1  # FIEMAP_EXTENT_LAST
_HEAD, _EXTENT = struct.Struct("=QQIIII"), struct.Struct("=QQQ16xI12x")  # struct fiemap, struct fiemap_extent
_AT_ONCE = 256


@dataclass(frozen=True)
class Extent:
    """A piece of a file: where it begins in the file and on the filesystem, in bytes."""

    logical: int
    physical: int
    length: int


def extents(fd: int) -> list[Extent]:
    """The pieces of a file in their order. Raises OSError where the filesystem cannot tell."""
    found: list[Extent] = []
    start = 0
    while True:
        buffer = bytearray(_HEAD.pack(start, (1 << 64) - 1 - start, 0, 0, _AT_ONCE, 0) + bytes(_EXTENT.size * _AT_ONCE))
        fcntl.ioctl(fd, FS_IOC_FIEMAP, buffer)
        count, last = _HEAD.unpack_from(buffer)[3], 0
        for number in range(count):
            logical, physical, length, last = _EXTENT.unpack_from(buffer, _HEAD.size + number * _EXTENT.size)
            found.append(Extent(logical, physical, length))
        if not count or last & _LAST:
            return found
        start = found[-1].logical + found[-1].length


def complement(pieces: list[Extent], size: int) -> list[tuple[int, int]]:
    """What of the first `size` bytes of the filesystem is not in these pieces: where it begins, and its length."""
    gaps, at = [], 0
    for piece in sorted(pieces, key=lambda piece: piece.physical):
        if piece.physical > at:
            gaps.append((at, piece.physical - at))
        at = max(at, piece.physical + piece.length)
    return [*gaps, (at, size - at)] if at < size else gaps


BALLAST, SPARE = "ballast", "spare"
SPARE_BYTES = 4 << 20


def fill(top: int, image_bytes: int, keep_bytes: int) -> list[tuple[int, int]]:
    """In a new image: make both files, leaving `keep_bytes` free. Returns what the disk has to give: all that the ballast does not hold."""
    with _opened(top, SPARE) as spare:
        os.posix_fallocate(spare.fileno(), 0, SPARE_BYTES)
    space = os.fstatvfs(top)
    free = space.f_bavail * space.f_frsize
    with _opened(top, BALLAST) as ballast:
        if free > keep_bytes:
            os.posix_fallocate(ballast.fileno(), 0, _blocks(free - keep_bytes, space.f_frsize))
        os.fsync(ballast.fileno())  # only now is it settled where its blocks lie
        return complement(extents(ballast.fileno()), image_bytes)


def used_bytes(top: int) -> int:
    """What is in the image besides the two files."""
    space = os.fstatvfs(top)
    ours = sum(os.stat(name, dir_fd=top, follow_symlinks=False).st_blocks * 512 for name in (BALLAST, SPARE))
    return max(0, (space.f_blocks - space.f_bfree) * space.f_frsize - ours)


def restrict(top: int, limit_bytes: int) -> None:
    """Let no more be free than fits into the limit."""
    space = os.fstatvfs(top)
    surplus = space.f_bavail * space.f_frsize - max(0, limit_bytes - used_bytes(top))
    if surplus < space.f_frsize:
        return
    with _opened(top, BALLAST) as ballast, suppress(OSError):  # what is not to be had is not free either
        os.posix_fallocate(ballast.fileno(), os.fstat(ballast.fileno()).st_size, _blocks(surplus, space.f_frsize))


def give(top: int, image: int, wanted_bytes: int) -> int:
    """Let the sandbox have more, as far as there is ballast. Returns how much. Raises OSError, having given none, when the disk is full."""
    block = os.fstatvfs(top).f_frsize
    with _opened(top, BALLAST) as ballast:
        size = os.fstat(ballast.fileno()).st_size
        end = max(0, size - _blocks(wanted_bytes, block))
        for piece in extents(ballast.fileno()):
            if piece.logical + piece.length > end:
                kept = max(0, end - piece.logical)
                os.posix_fallocate(image, piece.physical + kept, piece.length - kept)
        os.ftruncate(ballast.fileno(), end)
        return size - end


def make_room_for_directories(top: int) -> None:
    """When nothing is free any more, give up the spare; `take_spare` wants it back."""
    space = os.fstatvfs(top)
    if space.f_bavail * space.f_frsize < SPARE_BYTES:
        with _opened(top, SPARE) as spare:
            os.ftruncate(spare.fileno(), 0)


def take_spare(top: int) -> None:
    """Take back what was given up and not needed."""
    with _opened(top, SPARE) as spare, suppress(OSError):
        if os.fstat(spare.fileno()).st_size < SPARE_BYTES:
            os.posix_fallocate(spare.fileno(), 0, SPARE_BYTES)


def _blocks(size: int, block: int) -> int:
    return size // block * block


def _opened(top: int, name: str) -> FileIO:
    return FileIO(os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=top), "rb+")
