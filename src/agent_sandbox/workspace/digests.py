"""Digests of changes: of the new content of each file, and one digest for all that a promotion of the changes would write.

A person who saw a diff names its digest, and the promotion refuses changes with another digest. So the digest covers paths, kinds, types,
modes, link targets, sizes, content, the extended attributes that a promotion carries over, and the number of entries that go with a
removed directory. It does not cover owners, because a promotion never changes them.
"""

from __future__ import annotations

import errno
import hashlib  # OpenSSL's is several times faster than the interpreter's own, and files may have gigabytes
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress

from agent_sandbox.errors import PolicyError, WorkspaceError
from agent_sandbox.workspace.changes import Change, Contents
from agent_sandbox.workspace.contents import SMALLEST_UNREMEMBERED, Mixed, ReadFile
from agent_sandbox.workspace.nodes import EntryType, next_extent
from agent_sandbox.workspace.progress import NO_PROGRESS, Progress
from agent_sandbox.workspace.promotion.plan import LARGEST_BYTES, carried

MOST_HASHED = 4 << 30  # bytes for one diff: a sparse file costs nothing to make, and minutes to read
SHORTEST = 12  # hexadecimal digits by which a digest may be named
PRINTED = 32  # of a digest for people; nobody can make other changes with the same 128 bits
_CHUNK = 1 << 20
_TOGETHER = 64  # files that are open at a time
_ZEROS = bytes(_CHUNK)
_CHANGED = "it has changed since its size was read"
_FORM = b"agent-sandbox changes 1\n"
_DIGITS = frozenset("0123456789abcdef")


class ContentDigests:
    """The digests of the new content of changed files, by path. Content is read once, when a digest is first asked for."""

    def __init__(
        self,
        changes: Iterable[Change] = (),
        contents: Contents | None = None,
        *,
        most: int = LARGEST_BYTES,
        progress: Progress = NO_PROGRESS,
    ) -> None:
        """If the files have more than `most` bytes together, none is read. By default, so much cannot be promoted either."""
        self._files = tuple(change for change in changes if change.after is not None and change.after.type is EntryType.FILE)
        self._contents = contents
        self._most = most
        self._progress = progress
        self._known: dict[str, str] | None = None

    def by_path(self) -> Mapping[str, str]:
        """Return the digest of each file by path; nothing if there is too much to read. Raises `WorkspaceError` for an unreadable file."""
        if self._known is None and self.complete:
            self._progress.begin("reading the changed files", len(self._files), self._size)
            self._known = self._read_all()
        return self._known or {}

    @property
    def complete(self) -> bool:
        """Whether the files are small enough to be read."""
        return self._size <= self._most

    @property
    def _size(self) -> int:
        return sum(change.after.size for change in self._files if change.after is not None)

    def _read_all(self) -> dict[str, str]:
        """Return the digest of each file by path. Files are opened some at a time: the disk can read one while another is hashed."""
        digests: dict[str, str] = {}
        for first in range(0, len(self._files), _TOGETHER):
            some = self._files[first : first + _TOGETHER]
            opened: list[int] = []
            change = some[0]
            try:
                for change in some:
                    opened.append(self._open(change))
                for change, fd in zip(some, opened, strict=True):
                    self._progress.advance(files=1)
                    digests[change.path] = self._hash(change, fd)
            except OSError as error:
                what = f"{change.path!r} in the sandbox cannot be read: {error.strerror}"
                raise WorkspaceError(what, hint="leave it out: --skip, or drop the sandbox: reset") from error
            finally:
                for fd in opened:
                    os.close(fd)
        return digests

    def _open(self, change: Change) -> int:
        assert self._contents is not None
        fd = self._contents.open_file(change)
        with suppress(OSError):  # only advice
            os.posix_fadvise(fd, 0, _CHUNK, os.POSIX_FADV_WILLNEED)
        return fd

    def _hash(self, change: Change, fd: int) -> str:
        assert change.after is not None
        size = change.after.size
        if size >= SMALLEST_UNREMEMBERED or not isinstance(self._contents, Mixed):
            return _digest_of_open(fd, change, self._progress)
        content = _small_content(fd, size, change.path)
        self._progress.advance(size=size)
        digest = hashlib.sha256(content).hexdigest()
        self._contents.remember(change.path, ReadFile(content, digest, os.fstat(fd).st_mtime_ns))
        return digest


def content_digest(change: Change, contents: Contents, progress: Progress = NO_PROGRESS) -> str:
    """Return the SHA-256 of the new content of a file. Holes of a large file are not read: they are zeros.

    Raises OSError if the file cannot be read, or has another size than when it was listed: a running program could make it endless.
    """
    fd = contents.open_file(change)
    try:
        return _digest_of_open(fd, change, progress)
    finally:
        os.close(fd)


def _digest_of_open(fd: int, change: Change, progress: Progress) -> str:
    size = change.after.size if change.after is not None else 0
    if size > _CHUNK:
        return _large_digest(fd, size, change.path, progress)
    digest = hashlib.sha256(_small_content(fd, size, change.path)).hexdigest()
    progress.advance(size=size)
    return digest


def _small_content(fd: int, size: int, path: str) -> bytes:
    content = os.pread(fd, size + 1, 0)
    if len(content) > size:
        raise OSError(errno.ESTALE, _CHANGED, path)
    return content


def _large_digest(fd: int, size: int, path: str, progress: Progress) -> str:
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    digest, at = hashlib.sha256(), 0
    while at < size:
        data, end = next_extent(fd, at, size)
        while at < end:
            length = min(_CHUNK, (data if at < data else end) - at)
            piece = _ZEROS[:length] if at < data else os.pread(fd, length, at)
            if not piece:
                raise OSError(errno.ESTALE, _CHANGED, path)
            digest.update(piece)
            at += len(piece)
            progress.advance(size=len(piece))
    if os.fstat(fd).st_size != size:
        raise OSError(errno.ESTALE, _CHANGED, path)
    return digest.hexdigest()


def digest_of(changes: Iterable[Change], content: Mapping[str, str], history: Iterable[str] = ()) -> str:
    """Return one digest for all changes. `content` has the digest of the new content of each file, by path: see `ContentDigests`.

    `history` are the facts about commits and branches that are promoted with the changes.
    """
    digest = hashlib.sha256(_FORM)
    for change in changes:
        digest.update(f"{_row(change, content)!r}\n".encode("ascii"))
    for fact in history:
        digest.update(f"history {_hex(fact)}\n".encode("ascii"))
    return digest.hexdigest()


def _row(change: Change, content: Mapping[str, str]) -> tuple[object, ...]:
    node, inside = change.after, change.inside
    if node is None:
        return _hex(change.path), change.kind.value, inside
    xattrs = sorted((_hex(name), value.hex()) for name, value in node.xattrs.items() if carried(name, powers=True))
    look = node.type.value, node.mode, node.size, _hex(node.target), content.get(change.path, "")
    return _hex(change.path), change.kind.value, inside, *look, *xattrs


def _hex(path: str) -> str:
    return os.fsencode(path).hex()


def checked(expected: str) -> str:
    """Return the given digits of a digest in lower case. Raises `PolicyError` if they are not hexadecimal, or too few."""
    digits = expected.strip().lower()
    if not SHORTEST <= len(digits) <= 64 or not _DIGITS.issuperset(digits):
        raise PolicyError(
            f"not a digest of changes: {expected[:80]!r}", hint=f"give at least {SHORTEST} digits of the digest that diff prints at its end"
        )
    return digits
