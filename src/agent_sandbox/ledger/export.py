"""Entries in forms that other programs read: JSON lines, CSV, and OCSF for those who watch over many machines.

Whatever a name or an argument holds, an entry is one line, of printable characters only. A cell that a spreadsheet would take for a formula
is written so that it does not. These are copies to read and search; what can be verified is the ledger's own files.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from agent_sandbox.ledger.encoding import wrapped
from agent_sandbox.ledger.event import Entry
from agent_sandbox.ledger.ocsf import as_ocsf
from agent_sandbox.ledger.telling import Told

COLUMNS = ("sequence", "time", "level", "kind", "category", "action", "target", "allowed", "sandbox", "why", "details")
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
FURTHEST = 6e10  # seconds from 1970 that a calendar of our sort has, in both directions
FORMS = ("jsonl", "csv", "ocsf")


def document(entry: Entry, told: Told) -> dict[str, Any]:
    """One entry as JSON types: what it says, and all that it holds."""
    return {
        "sequence": entry.sequence,
        "time": moment(entry.time),
        "level": told.level,
        "kind": entry.event.kind,
        "category": told.category,
        "action": told.action,
        "target": told.target,
        "allowed": told.allowed,
        "sandbox": told.sandbox,
        "why": told.why,
        "event": {name: wrapped(value) for name, value in vars(entry.event).items()},
        "previous": entry.previous,
        "hash": entry.hash,
        "seal": entry.seal,
    }


def moment(seconds: float) -> str:
    """A time as everybody reads it, in UTC. One that no calendar has, from a clock that was wrong, is shown as the number it is."""
    if abs(seconds) >= FURTHEST:
        return repr(seconds)
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def exporter(form: str, *, host: str, version: str) -> tuple[str, Callable[[Entry, Told], str]]:
    """What comes first in an export of this form, and what makes the line of one entry. Every line has its end."""
    match form:
        case "jsonl":
            return "", lambda entry, told: _json(document(entry, told))
        case "csv":
            return _row(COLUMNS), lambda entry, told: _row(_cells(entry, told))
        case "ocsf":
            return "", lambda entry, told: _json(as_ocsf(entry, told, host=host, version=version))
        case _:
            raise ValueError(f"no form of export: {form!r}")


def _json(value: dict[str, Any]) -> str:
    # DEL is the one control character that JSON leaves as it is.
    return json.dumps(value, separators=(",", ":")).replace("\x7f", "\\u007f") + "\n"


def _cells(entry: Entry, told: Told) -> list[str]:
    event = {name: wrapped(value) for name, value in vars(entry.event).items()}
    texts = (told.level, entry.event.kind, told.category, told.action, told.target, str(told.allowed).lower(), told.sandbox, told.why)
    return [str(entry.sequence), moment(entry.time), *map(_cell, texts), _cell(_json(event).rstrip("\n"))]


def _cell(text: str) -> str:
    shown = text if text.isprintable() else "".join(each if each.isprintable() else _escaped(each) for each in text)
    return f"'{shown}" if shown.startswith(_FORMULA) else shown


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def _row(cells: tuple[str, ...] | list[str]) -> str:
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow(cells)
    return line.getvalue()
