"""HTTP/2 towards hosts beyond, for clients that speak it: trailers come back, as gRPC needs them. One request at a time on a connection."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import h2.config
import h2.connection
import h2.events
import h2.exceptions
import h2.settings

from agent_sandbox.egress.channel import SocketChannel
from agent_sandbox.egress.http1 import MOST_HEAD, Fields, MalformedHttp, ResponseHead, read_fields
from agent_sandbox.egress.rules import Origin
from agent_sandbox.egress.web import Passage

_CONFIG = h2.config.H2Configuration(client_side=True, header_encoding=None)
_FRAME_HEAD, _MOST_FRAME = 9, 16384  # bytes
_LOW = 64 << 10  # bytes that wait to be sent, below which more are taken
_FORBIDDEN = frozenset((b"host", b"connection", b"transfer-encoding", b"upgrade", b"keep-alive"))


class FrameLengths:
    """Watches the lengths of frames in a stream of bytes: h2 would hold a frame of 16 MB before it says that it is too long."""

    def __init__(self, skip: int = 0) -> None:
        self._left, self._head = skip, b""

    def check(self, data: bytes) -> None:
        """Take the next bytes. Raises `MalformedHttp` at a frame that is longer than was agreed on."""
        place = 0
        while place < len(data):
            if self._left:
                step = min(self._left, len(data) - place)
                self._left -= step
            else:
                step = min(_FRAME_HEAD - len(self._head), len(data) - place)
                self._head += data[place : place + step]
                if len(self._head) == _FRAME_HEAD:
                    self._left, self._head = int.from_bytes(self._head[:3], "big"), b""
                    if self._left > _MOST_FRAME:
                        raise MalformedHttp("a frame is longer than was agreed on")
            place += step


@dataclass(eq=False)
class Http2Upstream:
    """A connection to a host beyond that speaks HTTP/2. It has the methods of `UpstreamConnection`."""

    channel: SocketChannel
    origin: Origin
    between: float  # seconds that are waited for the next piece
    used: bool = False
    since: float = 0.0
    whole: bool = False
    trailers: Fields = ()
    _stream: int = 0
    _waiting: bytearray = field(default_factory=bytearray)  # to be sent
    _last: bool = False
    _closed: bool = False  # the end of the request has been sent
    _events: deque[ResponseHead | bytes | None] = field(default_factory=deque)  # None: the end
    _room: asyncio.Event = field(default_factory=asyncio.Event)
    _lengths: FrameLengths = field(default_factory=FrameLengths)

    def __post_init__(self) -> None:
        self._h2 = h2.connection.H2Connection(_CONFIG)
        self._h2.local_settings = h2.settings.Settings(
            client=True,
            initial_values={h2.settings.SettingCodes.ENABLE_PUSH: 0, h2.settings.SettingCodes.MAX_HEADER_LIST_SIZE: MOST_HEAD},
        )
        self._h2.initiate_connection()

    def begin(self, passage: Passage, first: bytes, length: int | None, *, ended: bool) -> None:
        """Send the head of a request and the first piece of its body. Raises OSError and MalformedHttp."""
        fields = [each for each in passage.onward_fields(length) if each[0] not in _FORBIDDEN]
        if passage.asked.values(b"te") == [b"trailers"]:
            fields.append((b"te", b"trailers"))
        special = [(b":method", passage.judged.method), (b":scheme", b"https"), (b":authority", self.origin.field)]
        self.whole, self._last, self.trailers = False, ended, ()
        self._closed = ended and not first
        self._waiting[:] = first
        self._events.clear()
        try:
            self._stream = self._h2.get_next_available_stream_id()
            self._h2.send_headers(self._stream, [*special, (b":path", passage.judged.target), *fields], end_stream=self._closed)
            self._pump()
        except h2.exceptions.ProtocolError as error:
            raise MalformedHttp(str(error)) from None

    async def send(self, piece: bytes, *, last: bool) -> None:
        """Send a piece of the request's body. Raises OSError, TimeoutError and MalformedHttp."""
        self._waiting += piece
        self._last = last
        self._pump()
        async with asyncio.timeout(self.between):
            while len(self._waiting) > _LOW:
                self._room.clear()
                await self._room.wait()
        await self.channel.drain(self.between)

    def _pump(self) -> None:
        """Send as much as the host takes now."""
        try:
            while self._waiting and (size := self._window()) > 0:
                piece = bytes(self._waiting[:size])
                del self._waiting[:size]
                self._closed = self._last and not self._waiting
                self._h2.send_data(self._stream, piece, end_stream=self._closed)
            if self._last and not self._waiting and not self._closed:
                self._closed = True
                self._h2.end_stream(self._stream)
        except h2.exceptions.ProtocolError as error:
            raise MalformedHttp(str(error)) from None
        if data := self._h2.data_to_send():
            self.channel.write(data)
        self._room.set()

    def _window(self) -> int:
        return min(self._h2.local_flow_control_window(self._stream), self._h2.max_outbound_frame_size)

    async def response(self, method: bytes, seconds: float) -> ResponseHead:
        """Return the head of the response. Raises OSError, TimeoutError and MalformedHttp."""
        while True:
            event = await self._next(seconds)
            if isinstance(event, ResponseHead):
                return event
            if event is None:
                raise MalformedHttp("it ended before it began")

    async def read(self) -> bytes:
        """Return the next piece of the response's body; nothing at its end. Raises OSError, TimeoutError and MalformedHttp."""
        piece = await self._next(self.between)
        if isinstance(piece, bytes):
            return piece
        self.whole = True
        return b""

    async def _next(self, seconds: float) -> ResponseHead | bytes | None:
        while not self._events:
            data = await self.channel.read(seconds)
            if not data:
                raise ConnectionResetError("it closed the connection")
            self._lengths.check(data)
            try:
                for event in self._h2.receive_data(data):
                    self._take(event)
            except h2.exceptions.ProtocolError as error:
                raise MalformedHttp(f"HTTP/2: {error}") from None
            self._pump()
        return self._events.popleft()

    def _take(self, event: Any) -> None:
        if isinstance(event, h2.events.ConnectionTerminated):
            raise ConnectionResetError("it ended the connection")
        if getattr(event, "stream_id", None) != self._stream:
            return
        if isinstance(event, h2.events.ResponseReceived):
            fields = list(event.headers)
            status = next((value for key, value in fields if key == b":status"), b"")
            if not (len(status) == 3 and status.isdigit()):
                raise MalformedHttp("its status is no number")
            plain = read_fields([key + b":" + value for key, value in fields if not key.startswith(b":")])
            length = next((int(value) for key, value in plain if key == b"content-length" and value.isdigit()), None)
            self._events.append(ResponseHead(int(status), plain, 0 if event.stream_ended is not None else length))
        elif isinstance(event, h2.events.DataReceived):
            self._h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            if event.data:
                self._events.append(event.data)
        elif isinstance(event, h2.events.TrailersReceived):
            self.trailers = read_fields([key + b":" + value for key, value in event.headers])
        elif isinstance(event, h2.events.StreamEnded):
            self._events.append(None)
        elif isinstance(event, h2.events.StreamReset):
            raise ConnectionResetError("it broke the request off")

    def leave(self) -> tuple[SocketChannel, bytes]:
        """Return nothing: no other protocol follows HTTP/2."""
        raise MalformedHttp("it changed to another protocol")

    @property
    def reusable(self) -> bool:
        """Whether another request can be sent, as far as is known."""
        return self.whole and self.channel.alive and self._closed
