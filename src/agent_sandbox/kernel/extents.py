"""Where the blocks of a file lie on its filesystem (FIEMAP)."""

from __future__ import annotations

import fcntl
import struct

from agent_sandbox.values import dataclass

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
