"""The ledger: one locked, append-only file that many processes and threads write to.

`record` gives the kernel first the whole line and then the anchor, and only then returns. So the record survives the end of this process,
however it ends. A `lasting` entry is also forced to the disk, with all entries before it, and survives a power cut. A power cut may lose
entries after the latest `lasting` entry; the next entry then says so. A process that is stopped while it holds the lock blocks the others.

The files are opened for each entry. That costs a few microseconds and avoids three problems: a lock shared with forked children, a
descriptor that a guest could inherit, and writes to a file that has been moved away. `OpenLedger` keeps the files open for callers that
record much, and `rotate` replaces a file that has grown large.
"""

from __future__ import annotations

import _thread  # `threading` is slow to load
import errno
import fcntl
import os
import stat
import time

from agent_sandbox._fast.contexts import contextmanager, suppress
from agent_sandbox._fast.encoding import Seal
from agent_sandbox._fast.values import TYPE_CHECKING
from agent_sandbox.errors import LedgerUnavailable
from agent_sandbox.ledger import chain, private_files
from agent_sandbox.ledger.chain import Head, closed_directory, closed_name, find_head, first_sequence, kept, torn_at
from agent_sandbox.ledger.encoding import encode, put_in_place, spell
from agent_sandbox.ledger.event import Checkpoint, Entry, Event, Gap, Intent, OutcomeEvent, Rotated
from agent_sandbox.ledger.private_files import ANCHOR, make_private, missing_entries, sync_directory, write_all

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Final


PURPOSE: Final = b"ledger"  # purpose of the derived key
SEGMENT_BYTES: Final = 64 << 20  # larger files are closed
KEPT_BYTES: Final = 1 << 30  # closed files beyond this total are removed, oldest first

# No link is followed: it could append to another user's file. Reading is needed to find the end of the chain.
_FLAGS = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
_CONTINUE = os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
_REPLACE = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
_AT_ONCE = fcntl.LOCK_EX | fcntl.LOCK_NB
_MOMENT = 50_000  # nanoseconds; an entry holds the lock for some ten microseconds
_LOOK_SECONDS = 0.01  # how long a held file is trusted to be the current one


