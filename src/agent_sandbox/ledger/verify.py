"""Examine a ledger, or a copy on another machine, for integrity and completeness, reported separately.

*Integrity*: nothing here was changed. It is checked by the hash chain and, with the ledger's key, by the seal of each entry.
*Completeness*: nothing is missing. A file alone cannot show that. It takes a record kept elsewhere of how far the ledger had come: the
anchor, or a checkpoint that was given away. The report lists what could not be checked, and what the check would need.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from agent_sandbox._fast.encoding import Seal
from agent_sandbox._fast.values import TYPE_CHECKING, dataclass, field
from agent_sandbox.errors import LedgerBroken, LedgerUnavailable
from agent_sandbox.ledger import checkpoint as checkpoints
from agent_sandbox.ledger import private_files
from agent_sandbox.ledger.chain import broken, opened, walk
from agent_sandbox.ledger.encoding import sealed
from agent_sandbox.ledger.event import Checkpoint, Entry, Gap, Rotated, Torn
from agent_sandbox.ledger.private_files import Anchor
from agent_sandbox.ledger.writer import PURPOSE

if TYPE_CHECKING:
    from typing import BinaryIO


@dataclass(frozen=True)
class Report:
    """The result of an examination.

    `fault` is the first fault; entries after it were not examined. `missing` describes missing entries, `untold` what could not be checked.
    """

    first: int = 0
    last: int = 0
    head: str = ""
    entries: int = 0
    torn: int = 0  # sealed torn writes
    unsealed: int = 0  # bytes of an unsealed torn write at the end
    removed_before: int = 0  # entries before this one were removed by rotation, according to the chain
    checkpoints: tuple[int, ...] = ()  # entries with a valid signed checkpoint
    fault: str = ""
    missing: tuple[str, ...] = ()
    untold: tuple[str, ...] = ()

    @property
    def intact(self) -> bool:
        """Whether no change was found."""
        return not self.fault

    @property
    def complete(self) -> bool | None:
        """Whether nothing is missing; None if that cannot be determined, as after a fault."""
        return False if self.missing else None if self.untold or self.fault else True


@dataclass(frozen=True)
class Evidence:
    """Evidence from outside the ledger: the key, the anchor, checkpoints that were given away, and the public key to trust."""

    seal: Seal | None = None
    anchor: Anchor | None = None
    notes: tuple[Checkpoint, ...] = ()
    public_key: str | None = None


@dataclass
class _Walked:
    """The state of an examination, after the entries examined so far."""

    first: int = 0
    before: Entry | None = None
    entries: int = 0
    torn: int = 0
    unsealed: int = 0
    oldest: int = 0
    end: int = 0  # bytes of the last file up to the end of its last entry
    checkpoints: list[int] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    wanted: dict[int, str] = field(default_factory=dict)  # hashes of entries known from outside, by number


def evidence(directory: str, notes: Sequence[Checkpoint] = (), public_key: str | None = None) -> Evidence:
    """Read the evidence in a ledger's key directory.

    Raises `LedgerBroken` if the anchor is damaged, OSError if the key or the anchor cannot be read.
    """
    seal: Seal | None = None
    with suppress(FileNotFoundError):
        seal = private_files.load_key(directory, make=False).derived(PURPOSE)
    try:
        found, again = private_files.read_anchor(directory), private_files.read_anchor(directory)
        while found != again:  # a write was under way: a half-written slot is not valid
            found, again = again, private_files.read_anchor(directory)
    except ValueError as error:
        raise LedgerBroken(f"the anchor in {directory} cannot be read: {error}", hint="find out what happened to that directory") from None
    if found is not None and found.furthest is None:
        raise LedgerBroken(f"the anchor in {directory} was emptied", hint="find out what happened to that directory")
    return Evidence(seal, found, tuple(notes), public_key)


def examine(path: str, known: Evidence) -> Report:
    """Examine a ledger with all its files, or a single file. Raises OSError if it cannot be read."""
    walked = _Walked(wanted={note.sequence: note.hash for note in known.notes})
    fault = ""
    try:
        for note in known.notes:
            if not checkpoints.is_genuine(note, known.public_key):
                raise LedgerBroken(f"the signature of the checkpoint on entry {note.sequence} does not hold")
        for slot in (known.anchor.last, known.anchor.lasting) if known.anchor else ():
            if slot is not None:
                if known.seal and slot.seal != sealed(bytes.fromhex(slot.hash), known.seal):
                    raise LedgerBroken("the anchor was not written with this key")
                walked.wanted.setdefault(slot.sequence, slot.hash)
        with opened(path) as all_files:
            for file in all_files:
                _walk_file(file, known, walked)
    except LedgerBroken as error:
        fault = error.message
    return _report(walked, known, fault)


def _walk_file(file: BinaryIO, known: Evidence, walked: _Walked) -> None:
    walked.unsealed = 0
    for item in walk(file, walked.before):
        if isinstance(item, Entry):
            _take(item, known, walked)
        else:
            walked.unsealed = item
    walked.end = file.tell() - walked.unsealed


def _take(entry: Entry, known: Evidence, walked: _Walked) -> None:
    if known.seal and entry.seal != sealed(bytes.fromhex(entry.hash), known.seal):
        raise broken(entry.sequence, "was not written with this key")
    if walked.wanted.pop(entry.sequence, entry.hash) != entry.hash:
        raise broken(entry.sequence, "is not the one that the anchor or a checkpoint names")
    match entry.event:
        case Torn():
            walked.torn += 1
        case Rotated(oldest=oldest):
            walked.oldest = oldest
        case Gap(last=last, hash=digest, why=why, torn=torn):
            start = walked.before.sequence + 1 if walked.before else 1
            walked.torn += bool(torn)
            walked.missing.append(f"entries {start} to {last}: {why}")
            if walked.wanted.pop(last, digest) != digest:
                raise broken(entry.sequence, "names another entry as missing than the one that was there")
        case Checkpoint():
            _take_checkpoint(entry, entry.event, known, walked)
    walked.first = walked.first or entry.sequence
    walked.entries += 1
    walked.before = entry


def _take_checkpoint(entry: Entry, signed: Checkpoint, known: Evidence, walked: _Walked) -> None:
    if (signed.sequence, signed.hash) != (entry.sequence - 1, entry.previous):
        raise broken(entry.sequence, "is a checkpoint of something else than the entry before it")
    with suppress(LedgerUnavailable):  # without the signing package: the seals were checked, or the report says that they were not
        if not checkpoints.is_genuine(signed, known.public_key):
            raise broken(entry.sequence, "is a checkpoint whose signature does not hold")
        walked.checkpoints.append(signed.sequence)


def _report(walked: _Walked, known: Evidence, fault: str) -> Report:
    last = walked.before.sequence if walked.before else 0
    untold: list[str] = []
    if not known.seal:
        untold.append("whether the ledger was rewritten as a whole after the last signed checkpoint: checking that needs its key")
    if not known.anchor and not any(note.sequence >= last for note in known.notes):
        untold.append(f"whether there were entries after {last}: checking that needs the anchor, or a checkpoint kept elsewhere")
    if not fault:
        walked.missing += _lacking(walked, known, last)
    return Report(
        first=walked.first,
        last=last,
        head=walked.before.hash if walked.before else "",
        entries=walked.entries,
        torn=walked.torn,
        unsealed=walked.unsealed,
        removed_before=walked.oldest if walked.oldest > 1 else 0,
        checkpoints=(*walked.checkpoints, *(note.sequence for note in known.notes)) if not fault else tuple(walked.checkpoints),
        fault=fault,
        missing=tuple(walked.missing),
        untold=tuple(untold),
    )


def _lacking(walked: _Walked, known: Evidence, last: int) -> list[str]:
    """Describe the entries that are missing at the beginning and at the end."""
    gaps: list[str] = []
    start = max(walked.oldest, 1)
    if walked.first > start and not walked.missing:  # a file started afresh states itself what is missing
        gaps.append(f"entries {start} to {walked.first - 1}: they are not in the examined files")
    if walked.wanted and (furthest := max(walked.wanted)) > last:
        gaps.append(f"entries {last + 1} to {furthest}: the anchor or a checkpoint names the last of them")
    slot = known.anchor.last if known.anchor else None
    if slot is not None and slot.sequence == last and walked.end < slot.size:
        gaps.append(f"the end of entry {last}: its line is shorter than it was")
    return gaps
