"""The event types of the ledger, and the summary of an entry in common words.

An intent without an outcome means that the process ended in between: the action may or may not have happened. An outcome says exactly how
the action of its intent ended. `sandbox` names the sandbox concerned, where there is one.

The log, the exports and the audit view share the summary, so that they agree.
"""

from __future__ import annotations

from _collections_abc import Mapping, Sequence  # and not `collections.abc`, which loads `collections`

from agent_sandbox._fast.encoding import sha256
from agent_sandbox._fast.values import TYPE_CHECKING, assert_never, dataclass, field

if TYPE_CHECKING:
    from typing import Any, ClassVar, Literal

Fact = None | bool | int | float | str | bytes | Sequence["Fact"] | Mapping[str, "Fact"]
Facts = Mapping[str, Fact]
LONGEST_TEXT = 4096  # characters kept of one value

# By the policy's name for the kind of action.
_ACTIONS = {
    "RunCode": ("code", "run_code"),
    "RunCommand": ("process", "run_command"),
    "Promote": ("promotion", "promote"),
    "Undo": ("promotion", "undo"),
    "CallTool": ("tool", "call_tool"),
    "UseFile": ("file", "use_file"),
    "OpenNetwork": ("network", "open_network"),
    "Connect": ("network", "connect"),
}
_FLOWS = ("flow", "repeated", "lost", "intent", "published", "visited", "turned-away", "capability")  # of the network of a run
_OBSERVED = ("file", "process", "network")  # observations from a run that is watched closely
CATEGORIES = (
    *("process", "code", "promotion", "tool", "file", "network", "capability", "approval", "elevation", "experiment", "checkpoint"),
    *("outcome", "ledger"),
    *("action", "unknown"),  # of entries that this version does not know, or that were too long to keep
)
LEVELS = ("debug", "info", "warning", "error", "critical")  # mildest first


@dataclass(frozen=True)
class Cut:
    """The record of a value that was too long: its beginning, and the length in bytes and SHA-256 of the whole (text as UTF-8)."""

    start: str
    length: int
    sha256: str


def cut(whole: str | bytes, start: str | None = None) -> Cut:
    """Shorten a long value to its beginning, or to `start` if the real beginning must not be recorded."""
    raw = whole if isinstance(whole, bytes) else whole.encode("utf-8", "surrogatepass")
    if start is None:
        start = whole[:LONGEST_TEXT] if isinstance(whole, str) else whole.decode("utf-8", "surrogateescape")[:LONGEST_TEXT]
    return Cut(start, len(raw), sha256(raw).hexdigest())


@dataclass(frozen=True)
class Intent:
    """An action is about to be done.

    `action` describes it, `digest` identifies it exactly, `policy` and `rule` say what allowed it.
    """

    kind: ClassVar[str] = "intent"
    action: Facts
    digest: str
    policy: str
    rule: str
    sandbox: str = ""


@dataclass(frozen=True)
class OutcomeEvent:
    """An action ended. `intent` is the number of the entry that announced the action."""

    kind: ClassVar[str] = "outcome"
    intent: int
    ended: Literal["done", "raised"]
    facts: Facts = field(default_factory=dict)
    sandbox: str = ""


@dataclass(frozen=True)
class RefusalEvent:
    """An action was refused and not done."""

    kind: ClassVar[str] = "refusal"
    action: Facts
    digest: str
    policy: str
    rule: str
    why: str
    sandbox: str = ""


@dataclass(frozen=True)
class Torn:
    """The seal on a torn write: the bytes between the previous entry and this one are not an entry.

    If the writer was killed or the disk was full, the action that the torn entry announced was not done. After a power cut, or if someone
    damaged the last entry, the action may have been done.
    """

    kind: ClassVar[str] = "torn"
    offset: int
    length: int
    sha256: str


@dataclass(frozen=True)
class Noted:
    """A fact that is not an action: a capability granted or revoked, an approval requested or answered, a file inspected.

    `what` is the kind of fact, written `subject.verb`. The subject is the category that people search by.
    """

    kind: ClassVar[str] = "noted"
    what: str
    facts: Facts = field(default_factory=dict)
    sandbox: str = ""


@dataclass(frozen=True)
class Gap:
    """Entries are missing: those after the previous entry, up to the entry `last`, which the anchor names.

    Either the machine lost power before they reached the disk, or someone removed the file. The missing entries keep their numbers. If a
    torn write precedes this entry, `torn` seals it as a `Torn` does.
    """

    kind: ClassVar[str] = "gap"
    last: int
    hash: str
    why: str
    torn: Facts = field(default_factory=dict)


@dataclass(frozen=True)
class Rotated:
    """The first entry of a new file. The chain continues from the closed file whose first entry has the number `closed`.

    Entries before `oldest` are removed.
    """

    kind: ClassVar[str] = "rotated"
    closed: int
    size: int
    oldest: int


@dataclass(frozen=True)
class Checkpoint:
    """A signature (Ed25519) on the number and hash of an entry.

    It is verified with the public key alone, without the ledger's key.
    """

    kind: ClassVar[str] = "checkpoint"
    sequence: int
    hash: str
    public_key: str
    signature: str


Event = Intent | OutcomeEvent | RefusalEvent | Noted | Torn | Gap | Rotated | Checkpoint
KINDS: Mapping[str, type[Event]] = {kind.kind: kind for kind in (Intent, OutcomeEvent, RefusalEvent, Noted, Torn, Gap, Rotated, Checkpoint)}


# The types of a field that was read back, by its annotation. Text or facts that were too long are a `Cut`.
_READ = {"str": (str, Cut), "int": (int,), "Facts": (dict, Cut)}


def fits(event: Event) -> bool:
    """Return whether an event read from a file has the field types of its kind.

    Another program, or a person, may have written the file.
    """
    kinds = {name: kind for name, kind in type(event).__annotations__.items() if name != "kind"}
    return all(isinstance(value, _READ.get(kinds[name], (str,))) and not isinstance(value, bool) for name, value in vars(event).items())


@dataclass(frozen=True)
class Entry:
    """An event at its place in the chain.

    `sequence` orders entries. `time` is the reading of the clock and may jump. `seal` is made with the ledger's key.
    """

    sequence: int
    time: float
    previous: str
    hash: str
    event: Event
    seal: str = ""

    def __init__(self, sequence: int, time: float, previous: str, hash: str, event: Event, seal: str = "") -> None:
        # Same as the shared `__init__`, in a third of the time: every recorded event makes one.
        values = self.__dict__
        values["sequence"], values["time"], values["previous"] = sequence, time, previous
        values["hash"], values["event"], values["seal"] = hash, event, seal


@dataclass(frozen=True)
class Told:
    """The summary of an entry in common words. `allowed` is False for refusals; `details` holds the rest of the entry."""

    level: str
    category: str
    action: str
    target: str
    allowed: bool
    sandbox: str
    why: str
    details: Mapping[str, Any]


def tell(entry: Entry) -> Told:
    """Return the summary of an entry. A text that was too long to keep is shown by its beginning."""
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
    level = "warning" if not allowed else "debug" if category in _OBSERVED and action not in _FLOWS else "info"
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
        case "OpenNetwork":
            return category, action, _words(facts.get("hosts", ()))
        case "UseFile":
            operation = _text(facts.get("operation", ""))
            return category, f"{operation}_file" if operation.isalpha() else action, _text(facts.get("path", ""))
        case "Connect":
            words = (facts.get(name, "") for name in ("method", "host", "path", "data"))
            return category, action, " ".join(filter(None, map(_text, words)))
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
