"""The cache of compiled modules and images: files in a cache directory, each with its digest in the state directory.

Loading a compiled module executes it, so it must be one that we made. Others may write to a cache directory, for instance a promoted change
of a guest; the state directory is hidden from guests and private to the user. So a file counts only if its content has the digest recorded
there. The digest is computed from the open file that is loaded, not from a name that may refer to another file by then.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import BinaryIO

from agent_sandbox._fast.values import dataclass

MODULE = "module"  # the Python interpreter
JAVASCRIPT = "javascript"  # the JavaScript interpreter, for a zygote; its name in the cache changes with how it was patched
COUNTING = "counting"  # the Python interpreter, compiled to count instructions
SCRATCH = "scratch-"  # prefix of the directories in which images are made
UNUSED_SECONDS = 14 * 86400.0  # after which an unused file is removed
_CHUNK = 4 << 20
_LARGEST = 2 << 30  # bytes: our files are far smaller, and hashing must end
_DIGITS = frozenset("0123456789abcdef")
_KEY_LENGTH = 24


class Untrusted(Exception):
    """A cached file is missing, or is not the file that we stored."""


@dataclass(frozen=True)
class CachedFile:
    """A cached file and the SHA-256 digest that its content must have."""

    path: str
    digest: str


@dataclass(frozen=True)
class Cache:
    """The cached files for one engine, configuration, interpreter and kind of machine, identified by `key`."""

    directory: str
    records: str
    key: str

    def entry(self, name: str) -> CachedFile | None:
        """Return the cached file of this name; None if there is none. Its content is not checked yet."""
        try:
            with open(open_regular(self._record(name)), encoding="ascii") as file:
                digest = file.read(65)
        except (OSError, UnicodeDecodeError):
            return None
        path = self._path(name)
        return CachedFile(path, digest) if len(digest) == 64 and _DIGITS.issuperset(digest) and os.path.exists(path) else None

    def keep(self, name: str, write: Callable[[BinaryIO], object]) -> None:
        """Store a file, completely or not at all: write the content under another name, write its digest, then rename it.

        Raises `Untrusted` if another user owns a directory or can write to it.
        """
        for directory in (self.directory, self.records):
            os.makedirs(directory, mode=0o700, exist_ok=True)
            _check_private(os.stat(directory), directory)
        new = f"{self._path(name)}.{os.getpid()}.new"
        try:
            with _create(new) as file:
                write(file)
            with open(new, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            with _create(f"{self._record(name)}.new") as record:
                record.write(digest.encode())
            os.rename(f"{self._record(name)}.new", self._record(name))
            os.rename(new, self._path(name))
        finally:
            if os.path.exists(new):
                os.unlink(new)

    def debris(self) -> list[str]:
        """Return the temporary files of a compiler that was killed, or that is running now."""
        try:
            names = os.listdir(self.directory)
        except FileNotFoundError:
            return []
        return [os.path.join(self.directory, name) for name in names if name.startswith(SCRATCH) or name.endswith(".new")]

    def clear_debris(self) -> None:
        """Remove the temporary files. The caller must hold the lock, so that no compiler is running."""
        for path in self.debris():
            if os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path, ignore_errors=True)
            else:
                os.unlink(path)

    def used(self, entries: Iterable[CachedFile], now: float) -> None:
        """Mark these entries as used now. Remove files that were unused for two weeks, such as those of earlier versions."""
        for entry in entries:
            with suppress(OSError):  # the file of another user, which all users share
                os.utime(entry.path, (now, now))
        for name in os.listdir(self.directory):
            if len(name.partition("-")[0]) == _KEY_LENGTH:
                with suppress(OSError):  # in use, or not ours to remove
                    _remove_unused(os.path.join(self.directory, name), os.path.join(self.records, f"{name}.sha256"), now)

    def _path(self, name: str) -> str:
        return os.path.join(self.directory, f"{self.key}-{name}")

    def _record(self, name: str) -> str:
        return os.path.join(self.records, f"{self.key}-{name}.sha256")


def _remove_unused(path: str, record: str, now: float) -> None:
    """Remove a file and its record if it was unused for `UNUSED_SECONDS`. Raises OSError if a zygote holds a shared lock on the file."""
    fd = open_regular(path)
    try:
        if os.fstat(fd).st_mtime < now - UNUSED_SECONDS:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(path)
            os.unlink(record)
    finally:
        os.close(fd)


def open_regular(path: str, flags: int = os.O_RDONLY) -> int:
    """Open a regular file and return its descriptor. Never waits, as opening a pipe would.

    Raises OSError, also for a symbolic link and for anything that is not a regular file.
    """
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise OSError(errno.EINVAL, "it is no regular file", path)


@contextmanager
def _create(path: str) -> Iterator[BinaryIO]:
    with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def checked(entry: CachedFile, copy: Callable[[bytes], object] | None = None) -> Iterator[int]:
    """Open a file, check its digest, and yield its descriptor. `copy` is called with the content, piece by piece.

    Raises `Untrusted` if the file is missing, too large, writable by others or has another digest.
    """
    try:
        fd = open_regular(entry.path)
    except OSError as error:
        raise Untrusted(f"{entry.path}: {error.strerror}") from error
    try:
        status = os.fstat(fd)
        _check_private(status, entry.path)
        if status.st_size > _LARGEST:
            raise Untrusted(f"{entry.path} is not what was made here: it is far too large")
        digest = hashlib.sha256()
        while chunk := os.read(fd, _CHUNK):
            digest.update(chunk)
            if copy is not None:
                copy(chunk)
        if digest.hexdigest() != entry.digest:
            raise Untrusted(f"{entry.path} is not what was made here")
        yield fd
    finally:
        os.close(fd)


def sound(entry: CachedFile) -> bool:
    """Return whether the file exists and is exactly the file that we stored."""
    try:
        with checked(entry):
            return True
    except Untrusted:
        return False


def _check_private(status: os.stat_result, path: str) -> None:
    if status.st_uid not in (0, os.geteuid()) or stat.S_IMODE(status.st_mode) & 0o022:
        raise Untrusted(f"{path} belongs to somebody else, or can be written by others")
