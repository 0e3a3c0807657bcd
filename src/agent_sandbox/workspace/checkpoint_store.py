"""Durable checkpoints of sessions: files in `<state>/checkpoints/`, each named by the digest of its content.

    agent-sandbox checkpoint 1     the version of the format, as a line
    length, JSON                   `CheckpointFacts`
    content                        the state of the session, which only a confined guest reads: see `runtime.wasm.state_stream`
    digest                         SHA-256 of everything before it

A file is written under another name, locked, synced and renamed: it is there whole or not at all. An unlocked file under such a name is
what a killed process left, and the next one that saves or deletes removes it. A file may come from another machine, so nothing in it is
believed: sizes are bounded before anything is read, and the digest is computed from the open file that is then used.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import stat
import struct
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from hashlib import sha256
from typing import Any, BinaryIO

from agent_sandbox._fast.values import dataclass
from agent_sandbox.errors import CheckpointError, WorkspaceError
from agent_sandbox.workspace.durable import explained, sync_directory
from agent_sandbox.workspace.store import Store

FORMAT = 1
LARGEST = 8 << 30  # bytes of a file
LONGEST_NAME = 200
LARGEST_MEMORY = 1 << 32  # of WebAssembly
_MAGIC = b"agent-sandbox checkpoint "
_LENGTH = struct.Struct("!I")
_LARGEST_FACTS = 1 << 16
_DIGEST = 32
_NEW = ".new-"  # prefix of files that are being written
_CHUNK = 1 << 20
_DIGITS = frozenset("0123456789abcdef")
_LEAST_DIGITS = 4  # of a digest, to name a checkpoint
_DAMAGED = "save it again, or copy it again from where it came"


@dataclass(frozen=True)
class CheckpointFacts:
    """What a checkpoint says of itself. It resumes where `machine`, `interpreter` and `image_digest` are the same.

    `created` is in seconds since the epoch. `seed` is that of a deterministic session.
    """

    name: str
    created: float
    machine: str
    interpreter: str
    image: str
    image_digest: str
    memory_bytes: int
    seed: int | None

    @classmethod
    def of(cls, value: object) -> CheckpointFacts:
        """Return the facts in JSON data. Raises ValueError for anything else."""
        kinds: dict[str, Any] = dict.fromkeys(("name", "machine", "interpreter", "image", "image_digest"), str)
        kinds |= {"created": (int, float), "memory_bytes": int, "seed": (int, type(None))}
        if not isinstance(value, dict) or value.keys() != kinds.keys():
            raise ValueError("its description has other fields")
        for name, kind in kinds.items():
            if not isinstance(value[name], kind) or isinstance(value[name], bool):
                raise ValueError(f"its description has a wrong {name}")
        facts = cls(**value)
        in_range = 0 < facts.memory_bytes <= LARGEST_MEMORY and 0 <= facts.created < 1e11 and 0 <= (facts.seed or 0) < 1 << 64
        if not in_range or len(facts.name) > LONGEST_NAME:
            raise ValueError("its description has a value that is out of range")
        return facts


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint in the store. `bytes` is the size of its file."""

    digest: str
    bytes: int
    facts: CheckpointFacts


@dataclass(frozen=True)
class OpenCheckpoint:
    """An open checkpoint whose digest was right. `content` returns the next bytes of its content, and nothing at their end."""

    stored: StoredCheckpoint
    content: Callable[[], bytes]


