"""Export entries as JSON lines, as CSV, and in the Open Cybersecurity Schema Framework (OCSF 1.3, security-control profile)."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from agent_sandbox.ledger.encoding import wrapped
from agent_sandbox.ledger.event import Entry, OutcomeEvent, Told, facts_in

FORMS = ("jsonl", "csv", "ocsf")
COLUMNS = ("sequence", "time", "level", "kind", "category", "action", "target", "allowed", "sandbox", "why", "details")
FURTHEST = 6e10  # seconds from 1970, in both directions, that a calendar covers
_FORMULA = ("=", "+", "-", "@", "\t", "\r")  # a spreadsheet would run a cell that starts like this

SCHEMA = "1.3.0"  # of OCSF
_SEVERITY = {"debug": 1, "info": 1, "warning": 3, "error": 4, "critical": 5}  # informational, medium, high, critical
_LAUNCH, _TERMINATE, _OTHER = 1, 2, 99
_FILE_ACTIVITY = {"create": 1, "read": 2, "write": 3, "delete": 4, "rename": 5, "open": 14}
_NAMES = {(1007, _LAUNCH): "Launch", (1007, _TERMINATE): "Terminate"}


def as_ocsf(entry: Entry, told: Told, *, host: str, version: str) -> dict[str, Any]:
    """Return one entry as an OCSF event. `host` is this machine's name, `version` this program's version."""
    category, number, activity, more = _class(entry, told)
    return {
        "category_uid": category,
        "class_uid": number,
        "activity_id": activity,
        "activity_name": _NAMES.get((number, activity), told.action),
        "type_uid": number * 100 + activity,
        "time": round(entry.time * 1000) if abs(entry.time) < FURTHEST else round(entry.time) * 1000,  # a product may be infinite
        "severity_id": _SEVERITY[told.level],
        "message": f"{told.action}: {told.target}",
        "action_id": 1 if told.allowed else 2,
        "disposition_id": 1 if told.allowed else 2,
        "status_id": 1 if told.allowed and told.level != "error" else 2,
        **({"status_detail": told.why} if told.why else {}),
        "metadata": {
            "version": SCHEMA,
            "uid": entry.hash,
            "sequence": entry.sequence,
            "profiles": ["security_control", "host"],
            "product": {"name": "Agent Sandbox", "vendor_name": "Agent Sandbox", "version": version},
        },
        "device": {"hostname": host, "type_id": 0},
        **more,
        "unmapped": {"kind": entry.event.kind, "category": told.category, "sandbox": told.sandbox, "previous": entry.previous},
    }


def _class(entry: Entry, told: Told) -> tuple[int, int, int, dict[str, Any]]:
    """Return the OCSF category, class and activity of an entry, and the attributes that the class needs."""
    actor = {"actor": {"app_name": "agent-sandbox"}}
    if told.category in ("process", "code"):
        return 1, 1007, _LAUNCH, {**actor, "process": {"cmd_line": told.target, "uid": str(entry.sequence)}}
    if isinstance(entry.event, OutcomeEvent):
        code = facts_in(entry.event.facts).get("exit_code")
        terminated = {**actor, "process": {"uid": str(entry.event.intent)}}
        return 1, 1007, _TERMINATE, {**terminated, "exit_code": code} if isinstance(code, int) else terminated
    if told.category == "file":
        file = {"name": told.target.rpartition("/")[2] or told.target, "path": told.target, "type_id": 0}
        return 1, 1001, _FILE_ACTIVITY.get(told.action, _OTHER), {**actor, "file": file}
    return 0, 0, _OTHER, {}


def document(entry: Entry, told: Told) -> dict[str, Any]:
    """Return one entry as JSON types: its summary, and all its fields."""
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
    """Format a time in UTC, as ISO 8601.

    A time outside the calendar, from a clock that was wrong, is shown as the plain number.
    """
    if abs(seconds) >= FURTHEST:
        return repr(seconds)
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def exporter(form: str, *, host: str, version: str) -> tuple[str, Callable[[Entry, Told], str]]:
    """Return the header of an export format, and a function that returns the line of an entry.

    Every line ends with a newline. Raises `ValueError` for an unknown format.
    """
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
    # DEL is the one control character that JSON does not escape.
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
