"""`log`: show, follow and export the entries of the ledger, and verify that the ledger is unchanged and complete."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from typing import NoReturn

from agent_sandbox._fast.values import dataclass, replace
from agent_sandbox.assembly import here
from agent_sandbox.cli.caller import write_all
from agent_sandbox.cli.context import project_of
from agent_sandbox.cli.help import version
from agent_sandbox.cli.log_options import LogOptions, LogVerifyOptions
from agent_sandbox.cli.render.messages import Console, complain, counted, remark, shown
from agent_sandbox.cli.render.pager import output
from agent_sandbox.cli.results import VerbResult
from agent_sandbox.errors import LedgerBroken, LedgerUnavailable, PolicyError
from agent_sandbox.ledger import checkpoint as checkpoints
from agent_sandbox.ledger.chain import entries, files
from agent_sandbox.ledger.event import Checkpoint, Entry, Intent, Told
from agent_sandbox.ledger.export import FURTHEST, document, exporter
from agent_sandbox.ledger.query import Filter, Index, Survey, follow, select, survey
from agent_sandbox.ledger.verify import Evidence, Report, evidence, examine
from agent_sandbox.workspace.store import sandbox_id

INDEX = "ledger.index"
_WORTH_AN_INDEX = 8 << 20  # bytes; less is read as quickly
_PAUSE_SECONDS = 0.2
_LONGEST_NOTE = 4096
_NAME_WIDTH = 28  # of the column of sandboxes, if the names are not known before the first line


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
    ended: bool | None  # whether the end of the action is recorded; null for entries that are no action


@dataclass(frozen=True)
class LogResult(VerbResult):
    """Entries of the ledger.

    `entries` is empty if the entries were already printed one by one. `elsewhere` is the number of matching entries of other projects.
    `missing` says which entries the anchor knows and the ledger has lost; null if there are none.
    """

    kind = "log"

    entries: tuple[LogEntry, ...] = ()
    elsewhere: int = 0
    missing: str | None = None
    recorded: bool = True  # whether the ledger has entries at all

    @property
    def code(self) -> int:
        """1 if the ledger has lost entries; else 0."""
        return 1 if self.missing else 0

    def text(self, console: Console) -> None:
        """Print what the entries, which were already printed, do not tell."""
        sys.stdout.flush()
        if self.missing:
            complain(self.missing, "somebody removed it, or the machine lost power; see: agent-sandbox log verify")
        elif not self.recorded:
            remark("nothing has been recorded yet")
        elif self.elsewhere:
            console.note(f"{counted(self.elsewhere, 'entry', 'entries')} of other projects: agent-sandbox log --all")


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
    ledger = here().ledger()
    project = "" if options.everywhere else _sandbox_of(options.project)
    wanted = Filter(
        since=options.since,
        until=options.until,
        category=options.category,
        level=options.level,
        sandbox=options.sandbox,
        project=project,
        allowed=False if options.denied else None,
        words=options.words,
    )
    known = _anchored(ledger.keys)  # before the ledger is read: entries written meanwhile are not missing
    lines = _Lines(options.form, everywhere=not project)
    newest, facts = _search(ledger.path, wanted, options.limit)
    lines.unended = facts.unended
    lines.width = _NAME_WIDTH if newest is None else max((len(told.sandbox) for _, told in newest), default=0)
    selected = select(_read(ledger.path, entries(ledger.path)), wanted) if newest is None else newest
    result = LogResult(
        tuple(_facts_of(entry, told, facts.unended) for entry, told in selected) if options.collect else (),
        facts.elsewhere,
        _missing(ledger.path, facts.last, known),
        recorded=facts.last > 0,
    )
    if options.follow:
        _follow(ledger.path, selected, wanted, lines)
    if not options.collect:
        with output(paged=options.pager) as write:
            write(lines.head.encode())
            for entry, told in selected:
                write(lines.line(entry, told).encode())
    return result


def _sandbox_of(named: str | None) -> str:
    """Return the sandbox of the named project, or of the one that we are in; empty if we are in none."""
    try:
        return sandbox_id(project_of(named).path)
    except PolicyError:
        if named is not None:
            raise
        return ""


def _anchored(keys: str) -> int:
    """Return the number of the last entry that the anchor knows; 0 without an anchor."""
    try:
        anchor = evidence(keys).anchor
    except OSError as error:
        raise LedgerUnavailable(f"the anchor in {keys} cannot be read: {error.strerror or error}", hint="check who may read it") from error
    return anchor.furthest.sequence if anchor is not None and anchor.furthest is not None else 0


def _missing(path: str, last: int, known: int) -> str | None:
    """Return a sentence about entries that the anchor knows and the ledger does not hold; None if there are none."""
    if last >= known:
        return None
    if not files(path):
        return f"the ledger {path} is missing: it had {counted(known, 'entry', 'entries')}"
    return f"the ledger {path} has lost its end: it had {counted(known, 'entry', 'entries')}, and the last one here is {last}"


def _read(path: str, found: Iterable[Entry]) -> Iterator[Entry]:
    """Yield entries; none if there is no ledger. An error in reading becomes `LedgerUnavailable`; the reader's own errors do not."""
    try:
        yield from found
    except FileNotFoundError:
        return
    except OSError as error:
        raise LedgerUnavailable(f"the ledger {path} cannot be read: {error.strerror or error}", hint="check who may read it") from error


