"""The key of a ledger: 32 random bytes in a file of its own, away from what it seals.

It is made on first use. Whoever can read it can write a ledger that verifies; the directory is its owner's alone, and is hidden from every
guest. There is one key, and from it one for each purpose.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress

from agent_sandbox._fast.encoding import Seal

KEY, LENGTH = "key", 32


def load(directory: str, *, make: bool = True) -> Seal:
    """The key in this directory; made, with the directory, if it is not there. Raises OSError, also when it is not ours alone."""
    path = os.path.join(directory, KEY)
    try:
        return Seal(_read(path))
    except FileNotFoundError:
        if not make:
            raise
    make_private(directory)
    _make(path)
    return Seal(_read(path))


def make_private(directory: str) -> None:
    """Make a directory and those above it that are missing, for this user only."""
    if not os.path.exists(directory):
        make_private(os.path.dirname(directory))
        with suppress(FileExistsError):
            os.mkdir(directory, 0o700)


def read_private(path: str, most: int) -> bytes:
    """What is in a file of ours that nobody else may read. Raises OSError for any other."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
        if status.st_mode & 0o077:  # whose it is need not be asked: who can open it is its owner, or root
            raise PermissionError(errno.EPERM, "others can read or change it, so it is no secret", path)
        return os.read(descriptor, most)
    finally:
        os.close(descriptor)


def write_once(path: str, content: bytes) -> None:
    """Make a private file with this content, whole or not at all, unless there is one. Raises OSError."""
    new = f"{path}.{os.urandom(8).hex()}.new"  # threads and processes may try at once
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, content)
        os.fsync(descriptor)
        with suppress(FileExistsError):  # somebody else was first, and theirs counts
            os.link(new, path)
    finally:
        os.close(descriptor)
        os.unlink(new)


def sync_directory(path: str) -> None:
    """Make the names in a directory last."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read(path: str) -> bytes:
    key = read_private(path, LENGTH + 1)
    if len(key) != LENGTH:
        raise OSError(errno.EINVAL, "not a key of a ledger", path)
    return key


def _make(path: str) -> None:
    write_once(path, os.urandom(LENGTH))
