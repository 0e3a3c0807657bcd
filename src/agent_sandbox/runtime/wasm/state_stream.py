"""The content of a durable checkpoint: records in one compressed stream. A guest writes it, and a guest reads it.

    F   a file, directory, link or missing path below the root: a length, JSON, and for a file its content
    S   the open descriptors and the state of our system calls: a length and JSON
    M   pages of memory: the first page, their number, and for each page its difference from the image
    E   the end

Everything is read in the confined guest, never in the supervisor: what is compressed there may come from anybody.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable, Iterable
from typing import Any

from agent_sandbox.runtime.guest_rpc.transfer import LARGEST_PIECE
from agent_sandbox.runtime.wasm.wasi.descriptors import NotKept

PAGE = 4096
RUN = 256  # pages in one record, at most
_LEVEL = 1  # most pages differ in few bytes: a higher level takes three times as long and saves a tenth
_FILE, _STATE, _MEMORY, _END = b"F", b"S", b"M", b"E"
_LENGTH, _PAGES, _SIZE = struct.Struct("!I"), struct.Struct("!II"), struct.Struct("!Q")
_LONGEST_JSON = 64 << 20


class StateWriter:
    """Writes the stream. `send` gets it in pieces."""

    def __init__(self, send: Callable[[bytes], None]) -> None:
        self._send = send
        self._compressor = zlib.compressobj(_LEVEL)
        self._unsent = bytearray()

    def file(self, entry: dict[str, Any], size: int = 0, content: Iterable[bytes] = ()) -> None:
        """Write a file, with exactly `size` bytes of content."""
        self._json(_FILE, entry)
        self._add(_SIZE.pack(size))
        for piece in content:
            self._add(piece[:size])
            size -= min(len(piece), size)
        if size:
            raise NotKept("a file became shorter while it was saved")

    def state(self, state: dict[str, Any]) -> None:
        """Write the descriptors and the state of our system calls."""
        self._json(_STATE, state)

    def memory(self, first: int, pages: list[bytes]) -> None:
        """Write pages that follow one another, each as its difference."""
        self._add(_MEMORY + _PAGES.pack(first, len(pages)))
        self._add(b"".join(pages))

    def end(self) -> None:
        """Write the end, and send what was not sent yet."""
        self._add(_END)
        self._unsent += self._compressor.flush()
        while self._unsent:
            self._send_piece()

    def _json(self, kind: bytes, value: dict[str, Any]) -> None:
        text = json.dumps(value, separators=(",", ":")).encode()
        if len(text) > _LONGEST_JSON:
            raise NotKept("it has too many open files, or too many files in the directories that it lists")
        self._add(kind + _LENGTH.pack(len(text)) + text)

    def _add(self, data: bytes) -> None:
        self._unsent += self._compressor.compress(data)
        while len(self._unsent) >= LARGEST_PIECE:
            self._send_piece()

    def _send_piece(self) -> None:
        self._send(bytes(self._unsent[:LARGEST_PIECE]))
        del self._unsent[:LARGEST_PIECE]


class StateReader:
    """Reads the stream. `receive` returns its next piece, and nothing at its end. Raises `NotKept` and zlib.error for a bad stream."""

    def __init__(self, receive: Callable[[], bytes]) -> None:
        self._receive = receive
        self._decompressor = zlib.decompressobj()
        self._unread = bytearray()

    def read(
        self,
        file: Callable[[dict[str, Any], int, Callable[[int], bytes]], None],
        state: Callable[[dict[str, Any]], None],
        memory: Callable[[int, list[bytes]], None],
    ) -> None:
        """Read all records, and call the function for each. `file` also gets the size, and a function that returns the next bytes."""
        while (kind := self._take(1)) != _END:
            match kind:
                case b"F":
                    entry = self._json()
                    (size,) = _SIZE.unpack(self._take(_SIZE.size))
                    file(entry, size, self._take)
                case b"S":
                    state(self._json())
                case b"M":
                    first, count = _PAGES.unpack(self._take(_PAGES.size))
                    if not 0 < count <= RUN:
                        raise NotKept("its memory is not in order")
                    memory(first, [self._take(PAGE) for _ in range(count)])
                case _:
                    raise NotKept("it has a record of an unknown kind")
        if self._unread or self._decompressor.unused_data or self._receive():
            raise NotKept("something follows its end")

    def _json(self) -> dict[str, Any]:
        (length,) = _LENGTH.unpack(self._take(_LENGTH.size))
        if length > _LONGEST_JSON:
            raise NotKept("a description in it is too long")
        value = json.loads(self._take(length))
        if not isinstance(value, dict):
            raise NotKept("a description in it is none")
        return value

    def _take(self, count: int) -> bytes:
        while len(self._unread) < count:
            waiting = self._decompressor.unconsumed_tail or self._receive()
            if not waiting:
                raise NotKept("it is cut off")
            self._unread += self._decompressor.decompress(waiting, LARGEST_PIECE)
        taken = bytes(self._unread[:count])
        del self._unread[:count]
        return taken
