"""Find entries by time, kind, category, level, sandbox or words, follow new entries, and index all of them in SQLite.

The index can be deleted at any time; it is rebuilt from the ledger.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, suppress

from agent_sandbox._fast.values import TYPE_CHECKING, dataclass
from agent_sandbox.ledger.chain import closed_name, files, first_sequence, walk
from agent_sandbox.ledger.encoding import decode
from agent_sandbox.ledger.event import LEVELS, Entry, Told, tell

if TYPE_CHECKING:
    from typing import BinaryIO

_VERSION = 1  # of the tables; an index of another version is rebuilt
_TABLES = """
CREATE TABLE entries (
    sequence INTEGER PRIMARY KEY, time REAL, kind TEXT, category TEXT, level INTEGER, sandbox TEXT, allowed INTEGER, words TEXT,
    hash TEXT, file INTEGER, start INTEGER, stop INTEGER
);
CREATE INDEX by_time ON entries (time);
CREATE INDEX by_sandbox ON entries (sandbox, sequence);
CREATE INDEX by_refusal ON entries (sequence) WHERE NOT allowed;
"""


@dataclass(frozen=True)
class Filter:
    """The conditions on entries; a field that is not set excludes nothing. `level` is the mildest level wanted."""

    since: float | None = None
    until: float | None = None
    after: int = 0  # only entries with a higher number
    kind: str = ""
    category: str = ""
    level: str = ""
    sandbox: str = ""
    allowed: bool | None = None
    words: str = ""  # searched in action, target and reason, ignoring case

    def takes(self, entry: Entry, told: Told) -> bool:
        """Return whether this entry meets all conditions."""
        return (
            entry.sequence > self.after
            and (self.since is None or entry.time >= self.since)
            and (self.until is None or entry.time < self.until)
            and self.kind in ("", entry.event.kind)
            and self.category in ("", told.category)
            and (not self.level or LEVELS.index(told.level) >= LEVELS.index(self.level))
            and self.sandbox in ("", told.sandbox)
            and self.allowed in (None, told.allowed)
            and (not self.words or self.words.lower() in f"{told.action} {told.target} {told.why}".lower())
        )


def select(found: Iterable[Entry], wanted: Filter) -> Iterator[tuple[Entry, Told]]:
    """Yield the entries that meet the filter, each with its summary."""
    for entry in found:
        told = tell(entry)
        if wanted.takes(entry, told):
            yield entry, told


def follow(path: str, *, pause: Callable[[], None]) -> Iterator[Entry]:
    """Yield every entry there is, then each new one as it is written, for ever.

    Calls `pause` when there is nothing new; `pause` may raise to stop. Continues in the next file after a rotation. Raises `LedgerBroken`
    at the first fault.
    """
    before: Entry | None = None
    while True:
        name = _next_file(path, before)
        try:
            file = open(name, "rb")  # noqa: SIM115  # the `with` is below: a missing file is waited for
        except FileNotFoundError:
            pause()
            continue
        with file:
            for entry in _read_on(file, path, before, pause):
                yield entry
                before = entry


def _next_file(path: str, before: Entry | None) -> str:
    """Return the file that holds, or will hold, the entry after `before`."""
    paths = files(path)
    if before is None:
        return paths[0] if paths else path
    following = closed_name(path, before.sequence + 1)
    return following if following in paths else path


def _read_on(file: BinaryIO, path: str, before: Entry | None, pause: Callable[[], None]) -> Iterator[Entry]:
    """Yield the entries of one file that follow `before`, until the file is read to its end and is no longer the current file."""
    end, last_yielded = 0, before.sequence if before else 0
    before = None  # reset: the first entry of this file has none before it
    while True:
        is_last_look = not _is_still(file, path)  # checked first, so that everything written until then is still read
        start = end
        file.seek(start)
        lines = WholeLines(file, end)
        for item in walk(lines, before, offset=end):
            if isinstance(item, Entry):
                before, end = item, lines.end
                if item.sequence > last_yielded:
                    yield item
        if is_last_look:
            return
        if end == start:
            pause()


class WholeLines:
    """The complete lines of a file from an offset on; a line still being written is left out. `end` is the offset after the last line."""

    def __init__(self, file: BinaryIO, start: int) -> None:
        self.end = start
        self._file = file

    def __iter__(self) -> Iterator[bytes]:
        for line in self._file:
            if not line.endswith(b"\n"):
                return
            self.end += len(line)
            yield line


def _is_still(file: BinaryIO, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except FileNotFoundError:
        return False


class Index:
    """The SQLite index of a ledger. `place` is the path of the index, `ledger` the path of the ledger."""

    def __init__(self, ledger: str, place: str) -> None:
        self._ledger = ledger
        self._place = place

    def find(self, wanted: Filter, *, newest: int) -> list[Entry]:
        """Return the last entries that meet the filter, at most `newest` of them, oldest first.

        The index is first brought up to date, and rebuilt if it does not match the ledger. Raises `LedgerBroken` if the ledger is broken,
        OSError if it cannot be read.
        """
        try:
            return self._found(wanted, newest)
        except (sqlite3.DatabaseError, _Stale):
            for name in (self._place, f"{self._place}-journal"):
                with suppress(FileNotFoundError):
                    os.unlink(name)
            return self._found(wanted, newest)

    def _found(self, wanted: Filter, newest: int) -> list[Entry]:
        descriptor = os.open(self._place, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        os.close(descriptor)  # made here with mode 0600; SQLite would use the umask
        with closing(sqlite3.connect(self._place, timeout=30, isolation_level=None)) as tables:
            self._catch_up(tables)
            query, values = _as_sql(wanted)
            columns = "SELECT hash, file, start, stop FROM entries"
            rows = tables.execute(f"{columns} WHERE {query} ORDER BY sequence DESC LIMIT ?", (*values, newest))
            return [self._read(*row) for row in rows][::-1]

    def _catch_up(self, tables: sqlite3.Connection) -> None:
        tables.execute("PRAGMA synchronous = OFF")  # a power cut may destroy it: it is rebuilt
        tables.execute("BEGIN IMMEDIATE")  # one process at a time updates it
        if tables.execute("PRAGMA user_version").fetchone()[0] != _VERSION:
            if tables.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                raise _Stale
            for statement in _TABLES.split(";"):
                tables.execute(statement)
            tables.execute(f"PRAGMA user_version = {_VERSION}")
        last = tables.execute("SELECT hash, file, start, stop FROM entries ORDER BY sequence DESC LIMIT 1").fetchone()
        tables.execute("DELETE FROM entries WHERE file < ?", (self._oldest(),))
        rows = self._rows_behind(self._read(*last), last[1], last[3]) if last else self._rows_behind(None, 0, 0)
        tables.executemany("INSERT INTO entries VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", rows)
        tables.execute("COMMIT")

    def _oldest(self) -> int:
        paths = files(self._ledger)
        return first_sequence(paths[0]) if paths else 0

    def _rows_behind(self, before: Entry | None, file: int, stop: int) -> Iterator[tuple[object, ...]]:
        for path in files(self._ledger):
            first = first_sequence(path)
            if first < file:
                continue
            with open(path, "rb") as content:
                content.seek(stop if first == file else 0)
                lines = WholeLines(content, content.tell())
                start = lines.end
                for item in walk(lines, before, offset=start):
                    if isinstance(item, Entry):
                        yield _row(item, first, start, lines.end)
                        before, start = item, lines.end

    def _read(self, digest: str, file: int, start: int, stop: int) -> Entry:
        """Read the entry that an index row names. Raises `_Stale` if another entry, or none, is there."""
        for path in (closed_name(self._ledger, file), self._ledger):
            with suppress(FileNotFoundError, ValueError), open(path, "rb") as content:
                content.seek(start)
                entry = decode(content.read(stop - start).removesuffix(b"\n").rpartition(b"\n")[2])
                if entry.hash == digest:
                    return entry
        raise _Stale


class _Stale(Exception):
    """The index does not match the ledger."""


def _row(entry: Entry, file: int, start: int, stop: int) -> tuple[object, ...]:
    told = tell(entry)
    words = f"{told.action} {told.target} {told.why}".lower().encode("utf-8", "replace").decode()
    return (
        *(entry.sequence, entry.time, entry.event.kind, told.category, LEVELS.index(told.level), told.sandbox, told.allowed, words),
        *(entry.hash, file, start, stop),
    )


def _as_sql(wanted: Filter) -> tuple[str, list[object]]:
    """Return the filter as an SQL condition and its values. User input occurs only in the values."""
    conditions: list[tuple[str, object]] = [("sequence > ?", wanted.after)]
    if wanted.since is not None:
        conditions.append(("time >= ?", wanted.since))
    if wanted.until is not None:
        conditions.append(("time < ?", wanted.until))
    conditions += [(f"{name} = ?", value) for name in ("kind", "category", "sandbox") if (value := getattr(wanted, name))]
    if wanted.level:
        conditions.append(("level >= ?", LEVELS.index(wanted.level)))
    if wanted.allowed is not None:
        conditions.append(("allowed = ?", wanted.allowed))
    if wanted.words:
        conditions.append(("instr(words, ?) > 0", wanted.words.lower().encode("utf-8", "replace").decode()))
    return " AND ".join(condition for condition, _ in conditions), [value for _, value in conditions]
