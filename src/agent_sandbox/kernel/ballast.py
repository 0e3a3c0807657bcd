"""How much of an image a sandbox may fill: the rest is held by a file of our own in it, the ballast.

An image is as large as it may ever become, but the disk it lies on has given blocks only for what is not ballast. To let a sandbox have
more, the disk is first asked for the blocks at the end of the ballast, and then the ballast gives them up: at any moment, while guests
write, in a few milliseconds, and nothing is ever written where the disk has not promised a block (a full disk would break the filesystem
in the image). To let it have less, the ballast takes what is free. Resizing the filesystem itself can do neither while it is in use, unless
one has CAP_SYS_RESOURCE, which root in a container has not.

A second file, the spare, is given up for a moment when a view is built in an image that a guest has filled: overlays need directories.
"""

from __future__ import annotations

import os
from contextlib import suppress
from io import FileIO

from agent_sandbox.kernel.extents import complement, extents

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
