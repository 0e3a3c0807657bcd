"""`log verify` and `log checkpoint`: whether the record is unchanged, whether all of it is here, and a signed note of that."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import suppress

from agent_sandbox import places
from agent_sandbox.errors import LedgerBroken, LedgerUnavailable
from agent_sandbox.ledger import checkpoint as checkpoints
from agent_sandbox.ledger.event import Checkpoint
from agent_sandbox.ledger.segments import files
from agent_sandbox.ledger.verify import Evidence, Report, evidence, examine
from agent_sandbox.surfaces.arguments import Request
from agent_sandbox.surfaces.log import INDEX
from agent_sandbox.surfaces.messages import remark, shown
from agent_sandbox.surfaces.quantities import counted

_HOLDS, _DOES_NOT = 0, 1
_LONGEST_NOTE = 4096


def verify(request: Request, file: str | None = None) -> int:
    """Examine the ledger of this user or, on whatever machine, a copy in a file, with the evidence that is given."""
    ledger = places.ledger()
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
        from agent_sandbox.surfaces.documents import print_document

        print_document("log-verify", {"path": path, "intact": report.intact, "complete": report.complete, **vars(report)})
    else:
        for line in _told(report, directory):
            print(line)
    return _HOLDS if report.intact and report.complete is not False else _DOES_NOT


def checkpoint(request: Request) -> int:
    """Sign the last entry, record that, and print the note to keep elsewhere."""
    signed = places.ledger().checkpoint()
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
