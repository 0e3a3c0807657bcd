"""Walk the chain: find where it ends, and verify that nothing in it was changed.

Bytes that are no entry are accepted in one case only: none of their lines ends as an entry does, as after a write that was cut short (a
kill, a power cut, a full disk), and the entry behind them is a `Torn` that seals exactly them, by place, length and digest. They are
kept, counted, and never merged with what follows.

What is not promised: the chain has no key and no anchor yet, so whoever can write the file can rewrite it whole or drop its end, and it
verifies. It finds accidents, and changes by whoever does not rewrite all that follows.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from agent_sandbox.errors import LedgerBroken
from agent_sandbox.ledger.encoding import decode, looks_whole, place
from agent_sandbox.ledger.event import Entry, Torn
from agent_sandbox.spelling import sha256
from agent_sandbox.values import TYPE_CHECKING, dataclass

if TYPE_CHECKING:
    from typing import BinaryIO

START = "0" * 64  # the hash before the first entry
_STEP = 8 << 10  # bytes; most entries are far smaller


@dataclass(frozen=True)
class Head:
    """Where the chain ends: the last entry, the offset behind its line, and the bytes from there on, left by a write that was cut short."""

    sequence: int = 0
    hash: str = START
    end: int = 0
    remains: bytes = b""
    line_ended: bool = True  # whether the file's last byte is a line end


@dataclass(frozen=True)
class Verified:
    """A chain without a fault: how many entries, the last hash, how many torn writes are sealed, and the bytes of one not sealed yet."""

    count: int
    head: str
    torn: int
    unsealed: int


def find_head(descriptor: int, size: int) -> Head:
    """The end of the chain, from the tail of the file. Raises `LedgerBroken` when what lies behind the last entry is no torn write."""
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
                sequence, digest = place(line)
            except ValueError:
                if looks_whole(line):
                    raise LedgerBroken(f"the ledger entry at byte {start + line_start} was changed", hint=_HINT) from None
                position = line_start - 1
                continue
            behind = tail[position:].removeprefix(b"\n")
            return Head(sequence, digest, size - len(behind), behind, tail.endswith(b"\n"))
        if start == 0:
            return Head(remains=tail, line_ended=tail.endswith(b"\n"))
        length = min(size, length * 4)


def read(path: str | os.PathLike[str]) -> Iterator[Entry]:
    """The entries, in order, each verified against the one before. Raises `LedgerBroken` at the first fault."""
    with open(path, "rb") as file:
        for item in _walk(file):
            if isinstance(item, Entry):
                yield item


def verify(path: str | os.PathLike[str]) -> Verified:
    """Check every entry. Raises `LedgerBroken` naming the first sequence number that is changed, missing, repeated or out of place."""
    count, head, torn, unsealed = 0, START, 0, 0
    with open(path, "rb") as file:
        for item in _walk(file):
            if isinstance(item, Entry):
                count, head, torn = item.sequence, item.hash, torn + isinstance(item.event, Torn)
            else:
                unsealed = item
    return Verified(count, head, torn, unsealed)


def _walk(file: BinaryIO) -> Iterator[Entry | int]:
    """Each entry; at the end, where there is one, the length of a torn write that is not sealed yet."""
    previous, expected, offset, debris = START, 1, 0, b""
    for line in file:
        entry = _entry(line.removesuffix(b"\n"))
        if entry is None:
            if looks_whole(line.removesuffix(b"\n")):
                raise _broken(expected, "was changed")
            debris += line
        else:
            if (entry.sequence, entry.previous) != (expected, previous):
                raise _broken(expected, f"is missing or out of place: entry {entry.sequence} stands there")
            if debris and not _seals(entry, offset - len(debris), debris):
                raise _broken(expected, "follows bytes that are no entry and that it does not seal")
            if isinstance(entry.event, Torn) and not debris:
                raise _broken(expected, "seals a torn write that is not there")
            debris, previous, expected = b"", entry.hash, expected + 1
            yield entry
        offset += len(line)
    if debris:
        yield len(debris)


def _seals(entry: Entry, offset: int, debris: bytes) -> bool:
    # The line end behind the debris was written by the sealer.
    torn = debris.removesuffix(b"\n")
    return entry.event == Torn(offset, len(torn), sha256(torn).hexdigest())


def _entry(line: bytes) -> Entry | None:
    try:
        return decode(line)
    except ValueError:
        return None


def _broken(sequence: int, what: str) -> LedgerBroken:
    return LedgerBroken(f"the ledger is broken: entry {sequence} {what}", hint=_HINT)


_HINT = "keep the file as evidence and move it aside; a new ledger starts with the next action"
