"""Copy one file's content from a descriptor to a new, empty file: cloned where the filesystem can, with its holes, and with its digest.

The content is a guest's. No more of it is read than was planned, and a file that turns out shorter or longer is a `Surprise`.
"""

from __future__ import annotations

import hashlib  # OpenSSL's is several times faster than the interpreter's own, and there may be gigabytes
import os

from agent_sandbox.workspace.copies import cloned
from agent_sandbox.workspace.nodes import next_extent
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
    shared = cloned(source, target)
    at = 0
    while at < size:
        data, end = next_extent(source, at, size)
        while at < data:  # a hole stays one: nothing is written
            length = min(_CHUNK, data - at)
            digest.update(_ZEROS[:length])
            at += length
        while at < end:
            content = os.pread(source, min(_CHUNK, end - at), at)
            if not content:
                raise Surprise(path, "the file in the sandbox has become shorter since it was looked at")
            digest.update(content)
            if not shared:
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
