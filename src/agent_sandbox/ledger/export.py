"""Export entries as JSON lines, as CSV, and in the Open Cybersecurity Schema Framework (OCSF 1.3, security-control profile)."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from agent_sandbox.ledger.encoding import wrapped
from agent_sandbox.ledger.event import Entry, Outcome
from agent_sandbox.ledger.summary import Told, facts_in

SCHEMA = "1.3.0"
_SEVERITY = {"debug": 1, "info": 1, "warning": 3, "error": 4, "critical": 5}  # informational, medium, high, critical
_LAUNCH, _TERMINATE, _OTHER = 1, 2, 99
_FILE_ACTIVITY = {"create": 1, "read": 2, "write": 3, "delete": 4, "rename": 5, "open": 14}
_NAMES = {(1007, _LAUNCH): "Launch", (1007, _TERMINATE): "Terminate"}


def as_ocsf(entry: Entry, told: Told, *, host: str, version: str) -> dict[str, Any]:
    """One entry as an event of OCSF. `host` and `version` are this machine's name and this program's version."""
    category, number, activity, more = _class(entry, told)
    return {
        "category_uid": category,
        "class_uid": number,
        "activity_id": activity,
        "activity_name": _NAMES.get((number, activity), told.action),
        "type_uid": number * 100 + activity,
        "time": round(entry.time * 1000),
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
    """The category, the class, the activity, and what that class needs."""
    actor = {"actor": {"app_name": "agent-sandbox"}}
    if told.category in ("process", "code"):
        return 1, 1007, _LAUNCH, {**actor, "process": {"cmd_line": told.target, "uid": str(entry.sequence)}}
    if isinstance(entry.event, Outcome):
        code = facts_in(entry.event.facts).get("exit_code")
        ended = {**actor, "process": {"uid": str(entry.event.intent)}}
        return 1, 1007, _TERMINATE, {**ended, "exit_code": code} if isinstance(code, int) else ended
    if told.category == "file":
        file = {"name": told.target.rpartition("/")[2] or told.target, "path": told.target, "type_id": 0}
        return 1, 1001, _FILE_ACTIVITY.get(told.action, _OTHER), {**actor, "file": file}
    return 0, 0, _OTHER, {}


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