class CheckpointWriter:
    """Writes one checkpoint. Raises OSError, and `CheckpointError` if it becomes too large."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._hash = sha256()
        self.size = 0
        self.facts: CheckpointFacts | None = None

    def begin(self, facts: CheckpointFacts) -> None:
        """Write what comes before the content."""
        text = json.dumps(vars(facts), separators=(",", ":")).encode()
        self.facts = facts
        self.add(_MAGIC + f"{FORMAT}\n".encode() + _LENGTH.pack(len(text)) + text)

    def add(self, data: bytes) -> None:
        """Write the next bytes of the content."""
        self.size += len(data)
        if self.size > LARGEST - _DIGEST:
            raise CheckpointError(f"the checkpoint would be larger than {LARGEST >> 30} GiB", hint="save less: delete what is not needed")
        self._hash.update(data)
        self._file.write(data)

    @property
    def digest(self) -> str:
        """The digest of what was written so far."""
        return self._hash.hexdigest()

    def end(self) -> StoredCheckpoint:
        """Write the digest, and let the disk have everything."""
        assert self.facts is not None
        self._file.write(self._hash.digest())
        self._file.flush()
        os.fsync(self._file.fileno())
        return StoredCheckpoint(self.digest, self.size + _DIGEST, self.facts)


class CheckpointStore:
    """The checkpoints in a state directory."""

    def __init__(self, store: Store) -> None:
        self._path = os.path.join(store.path, "checkpoints")

    def save(
        self, write: Callable[[CheckpointWriter], None], record: Callable[[StoredCheckpoint], None] = lambda stored: None
    ) -> StoredCheckpoint:
        """Keep what `write` writes, whole or not at all. `record` is called when it is on the disk and nobody can find it yet.

        Raises `CheckpointError`, and whatever the two functions raise.
        """
        try:
            with explained("keep the checkpoint"), self._new() as (file, path):
                writer = CheckpointWriter(file)
                write(writer)
                stored = writer.end()
                record(stored)
                os.rename(path, os.path.join(self._path, stored.digest))
                sync_directory(self._path)
        except WorkspaceError as error:
            raise CheckpointError(error.message, hint=error.hint) from error
        return stored

    def all(self) -> tuple[StoredCheckpoint, ...]:
        """Return the checkpoints, newest first. Their digests are not checked yet. A file that cannot be read is left out."""
        found = []
        for name in self._names():
            with suppress(CheckpointError, FileNotFoundError), self._opened(name) as file:
                found.append(StoredCheckpoint(name, os.fstat(file.fileno()).st_size, _read_facts(file)))
        return tuple(sorted(found, key=lambda each: (each.facts.created, each.digest), reverse=True))

    def damaged(self) -> tuple[str, ...]:
        """Return the digests in the names of files that are no checkpoints of this user, or whose beginning is damaged."""
        whole = {each.digest for each in self.all()}
        return tuple(sorted(name for name in self._names() if name not in whole))

    def find(self, word: str) -> StoredCheckpoint:
        """Return the checkpoint with this name, or whose digest begins so. Raises `CheckpointError` unless there is exactly one."""
        digest = self.locate(word)
        with self._opened(digest) as file:
            return StoredCheckpoint(digest, os.fstat(file.fileno()).st_size, _read_facts(file))

    def locate(self, word: str) -> str:
        """Return the digest of the checkpoint that `find` returns, also if it is damaged."""
        found = {each.digest for each in self.all() if each.facts.name == word}
        if len(word) >= _LEAST_DIGITS and _DIGITS.issuperset(word.lower()):
            found.update(name for name in self._names() if name.startswith(word.lower()))
        if len(found) > 1:
            ids = ", ".join(digest[:12] for digest in sorted(found))
            raise CheckpointError(f"{len(found)} checkpoints are called {word!r}", hint=f"name one by its id: {ids}")
        if not found:
            raise CheckpointError(f"there is no checkpoint {word!r}", hint="see: agent-sandbox checkpoints")
        return found.pop()

    @contextmanager
    def opened(self, digest: str) -> Iterator[OpenCheckpoint]:
        """Open a checkpoint, check its digest, and yield it. Raises `CheckpointError` if it is damaged or not this user's.

        The content is hashed again as it is read: the last bytes are returned only if they are those that were checked.
        """
        with self._opened(digest) as file:
            stored = StoredCheckpoint(digest, os.fstat(file.fileno()).st_size, _check(file, expected=digest))
            yield OpenCheckpoint(stored, _hashed_content(file, stored))

    def delete(self, digest: str) -> None:
        """Remove a checkpoint. Raises `CheckpointError` if there is none."""
        try:
            with self._alone():
                os.unlink(os.path.join(self._path, _name(digest)))
                sync_directory(self._path)
        except FileNotFoundError:
            raise CheckpointError(f"there is no checkpoint {digest[:12]!r}", hint="see: agent-sandbox checkpoints") from None
        except OSError as error:
            raise CheckpointError(f"the checkpoint cannot be deleted: {error.strerror}", hint="check the state directory") from error

    def export(self, digest: str, path: str) -> None:
        """Copy a checkpoint to a new file, readable for its owner alone. Raises `CheckpointError`, also if the file exists already."""
        with self._opened(digest) as file:
            _check(file, expected=digest)
            new = f"{path}.{secrets.token_hex(4)}.new"
            try:
                with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as target:
                    file.seek(0)
                    while chunk := file.read(_CHUNK):
                        target.write(chunk)
                    target.flush()
                    os.fsync(target.fileno())
                os.link(new, path)  # unlike a rename, it never replaces a file
                sync_directory(os.path.dirname(os.path.abspath(path)))
            except FileExistsError:
                raise CheckpointError(f"{path!r} exists already", hint="name a new file") from None
            except OSError as error:
                raise CheckpointError(f"cannot write {path!r}: {error.strerror}", hint="name a file that can be written") from error
            finally:
                with suppress(OSError):
                    os.unlink(new)

    def take_in(self, path: str, record: Callable[[StoredCheckpoint], None] = lambda stored: None) -> StoredCheckpoint:
        """Copy a file that was exported, perhaps on another machine, into the store. Raises `CheckpointError` if it is damaged.

        A file of another user is refused: a checkpoint is a program, and they could replace it.
        """
        with _opened_file(path, users=(os.geteuid(), 0)) as file:
            facts, digest = _check(file), _digest_at_end(file)

            def write(writer: CheckpointWriter) -> None:
                file.seek(0)
                writer.facts, left = facts, os.fstat(file.fileno()).st_size - _DIGEST
                while left > 0 and (chunk := file.read(min(left, _CHUNK))):
                    writer.add(chunk)
                    left -= len(chunk)
                if writer.digest != digest:
                    raise CheckpointError(f"{path!r} was changed while it was read", hint="import it again")

            return self.save(write, record)

    def _names(self) -> list[str]:
        try:
            return [name for name in os.listdir(self._path) if len(name) == 2 * _DIGEST and _DIGITS.issuperset(name)]
        except FileNotFoundError:
            return []

    def _opened(self, digest: str) -> AbstractContextManager[BinaryIO]:
        path = os.path.join(self._path, _name(digest))
        if not os.path.lexists(path):
            raise CheckpointError(f"there is no checkpoint {digest[:12]!r}", hint="see: agent-sandbox checkpoints")
        return _opened_file(path, users=(os.geteuid(),))

    @contextmanager
    def _new(self) -> Iterator[tuple[BinaryIO, str]]:
        """Make a locked file under a temporary name. It is removed at the end of the block, unless it was renamed."""
        path = os.path.join(self._path, _NEW + secrets.token_hex(8))
        with self._alone():
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            fcntl.flock(fd, fcntl.LOCK_EX)
        try:
            with open(fd, "wb") as file:
                yield file, path
        finally:
            with suppress(OSError):
                os.unlink(path)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Lock the directory briefly, and remove the files that killed processes were writing: those that nobody has locked."""
        os.makedirs(self._path, mode=0o700, exist_ok=True)
        lock = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for name in os.listdir(lock):
                if name.startswith(_NEW):
                    self._remove_unlocked(name, lock)
            yield
        finally:
            os.close(lock)

    def _remove_unlocked(self, name: str, directory: int) -> None:
        with suppress(OSError), open(os.open(name, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory), "wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(name, dir_fd=directory)


def _name(digest: str) -> str:
    if len(digest) != 2 * _DIGEST or not _DIGITS.issuperset(digest):
        raise CheckpointError(f"{digest[:80]!r} is no digest of a checkpoint", hint="see: agent-sandbox checkpoints")
    return digest


@contextmanager
def _opened_file(path: str, *, users: tuple[int, ...]) -> Iterator[BinaryIO]:
    """Open a regular file of one of these users, of bounded size. Never waits, and follows no link. Raises `CheckpointError`."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise CheckpointError(f"cannot read {path!r}: {error.strerror}", hint="name a file that was exported") from error
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{path!r} is no file", hint="name a file that was exported")
        if status.st_uid not in users:
            raise CheckpointError(f"{path!r} belongs to user {status.st_uid}", hint="copy it, if you trust whoever wrote it")
        if status.st_size > LARGEST:
            raise CheckpointError(f"{path!r} is larger than a checkpoint can be ({LARGEST >> 30} GiB)", hint=_DAMAGED)
        with open(fd, "rb", closefd=False) as file:
            yield file
    finally:
        os.close(fd)


def _check(file: BinaryIO, *, expected: str = "") -> CheckpointFacts:
    """Return the facts of a file, once its digest was found right. Raises `CheckpointError`."""
    facts = _read_facts(file)
    size = os.fstat(file.fileno()).st_size
    file.seek(0)
    computed, left = sha256(), size - _DIGEST
    while left > 0 and (chunk := file.read(min(left, _CHUNK))):
        computed.update(chunk)
        left -= len(chunk)
    recorded = file.read(_DIGEST)
    if left > 0 or computed.digest() != recorded or (expected and recorded.hex() != expected):
        raise CheckpointError("the checkpoint is damaged: its content does not have its digest", hint=_DAMAGED)
    return facts


def _digest_at_end(file: BinaryIO) -> str:
    file.seek(-_DIGEST, os.SEEK_END)
    return file.read(_DIGEST).hex()


def _read_facts(file: BinaryIO) -> CheckpointFacts:
    """Return the facts of a file, and leave it at the beginning of its content. Raises `CheckpointError`."""
    file.seek(0)
    line = file.readline(len(_MAGIC) + 20)
    version = line.removeprefix(_MAGIC).strip()
    if not line.startswith(_MAGIC) or not line.endswith(b"\n"):
        raise CheckpointError("this is no checkpoint, or its beginning is damaged", hint=_DAMAGED)
    if version != str(FORMAT).encode():
        why = f"the checkpoint has the format {version.decode(errors='replace')!r}, and this version reads {FORMAT}"
        raise CheckpointError(why, hint="resume it with the version that saved it")
    try:
        (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
        if length > _LARGEST_FACTS:
            raise ValueError("its description is too long")
        return CheckpointFacts.of(json.loads(file.read(length)))
    except (ValueError, struct.error, RecursionError) as error:
        raise CheckpointError(f"the checkpoint is damaged: {str(error)[:200]}", hint=_DAMAGED) from None


def _hashed_content(file: BinaryIO, stored: StoredCheckpoint) -> Callable[[], bytes]:
    """Return a function that reads the content piece by piece, and raises `CheckpointError` at its end if it has changed meanwhile."""
    _read_facts(file)
    begun = file.tell()
    file.seek(0)
    computed, left = sha256(file.read(begun)), stored.bytes - _DIGEST - begun

    def read() -> bytes:
        nonlocal left
        chunk = file.read(min(left, _CHUNK))
        computed.update(chunk)
        left -= len(chunk)
        if not chunk and (left or computed.hexdigest() != stored.digest):
            raise CheckpointError("the checkpoint was changed while it was read", hint=_DAMAGED)
        return chunk

    return read
