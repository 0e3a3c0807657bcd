"""WebSocket without sockets (RFC 6455): frames in, whole messages out; a client's messages are searched, and written afresh.

Extensions are never agreed on, so no bit is reserved for one and nothing is compressed.
"""

from __future__ import annotations

import base64
import hashlib
import os
from dataclasses import dataclass

from agent_sandbox.egress.fragments import texts_of_body
from agent_sandbox.egress.web import Passage

MOST_MESSAGE = 4 << 20  # bytes
TEXT, BINARY, CLOSE, PING, PONG = 1, 2, 8, 9, 10
_CONTINUATION = 0
_MOST_CONTROL = 125
_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"


class MalformedFrame(Exception):
    """Bytes that are no frame, or one that is not allowed here. `code` tells the other side."""

    def __init__(self, why: str, code: int = 1002) -> None:
        super().__init__(why)
        self.code = code


@dataclass(frozen=True)
class Message:
    """A whole message, or a control frame."""

    kind: int
    payload: bytes


class FrameReader:
    """Reads the frames of one side. A client's frames are masked, a server's are not."""

    def __init__(self, *, masked: bool) -> None:
        self._masked = masked
        self._buffer = bytearray()
        self._kind = 0  # of the message whose parts are read
        self._parts = bytearray()

    def receive(self, data: bytes) -> None:
        """Take bytes."""
        self._buffer += data

    def next(self) -> Message | None:
        """Return the next message; None while more bytes are needed. Raises `MalformedFrame`."""
        while (frame := self._frame()) is not None:
            final, kind, payload = frame
            if kind >= CLOSE:
                return Message(kind, payload)
            if (kind == _CONTINUATION) != bool(self._kind):
                raise MalformedFrame("a message begins inside of another, or goes on without having begun")
            self._kind = self._kind or kind
            self._parts += payload
            if len(self._parts) > MOST_MESSAGE:
                raise MalformedFrame(f"a message of more than {MOST_MESSAGE} bytes", 1009)
            if final:
                message = Message(self._kind, bytes(self._parts))
                self._kind = 0
                self._parts.clear()
                return message
        return None

    def _frame(self) -> tuple[bool, int, bytes] | None:
        buffer = self._buffer
        if len(buffer) < 2:
            return None
        final, kind, length = bool(buffer[0] & 0x80), buffer[0] & 15, buffer[1] & 0x7F
        if buffer[0] & 0x70:
            raise MalformedFrame("a frame of an extension that was not agreed on")
        if kind not in (_CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG):
            raise MalformedFrame("a frame of an unknown kind")
        if bool(buffer[1] & 0x80) != self._masked:
            raise MalformedFrame("a frame that should be masked, or should not be")
        if kind >= CLOSE and (not final or length > _MOST_CONTROL):
            raise MalformedFrame("a control frame that is too long, or in parts")
        wide = {126: 2, 127: 8}.get(length, 0)
        begin = 2 + wide + (4 if self._masked else 0)
        if len(buffer) < begin:
            return None
        if wide:
            length = int.from_bytes(buffer[2 : 2 + wide], "big")
            if length < (126 if wide == 2 else 1 << 16):
                raise MalformedFrame("a length that is not written in its shortest form")
        if length > MOST_MESSAGE:
            raise MalformedFrame(f"a message of more than {MOST_MESSAGE} bytes", 1009)
        if len(buffer) < begin + length:
            return None
        payload = bytes(buffer[begin : begin + length])
        if self._masked:
            payload = mask(payload, bytes(buffer[begin - 4 : begin]))
        del buffer[: begin + length]
        return final, kind, payload


def write_message(message: Message, key: bytes | None) -> bytes:
    """Return a message as one frame, masked with this key of four bytes, or not masked."""
    length = len(message.payload)
    masked = 0x80 if key is not None else 0
    head = bytes((0x80 | message.kind, masked | (length if length < 126 else 126 if length < 1 << 16 else 127)))
    if length >= 126:
        head += length.to_bytes(2 if length < 1 << 16 else 8, "big")
    return head + (key + mask(message.payload, key) if key is not None else message.payload)


def close_message(code: int, why: str) -> Message:
    """Return the message that closes a connection."""
    return Message(CLOSE, code.to_bytes(2, "big") + why.encode()[:120])


def mask(payload: bytes, key: bytes) -> bytes:
    """Return a payload masked, or unmasked: it is the same."""
    length = len(payload)
    repeated = (key * (length // 4 + 1))[:length]
    return (int.from_bytes(payload, "big") ^ int.from_bytes(repeated, "big")).to_bytes(length, "big")


def accept_key(key: bytes) -> bytes:
    """Return the answer that proves that a server has read the key of a handshake."""
    return base64.b64encode(hashlib.sha1(key + _GUID, usedforsecurity=False).digest())


class Relay:
    """The messages of one WebSocket, after its handshake. `notes` takes findings."""

    def __init__(self, passage: Passage, notes: list[str]) -> None:
        self._passage, self._notes = passage, notes
        self._client, self._server = FrameReader(masked=True), FrameReader(masked=False)

    def onward(self, data: bytes) -> bytes:
        """Return what goes on of a client's bytes. Raises `FlowRefused` and `MalformedFrame`."""
        self._client.receive(data)
        written = []
        inspection = self._passage.customs.inspection
        while (message := self._client.next()) is not None:
            payload = inspection.message(message.payload, "a message of WebSocket", self._notes)
            if inspection.joins:
                inspection.join(self._passage.origin.name, texts_of_body(self._kind(payload), payload), self._notes)
            written.append(write_message(Message(message.kind, payload), os.urandom(4)))
        return b"".join(written)

    def _kind(self, payload: bytes) -> bytes:
        return b"application/json" if payload[:1] in (b"{", b"[") else b""

    def back(self, data: bytes) -> bytes:
        """Return what goes back of a server's bytes: those bytes, or messages without secrets if some are bound to the host."""
        scrubber = self._passage.customs.broker.scrubber(self._passage.origin.name)
        if scrubber is None:
            return data
        self._server.receive(data)
        written = []
        while (message := self._server.next()) is not None:
            written.append(write_message(Message(message.kind, scrubber.clean(message.payload)), None))
        return b"".join(written)
