"""What the ledger records, as typed values.

An intent without an outcome means that the process ended in between: the deed may or may not have happened. Every other pairing is exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from agent_sandbox.values import TYPE_CHECKING, dataclass, field

if TYPE_CHECKING:
    from typing import ClassVar, Literal

Fact = None | bool | int | float | str | bytes | Sequence["Fact"] | Mapping[str, "Fact"]
Facts = Mapping[str, Fact]


@dataclass(frozen=True)
class Intent:
    """It is about to be done. `action` says what, `digest` names exactly that, `policy` and `rule` say what allowed it."""

    kind: ClassVar[str] = "intent"
    action: Facts
    digest: str
    policy: str
    rule: str


@dataclass(frozen=True)
class Outcome:
    """It ended. `intent` is the sequence number of the entry that announced it."""

    kind: ClassVar[str] = "outcome"
    intent: int
    ended: Literal["done", "raised"]
    facts: Facts = field(default_factory=dict)


@dataclass(frozen=True)
class Refusal:
    """It was not done."""

    kind: ClassVar[str] = "refusal"
    action: Facts
    digest: str
    policy: str
    rule: str
    why: str


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


Event = Intent | Outcome | Refusal | Torn
KINDS: Mapping[str, type[Event]] = {kind.kind: kind for kind in (Intent, Outcome, Refusal, Torn)}


@dataclass(frozen=True)
class Entry:
    """An event in its place in the chain. `sequence` orders entries; `time` is what the clock said and may jump."""

    sequence: int
    time: float
    previous: str
    hash: str
    event: Event