class Ledger:
    """An append-only record in one current file. Safe to share between threads, and to use on both sides of a fork.

    `keys` is the directory of the key and the anchor. Key and anchor protect the record against anyone who can write the ledger but not
    that directory. The default directory is beside the ledger, where key and anchor only reveal accidental damage.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        clock: Callable[[], float],
        keys: str | None = None,
        segment_bytes: int = SEGMENT_BYTES,
        kept_bytes: int = KEPT_BYTES,
    ) -> None:
        self.path = os.path.abspath(path)
        self.keys = f"{self.path}.keys" if keys is None else os.path.abspath(keys)
        self._clock = clock
        self._segment_bytes = segment_bytes
        self._kept_bytes = kept_bytes
        self._boot = ""
        self._seal: Seal | None = None
        self._held: OpenLedger | None = None
        # The end of the chain as last written by this object: (device, inode), file length, number, hash and seal of the last entry, and
        # the opening of the held files. Always replaced whole, never mutated. A stale value costs one read of the tail.
        self._seen: tuple[tuple[int, int], int, int, str, str, object] | None = None

    def __repr__(self) -> str:
        return f"Ledger({self.path!r})"

    def record(self, event: Event, *, lasting: bool = False) -> Entry:
        """Append an event; it is completely written when this returns.

        Raises `LedgerUnavailable` or `LedgerBroken`: then do not act.
        """
        return self.record_all((event,), lasting=lasting)[0]

    def record_all(self, events: Sequence[Event], *, lasting: bool = False) -> list[Entry]:
        """Append several events with no other entry between them. If this raises, some of them may have been recorded."""
        spelt = [(event, spell(event)) for event in events]  # before the lock, for which others wait
        try:
            seal, held = self._ready(), self._held
            if held is not None and held.ours and (entries := self._through(held, seal, spelt, lasting)) is not None:
                return entries
            descriptor = self._opened(seal)
            try:
                return self._append(descriptor, os.lseek(descriptor, 0, os.SEEK_END), self._clock(), seal, spelt, lasting)
            finally:
                os.close(descriptor)  # also releases the lock
        except OSError as error:
            raise self._unavailable(error) from error

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep the files open inside the block, for a process that records many events. Raises as `record` does.

        A ledger without entries has no files, and is not held. Do not nest such blocks. A run records two entries, and does not need this.
        """

        try:
            held = OpenLedger(self.path, self.keys)
        except FileNotFoundError:
            yield
            return
        except OSError as error:
            raise self._unavailable(error) from error
        self._held = held
        try:
            yield
        finally:
            self._held = None
            held.close()

    def checkpoint(self) -> Checkpoint:
        """Sign the last entry, and record the signature.

        Raises as `record` does, also if the signing package is not installed.
        """
        from agent_sandbox.ledger.checkpoint import sign  # an optional extra

        try:
            seal = self._ready()
            descriptor = self._opened(seal)
            try:
                file, size = _identity(descriptor)
                head, gap = self._head(descriptor, file, size, seal)
                if gap is not None or head.remains or not head.sequence:
                    raise LedgerUnavailable("the ledger has no last entry that could be signed", hint="record something first")
                signed = sign(self.keys, head.sequence, head.hash)
                self._append(descriptor, size, self._clock(), seal, [(signed, spell(signed))], lasting=True)
                return signed
            finally:
                os.close(descriptor)
        except OSError as error:
            raise self._unavailable(error) from error

    def unended(self, action_digest: str) -> int | None:
        """Return the number of the last intent of this action if that intent has no outcome; otherwise None.

        Reads the whole ledger. Raises as `record` does.
        """
        intent: int | None = None
        try:
            for entry in chain.entries(self.path):
                if isinstance(entry.event, Intent) and entry.event.digest == action_digest:
                    intent = entry.sequence
                elif isinstance(entry.event, OutcomeEvent) and entry.event.intent == intent:
                    intent = None
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._unavailable(error) from error
        return intent

    def _ready(self) -> Seal:
        if self._seal is None:
            self._boot = private_files.boot_id()
            self._seal = private_files.load_key(self.keys).derived(PURPOSE)
        return self._seal

    def _opened(self, seal: Seal) -> int:
        while (descriptor := self._locked(seal)) is None:
            continue  # the file was rotated between opening and locking: its successor exists already
        return descriptor

    def _locked(self, seal: Seal) -> int | None:
        """Open and lock the current file. If it has grown large, rotate it and return its successor.

        Returns None if another process rotated the file before it was locked.
        """
        try:
            descriptor = os.open(self.path, _FLAGS, 0o600)
        except FileNotFoundError:
            make_private(os.path.dirname(self.path))
            descriptor = os.open(self.path, _FLAGS, 0o600)
        result: int | None = None
        try:
            _lock(descriptor)
            # lseek raises on a FIFO.
            small = os.lseek(descriptor, 0, os.SEEK_END) < self._segment_bytes
            result = descriptor if small else self._rotated(descriptor, seal)
            return result
        finally:
            if result != descriptor:
                os.close(descriptor)

    def _rotated(self, descriptor: int, seal: Seal) -> int | None:
        """Rotate the locked file, and return its successor, open and locked.

        Returns the same file if it cannot be rotated now, None if it is no longer the current file. Happens once in a hundred thousand
        entries.
        """

        if not os.path.samestat(os.fstat(descriptor), os.stat(self.path)):
            return None
        head, gap = self._head(descriptor, *_identity(descriptor), seal)
        if head.remains or gap is not None:
            return descriptor  # the seal on a torn write must be in the same file; rotate at the next entry
        rotated = rotate(self.path, descriptor, head, self._clock(), seal, kept_bytes=self._kept_bytes)
        if rotated is None:
            return descriptor
        new, head = rotated
        try:
            self._settle(new, _identity(new)[0], head.end, head.sequence, head.hash, head.seal, lasting=True)
        except BaseException:
            os.close(new)
            raise
        return new

    def _through(self, held: OpenLedger, seal: Seal, events: Sequence[tuple[Event, str]], lasting: bool) -> list[Entry] | None:
        """Append events through the files held open; None, without appending, if the file must be rotated first or does not exist."""
        now = self._clock()
        with held.lock:
            try:
                size = held.locked(self.path, now, self._segment_bytes)
            except FileNotFoundError:
                return None
            try:
                if size >= self._segment_bytes:
                    return None
                return self._append(held.file, size, now, seal, events, lasting, held)
            finally:
                held.unlock()

    def _append(
        self,
        descriptor: int,
        size: int,
        now: float,
        seal: Seal,
        events: Sequence[tuple[Event, str]],
        lasting: bool,
        held: OpenLedger | None = None,
    ) -> list[Entry]:
        """Append events, each given with its spelling, to the file that is open and locked as `descriptor` and `size` bytes long."""
        # Not `list[Event]()`: it looks up a missing attribute on the list, which takes as long as the seal.
        before: list[Event] = []
        entries: list[Entry] = []
        lines: list[bytes] = []
        seen, mark = self._seen, ""
        # A file that was held since this object's last entry needs no look: nobody else has appended, or it would be longer.
        if (
            seen is not None
            and seen[1] == size
            and ((held is not None and seen[5] is held.opening) or _ends_with(descriptor, size, seen[4]))
        ):
            file, sequence, previous = seen[0], seen[2], seen[3]
        else:
            file = _identity(descriptor)[0] if held is None else held.identity
            head, gap = self._head(descriptor, file, size, seal)
            sequence, previous = head.sequence, head.hash
            lines += () if head.line_ended else (b"\n",)
            if gap is not None:
                before, sequence, previous = [gap], gap.last, head.hash if head.sequence else gap.hash
            elif head.remains:
                before = [torn_at(head.end, head.remains)]
        for event, spelt in (*((each, spell(each)) for each in before), *events) if before else events:
            sequence += 1
            line, digest, mark = put_in_place(sequence, now, previous, spelt, seal)
            entries.append(Entry(sequence, now, previous, digest, event, mark))
            lines.append(line)
            previous = digest
        text = b"".join(lines)
        write_all(descriptor, text)
        self._settle(descriptor, file, size + len(text), sequence, previous, mark, lasting, held, is_new=not size)
        return entries[len(before) :] if before else entries

    def _settle(
        self,
        descriptor: int,
        file: tuple[int, int],
        size: int,
        sequence: int,
        digest: str,
        mark: str,
        lasting: bool,
        held: OpenLedger | None = None,
        *,
        is_new: bool = False,
    ) -> None:
        """Finish a write: force it to the disk if it is `lasting`, then write the anchor."""
        if lasting:
            os.fsync(descriptor)
            if is_new:  # force the name of the file to the disk too
                sync_directory(os.path.dirname(self.path))
        if held is None:
            private_files.write_anchor(self.keys, sequence, digest, mark, size, self._boot, lasting=lasting)
        else:
            private_files.put_anchor(held.anchor, sequence, digest, mark, size, self._boot, lasting=lasting)
        self._seen = (file, size, sequence, digest, mark, held.opening if held is not None else None)

    def _head(self, descriptor: int, file: tuple[int, int], size: int, seal: Seal) -> tuple[Head, Gap | None]:
        """Return the end of the chain, and the `Gap` to record first if entries are missing, else None. Raises `LedgerBroken`, OSError."""
        seen = self._seen
        head = find_head(descriptor, size, seal) if size else Head()
        if seen is not None and seen[0] == file and size > seen[1]:
            return head, None  # others have appended after this object's last entry
        return head, missing_entries(self.path, self.keys, descriptor, size, head, self._boot, seal)

    def _unavailable(self, error: OSError) -> LedgerUnavailable:
        why = error.strerror or str(error)
        where = f" ({error.filename})" if error.filename and error.filename != self.path else ""
        return LedgerUnavailable(
            f"the ledger {self.path} cannot be written: {why}{where}", hint="free the disk or repair the directory's permissions"
        )


