"""Notification of every file opened on a filesystem: fanotify(7), as root.

The mark is on the filesystem, so it covers all its mounts in every namespace: on a guest's overlay it reports this guest's opens and
nothing else. An event carries a fresh descriptor of the file; its path comes from /proc. Regular files only, as far as possible:
directories are not reported unless requested, and a reported FIFO is opened without waiting for its other end.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
from collections.abc import Iterator

from agent_sandbox.kernel.syscalls import AT_FDCWD, check, libc

FAN_CLOEXEC, FAN_NONBLOCK, FAN_UNLIMITED_QUEUE = 0x1, 0x2, 0x10
FAN_MARK_ADD, FAN_MARK_FILESYSTEM = 0x1, 0x100
FAN_OPEN, FAN_Q_OVERFLOW = 0x20, 0x4000
_EVENT = struct.Struct("=IBBHQii")  # struct fanotify_event_metadata
_VERSION = 3
_BUFFER = 64 << 10
# O_NONBLOCK: a FIFO must not block us. O_NOATIME: watching must not change access times. O_LARGEFILE is missing from `os` where it is 0.
_EVENT_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOATIME | os.O_CLOEXEC | getattr(os, "O_LARGEFILE", 0)


class Overflow(Exception):
    """Raised if events were lost."""


def watch_opens(path: str) -> int:
    """Return a descriptor that reports files opened from now on on the filesystem at `path`. The caller closes it. Raises OSError."""
    flags = FAN_CLOEXEC | FAN_NONBLOCK | FAN_UNLIMITED_QUEUE
    group = check(libc.fanotify_init(ctypes.c_uint(flags), ctypes.c_uint(_EVENT_FLAGS)), "fanotify_init")
    try:
        how, what = ctypes.c_uint(FAN_MARK_ADD | FAN_MARK_FILESYSTEM), ctypes.c_uint64(FAN_OPEN)
        check(libc.fanotify_mark(group, how, what, AT_FDCWD, os.fsencode(path)), f"fanotify_mark {path}")
    except BaseException:
        os.close(group)
        raise
    return group


def opened(group: int) -> Iterator[str]:
    """Yield the paths of files opened since the last call, as named in the opener's namespace, until none is left.

    A deleted file has its last path. Raises `Overflow` if events were lost: more than the kernel queues, or than we can open descriptors
    for.
    """
    while True:
        try:
            buffer = os.read(group, _BUFFER)
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
                raise Overflow from error
            if error.errno in (errno.ENXIO, errno.EACCES, errno.EPERM, errno.ETXTBSY, errno.ENOENT):
                continue  # this file cannot be opened again, and its event is already consumed
            raise
        yield from _paths(buffer)


def _paths(buffer: bytes) -> Iterator[str]:
    at = 0
    found: list[int] = []
    lost = False
    while at < len(buffer):
        length, version, _, _, mask, fd, _ = _EVENT.unpack_from(buffer, at)
        if version != _VERSION or length < _EVENT.size:
            raise Overflow
        at += length
        lost = lost or bool(mask & FAN_Q_OVERFLOW)
        if fd >= 0:
            found.append(fd)
    try:
        while found:
            if (path := _path(found.pop())) is not None:
                yield path
    finally:
        for fd in found:
            os.close(fd)
    if lost:
        raise Overflow


def _path(fd: int) -> str | None:
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return None
        return os.readlink(f"/proc/self/fd/{fd}").removesuffix(" (deleted)")
    finally:
        os.close(fd)
