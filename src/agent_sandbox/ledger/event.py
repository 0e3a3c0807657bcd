"""What the ledger records, as typed values.

An intent without an outcome means that the process ended in between: the deed may or may not have happened. Every other pairing is exact.
`sandbox` names the one that it is about, where there is one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from agent_sandbox._fast.encoding import sha256
from agent_sandbox._fast.values import TYPE_CHECKING, dataclass, field

if TYPE_CHECKING:
    from typing import ClassVar, Literal

Fact = None | bool | int | float | str | bytes | Sequence["Fact"] | Mapping[str, "Fact"]
Facts = Mapping[str, Fact]
LONGEST_TEXT = 4096  # characters of one value


@dataclass(frozen=True)
class Cut:
    """What is left of a value that was too long: its beginning, and the length in bytes and SHA-256 of the whole (text as UTF-8)."""

    start: str
    length: int
    sha256: str


def cut(whole: str | bytes, start: str | None = None) -> Cut:
    """What is kept of a long value; `start` where the beginning is not to be kept as it is."""
    raw = whole if isinstance(whole, bytes) else whole.encode("utf-8", "surrogatepass")
    if start is None:
        start = whole[:LONGEST_TEXT] if isinstance(whole, str) else whole.decode("utf-8", "surrogateescape")[:LONGEST_TEXT]
    return Cut(start, len(raw), sha256(raw).hexdigest())


@dataclass(frozen=True)
class Intent:
    """It is about to be done. `action` says what, `digest` names exactly that, `policy` and `rule` say what allowed it."""

    kind: ClassVar[str] = "intent"
    action: Facts
    digest: str
    policy: str
    rule: str
    sandbox: str = ""


@dataclass(frozen=True)
class Outcome:
    """It ended. `intent` is the sequence number of the entry that announced it."""

    kind: ClassVar[str] = "outcome"
    intent: int
    ended: Literal["done", "raised"]
    facts: Facts = field(default_factory=dict)
    sandbox: str = ""


@dataclass(frozen=True)
class Refusal:
    """It was not done."""

    kind: ClassVar[str] = "refusal"
    action: Facts
    digest: str
    policy: str
    rule: str
    why: str
    sandbox: str = ""


@dataclass(frozen=True)
class Torn:
    """Bytes between this entry and the one before are no entry: what is left of a write that was cut short.

    If the writer was killed or the disk was full, what they announced was not done. After a power cut, or if somebody damaged the last
    entry, it may have been.
    """

    kind: ClassVar[str] = "torn"
    offset: int
    length: int
    sha256: str


@dataclass(frozen=True)
class Noted:
    """Something that is no action of its own: a capability granted or revoked, an approval asked for or answered, a file looked at.

    `what` is one of our own names, `subject.verb`: its first part is the category under which people look for it.
    """

    kind: ClassVar[str] = "noted"
    what: str
    facts: Facts = field(default_factory=dict)
    sandbox: str = ""


@dataclass(frozen=True)
class Gap:
    """Entries are missing: the anchor had seen `last` entries, and those after the one before this are not here.

    The machine lost power before they reached the disk, or somebody took the file away. They are numbered all the same. Where a torn write
    lies before this entry, `torn` seals it as a `Torn` does.
    """

    kind: ClassVar[str] = "gap"
    last: int
    hash: str
    why: str
    torn: Facts = field(default_factory=dict)


@dataclass(frozen=True)
class Rotated:
    """The first entry of a new file: the chain goes on from the file that begins with entry `closed`. Those before `oldest` are removed."""

    kind: ClassVar[str] = "rotated"
    closed: int
    size: int
    oldest: int


@dataclass(frozen=True)
class Checkpoint:
    """Entry `sequence` has this hash, signed (Ed25519): checked by whoever has the public key, without the key of the ledger."""

    kind: ClassVar[str] = "checkpoint"
    sequence: int
    hash: str
    public_key: str
    signature: str


Event = Intent | Outcome | Refusal | Noted | Torn | Gap | Rotated | Checkpoint
KINDS: Mapping[str, type[Event]] = {kind.kind: kind for kind in (Intent, Outcome, Refusal, Noted, Torn, Gap, Rotated, Checkpoint)}


# What a field holds when it is read back, by how it is declared. A text or facts that were too long are there as what is left of them.
_READ = {"str": (str, Cut), "int": (int,), "Facts": (dict, Cut)}


def fits(event: Event) -> bool:
    """Whether an event that was read from a file holds what its kind says: another program, or somebody, may have written it."""
    kinds = {name: kind for name, kind in type(event).__annotations__.items() if name != "kind"}
    return all(isinstance(value, _READ.get(kinds[name], (str,))) and not isinstance(value, bool) for name, value in vars(event).items())


@dataclass(frozen=True)
class Entry:
    """An event in its place in the chain. `sequence` orders entries; `time` is what the clock said and may jump. `seal` is the ledger's
    own, made with its key."""

    sequence: int
    time: float
    previous: str
    hash: str
    event: Event
    seal: str = ""

    def __init__(self, sequence: int, time: float, previous: str, hash: str, event: Event, seal: str = "") -> None:
        # What every value would do by itself, in a third of the time: one is made for each entry that is recorded.
        values = self.__dict__
        values["sequence"], values["time"], values["previous"] = sequence, time, previous
        values["hash"], values["event"], values["seal"] = hash, event, seal
