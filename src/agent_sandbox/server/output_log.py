"""The output of a detached program on disk: bounded, in the order in which it came, and readable while it grows.

Each line of a file is one piece: when it came, the stream, and its bytes in base64. When a file is full it becomes `output.1`, and the one
before that is dropped: so the newest output is kept. A piece that was cut off by a crash is left out.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import BinaryIO

from agent_sandbox._fast.values import dataclass
from agent_sandbox.server.messages import BrokenMessage, packed, unpacked

MOST_BYTES = 32 << 20  # of both files together, with what base64 adds
LARGEST_PIECE = 1 << 16
OUTPUT, OLDER = "output", "output.1"


@dataclass(frozen=True)
class Piece:
    """Some output: when it came, `stream` and bytes."""

    at: float
    stream: str
    data: bytes


class OutputLog:
    """Writes output to the files in a directory. If the disk is full, output is dropped, and counted."""

    def __init__(self, directory: str, most_bytes: int = MOST_BYTES, clock: Callable[[], float] = time.time) -> None:
        self._path, self._older = os.path.join(directory, OUTPUT), os.path.join(directory, OLDER)
        self._half = most_bytes // 2
        self._clock = clock
        self._file = self._opened()
        self.dropped = 0  # bytes that could not be written

    def _opened(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    def write(self, stream: str, data: bytes) -> None:
        """Append output."""
        for start in range(0, len(data), LARGEST_PIECE):
            piece = data[start : start + LARGEST_PIECE]
            line = json.dumps([round(self._clock(), 3), stream, packed(piece)], separators=(",", ":")).encode() + b"\n"
            try:
                if os.fstat(self._file).st_size + len(line) > self._half:
                    self._turn_over()
                if (written := os.write(self._file, line)) < len(line):  # the disk is full: no half line may stay before the next
                    os.ftruncate(self._file, os.fstat(self._file).st_size - written)
                    self.dropped += len(piece)
            except OSError:
                self.dropped += len(piece)

    def _turn_over(self) -> None:
        os.replace(self._path, self._older)
        os.close(self._file)
        self._file = self._opened()

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def read_output(directory: str) -> tuple[Piece, ...]:
    """Return all output that is kept, oldest first."""
    reader = OutputReader(directory)
    try:
        return tuple(reader.pieces())
    finally:
        reader.close()


class OutputReader:
    """Reads the files in a directory, and goes on where it stopped when there is more. Close it."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._file: BinaryIO | None = None  # kept open, so that the kernel gives its number to no other file

    def pieces(self) -> Iterator[Piece]:
        """Yield what has come since the last call."""
        yield from self._rest()
        before = self._identity
        if before == self._identity_of(OUTPUT):
            return
        for name in (OLDER, OUTPUT):
            if self._identity_of(name) in (None, before):
                continue
            with suppress(FileNotFoundError):
                opened = open(os.path.join(self._directory, name), "rb")  # noqa: SIM115 - kept open
                self.close()
                self._file = opened
                yield from self._rest()

    def close(self) -> None:
        """Close the file that is being read."""
        if self._file is not None:
            self._file.close()
            self._file = None

    @property
    def _identity(self) -> tuple[int, int] | None:
        if self._file is None:
            return None
        status = os.fstat(self._file.fileno())
        return status.st_dev, status.st_ino

    def _identity_of(self, name: str) -> tuple[int, int] | None:
        with suppress(FileNotFoundError):
            status = os.stat(os.path.join(self._directory, name))
            return status.st_dev, status.st_ino
        return None

    def _rest(self) -> Iterator[Piece]:
        while self._file is not None:
            start = self._file.tell()
            line = self._file.readline()
            if not line.endswith(b"\n"):  # it is not written to its end
                self._file.seek(start)
                return
            if (piece := _piece(line)) is not None:
                yield piece


def _piece(line: bytes) -> Piece | None:
    try:
        at, stream, data = json.loads(line)
        return Piece(float(at), "stderr" if stream == "stderr" else "stdout", unpacked(data))
    except (ValueError, TypeError, BrokenMessage):
        return None


def newest_lines(pieces: tuple[Piece, ...], most: int) -> tuple[Piece, ...]:
    """Return the newest lines of output, of both streams together. A line may have come in several pieces.

    >>> newest_lines((Piece(0, "stdout", b"a\\nb\\n"), Piece(1, "stderr", b"c\\nd")), 2)
    (Piece(at=1, stream='stderr', data=b'c\\nd'),)
    """
    kept: list[Piece] = []
    left = most
    # By stream: whether the oldest line that is kept of it may have begun in an older piece. False once a line is left out.
    begun: dict[str, bool] = {}
    for piece in reversed(pieces):
        if not left and not any(begun.values()):
            break
        start, within = len(piece.data), begun.get(piece.stream)
        while start and within is not False:
            if within is None or piece.data[start - 1 : start] == b"\n":  # the end of another line
                if not left:
                    within = False
                    break
                left -= 1
            within = True
            start = piece.data.rfind(b"\n", 0, start - 1) + 1
        if within is not None:
            begun[piece.stream] = within
        if start < len(piece.data):
            kept.append(Piece(piece.at, piece.stream, piece.data[start:]))
    return tuple(reversed(kept))
