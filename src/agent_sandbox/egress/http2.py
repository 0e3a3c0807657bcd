"""HTTP/2 on the client's side: one connection whose requests are read side by side, each judged and carried like one of HTTP/1.1.

Frames, header compression and flow control are h2's. A head becomes the same values as that of HTTP/1.1, and is checked as strictly.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.exceptions
import h2.settings

from agent_sandbox.egress.channel import SocketChannel
from agent_sandbox.egress.http1 import MOST_FIELDS, MOST_HEAD, Fields, MalformedHttp, RequestHead, ResponseHead, read_fields
from agent_sandbox.egress.http2_upstream import FrameLengths
from agent_sandbox.egress.rules import FlowRefused
from agent_sandbox.egress.upstream import Patience
from agent_sandbox.egress.web import refusal_response

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
MOST_STREAMS = 100
_MOST_RESETS = 1000  # streams that a client opens only to break them off, before its connection is closed
_TARGET = re.compile(rb"[\x21-\x7e]+")
_METHOD = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]{1,32}")
_CONFIG = h2.config.H2Configuration(client_side=False, header_encoding=None)


def read_head(fields: list[tuple[bytes, bytes]], *, ended: bool) -> RequestHead:
    """Return the head of a request from its fields in HTTP/2. Raises `MalformedHttp`."""
    special = {key: value for key, value in fields if key.startswith(b":")}
    plain = [(key, value) for key, value in fields if not key.startswith(b":")]
    if len(special) + len(plain) != len(fields) or len(plain) > MOST_FIELDS:
        raise MalformedHttp("it has too many fields, or one twice", 431)
    if set(special) != {b":method", b":scheme", b":path", b":authority"} and set(special) != {b":method", b":scheme", b":path"}:
        raise MalformedHttp("it has no method, scheme or path, or is a CONNECT")
    method, target = special[b":method"], special[b":path"]
    if not _METHOD.fullmatch(method) or not _TARGET.fullmatch(target):
        raise MalformedHttp("its method or path is malformed")
    hosts = [value for key, value in plain if key == b"host"] + ([special[b":authority"]] if b":authority" in special else [])
    if not hosts or len({each.lower() for each in hosts}) != 1:
        raise MalformedHttp("it has no host, or two")
    cookies = [value for key, value in plain if key == b"cookie"]
    kept = [(b"host", hosts[0]), *((key, value) for key, value in plain if key not in (b"host", b"cookie"))]
    if cookies:
        kept.append((b"cookie", b"; ".join(cookies)))
    checked = read_fields([key + b":" + value for key, value in kept])
    lengths = [value for key, value in checked if key == b"content-length"]
    if len(lengths) > 1 or not all(re.fullmatch(rb"[0-9]{1,18}", each) for each in lengths):
        raise MalformedHttp("it has more than one length, or none that is a number")
    return RequestHead(method, target, checked, 0 if ended else int(lengths[0]) if lengths else None)


class Http2Connection:
    """A connection of the sandbox that speaks HTTP/2. `serve` carries one request; it runs as a task of its own for each."""

    def __init__(self, channel: SocketChannel, patience: Patience, serve: Callable[[StreamRequest], Awaitable[None]]) -> None:
        self.channel, self.patience = channel, patience
        self.h2 = h2.connection.H2Connection(_CONFIG)
        self.h2.local_settings = h2.settings.Settings(
            client=False,
            initial_values={
                h2.settings.SettingCodes.MAX_CONCURRENT_STREAMS: MOST_STREAMS,
                h2.settings.SettingCodes.MAX_HEADER_LIST_SIZE: MOST_HEAD,
            },
        )
        self._serve = serve
        self._streams: dict[int, StreamRequest] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._resets = 0
        self._lengths = FrameLengths(len(PREFACE))

    async def run(self, idle: Callable[[], None]) -> None:
        """Serve requests until the connection ends. `idle` is called when it rests. Raises OSError."""
        self.h2.initiate_connection()
        try:
            self.flush()
            while True:
                try:
                    data = await self.channel.read(self.patience.idle)
                except TimeoutError:
                    if self._tasks:
                        continue
                    break
                if not data:
                    break
                self._lengths.check(data)
                for event in self.h2.receive_data(data):
                    self._take(event)
                self.flush()
                await self.channel.drain(self.patience.between)
                if self._resets > _MOST_RESETS:
                    break
                if not self._tasks:
                    idle()
        except (h2.exceptions.ProtocolError, MalformedHttp):
            self.flush()
            raise FlowRefused(400, "the connection is malformed HTTP/2") from None
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)
            with suppress(h2.exceptions.ProtocolError, OSError):
                self.h2.close_connection()
                self.flush()

    def flush(self) -> None:
        """Send what is to be sent. Raises OSError."""
        if data := self.h2.data_to_send():
            self.channel.write(data)

    def _take(self, event: Any) -> None:
        stream = self._streams.get(getattr(event, "stream_id", 0) or 0)
        if isinstance(event, h2.events.RequestReceived):
            self._begin(event)
        elif isinstance(event, h2.events.DataReceived):
            if stream is None:
                self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            else:
                stream.take(event.data, event.flow_controlled_length)
        elif isinstance(event, h2.events.StreamEnded) and stream is not None:
            stream.end()
        elif isinstance(event, h2.events.StreamReset):
            self._resets += 1
            if (task := self._tasks.get(event.stream_id)) is not None:
                task.cancel()
        elif isinstance(event, (h2.events.WindowUpdated, h2.events.RemoteSettingsChanged)):
            for each in self._streams.values():
                each.room.set()

    def _begin(self, event: Any) -> None:
        ended = event.stream_ended is not None
        try:
            head = read_head(list(event.headers), ended=ended)
        except MalformedHttp as error:
            response, text = refusal_response(error.status, f"the request is malformed HTTP/2: {error}")
            self.h2.send_headers(event.stream_id, [(b":status", b"%d" % response.status), *response.fields])
            self.h2.send_data(event.stream_id, text, end_stream=True)
            return
        stream = self._streams[event.stream_id] = StreamRequest(self, event.stream_id, head, ended)
        task = self._tasks[event.stream_id] = asyncio.ensure_future(self._carry(stream))
        task.add_done_callback(lambda _: self._forget(event.stream_id))

    async def _carry(self, stream: StreamRequest) -> None:
        try:
            await self._serve(stream)
        except (OSError, TimeoutError, h2.exceptions.ProtocolError):
            stream.reset()
        else:
            if not stream.at_end():
                stream.reset(h2.errors.ErrorCodes.NO_ERROR)  # the answer is whole, and the rest of the body is not wanted

    def _forget(self, number: int) -> None:
        stream = self._streams.pop(number, None)
        self._tasks.pop(number, None)
        if stream is not None:
            stream.give_back()


class StreamRequest:
    """One request of HTTP/2, and the way to answer it: a `Requester` of `exchange`."""

    http2 = True

    def __init__(self, connection: Http2Connection, number: int, head: RequestHead, ended: bool) -> None:
        self.head, self.answered = head, False
        self.room = asyncio.Event()  # set when more may be sent
        self._connection, self._number = connection, number
        self._pieces: deque[tuple[bytes, int]] = deque()
        self._news = asyncio.Event()
        self._ended = ended

    @property
    def alive(self) -> bool:
        """Whether the client still holds the connection. A stream that it resets ends by itself."""
        return self._connection.channel.alive

    def take(self, data: bytes, counted: int) -> None:
        """Take a piece of the body. The client may send more once it has been read."""
        self._pieces.append((data, counted))
        self._news.set()

    def end(self) -> None:
        """Take the end of the body."""
        self._ended = True
        self._news.set()

    def give_back(self) -> None:
        """Let the client send on other streams what this one has not read."""
        while self._pieces:
            self._acknowledge(self._pieces.popleft()[1])

    async def read(self) -> bytes:
        """Return the next piece of the request's body; nothing at its end. Raises `FlowRefused` if it breaks, whatever the cause."""
        while True:
            while self._pieces:
                data, counted = self._pieces.popleft()
                self._acknowledge(counted)
                if data:
                    return data
            if self._ended:
                return b""
            self._news.clear()
            try:
                async with asyncio.timeout(self._connection.patience.between):
                    await self._news.wait()
            except TimeoutError:
                raise FlowRefused(408, "the body of the request did not arrive in time") from None

    def _acknowledge(self, counted: int) -> None:
        with suppress(h2.exceptions.ProtocolError, OSError, KeyError):
            if counted:
                self._connection.h2.acknowledge_received_data(counted, self._number)
                self._connection.flush()

    def at_end(self) -> bool:
        """Return whether the whole body has arrived and been read, without waiting."""
        return self._ended and not self._pieces

    async def answer(self, head: ResponseHead) -> None:
        """Begin the answer. Raises OSError."""
        self.answered = True
        fields = list(head.fields)
        if head.length is not None and head.length > 0 and not head.values(b"content-length"):
            fields.append((b"content-length", b"%d" % head.length))
        self._connection.h2.send_headers(self._number, [(b":status", b"%d" % head.status), *fields])

    async def send(self, piece: bytes) -> None:
        """Send a piece of the answer's body. Raises OSError and TimeoutError."""
        connection = self._connection
        view = memoryview(piece)
        while view:
            size = min(len(view), connection.h2.local_flow_control_window(self._number), connection.h2.max_outbound_frame_size)
            if size <= 0:
                self.room.clear()
                connection.flush()
                async with asyncio.timeout(connection.patience.between):
                    await self.room.wait()
                continue
            connection.h2.send_data(self._number, bytes(view[:size]))
            view = view[size:]
        connection.flush()
        await connection.channel.drain(connection.patience.between)

    async def finish(self, trailers: Fields = ()) -> None:
        """End the answer. Raises OSError and TimeoutError."""
        if trailers:
            self._connection.h2.send_headers(self._number, list(trailers), end_stream=True)
        else:
            self._connection.h2.end_stream(self._number)
        self._connection.flush()

    def reset(self, code: h2.errors.ErrorCodes = h2.errors.ErrorCodes.INTERNAL_ERROR) -> None:
        """Break the stream off."""
        with suppress(h2.exceptions.ProtocolError, OSError):
            self._connection.h2.reset_stream(self._number, code)
            self._connection.flush()
