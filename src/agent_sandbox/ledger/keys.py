"""The ledger's key: 32 random bytes in a file of its own, away from the ledger.

The key is made on first use. Anyone who can read it can write a ledger that verifies. The directory is private to its owner and hidden from
every guest. There is one key, and one derived from it for each purpose.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress

from agent_sandbox._fast.encoding import Seal

KEY, LENGTH = "key", 32


def load(directory: str, *, make: bool = True) -> Seal:
    """Load the key of this directory; make the key and the directory if missing.

    Raises OSError, also if others can access the key file, and FileNotFoundError if it is missing and `make` is false.
    """
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
    """Make a directory and its missing parents, for this user only."""
    if not os.path.exists(directory):
        make_private(os.path.dirname(directory))
        with suppress(FileExistsError):
            os.mkdir(directory, 0o700)


def read_private(path: str, most: int) -> bytes:
    """Read a file that only its owner can access. Raises OSError for any other."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
        if status.st_mode & 0o077:  # the owner needs no check: only the owner or root can open it
            raise PermissionError(errno.EPERM, "others can read or change it, so it is no secret", path)
        return os.read(descriptor, most)
    finally:
        os.close(descriptor)


def write_once(path: str, content: bytes) -> None:
    """Make a private file with this content, atomically, unless it exists. Raises OSError."""
    new = f"{path}.{os.urandom(8).hex()}.new"  # threads and processes may race
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, content)
        os.fsync(descriptor)
        with suppress(FileExistsError):  # another one was first, and that one counts
            os.link(new, path)
    finally:
        os.close(descriptor)
        os.unlink(new)


def sync_directory(path: str) -> None:
    """Force the names in a directory to the disk."""
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
