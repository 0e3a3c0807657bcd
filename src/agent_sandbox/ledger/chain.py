"""Walk the chain: find where it ends, and check that nothing in it was changed.

Bytes that are no entry are accepted in one case only: none of their lines ends as an entry does, as after a write that was cut short (a
kill, a power cut, a full disk), and the entry behind them is a `Torn` that seals exactly them, by place, length and digest. They are
kept, counted, and never merged with what follows. Numbers go up by one; only a `Gap`, which says so, leaves some out.

The hashes alone find accidents, and changes by whoever does not rewrite all that follows. The seals find the rest, for who has the key;
that the end or the whole of it is missing is found with the anchor. `verifying` brings these together.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

from agent_sandbox._fast.encoding import Seal, sha256
from agent_sandbox._fast.values import dataclass
from agent_sandbox.errors import LedgerBroken
from agent_sandbox.ledger.encoding import UnknownForm, decode, looks_whole, place, sealed
from agent_sandbox.ledger.event import Entry, Gap, Rotated, Torn

START = "0" * 64  # the hash before the first entry
_STEP = 2 << 10  # bytes; most entries are far smaller


@dataclass(frozen=True)
class Head:
    """Where the chain ends: the last entry, the offset behind its line, and the bytes from there on, left by a write that was cut short."""

    sequence: int = 0
    hash: str = START
    seal: str = ""
    end: int = 0
    remains: bytes = b""
    line_ended: bool = True  # whether the file's last byte is a line end


@dataclass(frozen=True)
class Verified:
    """A chain without a fault: the last number, the last hash, how many torn writes are sealed, and the bytes of one not sealed yet."""

    count: int
    head: str
    torn: int
    unsealed: int


def find_head(descriptor: int, size: int, seal: Seal) -> Head:
    """The end of the chain, from the tail of the file. Raises `LedgerBroken` when the last entry is not of this key, and when what lies
    behind it is no torn write."""
    length = min(size, _STEP)
    while True:
        start = size - length
        tail = os.pread(descriptor, length, start)
        position = len(tail)
        while position > 0:
            line_start = tail.rfind(b"\n", 0, position) + 1
            if line_start == 0 and start > 0:
                break  # this line may begin before what was read
            line = tail[line_start:position]
            try:
                sequence, digest, mark = place(line)
            except ValueError:
                if looks_whole(line):
                    raise LedgerBroken(f"the ledger entry at byte {start + line_start} was changed", hint=HINT) from None
                position = line_start - 1
                continue
            if mark != sealed(bytes.fromhex(digest), seal):
                raise LedgerBroken(f"entry {sequence} of the ledger was not written with this ledger's key", hint=_OTHER_KEY)
            behind = tail[position:].removeprefix(b"\n")
            return Head(sequence, digest, mark, size - len(behind), behind, tail.endswith(b"\n"))
        if start == 0:
            return Head(remains=tail, line_ended=tail.endswith(b"\n"))
        length = min(size, length * 4)


def holds(descriptor: int, size: int, sequence: int, digest: str) -> bool:
    """Whether this entry is in the file, or was before what the file begins with, or is one that a `Gap` names as missing."""
    following: bytes | None = None
    for line in _backwards(descriptor, size):
        try:
            number, found, _ = place(line)
        except ValueError:
            continue  # torn, or an empty end
        if number == sequence:
            return found == digest
        if number < sequence:
            break
        following = line
    if following is None:
        return False
    entry = decode(following)
    named = entry.event.hash if isinstance(entry.event, Gap) else entry.previous
    return entry.sequence == sequence + 1 and named == digest


def _backwards(descriptor: int, size: int) -> Iterator[bytes]:
    """The lines of a file, the last one first."""
    rest, end, step = b"", size, _STEP
    while end > 0:
        start = max(0, end - step)
        rest, *lines = (os.pread(descriptor, end - start, start) + rest).split(b"\n")
        yield from reversed(lines)
        end, step = start, step * 2
    yield rest


def read(path: str | os.PathLike[str]) -> Iterator[Entry]:
    """The entries of one file, in order, each checked against the one before. Raises `LedgerBroken` at the first fault."""
    with open(path, "rb") as file:
        for item in walk(file):
            if isinstance(item, Entry):
                yield item


def verify(path: str | os.PathLike[str]) -> Verified:
    """Check the hashes of one file. Raises `LedgerBroken` naming the first number that is changed, missing, repeated or out of place."""
    count, head, torn, unsealed = 0, START, 0, 0
    with open(path, "rb") as file:
        for item in walk(file):
            if isinstance(item, Entry):
                count, head, torn = item.sequence, item.hash, torn + isinstance(item.event, Torn)
            else:
                unsealed = item
    return Verified(count, head, torn, unsealed)


def walk(lines: Iterable[bytes], before: Entry | None = None, *, offset: int = 0) -> Iterator[Entry | int]:
    """Each entry of one file; at the end, where there is one, the length of a torn write that is not sealed yet.

    `before` is the entry before the first line, when that is known, and `offset` where in its file that line begins. Raises `LedgerBroken`
    at the first fault.
    """
    debris, length = list[bytes](), 0
    for line in lines:
        try:
            entry = _entry(line.removesuffix(b"\n"))
        except UnknownForm:
            raise broken(_next(before), "was written by another version, in a form that this one does not know") from None
        if entry is None:
            if looks_whole(line.removesuffix(b"\n")):
                raise broken(_next(before), "was changed")
            debris.append(line)
            length += len(line)
        else:
            if problem := _misfit(entry, before):
                raise broken(_next(before), problem)
            if debris and not _seals(entry, offset - length, b"".join(debris)):
                raise broken(_next(before), "follows bytes that are no entry and that it does not seal")
            if not debris and (isinstance(entry.event, Torn) or (isinstance(entry.event, Gap) and entry.event.torn)):
                raise broken(_next(before), "seals a torn write that is not there")
            debris, length, before = [], 0, entry
            yield entry
        offset += len(line)
    if debris:
        yield length


def broken(sequence: int, what: str) -> LedgerBroken:
    """The chain has a fault at this number."""
    return LedgerBroken(f"the ledger is broken: entry {sequence} {what}", hint=HINT)


def _next(before: Entry | None) -> int:
    return before.sequence + 1 if before else 1


def _misfit(entry: Entry, before: Entry | None) -> str:
    """Why this entry cannot stand behind that one; empty when it can."""
    out_of_place = f"is missing or out of place: entry {entry.sequence} stands there"
    if isinstance(entry.event, Gap) and entry.sequence != entry.event.last + 1:
        return "names other entries as missing than those before it"
    if before is None:
        # A file begins with the first entry of all, or with one that says what came before it.
        first = (entry.sequence, entry.previous) == (1, START)
        return "" if first or isinstance(entry.event, Rotated) or _bridges(entry, 0) else out_of_place
    if _bridges(entry, before.sequence):
        # In a file that was begun anew, the entry that is missing is the one before.
        return "" if entry.previous in (before.hash, entry.event.hash) else out_of_place  # type: ignore[union-attr]
    return "" if (entry.sequence, entry.previous) == (before.sequence + 1, before.hash) else out_of_place


def _bridges(entry: Entry, last: int) -> bool:
    return isinstance(entry.event, Gap) and entry.event.last > last


def _seals(entry: Entry, offset: int, debris: bytes) -> bool:
    # The line end behind the debris was written by the sealer.
    expected = torn_at(offset, debris)
    return entry.event == expected or (isinstance(entry.event, Gap) and entry.event.torn == vars(expected))


def torn_at(offset: int, debris: bytes) -> Torn:
    """What seals these bytes, which begin at this place of the file."""
    torn = debris.removesuffix(b"\n")
    return Torn(offset, len(torn), sha256(torn).hexdigest())


def _entry(line: bytes) -> Entry | None:
    try:
        return decode(line)
    except UnknownForm:
        raise
    except ValueError:
        return None


_OTHER_KEY = (
    "if XDG_DATA_HOME or AGENT_SANDBOX_KEYS is another than before, set it back; if not, keep the file as evidence and move it aside"
)
HINT = "keep the file as evidence and move it aside; a new ledger starts with the next action, and says what is missing"
