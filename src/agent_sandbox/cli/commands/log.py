"""`log`: show, follow and export the entries of the ledger, and verify that the ledger is unchanged and complete."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import islice

from agent_sandbox._fast.values import dataclass
from agent_sandbox.assembly import here
from agent_sandbox.cli.help import version
from agent_sandbox.cli.options import LogOptions, LogVerifyOptions
from agent_sandbox.cli.render.messages import Console, counted, remark, shown
from agent_sandbox.cli.render.pager import output
from agent_sandbox.cli.results import VerbResult
from agent_sandbox.errors import LedgerBroken, LedgerUnavailable
from agent_sandbox.ledger import checkpoint as checkpoints
from agent_sandbox.ledger.chain import entries, files
from agent_sandbox.ledger.event import Checkpoint, Entry, Told
from agent_sandbox.ledger.export import FURTHEST, document, exporter
from agent_sandbox.ledger.query import Filter, Index, follow, select
from agent_sandbox.ledger.verify import Evidence, Report, evidence, examine

INDEX = "ledger.index"
_WORTH_AN_INDEX = 8 << 20  # bytes; less is read as quickly
_PAUSE_SECONDS = 0.2
_LONGEST_NOTE = 4096


@dataclass(frozen=True)
class LogEntry:
    """An entry of the ledger: summary fields, then the complete event and the hashes."""

    sequence: int
    time: str
    level: str
    kind: str
    category: str
    action: str
    target: str
    allowed: bool
    sandbox: str
    why: str
    event: Mapping[str, object]
    previous: str
    hash: str
    seal: str


@dataclass(frozen=True)
class LogResult(VerbResult):
    """Entries of the ledger.

    `entries` is empty if the entries were already printed one by one.
    """

    kind = "log"

    entries: tuple[LogEntry, ...] = ()

    def text(self, console: Console) -> None:
        """Print nothing: the entries were already printed."""


@dataclass(frozen=True)
class LogVerifyResult(VerbResult):
    """Whether a ledger is unchanged and complete, with the evidence. `complete` is null if that cannot be determined."""

    kind = "log-verify"

    path: str
    intact: bool
    complete: bool | None
    first: int
    last: int
    head: str
    entries: int
    torn: int
    unsealed: int
    removed_before: int
    checkpoints: tuple[int, ...]
    fault: str
    missing: tuple[str, ...]
    untold: tuple[str, ...]
    keys: str  # the directory of the key and the anchor; empty without

    @property
    def code(self) -> int:
        """1 if the ledger was changed, or if entries are missing; else 0."""
        return 0 if self.intact and self.complete is not False else 1

    def text(self, console: Console) -> None:
        removed = f", those before {self.removed_before} were removed when files were closed" if self.removed_before else ""
        print(f"examined    {counted(self.entries, 'entry', 'entries')}, {self.first} to {self.last}{removed}")
        print(f"integrity   {'holds: no entry was changed' if self.intact else 'BROKEN: ' + shown(self.fault)}")
        print(f"complete    {({True: 'holds: no entry is missing', False: 'INCOMPLETE', None: 'unknown'})[self.complete]}")
        for line in self.missing:
            print(f"  missing   {shown(line)}")
        for line in self.untold:
            print(f"  unknown   {shown(line)}")
        if self.torn or self.unsealed:
            open_end = f", and {self.unsealed} bytes at the end not sealed yet" if self.unsealed else ""
            print(f"torn        {counted(self.torn, 'write')} cut short and sealed since{open_end}")
        if self.checkpoints:
            print(f"signed      {counted(len(self.checkpoints), 'checkpoint')}, the last on entry {max(self.checkpoints)}")
        print(f"evidence    {'the key and the anchor in ' + shown(self.keys) if self.keys else 'only the given files'}")


@dataclass(frozen=True)
class CheckpointResult(VerbResult):
    """A signed checkpoint, to be stored elsewhere."""

    kind = "log-checkpoint"

    note: str

    def text(self, console: Console) -> None:
        print(self.note, end="")
        console.note("store this where the ledger cannot be changed from; compare later: agent-sandbox log verify --checkpoint FILE")


def log(options: LogOptions) -> LogResult:
    """Show, follow or export entries."""
    path = here().ledger().path
    wanted = Filter(
        since=options.since,
        until=options.until,
        category=options.category,
        level=options.level,
        sandbox=options.sandbox,
        allowed=False if options.denied else None,
        words=options.words,
    )
    try:
        if options.follow:
            for line in _lines(select(follow(path, pause=lambda: time.sleep(_PAUSE_SECONDS)), wanted), options.form):
                os.write(1, line.encode())
            return LogResult()
        selected = select(_entries(path, wanted, options.limit), wanted)
        if options.collect:
            return LogResult(tuple(LogEntry(**document(entry, told)) for entry, told in selected))
        with output(paged=options.pager) as write:
            for line in _lines(selected, options.form):
                write(line.encode())
    except FileNotFoundError:
        remark("nothing has been recorded yet")
        return LogResult()
    except OSError as error:
        raise LedgerUnavailable(f"the ledger {path} cannot be read: {error.strerror or error}", hint="check who may read it") from error
    return LogResult()


def _entries(path: str, wanted: Filter, limit: int | None) -> Iterable[Entry]:
    """Return the newest `limit` entries that match; without a limit, all entries, unfiltered."""
    if limit is None:
        return entries(path)
    if not files(path):
        raise FileNotFoundError(path)
    if sum(map(os.path.getsize, files(path))) >= _WORTH_AN_INDEX:
        return Index(path, os.path.join(os.path.dirname(path), INDEX)).find(wanted, newest=limit)
    return [entry for entry, _ in select(entries(path), wanted)][-limit:]


def _lines(selected: Iterable[tuple[Entry, Told]], form: str | None) -> Iterator[str]:
    if form is None:
        for entry, told in selected:
            yield f"{_line(entry, told)}\n"
        return
    head, line = exporter(form, host=os.uname().nodename, version=version())
    yield head
    for entry, told in selected:
        yield line(entry, told)


def _line(entry: Entry, told: Told) -> str:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.time)) if abs(entry.time) < FURTHEST else f"{entry.time:.0f}"
    mark = "DENIED" if not told.allowed else "" if told.level in ("debug", "info") else told.level.upper()
    why = f"  ({shown(told.why)})" if told.why and (mark or told.category == "ledger") else ""
    ended = _facts(told) if told.category == "outcome" else ""
    return f"{entry.sequence:>7}  {when}  {mark:8} {shown(told.category):10} {shown(told.action):12} {shown(told.target)}{ended}{why}"


def _facts(told: Told) -> str:
    facts = told.details.get("facts")
    pairs = facts.items() if isinstance(facts, dict) else ()
    return "".join(f", {name} {shown(str(value))}" for name, value in islice(pairs, 6) if value not in ("", None))


def log_verify(options: LogVerifyOptions) -> LogVerifyResult:
    """Verify this user's ledger or, on any machine, a copy of a ledger in a file, against the given evidence."""
    ledger, file = here().ledger(), options.file
    path = os.path.abspath(file) if file is not None else ledger.path
    keys = options.keys or ("" if file is not None else ledger.keys)
    notes = tuple(_note(name) for name in options.checkpoints)
    try:
        if not files(path):
            raise LedgerUnavailable(f"there is no ledger at {path}", hint="it begins with the first action")
        known = evidence(keys, notes, options.public_key) if keys else Evidence(notes=notes, public_key=options.public_key)
        report = examine(path, known)
        if file is None:
            with suppress(FileNotFoundError):  # `log` then builds its index again, from the examined entries
                os.unlink(os.path.join(os.path.dirname(path), INDEX))
    except OSError as error:
        raise LedgerUnavailable(f"the ledger {path} cannot be examined: {error.strerror or error}", hint="check who may read it") from error
    return _verified(path, report, keys)


def _verified(path: str, report: Report, keys: str) -> LogVerifyResult:
    return LogVerifyResult(path, report.intact, report.complete, **vars(report), keys=keys)


def log_checkpoint() -> CheckpointResult:
    """Sign the last entry of the ledger, and record the signature in the ledger."""
    return CheckpointResult(checkpoints.note(here().ledger().checkpoint()))


def _note(name: str) -> Checkpoint:
    try:
        with open(name, encoding="ascii", errors="replace") as file:
            return checkpoints.read_note(file.read(_LONGEST_NOTE))
    except OSError as error:
        why = f"the checkpoint {name!r} cannot be read: {error.strerror or error}"
        raise LedgerBroken(why, hint="name a file with a checkpoint") from error
