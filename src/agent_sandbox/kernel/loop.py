"""Loop devices, and the ballast file that limits how much of an image a sandbox may fill.

A loop device shows a regular file as a disk. It is attached with "autoclear": the kernel detaches it after the last descriptor and the last
mount are gone, however their owners ended, so a kill leaves nothing behind. The device keeps the open file description it was given, and
with it the caller's flock: that lock lasts until the device is detached.

The ballast is a file of ours in the image. The image has its final size from the start, but the disk has allocated blocks only for the part
outside the ballast. To give a sandbox more room, first allocate the disk blocks under the end of the ballast, then truncate the ballast.
This takes a few milliseconds and is possible at any moment, also while guests write. Every block that a guest can write is allocated on the
disk; otherwise a full disk would break the filesystem in the image. To give a sandbox less room, grow the ballast into the free space.
While the image is not attached, blocks without content are returned to the disk: see `image_space`.
Resizing a filesystem that is in use needs CAP_SYS_RESOURCE instead, which root in a container lacks.

A second file, the spare, is released for a moment when a view is built in an image that a guest has filled: overlays need directories.

Only `mount_detached` needs ctypes. The start of a run does not call it, because the run's init mounts the device itself.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from io import FileIO

from agent_sandbox._fast.contexts import suppress
from agent_sandbox._fast.values import dataclass

CONTROL, _DEVICES = "/dev/loop-control", "/sys/block"
LOOP_CTL_GET_FREE, LOOP_CONFIGURE, LOOP_GET_STATUS64 = 0x4C82, 0x4C0A, 0x4C05
LO_FLAGS_READ_ONLY, LO_FLAGS_AUTOCLEAR = 1, 4
_CONFIG = struct.Struct("=II 5Q 4I 160x 2Q 8Q")  # struct loop_config: a file, a block size, and a struct loop_info64
_STATUS = struct.Struct("=5Q 4I 160x 2Q")  # struct loop_info64
_PATIENCE = 64  # attempts, if another process takes the free device first
OPTIONS = "noinit_itable"  # the blocks of new inode tables already read as zero: allocated blocks of a file that were never written
FS_IOC_FIEMAP = 0xC020660B
_LAST = 1  # FIEMAP_EXTENT_LAST
_HEAD, _EXTENT = struct.Struct("=QQIIII"), struct.Struct("=QQQ16xI12x")  # struct fiemap, struct fiemap_extent
_AT_ONCE = 256  # extents per call
BALLAST, SPARE = "ballast", "spare"
SPARE_BYTES = 4 << 20
_EXTENT_BLOCKS = 1 << 20  # the disk may use so many bytes of its own to say where the blocks of an image are


@dataclass(frozen=True)
class LoopDevice:
    """An attached device. It stays attached while `fd` or a mount of it exists."""

    fd: int
    device: str


def attach(file: int, *, read_only: bool = False) -> LoopDevice:
    """Attach a file, open for reading and writing, to a free device. Raises OSError, for example ENOENT without loop devices."""
    flags = LO_FLAGS_AUTOCLEAR | (LO_FLAGS_READ_ONLY if read_only else 0)
    control = os.open(CONTROL, os.O_RDWR | os.O_CLOEXEC)
    try:
        for _ in range(_PATIENCE):
            device = f"/dev/loop{fcntl.ioctl(control, LOOP_CTL_GET_FREE)}"
            fd = os.open(device, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.ioctl(fd, LOOP_CONFIGURE, _CONFIG.pack(file, 0, *[0] * 5, 0, 0, 0, flags, *[0] * 10))
                return LoopDevice(fd, device)
            except OSError as error:
                os.close(fd)
                if error.errno != errno.EBUSY:
                    raise
    finally:
        os.close(control)
    raise OSError(errno.EBUSY, "every free loop device was taken by another")


def find(file: tuple[int, int]) -> LoopDevice | None:
    """Return the loop device of a file, given by device and inode; None if the file has none.

    The loop device stays attached while the result is open.
    """
    for name in os.listdir(_DEVICES):
        if name.startswith("loop") and os.path.exists(f"{_DEVICES}/{name}/loop"):
            try:
                fd = os.open(f"/dev/{name}", os.O_RDWR | os.O_CLOEXEC)
            except OSError:  # detached meanwhile
                continue
            try:
                if backing(fd) == file:
                    return LoopDevice(fd, f"/dev/{name}")
            except OSError:
                pass
            os.close(fd)
    return None


def backing(fd: int) -> tuple[int, int]:
    """Return device and inode of the file behind an open loop device."""
    status = _STATUS.unpack(fcntl.ioctl(fd, LOOP_GET_STATUS64, bytes(_STATUS.size)))
    return status[0], status[1]


def is_read_only(device: LoopDevice) -> bool:
    """Return whether nothing can be written to the device. Raises OSError."""
    return bool(_STATUS.unpack(fcntl.ioctl(device.fd, LOOP_GET_STATUS64, bytes(_STATUS.size)))[8] & LO_FLAGS_READ_ONLY)


def mount_detached(device: str, *, read_only: bool = False) -> int:
    """Mount the ext4 filesystem of a device at no path. Return a descriptor of its top directory. Raises OSError.

    The filesystem is unmounted when that descriptor, and every descriptor opened through it, are closed. Programs, devices and setuid bits
    on it have no effect. The kernel replays a journal that a power cut left.
    """
    mount = _mount_nowhere(device, read_only=read_only)
    try:
        return os.open(f"/proc/self/fd/{mount}/.", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    finally:
        os.close(mount)


@dataclass(frozen=True)
class MountedImage:
    """The filesystem of an image, mounted at no path. `mount` is a descriptor that can be attached."""

    device: str
    backing: tuple[int, int]
    mount: int


def mount_image(device: str, backing: tuple[int, int]) -> MountedImage:
    """Mount the filesystem of a loop device at no path. Raises OSError, ESTALE if the device is not attached to the image `backing`."""
    held = os.open(device, os.O_RDWR | os.O_CLOEXEC)  # while open, the device cannot be reassigned
    try:
        check_backing(held, device, backing)
        return MountedImage(device, backing, _mount_nowhere(device))
    finally:
        os.close(held)


def check_backing(fd: int, device: str, wanted: tuple[int, int]) -> None:
    """Raise OSError (ESTALE) if an open loop device is not attached to this file, given by device and inode."""
    if backing(fd) != wanted:
        raise OSError(errno.ESTALE, f"{device} has been detached from the image")


def _mount_nowhere(device: str, *, read_only: bool = False) -> int:
    """Mount the filesystem of a device at no path. Return a descriptor of the mount."""
    from agent_sandbox.kernel import syscalls as sc

    context = sc.fsopen("ext4")
    try:
        sc.fsconfig(context, sc.FSCONFIG_SET_STRING, "source", device)
        for flag in (OPTIONS, *(["ro"] if read_only else [])):
            sc.fsconfig(context, sc.FSCONFIG_SET_FLAG, flag)
        sc.fsconfig(context, sc.FSCONFIG_CMD_CREATE)
        return sc.fsmount(context, sc.MOUNT_ATTR_NOSUID | sc.MOUNT_ATTR_NODEV | sc.MOUNT_ATTR_NOEXEC | sc.MOUNT_ATTR_NOATIME)
    finally:
        os.close(context)


@dataclass(frozen=True)
class Extent:
    """A contiguous piece of a file: its start in the file and on the filesystem, and its length, in bytes."""

    logical: int
    physical: int
    length: int


def extents(fd: int) -> list[Extent]:
    """Return the extents of a file in file order. Raises OSError if the filesystem has no FIEMAP."""
    pieces: list[Extent] = []
    start = 0
    while True:
        buffer = bytearray(_HEAD.pack(start, (1 << 64) - 1 - start, 0, 0, _AT_ONCE, 0) + bytes(_EXTENT.size * _AT_ONCE))
        fcntl.ioctl(fd, FS_IOC_FIEMAP, buffer)
        count, last = _HEAD.unpack_from(buffer)[3], 0
        for number in range(count):
            logical, physical, length, last = _EXTENT.unpack_from(buffer, _HEAD.size + number * _EXTENT.size)
            pieces.append(Extent(logical, physical, length))
        if not count or last & _LAST:
            return pieces
        start = pieces[-1].logical + pieces[-1].length


def complement(pieces: list[Extent], size: int) -> list[tuple[int, int]]:
    """Return the parts of the first `size` bytes of the filesystem outside these extents, each as start and length."""
    gaps, at = [], 0
    for piece in sorted(pieces, key=lambda piece: piece.physical):
        if piece.physical > at:
            gaps.append((at, piece.physical - at))
        at = max(at, piece.physical + piece.length)
    return [*gaps, (at, size - at)] if at < size else gaps


def fill(top: int, image_bytes: int, keep_bytes: int) -> list[tuple[int, int]]:
    """Create the ballast file and the spare file in a new image, and leave `keep_bytes` free. Return the ranges outside the ballast."""
    with _opened(top, SPARE, os.O_CREAT) as spare:
        os.posix_fallocate(spare.fileno(), 0, SPARE_BYTES)
    space = os.fstatvfs(top)
    free = space.f_bavail * space.f_frsize
    with _opened(top, BALLAST, os.O_CREAT) as ballast:
        if free > keep_bytes:
            # Nearly all of it first, and then less: the free part is in one piece at the end, and every block bitmap is on the disk.
            os.posix_fallocate(ballast.fileno(), 0, _blocks(free - min(keep_bytes, SPARE_BYTES), space.f_frsize))
            os.ftruncate(ballast.fileno(), _blocks(free - keep_bytes, space.f_frsize))
        os.fsync(ballast.fileno())  # before this, its blocks have no place on the filesystem
        return complement(extents(ballast.fileno()), image_bytes)


def used_bytes(top: int) -> int:
    """Return the bytes used in the image, without ballast and spare."""
    space = os.fstatvfs(top)
    ours = sum(os.stat(name, dir_fd=top, follow_symlinks=False).st_blocks * 512 for name in (BALLAST, SPARE))
    return max(0, (space.f_blocks - space.f_bfree) * space.f_frsize - ours)


def restrict(top: int, limit_bytes: int) -> None:
    """Grow the ballast file, so that the sandbox cannot use more than `limit_bytes` of the image."""
    keep_free(top, max(0, limit_bytes - used_bytes(top)))


def keep_free(top: int, most_bytes: int) -> None:
    """Grow the ballast file, so that no more than so many bytes are free."""
    space = os.fstatvfs(top)
    surplus = space.f_bavail * space.f_frsize - most_bytes
    if surplus < space.f_frsize:
        return
    with _opened(top, BALLAST) as ballast, suppress(OSError):  # space that cannot be allocated is not free either
        os.posix_fallocate(ballast.fileno(), os.fstat(ballast.fileno()).st_size, _blocks(surplus, space.f_frsize))


def release_ballast(top: int, image: int) -> None:
    """Return the disk blocks under the ballast to the disk, if it has any: it grew over blocks that were reserved. Raises OSError.

    This is safe while the image is in use, because nothing is ever written to the ballast. If power is lost before the filesystem has
    written that the blocks belong to the ballast, they are free blocks when it is opened next, and are reserved then.
    """
    from agent_sandbox.kernel import image_space

    with _opened(top, BALLAST) as ballast:
        outside = os.fstat(image).st_size - os.fstat(ballast.fileno()).st_blocks * 512
        if os.fstat(image).st_blocks * 512 > outside + _EXTENT_BLOCKS:
            os.fsync(ballast.fileno())  # before this, new blocks may have no place on the filesystem
            image_space.release(image, tuple((piece.physical, piece.length) for piece in extents(ballast.fileno())))


def give(top: int, image: int, wanted_bytes: int) -> int:
    """Shrink the ballast to give the sandbox more room. Return the bytes given. Raises OSError if the disk is full; then none are given."""
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
    """Release the spare file if the image is nearly full, so that overlays have room for their directories. `take_spare` reverses it."""
    space = os.fstatvfs(top)
    if space.f_bavail * space.f_frsize < SPARE_BYTES:
        with _opened(top, SPARE) as spare:
            os.ftruncate(spare.fileno(), 0)


def take_spare(top: int) -> None:
    """Allocate the released spare file again, if there is enough free space."""
    with _opened(top, SPARE) as spare, suppress(OSError):
        if os.fstat(spare.fileno()).st_size < SPARE_BYTES:
            os.posix_fallocate(spare.fileno(), 0, SPARE_BYTES)


def _blocks(size: int, block: int) -> int:
    return size // block * block


def _opened(top: int, name: str, flags: int = 0) -> FileIO:
    # Only `fill` creates them: created in any other directory than that of an image, the ballast would fill the disk of the machine.
    return FileIO(os.open(name, os.O_RDWR | flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=top), "rb+")