def _search(path: str, wanted: Filter, limit: int | None) -> tuple[list[tuple[Entry, Told]] | None, Survey]:
    """Survey the ledger. Return also the newest `limit` entries that match; None instead of all entries, which may be too many."""
    if limit is None:
        return None, survey(_read(path, entries(path)), wanted)
    if sum(map(os.path.getsize, files(path))) >= _WORTH_AN_INDEX:
        index = Index(path, os.path.join(os.path.dirname(path), INDEX))
        found = list(_read(path, _indexed(index, wanted, limit)))
        return list(select(found, wanted)), index.survey(wanted)
    newest = deque[tuple[Entry, Told]](maxlen=limit)
    facts = survey(_read(path, entries(path)), wanted, lambda entry, told: newest.append((entry, told)))
    return list(newest), facts


def _indexed(index: Index, wanted: Filter, limit: int) -> Iterator[Entry]:
    yield from index.find(wanted, newest=limit)


def _follow(path: str, selected: Iterable[tuple[Entry, Told]], wanted: Filter, lines: _Lines) -> NoReturn:
    """Print the selected entries, then each new one that matches, until interrupted."""
    write_all(1, lines.head.encode())
    last = 0
    for entry, told in selected:
        write_all(1, lines.line(entry, told).encode())
        last = entry.sequence
    lines.unended = frozenset()  # the end of a new action may be still to come
    new = _read(path, follow(path, pause=lambda: time.sleep(_PAUSE_SECONDS)))
    for entry, told in select(new, replace(wanted, after=last)):
        write_all(1, lines.line(entry, told).encode())
    raise AssertionError("following has no end")


class _Lines:
    """Entries as lines, for people or in an export format. `unended` are the actions whose end is not recorded."""

    def __init__(self, form: str | None, *, everywhere: bool) -> None:
        self.unended: frozenset[int] = frozenset()
        self.width = _NAME_WIDTH
        self._everywhere = everywhere
        self._exported: Callable[[Entry, Told], str] | None = None
        self.head = ""
        if form is not None:
            self.head, self._exported = exporter(form, host=os.uname().nodename, version=version())

    def line(self, entry: Entry, told: Told) -> str:
        """Return an entry as a line of text."""
        if self._exported is not None:
            return self._exported(entry, told)
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.time)) if abs(entry.time) < FURTHEST else f"{entry.time:.0f}"
        unended = entry.sequence in self.unended
        mark = "DENIED" if not told.allowed else "NO END" if unended else "" if told.level in ("debug", "info") else told.level.upper()
        # In a list of all projects the whole name; else only whether it was a clone of the project's sandbox.
        where = f"{shown(told.sandbox):{self.width}} " if self._everywhere else f"{shown(told.sandbox.partition('/')[2]):10} "
        explained = told.why and (mark not in ("", "NO END") or told.category == "ledger")
        why = f"  ({shown(told.why)})" if explained else ""
        ended = _facts(told) if told.category == "outcome" else ""
        unended_note = "  (no end is recorded: it was killed, or it still runs)" if unended else ""
        what = f"{shown(told.category):10} {shown(told.action):12} {shown(told.target)}{ended}{why}{unended_note}"
        return f"{entry.sequence:>7}  {when}  {mark:8} {where}{what}\n"


def _facts_of(entry: Entry, told: Told, unended: frozenset[int]) -> LogEntry:
    ended = entry.sequence not in unended if isinstance(entry.event, Intent) else None
    return LogEntry(**document(entry, told), ended=ended)


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
        if not files(path) and not (keys and _anchored(keys)):
            raise LedgerUnavailable(f"there is no ledger at {path}", hint="it begins with the first action")
        known = evidence(keys, notes, options.public_key) if keys else Evidence(notes=notes, public_key=options.public_key)
        report = examine(path, known)
        if file is not None and not (report.entries or report.fault or report.missing):
            raise LedgerBroken(f"{path} is not a ledger: it holds no entry", hint="name a file such as ledger.jsonl")
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
