"""What is compiled and imaged once and used by every zygote: files in a cache directory, each with its digest in the state directory.

Loading a compiled module executes it, so it must be one that we made. A cache directory may be filled by anybody, a promoted change of a
guest's for one; the state directory is hidden from guests and private to the user. So a file counts only if its content has the digest that
is recorded there, and the digest is taken of what is loaded, not of a name that may by then be another file's.
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

MODULE = "module"  # the interpreter of Python
JAVASCRIPT = "javascript"  # that of JavaScript, for a zygote; in the cache its name changes with what was done to it
COUNTING = "counting"  # the first one, compiled to count what it executes
SCRATCH = "scratch-"  # how the directories begin in which images are made
UNUSED_SECONDS = 14 * 86400.0  # after which a file is no longer kept
_CHUNK = 4 << 20
_LARGEST = 2 << 30  # bytes: ours are far smaller, and nobody hashes a file without end
_DIGITS = frozenset("0123456789abcdef")
_KEY_LENGTH = 24


class Untrusted(Exception):
    """A file is not there, or not as it was made here."""


@dataclass(frozen=True)
class Entry:
    """One file and what it must hash to."""

    path: str
    digest: str


@dataclass(frozen=True)
class Cache:
    """The files for one engine, configuration and interpreter, which `key` names."""

    directory: str
    records: str
    key: str

    def entry(self, name: str) -> Entry | None:
        """What there is by this name, not yet checked; None when there is nothing."""
        try:
            with open(open_regular(self._record(name)), encoding="ascii") as file:
                digest = file.read(65)
        except (OSError, UnicodeDecodeError):
            return None
        path = self._path(name)
        return Entry(path, digest) if len(digest) == 64 and _DIGITS.issuperset(digest) and os.path.exists(path) else None

    def keep(self, name: str, write: Callable[[BinaryIO], object]) -> None:
        """Make the file whole, or not at all: first the content under another name, then its record, then its name."""
        for directory in (self.directory, self.records):
            os.makedirs(directory, mode=0o700, exist_ok=True)
            _check_private(os.stat(directory), directory)
        new = f"{self._path(name)}.{os.getpid()}.new"
        try:
            with _made(new) as file:
                write(file)
            with open(new, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            with _made(f"{self._record(name)}.new") as record:
                record.write(digest.encode())
            os.rename(f"{self._record(name)}.new", self._record(name))
            os.rename(new, self._path(name))
        finally:
            if os.path.exists(new):
                os.unlink(new)

    def debris(self) -> list[str]:
        """What a maker left that was killed, or what one is making just now."""
        try:
            names = os.listdir(self.directory)
        except FileNotFoundError:
            return []
        return [os.path.join(self.directory, name) for name in names if name.startswith(SCRATCH) or name.endswith(".new")]

    def clear_debris(self) -> None:
        """Remove it. For who holds the lock: then nobody is making anything."""
        for path in self.debris():
            if os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path, ignore_errors=True)
            else:
                os.unlink(path)

    def used(self, entries: Iterable[Entry], now: float) -> None:
        """Note that these are in use, and remove what nobody has used for two weeks: that of other versions, of the engine's or of ours."""
        for entry in entries:
            with suppress(OSError):  # somebody else's, for all to use
                os.utime(entry.path, (now, now))
        for name in os.listdir(self.directory):
            if len(name.partition("-")[0]) == _KEY_LENGTH:
                with suppress(OSError):  # it is in use, or not ours to remove
                    _remove_unused(os.path.join(self.directory, name), os.path.join(self.records, f"{name}.sha256"), now)

    def _path(self, name: str) -> str:
        return os.path.join(self.directory, f"{self.key}-{name}")

    def _record(self, name: str) -> str:
        return os.path.join(self.records, f"{self.key}-{name}.sha256")


def _remove_unused(path: str, record: str, now: float) -> None:
    """Unless it is in use: who has loaded a file holds a shared lock on it."""
    fd = open_regular(path)
    try:
        if os.fstat(fd).st_mtime < now - UNUSED_SECONDS:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(path)
            os.unlink(record)
    finally:
        os.close(fd)


def open_regular(path: str, flags: int = os.O_RDONLY) -> int:
    """A descriptor of a file, and of nothing else: opening a pipe would wait for somebody at its other end. Raises OSError."""
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise OSError(errno.EINVAL, "it is no regular file", path)


@contextmanager
def _made(path: str) -> Iterator[BinaryIO]:
    with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def checked(entry: Entry, copy: Callable[[bytes], object] | None = None) -> Iterator[int]:
    """A descriptor of the very file whose content has the digest; `copy` gets the content as it is read. Raises `Untrusted`."""
    try:
        fd = open_regular(entry.path)
    except OSError as error:
        raise Untrusted(f"{entry.path}: {error.strerror}") from error
    try:
        found = os.fstat(fd)
        _check_private(found, entry.path)
        if found.st_size > _LARGEST:
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


def sound(entry: Entry) -> bool:
    """Whether it is as it was made."""
    try:
        with checked(entry):
            return True
    except Untrusted:
        return False


def _check_private(found: os.stat_result, path: str) -> None:
    if found.st_uid not in (0, os.geteuid()) or stat.S_IMODE(found.st_mode) & 0o022:
        raise Untrusted(f"{path} belongs to somebody else, or can be written by others")
