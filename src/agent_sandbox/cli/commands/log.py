"""`log`: what happened, found, followed and exported; and whether the record of it is whole."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import datetime
from itertools import islice

from agent_sandbox.assembly import here
from agent_sandbox.cli.help import version
from agent_sandbox.cli.parser import Request, UsageError
from agent_sandbox.cli.render import quantities
from agent_sandbox.cli.render.messages import remark, shown
from agent_sandbox.cli.render.pager import output
from agent_sandbox.cli.render.quantities import counted
from agent_sandbox.errors import LedgerBroken, LedgerUnavailable, PolicyError
from agent_sandbox.ledger import checkpoint as checkpoints
from agent_sandbox.ledger.chain import entries, files
from agent_sandbox.ledger.event import Checkpoint, Entry
from agent_sandbox.ledger.export import FORMS, FURTHEST, document, exporter
from agent_sandbox.ledger.query import Filter, Index, follow, select
from agent_sandbox.ledger.summary import LEVELS, Told
from agent_sandbox.ledger.verify import Evidence, Report, evidence, examine

INDEX = "ledger.index"
_NEWEST = 100  # entries, unless more are asked for
_WORTH_AN_INDEX = 8 << 20  # bytes; less is read as quickly
_PAUSE_SECONDS = 0.2


def log(request: Request) -> int:
    """The verb `log`."""
    match request.words:
        case ():
            return _show(request)
        case ("verify", *file):
            return verify(request, *file)
        case ("checkpoint",):
            return checkpoint(request)
        case _:
            raise UsageError(f"log has no {request.words[0]!r}", hint="agent-sandbox log, log verify [FILE] or log checkpoint")


def _show(request: Request) -> int:
    wanted, form = _filter(request), _form(request)
    path = here().ledger().path
    try:
        if request.has("--follow"):
            return _follow(request, path, wanted, form)
        found = select(_entries(request, path, wanted, form), wanted)
        if request.has("--json"):
            from agent_sandbox.cli.render.json import print_document

            print_document("log", {"entries": [document(entry, told) for entry, told in found]})
            return 0
        with output(paged=form is None and not request.has("--no-pager")) as write:
            for line in _lines(found, form):
                write(line.encode())
    except FileNotFoundError:
        remark("nothing has been recorded yet")
    except OSError as error:
        raise LedgerUnavailable(f"the ledger {path} cannot be read: {error.strerror or error}", hint="check who may read it") from error
    return 0


def _entries(request: Request, path: str, wanted: Filter, form: str | None) -> Iterable[Entry]:
    """The entries among which to look: for a screen the newest, for an export all of them, unless a number was given."""
    limit = quantities.count("--limit", request.value("--limit") or ("none" if form else str(_NEWEST)))
    if limit is None:
        return entries(path)
    if not files(path):
        raise FileNotFoundError(path)
    if sum(map(os.path.getsize, files(path))) >= _WORTH_AN_INDEX:
        return Index(path, os.path.join(os.path.dirname(path), INDEX)).find(wanted, newest=limit)
    found = [entry for entry, _ in select(entries(path), wanted)]
    return found[-limit:]


def _follow(request: Request, path: str, wanted: Filter, form: str | None) -> int:
    if request.has("--json"):
        raise UsageError("--follow has no end, and --json is one document", hint="use --format jsonl")
    for line in _lines(select(follow(path, pause=lambda: time.sleep(_PAUSE_SECONDS)), wanted), form):
        os.write(1, line.encode())
    return 0


def _lines(found: Iterable[tuple[Entry, Told]], form: str | None) -> Iterator[str]:
    if form is None:
        for entry, told in found:
            yield f"{_line(entry, told)}\n"
        return
    head, line = exporter(form, host=os.uname().nodename, version=version())
    yield head
    for entry, told in found:
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


def _form(request: Request) -> str | None:
    form = request.value("--format")
    if form is not None and form not in FORMS:
        raise UsageError(f"--format takes {', '.join(FORMS)}, not {form!r}", hint="without it, lines for people are printed")
    return form


def _filter(request: Request) -> Filter:
    level = request.value("--level") or ""
    if level and level not in LEVELS:
        raise UsageError(f"--level takes {', '.join(LEVELS)}, not {level!r}", hint="entries of that level and above are shown")
    return Filter(
        since=_moment("--since", request.value("--since")),
        until=_moment("--until", request.value("--until")),
        category=request.value("--category") or "",
        level=level,
        sandbox=request.value("--sandbox") or "",
        allowed=False if request.has("--denied") else None,
        words=request.value("--grep") or "",
    )


def _moment(option: str, text: str | None) -> float | None:
    """`2026-11-16`, `2026-11-16T06:30`, or how long ago: `90s`, `30m`, `2h`, `7d`."""
    if text is None:
        return None
    if text[:4].isdigit() and "-" in text:
        try:
            return datetime.fromisoformat(text).timestamp()
        except ValueError:
            raise PolicyError(f"{option} takes a date or how long ago, not {text!r}", hint=f"write {option} 2h") from None
    days = text.removesuffix("d")
    if days != text and days.isascii() and days.isdigit():
        return time.time() - int(days) * 86400
    ago = quantities.seconds(option, text)
    return None if ago is None else time.time() - ago


_HOLDS, _DOES_NOT = 0, 1
_LONGEST_NOTE = 4096


def verify(request: Request, file: str | None = None) -> int:
    """Examine the ledger of this user or, on whatever machine, a copy in a file, with the evidence that is given."""
    ledger = here().ledger()
    path = os.path.abspath(file) if file is not None else ledger.path
    directory = request.value("--keys") or ("" if file is not None else ledger.keys)
    notes, public_key = tuple(_note(name) for name in request.values("--checkpoint")), request.value("--public-key")
    try:
        if not files(path):
            raise LedgerUnavailable(f"there is no ledger at {path}", hint="one is begun with the first action")
        known = evidence(directory, notes, public_key) if directory else Evidence(notes=notes, public_key=public_key)
        report = examine(path, known)
        if file is None:
            with suppress(FileNotFoundError):  # `log` finds entries by it; made anew, it is an index of what was examined
                os.unlink(os.path.join(os.path.dirname(path), INDEX))
    except OSError as error:
        raise LedgerUnavailable(f"the ledger {path} cannot be examined: {error.strerror or error}", hint="check who may read it") from error
    if request.has("--json"):
        from agent_sandbox.cli.render.json import print_document

        print_document("log-verify", {"path": path, "intact": report.intact, "complete": report.complete, **vars(report)})
    else:
        for line in _told(report, directory):
            print(line)
    return _HOLDS if report.intact and report.complete is not False else _DOES_NOT


def checkpoint(request: Request) -> int:
    """Sign the last entry, record that, and print the note to keep elsewhere."""
    signed = here().ledger().checkpoint()
    sys.stdout.write(checkpoints.note(signed))
    if not request.has("--quiet"):
        remark("keep this where the ledger cannot be changed from; agent-sandbox log verify --checkpoint FILE compares with it")
    return 0


def _note(name: str) -> Checkpoint:
    try:
        with open(name, encoding="ascii", errors="replace") as file:
            return checkpoints.read_note(file.read(_LONGEST_NOTE))
    except OSError as error:
        why = f"the checkpoint {name!r} cannot be read: {error.strerror or error}"
        raise LedgerBroken(why, hint="name a file with a checkpoint") from error


def _told(report: Report, directory: str) -> Iterator[str]:
    kept = f", those before {report.removed_before} were removed when files were closed" if report.removed_before else ""
    yield f"examined    {counted(report.entries, 'entry', 'entries')}, {report.first} to {report.last}{kept}"
    yield f"integrity   {'holds: nothing that is here was changed' if report.intact else 'BROKEN: ' + shown(report.fault)}"
    complete = {True: "holds: all of it is here", False: "INCOMPLETE", None: "cannot be told"}[report.complete]
    yield f"complete    {complete}"
    yield from (f"  missing   {shown(line)}" for line in report.missing)
    yield from (f"  not told  {shown(line)}" for line in report.untold)
    if report.torn or report.unsealed:
        open_end = f", and {report.unsealed} bytes at the end are the next to be" if report.unsealed else ""
        yield f"torn        {counted(report.torn, 'write')} cut short and sealed since{open_end}"
    if report.checkpoints:
        yield f"signed      {counted(len(report.checkpoints), 'checkpoint')}, the last on entry {max(report.checkpoints)}"
    yield f"evidence    {'the key and the anchor in ' + shown(directory) if directory else 'none but what was given'}"
