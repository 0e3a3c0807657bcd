"""The audit log: a view of the ledger in memory, for programs that want to know what their sandboxes did.

Entries go to the ledger first, so the log never has an entry that the ledger lacks. A full log drops its oldest entries; the ledger drops
none. `load` adds earlier entries from a ledger file.
"""

from __future__ import annotations

import json
import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from types import NoneType
from typing import Any

from agent_sandbox._calls import check_type
from agent_sandbox._fast.values import dataclass, field
from agent_sandbox.engine.gate import EntryWriter
from agent_sandbox.ledger.chain import entries
from agent_sandbox.ledger.encoding import wrapped
from agent_sandbox.ledger.event import LEVELS, Entry, Event, Intent, OutcomeEvent, tell

_REMEMBERED = 10_000  # intents whose outcome is still to come


class AuditLevel(Enum):
    """Levels of entries, least severe first."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"
    CRITICAL = "critical"

    def __ge__(self, other: AuditLevel) -> bool:
        return LEVELS.index(self.value) >= LEVELS.index(other.value)


@dataclass(frozen=True)
class AuditEntry:
    """An entry of the audit log. `target` is the command, file or other object of the action; a hostile program may choose its text."""

    sequence: int
    timestamp: float
    level: AuditLevel
    category: str
    action: str
    target: str
    allowed: bool
    sandbox_id: str
    reason: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the entry as JSON types."""
        return vars(self) | {"level": self.level.value, "details": wrapped(self.details)}


class AuditLog:
    """The actions of sandboxes, newest last. Safe to share between threads and sandboxes.

    `on_entry` is called for each entry, in the thread that acts, after the ledger has the entry. For an intent, that is before the action.
    An exception in `on_entry` stops nothing; the summary counts it.
    """

    def __init__(
        self,
        max_entries: int = 10_000,
        on_entry: Callable[[AuditEntry], object] | None = None,
        *,
        level: AuditLevel = AuditLevel.DEBUG,
    ) -> None:
        check_type("max_entries", max_entries, int, NoneType, write="AuditLog(max_entries=10_000)")
        check_type("level", level, AuditLevel, write="level=AuditLevel.DEBUG")
        self._on_entry = on_entry
        self._level = level
        self._lock = threading.Lock()
        self._entries: deque[AuditEntry] = deque(maxlen=max_entries)
        self._begun: dict[int, AuditEntry] = {}
        self._seen = self._failed = 0

    def __len__(self) -> int:
        return len(self._entries)

    def over(self, ledger: EntryWriter) -> EntryWriter:
        """Return a ledger that records in `ledger` first, and then adds each entry to this log."""
        return _Watched(ledger, self)

    def load(self, ledger: str | os.PathLike[str]) -> None:
        """Add the entries of a ledger file. Raises `LedgerBroken` if the file was tampered with, OSError if it cannot be read."""
        for entry in entries(os.fspath(ledger)):
            self.show(entry)

    def show(self, entry: Entry) -> None:
        """Add an entry of the ledger to this log."""
        with self._lock:
            audited = self._made(entry)
            if not audited.level >= self._level:
                return
            self._entries.append(audited)
            self._seen += 1
        if self._on_entry is not None:
            try:
                self._on_entry(audited)
            except Exception:  # a callback decides nothing, so its error neither stops nor changes the action
                self._failed += 1

    def get_entries(
        self,
        level: AuditLevel | None = None,
        category: str | None = None,
        sandbox_id: str | None = None,
        limit: int | None = None,
        *,
        allowed: bool | None = None,
        since: float | None = None,
    ) -> list[AuditEntry]:
        """Return the entries that match all given filters, oldest first. `level` is the lowest level; `limit` keeps only the newest."""
        with self._lock:
            held = list(self._entries)
        chosen = [
            entry
            for entry in held
            if (level is None or entry.level >= level)
            and category in (None, entry.category)
            and sandbox_id in (None, entry.sandbox_id)
            and allowed in (None, entry.allowed)
            and (since is None or entry.timestamp >= since)
        ]
        return chosen if limit is None else chosen[max(len(chosen) - limit, 0) :]

    def get_denied_actions(self, sandbox_id: str | None = None, limit: int | None = None) -> list[AuditEntry]:
        """Return the refused actions."""
        return self.get_entries(sandbox_id=sandbox_id, limit=limit, allowed=False)

    def get_summary(self) -> dict[str, Any]:
        """Return the number of entries by level, category and sandbox, and how many old entries were dropped."""
        held = self.get_entries()
        denied = sum(not entry.allowed for entry in held)
        return {
            "total_entries": len(held),
            "allowed": len(held) - denied,
            "denied": denied,
            "by_level": _counts(entry.level.value for entry in held),
            "by_category": _counts(entry.category for entry in held),
            "by_sandbox": _counts(entry.sandbox_id for entry in held if entry.sandbox_id),
            "forgotten": self._seen - len(held),
            "callback_errors": self._failed,
        }

    def export_to_file(self, path: str | os.PathLike[str]) -> int:
        """Write all entries to a file, one JSON object in ASCII on each line. Returns how many. Raises OSError."""
        held = self.get_entries()
        with open(path, "w", encoding="ascii", opener=_for_this_user) as file:
            file.writelines(json.dumps(entry.to_dict()).replace("\x7f", "\\u007f") + "\n" for entry in held)
        return len(held)

    def clear(self) -> None:
        """Remove all entries from this log. The ledger keeps them."""
        with self._lock:
            self._entries.clear()
            self._seen = 0

    def _made(self, entry: Entry) -> AuditEntry:
        told = tell(entry)
        level = AuditLevel(told.level)
        details = {**told.details, "hash": entry.hash}
        audited = AuditEntry(
            entry.sequence, entry.time, level, told.category, told.action, told.target, told.allowed, told.sandbox, told.why, details
        )
        if isinstance(entry.event, Intent):
            self._begun[entry.sequence] = audited
            if len(self._begun) > _REMEMBERED:
                del self._begun[next(iter(self._begun))]
        elif isinstance(entry.event, OutcomeEvent) and (begun := self._begun.pop(entry.event.intent, None)) is not None:
            action = f"{begun.action}_{'completed' if entry.event.ended == 'done' else 'failed'}"
            names = (begun.category, action, begun.target, True, begun.sandbox_id, "", details)
            return AuditEntry(entry.sequence, entry.time, level, *names)
        return audited


class _Watched:
    """A ledger that also adds each of its entries to an audit log."""

    def __init__(self, ledger: EntryWriter, audit: AuditLog) -> None:
        self._ledger = ledger
        self._audit = audit

    def record(self, event: Event, *, lasting: bool = False) -> Entry:
        entry = self._ledger.record(event, lasting=lasting)
        self._audit.show(entry)
        return entry

    def unended(self, action_digest: str) -> int | None:
        return self._ledger.unended(action_digest)


def _counts(names: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(names).items()))


def _for_this_user(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)
