"""The ledger: one locked, append-only file that many processes and threads write to.

`record` returns when the whole line is with the kernel, so the record survives the end of this process, however it ends. It is not forced
to the disk: a power cut may lose the last moments, and with them records of deeds done in those moments. A process that is stopped while
it holds the lock makes the others wait.

The file is opened for each entry. That costs a few microseconds and saves three problems: a lock shared with forked children, a
descriptor that a guest could inherit, and writing on into a file that has been moved away.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Callable
from contextlib import suppress

from agent_sandbox.errors import LedgerBroken, LedgerUnavailable
from agent_sandbox.ledger.chain import Head, find_head, read
from agent_sandbox.ledger.encoding import encode
from agent_sandbox.ledger.event import Entry, Event, Intent, Outcome, Torn
from agent_sandbox.spelling import sha256
from agent_sandbox.values import dataclass

# No link is followed, so that nobody else's file is appended to; reading finds the end of the chain.
_FLAGS = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


@dataclass(frozen=True)
class _Seen:
    """The end of the chain as this object last wrote it, and in which file."""

    file: tuple[int, int]
    size: int
    head: Head


class Ledger:
    """An append-only record in one file. Safe to share between threads, and to use on both sides of a fork."""

    def __init__(self, path: str | os.PathLike[str], *, clock: Callable[[], float]) -> None:
        self.path = os.fspath(path)
        self._clock = clock
        self._seen: _Seen | None = None  # replaced whole, never changed: a stale one costs a look at the file's tail, no more

    def __repr__(self) -> str:
        return f"Ledger({self.path!r})"

    def record(self, event: Event) -> Entry:
        """Append an event, completely written when this returns. Raises `LedgerUnavailable` or `LedgerBroken`: then do not act."""
        try:
            descriptor = self._open()
        except OSError as error:
            raise self._unavailable(error) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            return self._append(descriptor, event)
        except OSError as error:
            raise self._unavailable(error) from error
        finally:
            os.close(descriptor)  # which frees the lock

    def unended(self, action_digest: str) -> int | None:
        """The last entry that announced this action, if it is not recorded how that ended. Reads all of it; raises as `record` does."""
        found: int | None = None
        try:
            for entry in read(self.path):
                if isinstance(entry.event, Intent) and entry.event.digest == action_digest:
                    found = entry.sequence
                elif isinstance(entry.event, Outcome) and entry.event.intent == found:
                    found = None
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._unavailable(error) from error
        return found

    def _open(self) -> int:
        try:
            return os.open(self.path, _FLAGS, 0o600)
        except FileNotFoundError:
            _make_private(os.path.dirname(os.path.abspath(self.path)))
            return os.open(self.path, _FLAGS, 0o600)

    def _append(self, descriptor: int, event: Event) -> Entry:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        file, size = (status.st_dev, status.st_ino), status.st_size
        head = self._head(descriptor, file, size)
        now = self._clock()
        lines, previous, sequence = b"" if head.line_ended else b"\n", head.hash, head.sequence
        if head.remains:
            torn = head.remains.removesuffix(b"\n")
            sequence += 1
            line, previous = encode(sequence, now, previous, Torn(head.end, len(torn), sha256(torn).hexdigest()))
            lines += line
        line, digest = encode(sequence + 1, now, previous, event)
        lines += line
        _write_all(descriptor, lines)
        end = size + len(lines)
        self._seen = _Seen(file, end, Head(sequence + 1, digest, end))
        return Entry(sequence + 1, now, previous, digest, event)

    def _head(self, descriptor: int, file: tuple[int, int], size: int) -> Head:
        seen = self._seen
        if seen is not None and seen.file == file:
            if size == seen.size:
                return seen.head
            if size < seen.size:
                raise LedgerBroken(f"the ledger {self.path} has lost its end", hint="find out who cut it; then move it aside")
        return find_head(descriptor, size) if size else Head()

    def _unavailable(self, error: OSError) -> LedgerUnavailable:
        why = error.strerror or str(error)
        return LedgerUnavailable(
            f"the ledger {self.path} cannot be written: {why}", hint="free the disk or repair the directory's permissions"
        )


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _make_private(directory: str) -> None:
    """Make a directory and those above it that are missing, for this user only."""
    if not os.path.exists(directory):
        _make_private(os.path.dirname(directory))
        with suppress(FileExistsError):
            os.mkdir(directory, 0o700)
