"""WebSocket: frames without sockets, and messages through the door."""

from __future__ import annotations

import asyncio
import base64

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_sandbox.egress.dlp.own_secrets import OwnSecrets
from agent_sandbox.egress.dlp.rules import SearchRule
from agent_sandbox.egress.dlp.scanner import Search
from agent_sandbox.egress.websocket import (
    BINARY,
    CLOSE,
    MOST_MESSAGE,
    PING,
    TEXT,
    FrameReader,
    MalformedFrame,
    Message,
    accept_key,
    mask,
    write_message,
)
from agent_sandbox.policy.bound_secrets import BoundSecret, new_placeholder
from tests.egress.wire import door, run

KEY = base64.b64encode(b"0123456789abcdef")
HANDSHAKE = (
    b"GET /ws HTTP/1.1\r\nHost: web.test\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: " + KEY + b"\r\nSec-WebSocket-Extensions: permessage-deflate\r\n\r\n"
)


def read(data: bytes, *, masked: bool = True, cuts: tuple[int, ...] = ()) -> list[Message]:
    reader = FrameReader(masked=masked)
    found = []
    for start, end in zip((0, *cuts), (*cuts, len(data)), strict=True):
        reader.receive(data[start:end])
        while (message := reader.next()) is not None:
            found.append(message)
    return found


_MESSAGES = st.lists(st.builds(Message, st.sampled_from([TEXT, BINARY]), st.binary(max_size=300)), max_size=4)


@given(_MESSAGES, st.sets(st.integers(1, 1200), max_size=6), st.booleans())
@settings(max_examples=200, deadline=None)
def test_what_is_written_is_read_however_it_is_divided(messages: list[Message], cuts: set[int], masked: bool) -> None:
    data = b"".join(write_message(each, b"\x01\x02\x03\x04" if masked else None) for each in messages)
    assert read(data, masked=masked, cuts=tuple(sorted(each for each in cuts if each < len(data)))) == messages


@given(st.binary(max_size=60))
@settings(max_examples=300, deadline=None)
def test_no_bytes_break_the_reader(data: bytes) -> None:
    for masked in (True, False):
        try:
            read(data, masked=masked)
        except MalformedFrame as error:
            assert error.code in (1002, 1009)


def frame(first: int, payload: bytes = b"", second: int | None = None) -> bytes:
    return bytes((first, 0x80 | len(payload) if second is None else second)) + b"\0\0\0\0" + payload


def test_a_message_in_parts_is_put_together_around_a_ping() -> None:
    data = frame(0x01, b"ab") + frame(0x89, b"?") + frame(0x00, b"cd") + frame(0x80, b"e")
    assert read(data) == [Message(PING, b"?"), Message(TEXT, b"abcde")]


@pytest.mark.parametrize(
    "data",
    [
        frame(0xC1, b"packed"),
        frame(0x83),
        frame(0x80, b"goes on"),
        frame(0x01) + frame(0x81),
        frame(0x09),
        bytes((0x88, 0xFE, 0, 200)),
        bytes((0x81, 0xFE, 0, 5)) + b"\0" * 9,
        bytes((0x82, 0xFF)) + (MOST_MESSAGE + 1).to_bytes(8, "big") + b"\0\0\0\0",
        bytes((0x81, 0x01)) + b"a",
    ],
)
def test_a_frame_that_is_not_allowed_is_refused(data: bytes) -> None:
    with pytest.raises(MalformedFrame):
        read(data)


def test_the_mask_is_the_bytes_of_the_key_in_turn() -> None:
    assert mask(b"abcdef", b"\x01\x02\x03\x04") == bytes(each ^ (place % 4 + 1) for place, each in enumerate(b"abcdef"))


class Echo:
    """A server of WebSocket that writes down what it gets, and sends back each message."""

    def __init__(self, *, wrong: bool = False) -> None:
        self.head, self.messages, self.wrong = b"", list[Message](), wrong

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.head = await reader.readuntil(b"\r\n\r\n")
        writer.write(
            b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: "
            + accept_key(b"x" if self.wrong else KEY)
            + b"\r\n\r\n"
        )
        frames = FrameReader(masked=True)
        while data := await reader.read(65536):
            frames.receive(data)
            while (message := frames.next()) is not None:
                self.messages.append(message)
                writer.write(write_message(message, None))
        writer.close()


