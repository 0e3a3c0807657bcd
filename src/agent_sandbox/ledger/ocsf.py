"""Entries in the Open Cybersecurity Schema Framework (OCSF 1.3), with its profile for security controls.

Runs are process activity (class 1007), looks at files are file system activity (1001); what has no class of its own is a base event, with
our own names in `activity_name` and `unmapped`.
"""

from __future__ import annotations

from typing import Any

from agent_sandbox.ledger.event import Entry, Outcome
from agent_sandbox.ledger.telling import Told, facts_in

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
