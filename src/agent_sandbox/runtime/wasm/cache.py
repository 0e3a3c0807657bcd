"""The cache of compiled modules and images: files in a cache directory, each with its digest in a directory of records.

Loading a compiled module executes it, so it must be one that this user or root made. Nobody else may be able to write to either directory,
nor to a directory above them (`ownership`). Records are hidden from guests; files may change by a promoted change of a guest. So a file
counts only if its content has the digest recorded there. The digest is computed from the open file that is loaded, not from a name that
may refer to another file by then.

A cache may read other directories, too: what root has compiled, all users of the machine use.
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
from agent_sandbox.runtime.wasm.ownership import distrust, distrust_file

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
    """The cached files for one engine, configuration, interpreter and kind of machine, identified by `key`.

    New files go to `directory`, and their digests to `records`. With `public`, all users may read them. `others` are pairs of such
    directories that are only read.
    """

    directory: str
    records: str
    key: str
    others: tuple[tuple[str, str], ...] = ()
    public: bool = False

    def entry(self, name: str) -> CachedFile | None:
        """Return the cached file of this name; None if there is none where only root and this user can write. Its content is not checked
        yet."""
        for directory, records in ((self.directory, self.records), *self.others):
            path = os.path.join(directory, f"{self.key}-{name}")
            digest = _read_digest(os.path.join(records, f"{self.key}-{name}.sha256"))
            if digest and os.path.exists(path) and not _distrust((directory, records)):
                return CachedFile(path, digest)
        return None

    def distrust(self) -> str:
        """Return why somebody else could write to the directories of new files; "" if only root and this user can."""
        return _distrust((self.directory, self.records))

    def make_directories(self) -> None:
        """Make the directories of new files. Raises `Untrusted` if somebody else could write to them."""
        for directory in (self.directory, self.records):
            _make_directory(directory, 0o755 if self.public else 0o700)
        if why := self.distrust():
            raise Untrusted(why)

    def keep(self, name: str, write: Callable[[BinaryIO], object]) -> None:
        """Store a file, completely or not at all: write the content under another name, write its digest, then rename it.

        Raises `Untrusted` if somebody else could write to a directory.
        """
        self.make_directories()
        mode = 0o644 if self.public else 0o600
        new = f"{self._path(name)}.{os.getpid()}.new"
        try:
            with _create(new, mode) as file:
                write(file)
            with open(new, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            with _create(f"{self._record(name)}.new", mode) as record:
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
        try:
            names = os.listdir(self.directory)
        except OSError:  # nothing was ever compiled here: others' files are used
            return
        for name in names:
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


def _read_digest(path: str) -> str:
    """Return the digest in a record; "" if there is none."""
    try:
        with open(open_regular(path), encoding="ascii") as file:
            digest = "" if distrust_file(os.fstat(file.fileno()), path) else file.read(65)
    except (OSError, UnicodeDecodeError):
        return ""
    return digest if len(digest) == 64 and _DIGITS.issuperset(digest) else ""


def _distrust(directories: Iterable[str]) -> str:
    for directory in directories:
        try:
            why = distrust(directory)
        except OSError as error:
            why = f"{directory}: {error.strerror}"
        if why:
            return why
    return ""


def _make_directory(path: str, mode: int) -> None:
    """Make a directory and those above it, whatever the umask is. Directories that exist stay as they are."""
    if os.path.isdir(path):
        return
    _make_directory(os.path.dirname(path), mode)
    with suppress(FileExistsError):  # another process was quicker
        os.mkdir(path, 0o700)
        os.chmod(path, mode)


@contextmanager
def _create(path: str, mode: int) -> Iterator[BinaryIO]:
    with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), "wb") as file:
        os.fchmod(file.fileno(), mode)  # whatever the umask is
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
        if why := distrust_file(status, entry.path):
            raise Untrusted(why)
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