def test_messages_go_through_the_door_and_back() -> None:
    async def test() -> None:
        beyond = Echo()
        async with door(beyond=beyond.serve) as opened:
            reader, writer = await opened.open_tls("web.test")
            writer.write(HANDSHAKE + write_message(Message(TEXT, b"early"), b"abcd"))
            assert b" 101 " in await reader.readuntil(b"\r\n\r\n")
            assert await reader.readexactly(7) == write_message(Message(TEXT, b"early"), None)
            writer.write(frame(0x01, b"in ") + frame(0x80, b"parts"))
            assert await reader.readexactly(10) == write_message(Message(TEXT, b"in parts"), None)
            writer.transport.abort()
            assert b"Extensions" not in beyond.head
        assert [flow["how"] for flow in opened.flows] == ["https", "websocket"]
        assert opened.flows[0]["requests"] == ["GET /ws 101"]

    run(test())


async def _closed(reader: asyncio.StreamReader) -> bytes:
    """Return the frame that closes a connection, with its reason."""
    data = b""
    while piece := await reader.read(65536):
        data += piece
    return data


@pytest.mark.parametrize(
    "sent",
    [
        frame(0x81, b"tok-12345678"),
        frame(0x01, b"tok-1234") + frame(0x80, b"5678"),
        frame(0x89, b"tok-12345678"),
        frame(0x82, base64.b64encode(b"a longer text with tok-12345678 in it")),
    ],
)
def test_a_message_with_data_that_must_not_leave_does_not(sent: bytes) -> None:
    async def test() -> None:
        beyond = Echo()
        search = Search.of((SearchRule("test-token", "a token", "tok-[0-9]{8}"),), OwnSecrets.of(()), b"k" * 32)
        async with door(beyond=beyond.serve, search=search) as opened:
            reader, writer = await opened.open_tls("web.test")
            writer.write(HANDSHAKE)
            await reader.readuntil(b"\r\n\r\n")
            writer.write(frame(0x81, b"tak-12345678"))
            await reader.readexactly(14)
            writer.write(sent)
            closed = read(await _closed(reader), masked=False)
            assert closed[-1].kind == CLOSE
            assert b"test-token" in closed[-1].payload
            writer.transport.abort()
            assert [each.payload for each in beyond.messages] == [b"tak-12345678"]
        assert "test-token" in opened.flows[-1]["refused"]

    run(test())


def test_a_secret_is_put_into_the_handshake_and_never_into_a_message() -> None:
    holder, value = new_placeholder("T", b"x" * 16), "the-real-value-1"

    async def test() -> None:
        beyond = Echo()
        async with door(beyond=beyond.serve, secrets=(BoundSecret("T", holder, value, ("web.test",)),)) as opened:
            reader, writer = await opened.open_tls("web.test")
            writer.write(HANDSHAKE.replace(b"\r\n\r\n", f"\r\nAuthorization: Bearer {holder}\r\n\r\n".encode()))
            await reader.readuntil(b"\r\n\r\n")
            assert f"Bearer {value}".encode() in beyond.head
            writer.write(frame(0x81, value.encode()))  # a guest that has it from elsewhere: it does not come back
            assert holder.encode() in await reader.readexactly(len(holder) + 2)
            writer.write(frame(0x81, holder.encode()))
            assert b"which is not bound to it" in await _closed(reader)
            writer.transport.abort()
            assert len(beyond.messages) == 1

    run(test())


def test_a_handshake_that_is_answered_wrongly_fails() -> None:
    async def test() -> None:
        async with door(beyond=Echo(wrong=True).serve) as opened:
            reader, writer = await opened.open_tls("web.test")
            writer.write(HANDSHAKE)
            assert (await reader.readline()).startswith(b"HTTP/1.1 502 ")
            writer.transport.abort()

    run(test())