def _lock(descriptor: int) -> None:
    """Lock a file. Ask again for a moment before going to sleep: to fall asleep and be woken takes as long as three entries."""
    give_up = 0
    while True:
        try:
            fcntl.flock(descriptor, _AT_ONCE)
            return
        except BlockingIOError:
            now = time.monotonic_ns()
            give_up = give_up or now + _MOMENT
            if now >= give_up:
                break
    fcntl.flock(descriptor, fcntl.LOCK_EX)


def _ends_with(descriptor: int, size: int, mark: str) -> bool:
    """Return whether the last entry of a file has this seal, which is unique.

    `stat` is not used: after a stat, the kernel records finer timestamps for the file, which costs more.
    """
    ending = f'{mark}"}}\n'.encode()
    return os.pread(descriptor, len(ending), size - len(ending)) == ending


def _identity(descriptor: int) -> tuple[tuple[int, int], int]:
    """Return device and inode of an open file, and its length."""
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file")
    return (status.st_dev, status.st_ino), status.st_size


class OpenLedger:
    """The current file of the ledger and its anchor, held open.

    `lock` serialises threads. `ours` is false in a forked child, which must not use the files. `opening` is replaced whenever the ledger is
    reopened.
    """

    __slots__ = ("_looked", "anchor", "file", "identity", "lock", "opening", "ours")

    def __init__(self, path: str, keys: str) -> None:
        """Open both files. Raises OSError if one of them does not exist yet."""
        self.lock = _thread.allocate_lock()
        self.ours = True
        self._looked = 0.0
        self.opening = object()
        self.file, self.identity = _opened(path)
        try:
            self.anchor = os.open(f"{keys}/{ANCHOR}", os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except BaseException:
            os.close(self.file)
            raise
        if not _watched:
            _watched.append(True)
            os.register_at_fork(after_in_child=_let_go)
        _all.add(self)

    def locked(self, path: str, now: float, segment_bytes: int) -> int:
        """Lock the ledger at this path, and return its length. Reopens the file if another one has taken its place.

        Raises OSError, and holds no lock, if there is no file at the path.
        """
        while True:
            _lock(self.file)
            try:
                size = os.lseek(self.file, 0, os.SEEK_END)
                # stat(2) costs more than all the rest: after it, the kernel records finer timestamps for the file.
                if size < segment_bytes and 0 <= now - self._looked < _LOOK_SECONDS:
                    return size
                status = os.stat(path)
                if (status.st_dev, status.st_ino) == self.identity:
                    self._looked = now
                    return status.st_size
            except BaseException:
                self.unlock()
                raise
            self.unlock()
            old = self.file
            self.file, self.identity = _opened(path)
            self.opening = object()
            os.close(old)

    def unlock(self) -> None:
        """Release the lock."""
        fcntl.flock(self.file, fcntl.LOCK_UN)

    def close(self) -> None:
        """Close both files. Idempotent."""
        if self in _all:
            _all.discard(self)
            os.close(self.file)
            os.close(self.anchor)


_all: set[OpenLedger] = set()
_watched: list[bool] = []  # whether the fork hook is registered; it cannot be unregistered


def _opened(path: str) -> tuple[int, tuple[int, int]]:
    descriptor = os.open(path, _CONTINUE)
    status = os.fstat(descriptor)
    return descriptor, (status.st_dev, status.st_ino)


def _let_go() -> None:
    for held in list(_all):
        held.ours = False
        held.close()


def rotate(path: str, descriptor: int, head: Head, now: float, seal: Seal, *, kept_bytes: int) -> tuple[int, Head] | None:
    """Replace the current file, which is open and locked as `descriptor`, with a new one. The old one becomes a closed file.

    Returns the new file's descriptor, locked, and its head. Returns None on a filesystem without hard links, where the old file keeps
    growing. Raises OSError.
    """
    os.fsync(descriptor)
    first = first_sequence(path)
    make_private(closed_directory(path))
    if not _name_again(path, closed_name(path, first)):
        return None
    oldest, gone = kept(path, kept_bytes)
    line, digest, mark = encode(head.sequence + 1, now, head.hash, Rotated(first, head.end, oldest), seal)
    new = os.open(f"{path}.new", _REPLACE, 0o600)
    try:
        fcntl.flock(new, fcntl.LOCK_EX)  # before it has its name
        write_all(new, line)
        os.fsync(new)
        os.rename(f"{path}.new", path)
        sync_directory(closed_directory(path))
        sync_directory(os.path.dirname(path))
        for each in gone:
            with suppress(FileNotFoundError):
                os.unlink(each)
    except BaseException:
        os.close(new)
        raise
    return new, Head(head.sequence + 1, digest, mark, len(line))


def _name_again(path: str, name: str) -> bool:
    """Give the file a second name, as a hard link. Returns False if the filesystem has no hard links."""
    try:
        os.link(path, name)
    except FileExistsError:
        if not os.path.samefile(path, name):  # the second name belongs to a file of an earlier ledger
            raise
    except OSError as error:
        if error.errno in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
            return False
        raise
    return True
