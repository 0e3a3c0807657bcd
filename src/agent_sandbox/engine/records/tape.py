"""What is kept of an output stream of any length: its beginning, and digests of pieces by which a difference further on is found."""

from __future__ import annotations

import hashlib

from agent_sandbox.values import dataclass, field

PIECE = 4096
KEPT = 64 << 10  # bytes of the beginning that are kept as they are
MOST_PIECES = 16384  # digests: beyond 64 MiB the rest is one piece
_DIGITS = 32  # hexadecimal, of each


@dataclass(frozen=True)
class Tape:
    """An output stream."""

    size: int
    digest: str
    beginning: bytes
    pieces: tuple[str, ...] = field(default=())


class Taping:
    """Takes a stream as it comes."""

    def __init__(self) -> None:
        self._all = hashlib.sha256()
        self._size = 0
        self._beginning = b""
        self._pieces: list[str] = []
        self._rest = b""

    def take(self, data: bytes) -> None:
        """More of it."""
        self._all.update(data)
        self._size += len(data)
        self._beginning += data[: KEPT - len(self._beginning)]
        self._rest += data
        while len(self._rest) >= PIECE:
            piece, self._rest = self._rest[:PIECE], self._rest[PIECE:]
            if len(self._pieces) < MOST_PIECES:
                self._pieces.append(_named(piece))

    def taped(self) -> Tape:
        """All of it."""
        last = [_named(self._rest)] if self._rest and len(self._pieces) < MOST_PIECES else []
        return Tape(self._size, self._all.hexdigest(), self._beginning, (*self._pieces, *last))


def _named(piece: bytes) -> str:
    return hashlib.sha256(piece).hexdigest()[:_DIGITS]


def first_difference(one: Tape, other: Tape) -> tuple[int, bool] | None:
    """Where two streams begin to differ, and whether that is the very byte or only the piece that holds it; None when they are the same."""
    if (one.size, one.digest) == (other.size, other.digest):
        return None
    for index, (left, right) in enumerate(zip(one.beginning, other.beginning, strict=False)):
        if left != right:
            return index, True
    shorter = min(len(one.beginning), len(other.beginning))
    if len(one.beginning) != len(other.beginning):
        return shorter, True
    for index, (piece, same) in enumerate(zip(one.pieces, other.pieces, strict=False)):
        if piece != same:
            return index * PIECE, False
    return min(one.size, other.size, MOST_PIECES * PIECE), one.size != other.size
