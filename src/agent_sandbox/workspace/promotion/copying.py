"""Copy one file's content from a descriptor to a new, empty file: cloned where the filesystem can, with its holes, and with its digest.

The content is a guest's. No more of it is read than was planned, and a file that turns out shorter or longer is a `Surprise`.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib  # OpenSSL's is several times faster than the interpreter's own, and there may be gigabytes
import os

from agent_sandbox.kernel.syscalls import FICLONE
from agent_sandbox.workspace.promotion.anchor import Surprise

_CHUNK = 1 << 20
_SMALL = 1 << 16
_ZEROS = bytes(_CHUNK)


def copy(source: int, target: int, size: int, *, path: str) -> str:
    """Fill `target` with the `size` bytes of `source`, from its beginning. Returns their digest. Raises OSError, and `Surprise`."""
    if size <= _SMALL:
        content = os.pread(source, size + 1, 0)
        if len(content) != size:
            raise Surprise(path, "the file in the sandbox has changed since it was looked at")
        _write(target, content, 0)
        return hashlib.sha256(content).hexdigest()
    digest = hashlib.sha256()
    cloned = _cloned(source, target)
    at = 0
    while at < size:
        data = min(_seek(source, at, os.SEEK_DATA, size), size)
        while at < data:  # a hole stays one: nothing is written
            length = min(_CHUNK, data - at)
            digest.update(_ZEROS[:length])
            at += length
        end = min(_seek(source, at, os.SEEK_HOLE, size), size)
        while at < end:
            content = os.pread(source, min(_CHUNK, end - at), at)
            if not content:
                raise Surprise(path, "the file in the sandbox has become shorter since it was looked at")
            digest.update(content)
            if not cloned:
                _write(target, content, at)
            at += len(content)
    if os.pread(source, 1, size):
        raise Surprise(path, "the file in the sandbox has become longer since it was looked at")
    os.ftruncate(target, size)
    return digest.hexdigest()


def _write(fd: int, content: bytes, at: int) -> None:
    while content:
        written = os.pwrite(fd, content, at)
        content, at = content[written:], at + written


def _cloned(source: int, target: int) -> bool:
    try:
        fcntl.ioctl(target, FICLONE, source)
    except OSError:  # another filesystem, or one that does not share blocks
        return False
    return True


def _seek(fd: int, at: int, what: int, end: int) -> int:
    """Where the next data or hole begins; `end` when there is no more of it, and for filesystems that do not know holes."""
    if at >= end:
        return end
    try:
        return os.lseek(fd, at, what)
    except OSError as error:
        if error.errno == errno.ENXIO:
            return end
        if error.errno == errno.EINVAL:
            return at if what == os.SEEK_DATA else end
        raise
