"""Find entries by time, kind, category, level, sandbox or words, follow new entries, and index all of them in SQLite.

The index can be deleted at any time; it is rebuilt from the ledger.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, suppress

from agent_sandbox._fast.values import TYPE_CHECKING, dataclass, replace
from agent_sandbox.ledger.chain import closed_name, files, first_sequence, walk
from agent_sandbox.ledger.encoding import decode
from agent_sandbox.ledger.event import LEVELS, Entry, Intent, OutcomeEvent, Told, tell

if TYPE_CHECKING:
    from typing import BinaryIO

_VERSION = 2  # of the tables; an index of another version is rebuilt
_TABLES = """
CREATE TABLE entries (
    sequence INTEGER PRIMARY KEY, time REAL, kind TEXT, category TEXT, level INTEGER, sandbox TEXT, allowed INTEGER, words TEXT,
    ends INTEGER, hash TEXT, file INTEGER, start INTEGER, stop INTEGER
);
CREATE INDEX by_time ON entries (time);
CREATE INDEX by_sandbox ON entries (sandbox, sequence);
CREATE INDEX by_end ON entries (ends) WHERE ends IS NOT NULL;
CREATE INDEX by_refusal ON entries (sequence) WHERE NOT allowed;
"""


_WITHIN = "instr(sandbox || '/', ?) = 1"


@dataclass(frozen=True)
class Filter:
    """The conditions on entries; a field that is not set excludes nothing. `level` is the mildest level wanted.

    `sandbox` also takes its throw-away clones, which are named SANDBOX/…; `project` is the sandbox of a project, and also takes entries
    that name no sandbox, such as those about the ledger itself.
    """

    since: float | None = None
    until: float | None = None
    after: int = 0  # only entries with a higher number
    kind: str = ""
    category: str = ""
    level: str = ""
    sandbox: str = ""
    project: str = ""
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
            and (not self.sandbox or _belongs(told.sandbox, self.sandbox))
            and (not self.project or not told.sandbox or _belongs(told.sandbox, self.project))
            and self.allowed in (None, told.allowed)
            and (not self.words or self.words.lower() in f"{told.action} {told.target} {told.why}".lower())
        )


def _belongs(sandbox: str, to: str) -> bool:
    return sandbox == to or sandbox.startswith(f"{to}/")


@dataclass(frozen=True)
class Survey:
    """Facts about a whole ledger: its last entry, the actions without an outcome, and how many entries only the project excludes."""

    last: int = 0
    unended: frozenset[int] = frozenset()
    elsewhere: int = 0


def survey(found: Iterable[Entry], wanted: Filter, each: Callable[[Entry, Told], object] | None = None) -> Survey:
    """Read all entries of a ledger, and call `each` with those that meet the filter."""
    last, elsewhere, unended, anywhere = 0, 0, set[int](), replace(wanted, project="")
    for entry in found:
        last, event = entry.sequence, entry.event
        if isinstance(event, Intent):
            unended.add(last)
        elif isinstance(event, OutcomeEvent):
            unended.discard(event.intent)
        told = tell(entry)
        if wanted.takes(entry, told):
            if each is not None:
                each(entry, told)
        elif wanted.project and anywhere.takes(entry, told):
            elsewhere += 1
    return Survey(last, frozenset(unended), elsewhere)


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

    def survey(self, wanted: Filter) -> Survey:
        """Return what `survey` returns, from the index as the last `find` left it."""
        with closing(sqlite3.connect(self._place, timeout=30, isolation_level=None)) as tables:
            last = tables.execute("SELECT coalesce(max(sequence), 0) FROM entries").fetchone()[0]
            ended = "SELECT ends FROM entries WHERE ends IS NOT NULL"
            rows = tables.execute(f"SELECT sequence FROM entries WHERE kind = 'intent' AND sequence NOT IN ({ended})")
            unended = frozenset(row[0] for row in rows)
            counts: list[int] = []
            for each in (replace(wanted, project=""), wanted):
                query, values = _as_sql(each)
                counts.append(tables.execute(f"SELECT count(*) FROM entries WHERE {query}", values).fetchone()[0])
            return Survey(last, unended, counts[0] - counts[1])

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
        tables.executemany("INSERT INTO entries VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", rows)
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
    words = _writable(f"{told.action} {told.target} {told.why}".lower())
    return (
        *(entry.sequence, entry.time, entry.event.kind, told.category, LEVELS.index(told.level), told.sandbox, told.allowed, words),
        *(entry.event.intent if isinstance(entry.event, OutcomeEvent) else None, entry.hash, file, start, stop),
    )


def _writable(text: str) -> str:
    """Return the text without lone surrogates, which SQLite refuses."""
    return text.encode("utf-8", "replace").decode()


def _as_sql(wanted: Filter) -> tuple[str, list[object]]:
    """Return the filter as an SQL condition and its values. User input occurs only in the values."""
    conditions: list[tuple[str, object]] = [("sequence > ?", wanted.after)]
    if wanted.since is not None:
        conditions.append(("time >= ?", wanted.since))
    if wanted.until is not None:
        conditions.append(("time < ?", wanted.until))
    conditions += [(f"{name} = ?", value) for name in ("kind", "category") if (value := getattr(wanted, name))]
    if wanted.level:
        conditions.append(("level >= ?", LEVELS.index(wanted.level)))
    if wanted.sandbox:
        conditions.append((_WITHIN, f"{_writable(wanted.sandbox)}/"))
    if wanted.project:
        conditions.append((f"(sandbox = '' OR {_WITHIN})", f"{_writable(wanted.project)}/"))
    if wanted.allowed is not None:
        conditions.append(("allowed = ?", wanted.allowed))
    if wanted.words:
        conditions.append(("instr(words, ?) > 0", _writable(wanted.words.lower())))
    return " AND ".join(condition for condition, _ in conditions), [value for _, value in conditions]
