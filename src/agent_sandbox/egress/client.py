"""The client's side of HTTP/1.1: a connection of the sandbox whose requests are read one after another, and answered."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from agent_sandbox.egress.channel import SocketChannel
from agent_sandbox.egress.http1 import (
    LAST_CHUNK,
    Fields,
    MalformedHttp,
    MessageReader,
    ReaderMark,
    RequestHead,
    ResponseHead,
    reason_of,
    write_chunk,
    write_response,
)
from agent_sandbox.egress.rules import FlowRefused
from agent_sandbox.egress.upstream import Patience
from agent_sandbox.egress.web import refusal_response

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_SETTLE = 1.0  # seconds after which a connection without a new request counts as idle


class ClientConnection:
    """One connection of the sandbox that speaks HTTP/1.1."""

    def __init__(self, channel: SocketChannel, patience: Patience) -> None:
        self.channel, self.patience = channel, patience
        self.reader = MessageReader()
        self._first = True

    async def next(self, idle: Callable[[], None]) -> ClientRequest | None:
        """Return the next request; None at the end. `idle` is called once the connection rests. Raises `FlowRefused` and OSError."""
        try:
            head: object = self.reader.next()
            if head is ReaderMark.MORE:
                head = await self._wait(idle)
        except MalformedHttp as error:
            raise FlowRefused(error.status, f"the request is malformed HTTP: {error}") from None
        if not isinstance(head, RequestHead):
            return None
        self._first = False
        return ClientRequest(self, head)

    async def _wait(self, idle: Callable[[], None]) -> object:
        """Read until a head is whole. All of it must come within a time, so that a client cannot hold a connection by single bytes."""
        loop = asyncio.get_running_loop()
        begun = bool(self.reader.rest)
        seconds = self.patience.first if self._first else self.patience.idle
        until = loop.time() + (self.patience.head if begun else seconds)
        while True:
            try:
                data = await self.channel.read(min(_SETTLE, max(0.0, until - loop.time())))
            except TimeoutError:
                idle()
                if loop.time() < until:
                    continue
                if begun:
                    raise FlowRefused(408, "the request did not arrive in time") from None
                return ReaderMark.CLOSED
            self.reader.receive(data)
            if (head := self.reader.next()) is not ReaderMark.MORE:
                return head
            if not begun:
                begun, until = True, loop.time() + self.patience.head

    async def refuse(self, why: FlowRefused) -> None:
        """Answer what is no request with a refusal."""
        head, text = refusal_response(why.status, str(why))
        fields = (*head.fields, (b"content-length", b"%d" % len(text)), (b"connection", b"close"))
        self.channel.write(write_response(head.status, head.reason, fields) + text)
        await self.channel.drain(self.patience.between)


class ClientRequest:
    """One request of a client, and the way to answer it: a `Requester` of `exchange`."""

    http2 = False

    def __init__(self, connection: ClientConnection, head: RequestHead) -> None:
        self.connection, self.head = connection, head
        self.answered = False
        self._read = False  # the body has been read to its end
        self._waits = head.minor == 1 and head.length != 0 and [each.lower() for each in head.values(b"expect")] == [b"100-continue"]
        self._ahead = b""  # a piece of the body that was read ahead
        self._pending = b""  # the head of the answer, until there is something to send with it
        self._chunked = False
        self._keep = head.minor == 1 and b"close" not in b",".join(head.values(b"connection")).lower()

    @property
    def alive(self) -> bool:
        """Whether the client still holds the connection."""
        return self.connection.channel.alive

    @property
    def reusable(self) -> bool:
        """Whether another request can follow on the connection."""
        return self._keep and self.at_end()

    async def read(self) -> bytes:
        """Return the next piece of the request's body; nothing at its end. Raises `FlowRefused` if it breaks, whatever the cause."""
        connection = self.connection
        if self._read:
            return b""
        if piece := self._ahead:
            self._ahead = b""
            return piece
        try:
            while (event := connection.reader.next()) is ReaderMark.MORE:
                if self._waits:
                    self._waits = False
                    connection.channel.write(_CONTINUE)
                connection.reader.receive(await connection.channel.read(connection.patience.between))
        except TimeoutError:
            raise FlowRefused(408, "the body of the request did not arrive in time") from None
        except MalformedHttp as error:
            raise FlowRefused(error.status, f"the body of the request is malformed: {error}") from None
        except OSError:
            raise FlowRefused(400, "the client broke off in the middle of the request") from None
        if isinstance(event, bytes):
            return event
        self._read = True
        return b""

    def at_end(self) -> bool:
        """Return whether the whole body has arrived and been read, without waiting."""
        if not self._read and not self._ahead:
            with suppress(MalformedHttp):  # the next read says so
                event = self.connection.reader.next()
                self._read = event is ReaderMark.END
                self._ahead = event if isinstance(event, bytes) else b""
        return self._read

    async def answer(self, head: ResponseHead) -> None:
        """Begin the answer. A length of None or -1 means that it is not known yet."""
        self.answered = True
        fields = head.fields
        empty = self.head.method == b"HEAD" or head.status in (204, 304)
        if not empty:
            if head.length is not None and head.length >= 0:
                if not any(key == b"content-length" for key, _ in fields):
                    fields = (*fields, (b"content-length", b"%d" % head.length))
            elif self.head.minor:
                self._chunked = True
                fields = (*fields, (b"transfer-encoding", b"chunked"))
            else:
                self._keep = False
        if head.status >= 400 and not self.reusable:
            self._keep = False
        if not self._keep:
            fields = (*fields, (b"connection", b"close"))
        self._pending = write_response(head.status, head.reason or reason_of(head.status), fields)

    async def switch(self, head: ResponseHead) -> None:
        """Answer that the protocol changes to WebSocket. Raises OSError."""
        self.answered, self._keep = True, False
        fields = (*head.fields, (b"connection", b"Upgrade"), (b"upgrade", b"websocket"))
        self.connection.channel.write(write_response(101, reason_of(101), fields))

    async def send(self, piece: bytes) -> None:
        """Send a piece of the answer's body. Raises OSError and TimeoutError."""
        if not piece:
            return
        data = self._pending + (write_chunk(piece) if self._chunked else piece)
        self._pending = b""
        self.connection.channel.write(data)
        await self.connection.channel.drain(self.connection.patience.between)

    async def finish(self, trailers: Fields = ()) -> None:
        """End the answer; trailers are not passed on. Raises OSError and TimeoutError."""
        data = self._pending + (LAST_CHUNK if self._chunked else b"")
        self._pending = b""
        if data:
            self.connection.channel.write(data)
            await self.connection.channel.drain(self.connection.patience.between)
