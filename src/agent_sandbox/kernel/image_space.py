"""The disk blocks of an image file: reserved while the image is in use, returned to the disk while it is not.

While an image is attached, every block outside the ballast must be allocated on the disk: see `loop`. While it is not attached, nobody can
write to it. Then only its content has to be on the disk, and the rest is a hole:

    free blocks                          as the block bitmaps of the filesystem say
    inode tables beyond the last inode   as the group descriptors say; the kernel has never written there

Both can be read from the file, because the filesystem was unmounted: it is not read while the filesystem is in use. So `reserve` finds the
same parts as `release` did before it, and nothing has to be remembered; a kill between the two leaves more reserved than is needed. A hole
reads as zeros, as does a block that was allocated and never written, so the filesystem cannot tell them apart.

An image has two locks. The *gate* belongs to whoever opens the image, repairs it, reserves its blocks or returns them; nobody attaches or
shares a device without it. It lasts only for that work, and the kernel ends it with its holder. The *lock* (flock) belongs to the device.

Only images of our own are read: ext4 with blocks of 4096 bytes, in which a guest never wrote any metadata itself. Nothing here needs
ctypes, because a run calls `reserve` before it starts.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct

from agent_sandbox._fast.values import TYPE_CHECKING, dataclass

if TYPE_CHECKING:
    from collections.abc import Iterator

BLOCK = 4096
LEAST_HOLE = 16  # blocks: smaller parts stay reserved, so that a fragmented filesystem does not cost thousands of calls
_STEP = 1 << 20  # bytes reserved at a time when the disk is nearly full
_SUPERBLOCK, _MAGIC, _NEEDS_RECOVERY, _HAS_ERRORS = 1024, 0xEF53, 4, 2
_INODE_UNINIT, _BLOCK_UNINIT = 1, 2
# A group descriptor: block bitmap, inode bitmap, inode table, free blocks, flags, unused inodes; then upper halves, not of the flags.
_GROUP = struct.Struct("<IIIH4xH8xH2xIIIH4xH12x")
_FS_IOC_RESVSP64, _FS_IOC_UNRESVSP64 = 0x4030582A, 0x4030582B  # fallocate(2), and with FALLOC_FL_PUNCH_HOLE; both keep the file's size
_SPACE = struct.Struct("=hh4xqqiI16x")  # struct space_resv
_FULL = (errno.ENOSPC, errno.EDQUOT)
_FLOCK = struct.Struct("hhqqi4x")  # struct flock: type, whence, start, length, process
NO_FILESYSTEM, ERRORS, NOT_UNMOUNTED, SOUND = "it holds no filesystem", "the kernel found errors in it", "it was not unmounted", ""


@dataclass(frozen=True)
class Unused:
    """The parts of an image that need no disk blocks at rest, each as start and length in bytes."""

    tables: tuple[tuple[int, int], ...]  # never used parts of inode tables, and inode bitmaps without inodes
    free: tuple[tuple[int, int], ...]


def condition(image: int) -> str:
    """Return `SOUND` if the image was unmounted after its last use, else what is wrong. The kernel also unmounts for a killed process."""
    block = os.pread(image, 1024, _SUPERBLOCK)
    if len(block) < 1024 or struct.unpack_from("<H", block, 0x38)[0] != _MAGIC:
        return NO_FILESYSTEM
    if struct.unpack_from("<H", block, 0x3A)[0] & _HAS_ERRORS:
        return ERRORS
    return NOT_UNMOUNTED if struct.unpack_from("<I", block, 0x60)[0] & _NEEDS_RECOVERY else SOUND


def unused(image: int, *, least: int = LEAST_HOLE, initialised: bool = True) -> Unused:
    """Return the unused parts of a sound image that nobody uses: free parts of at least so many blocks.

    With `initialised` only groups count whose bitmap is on the disk. Without it, all of any other group counts as free.
    """
    block = os.pread(image, 1024, _SUPERBLOCK)
    blocks = struct.unpack_from("<I", block, 0x4)[0] | struct.unpack_from("<I", block, 0x150)[0] << 32
    per_group, inodes = struct.unpack_from("<I", block, 0x20)[0], struct.unpack_from("<I", block, 0x28)[0]
    inode_size, size = struct.unpack_from("<H", block, 0x58)[0], struct.unpack_from("<H", block, 0xFE)[0]
    tables: list[tuple[int, int]] = []
    free: list[tuple[int, int]] = []
    if size != _GROUP.size:  # not an image that we made: so nothing of it is returned to the disk either
        return Unused((), ())
    groups = -(-blocks // per_group)
    for number, group in enumerate(_GROUP.iter_unpack(os.pread(image, groups * size, BLOCK))):
        block_bitmap, inode_bitmap, inode_table, free_blocks, flags, unused_inodes = (
            *(group[each] | group[each + 6] << 32 for each in range(3)),
            *(group[3] | group[9] << 16, group[4], group[5] | group[10] << 16),
        )
        if flags & _INODE_UNINIT:
            tables.append((inode_bitmap, 1))
        used = -(-(inodes - unused_inodes) * inode_size // BLOCK)
        tables.append((inode_table + used, inodes * inode_size // BLOCK - used))
        first = number * per_group
        length = min(per_group, blocks - first)
        if flags & _BLOCK_UNINIT:
            free += [] if initialised else [(first, length)]
        elif free_blocks:
            free += [(first + start, count) for start, count in _clear(os.pread(image, length // 8, block_bitmap * BLOCK))]
    return Unused(_joined(tables, least), _joined(free, least))


def _clear(bitmap: bytes) -> Iterator[tuple[int, int]]:
    """Yield start and length of each run of zero bits. The first bit is the lowest bit of the first byte."""
    bits = bin(int.from_bytes(bitmap, "little") | 1 << len(bitmap) * 8)[:2:-1]
    start = bits.find("0")
    while start >= 0:
        end = bits.find("1", start)
        end = len(bits) if end < 0 else end
        yield start, end - start
        start = bits.find("0", end)


def _joined(parts: list[tuple[int, int]], least: int) -> tuple[tuple[int, int], ...]:
    """Join adjacent parts, drop small ones, and turn blocks into bytes."""
    joined: list[tuple[int, int]] = []
    for start, count in sorted(parts):
        if joined and sum(joined[-1]) == start:
            start, count = joined[-1][0], joined.pop()[1] + count
        joined.append((start, count))
    return tuple((start * BLOCK, count * BLOCK) for start, count in joined if count >= least)


def reserve(image: int, parts: tuple[tuple[int, int], ...], leave_bytes: int) -> bool:
    """Allocate disk blocks for these parts. Return False if the disk is full or would have less than `leave_bytes` left.

    Then some parts may have blocks. Parts that have them already cost nothing. Raises OSError if the disk cannot reserve blocks.
    """
    for start, length in parts:
        step = length if _free(image) - length >= leave_bytes else _STEP
        for at in range(start, start + length, step):
            if not _allocate(image, at, min(step, start + length - at), leave_bytes):
                return False
    return True


def _allocate(image: int, start: int, length: int, leave_bytes: int) -> bool:
    before = os.fstat(image).st_blocks
    try:
        fcntl.ioctl(image, _FS_IOC_RESVSP64, _SPACE.pack(0, 0, start, length, 0, 0))
    except OSError as error:
        if error.errno in _FULL:
            return False
        raise
    return os.fstat(image).st_blocks == before or _free(image) >= leave_bytes


def release(image: int, parts: tuple[tuple[int, int], ...]) -> None:
    """Return the disk blocks of these parts to the disk. They must be unused, and nobody may be able to write to them. Raises OSError."""
    for start, length in parts:
        fcntl.ioctl(image, _FS_IOC_UNRESVSP64, _SPACE.pack(0, 0, start, length, 0, 0))


def _free(image: int) -> int:
    space = os.fstatvfs(image)
    return space.f_bavail * space.f_frsize


def enter_gate(image: int) -> bool:
    """Take the gate of an image. Return False if another holds it. Raises OSError.

    `image` is a descriptor of its own, opened for this and never attached: the gate belongs to it, and ends when it is closed.
    """
    try:
        fcntl.fcntl(image, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0))
    except (BlockingIOError, PermissionError):  # EAGAIN or EACCES, as POSIX leaves it open
        return False
    return True


def rest(image: int) -> bool:
    """Return the disk blocks of all unused parts to the disk. Return False if the image is in use. Raises OSError.

    `image` is a descriptor of its own, opened for this: both locks belong to it, and end when it is closed.
    """
    if not enter_gate(image):
        return False
    try:
        fcntl.flock(image, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    if condition(image) == SOUND:
        parts = unused(image)
        release(image, parts.tables)
        release(image, parts.free)
    return True
