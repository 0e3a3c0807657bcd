"""The summary of an entry in common words: category, action, target, and whether it was allowed.

The log, the exports and the audit view share it, so that they agree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from agent_sandbox._fast.values import TYPE_CHECKING, assert_never, dataclass
from agent_sandbox.ledger.event import Checkpoint, Cut, Entry, Gap, Intent, Noted, OutcomeEvent, RefusalEvent, Rotated, Torn

if TYPE_CHECKING:
    from typing import Any

# By the policy's name for the kind of action.
_ACTIONS = {
    "RunCode": ("code", "run_code"),
    "RunCommand": ("process", "run_command"),
    "Promote": ("promotion", "promote"),
    "Undo": ("promotion", "undo"),
    "CallTool": ("tool", "call_tool"),
}
_OBSERVED = ("file", "process", "network")  # observations from a run that is watched closely
LEVELS = ("debug", "info", "warning", "error", "critical")  # mildest first


@dataclass(frozen=True)
class Told:
    """An entry in words. `allowed` is False for refusals; `details` holds the rest of the entry."""

    level: str
    category: str
    action: str
    target: str
    allowed: bool
    sandbox: str
    why: str
    details: Mapping[str, Any]


def tell(entry: Entry) -> Told:
    """Summarise an entry. A text that was too long to keep is shown by its beginning."""
    event = entry.event
    sandbox = _text(getattr(event, "sandbox", ""))
    match event:
        case Intent():
            category, action, target = _deed(event.action)
            return Told("info", category, action, target, True, sandbox, _text(event.rule), {"facts": event.action, "digest": event.digest})
        case RefusalEvent():
            category, action, target = _deed(event.action)
            details = {"facts": event.action, "digest": event.digest, "rule": event.rule}
            return Told("warning", category, action, target, False, sandbox, _text(event.why), details)
        case OutcomeEvent():
            level = "error" if event.ended == "raised" else "info"
            return Told(level, "outcome", event.ended, f"entry {event.intent}", True, sandbox, "", {"facts": event.facts})
        case Noted():
            return _noted(event, sandbox)
        case Torn():
            return Told("warning", "ledger", "torn", f"{event.length} bytes", True, "", "a write was cut short", {})
        case Gap():
            return Told("critical", "ledger", "gap", f"up to entry {event.last}", True, "", _text(event.why), {})
        case Rotated():
            return Told("info", "ledger", "rotated", f"entries from {event.closed} on", True, "", "", {"kept_from": event.oldest})
        case Checkpoint():
            return Told("info", "ledger", "checkpoint", f"entry {event.sequence}", True, "", "", {"public_key": event.public_key})
        case _:
            assert_never(event)


def _noted(event: Noted, sandbox: str) -> Told:
    category, _, action = _text(event.what).partition(".")
    facts = facts_in(event.facts)
    allowed = facts.get("allowed", True) is not False
    level = "warning" if not allowed else "debug" if category in _OBSERVED else "info"
    target, why = (_text(facts.get(name, "")) for name in ("target", "why"))
    return Told(level, category, action or category, target, allowed, sandbox, why, {"facts": event.facts})


def _deed(facts: Mapping[str, Any] | Cut) -> tuple[str, str, str]:
    if isinstance(facts, Cut):  # too long to keep; its beginning still identifies it
        return "unknown", "unknown", facts.start[:200]
    kind = _text(facts.get("kind", ""))
    category, action = _ACTIONS.get(kind, ("action", kind))
    match kind:
        case "RunCommand":
            return category, action, _words(facts.get("argv", ()))
        case "RunCode":
            return category, action, f"{_text(facts.get('language', ''))} {_text(facts.get('source_sha256', ''))[:12]}"
        case _:
            return category, action, _text(facts.get("root", facts.get("tool", "")))


def _words(argv: object) -> str:
    """Quote a command for a shell, so that spaces inside words are visible."""
    from shlex import join  # only readers need it

    return join(map(_text, argv)) if isinstance(argv, Sequence) and not isinstance(argv, str) else _text(argv)


def _text(value: object) -> str:
    return value if isinstance(value, str) else value.start if isinstance(value, Cut) else str(value)


def facts_in(value: object) -> Mapping[str, Any]:
    """Return the facts of an event that was read back; empty if they were too long to keep."""
    return value if isinstance(value, Mapping) else {}
