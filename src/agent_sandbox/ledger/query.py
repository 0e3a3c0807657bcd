"""Find entries: by time, kind, category, level, sandbox, words; and wait for new ones."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator

from agent_sandbox.ledger.chain import walk
from agent_sandbox.ledger.event import Entry
from agent_sandbox.ledger.segments import closed_name, files
from agent_sandbox.ledger.telling import LEVELS, Told, tell
from agent_sandbox.values import TYPE_CHECKING, dataclass

if TYPE_CHECKING:
    from typing import BinaryIO


@dataclass(frozen=True)
class Filter:
    """Which entries are wanted; what is not given does not matter. `level` is the mildest that is shown."""

    since: float | None = None
    until: float | None = None
    after: int = 0  # only entries with a higher number
    kind: str = ""
    category: str = ""
    level: str = ""
    sandbox: str = ""
    allowed: bool | None = None
    words: str = ""  # in the action, what it was done to, or why; in any case of letters

    def takes(self, entry: Entry, told: Told) -> bool:
        """Whether this entry is wanted."""
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
    """Those of the entries that are wanted, with what they say."""
    for entry in found:
        told = tell(entry)
        if wanted.takes(entry, told):
            yield entry, told


def follow(path: str, *, pause: Callable[[], None]) -> Iterator[Entry]:
    """Every entry there is, and then each new one as it comes, for ever. `pause` is called when there is nothing new; it may raise to end.

    Goes on in the next file when one is closed. Raises `LedgerBroken` as reading does.
    """
    before: Entry | None = None
    while True:
        name = _next_file(path, before)
        try:
            file = open(name, "rb")  # noqa: SIM115  # the block is below: a file that is not there yet is waited for
        except FileNotFoundError:
            pause()
            continue
        with file:
            for entry in _read_on(file, path, before, pause):
                yield entry
                before = entry


def _next_file(path: str, before: Entry | None) -> str:
    """The file in which the entry behind this one is, or will be."""
    kept = files(path)
    if before is None:
        return kept[0] if kept else path
    following = closed_name(path, before.sequence + 1)
    return following if following in kept else path


def _read_on(file: BinaryIO, path: str, before: Entry | None, pause: Callable[[], None]) -> Iterator[Entry]:
    """The entries of one file behind this one, until all of it was read and it is not the one that is written."""
    end, told = 0, before.sequence if before else 0
    before = None  # of this file
    while True:
        is_last_look = not _is_still(file, path)  # asked first: what was written until then is read once more
        start = end
        file.seek(start)
        lines = WholeLines(file, end)
        for item in walk(lines, before, offset=end):
            if isinstance(item, Entry):
                before, end = item, lines.end
                if item.sequence > told:
                    yield item
        if is_last_look:
            return
        if end == start:
            pause()


class WholeLines:
    """The whole lines of a file from some place on, and where the last one that was taken ends. One that is being written is left."""

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
