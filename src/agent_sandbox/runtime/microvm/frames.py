"""The frames on the serial port between the driver (outside the machine) and the agent (inside): a kind, a length, and bytes.

The agent is hostile: a program that has taken over the machine's kernel sends whatever it likes. So the driver accepts short frames of
known kinds only, keeps at most one of them, and never unmarshals their content.
"""

from __future__ import annotations

import os
import struct

HEADER = struct.Struct("!cI")
LONGEST = 1 << 16  # bytes of a frame's content
WINDOW = 1 << 16  # bytes of input that the driver sends ahead of the program; the agent holds no more

# From the driver: how to prepare this run, marshalled; bytes for the program's payload socket and for its input; a signal's number.
SETUP, PAYLOAD, PAYLOAD_END, INPUT, INPUT_END, SIGNAL = b"S", b"P", b"Q", b"I", b"Z", b"K"
# From the agent: the template is complete; the machine could not be prepared, with the reason; bytes of the program's payload socket and
# output; how many bytes of input the program has taken, four bytes; the end of the program.
BOOTED, FAILED, SAID, SAID_END, OUTPUT, ERRORS, TAKEN, EXIT = b"b", b"f", b"p", b"q", b"o", b"e", b"t", b"x"
# Of a run with a network, in both directions: bytes of one of its connections; their end; how many of the other side's bytes were passed
# on; the end of the connection, whatever was under way. Each begins with the number of the connection.
BYTES, BYTES_END, PASSED, CUT = b"B", b"D", b"C", b"X"
# From the agent: a new connection of the program, and a query for a name, with the address that it is for. From the driver: the answer.
DIAL, QUERY, ANSWER = b"d", b"u", b"U"
OF_NETWORK = frozenset((BYTES, BYTES_END, PASSED, CUT, DIAL, QUERY))  # that the agent sends
FROM_AGENT = frozenset((BOOTED, FAILED, SAID, SAID_END, OUTPUT, ERRORS, TAKEN, EXIT, *OF_NETWORK))
COUNT = struct.Struct("!I")
# The number of a connection, or of a query; with a number of bytes; with an address (IPv6, or IPv4 mapped into it) and a port.
NUMBER, NUMBER_PASSED, DIALLED, ASKED = struct.Struct("!I"), struct.Struct("!II"), struct.Struct("!I16sH"), struct.Struct("!I16s")
# Wait status, seconds of processor time, peak memory in bytes, and which limits the machine's own kernel enforced: a bit mask.
ENDED = struct.Struct("!HdQB")
OUT_OF_MEMORY, OUT_OF_PROCESSES = 1, 2


class Garbled(Exception):
    """The other side sent something that is no frame. The message says what."""


class PortReader:
    """Splits a stream into frames. Raises `Garbled` as soon as a header is not acceptable, so that it never waits for a huge frame."""

    def __init__(self, kinds: frozenset[bytes] | None = None, longest: int = LONGEST) -> None:
        """Accept frames of these kinds (None: of all), with at most `longest` bytes."""
        self._kinds, self._longest = kinds, longest
        self._bytes = bytearray()

    def feed(self, data: bytes) -> None:
        """Add bytes of the stream."""
        self._bytes += data

    def next(self) -> tuple[bytes, bytes] | None:
        """Return the next frame, as kind and content; None if it is not complete."""
        if len(self._bytes) < HEADER.size:
            return None
        kind, length = HEADER.unpack_from(self._bytes)
        if self._kinds is not None and kind not in self._kinds:
            raise Garbled(f"a frame of the unknown kind {kind!r}")
        if length > self._longest:
            raise Garbled(f"a frame of {length} bytes")
        end = HEADER.size + length
        if len(self._bytes) < end:
            return None
        content = bytes(self._bytes[HEADER.size : end])
        del self._bytes[:end]
        return kind, content


def frame(kind: bytes, content: bytes = b"") -> bytes:
    """Return one frame as bytes."""
    return HEADER.pack(kind, len(content)) + content


def write(fd: int, kind: bytes, content: bytes = b"") -> None:
    """Write a frame to a blocking descriptor."""
    left = memoryview(frame(kind, content))
    while left:
        left = left[os.write(fd, left) :]
