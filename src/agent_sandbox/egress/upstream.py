"""Connections to the hosts beyond: resolved once, judged, dialled, verified, and used again.

A name is resolved by the supervisor after the rules have allowed it. All addresses of the answer are judged, and one that was judged is
dialled. A connection that has served a request waits a while for the next one to the same host, from whichever connection of the sandbox.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field

from agent_sandbox.egress.addresses import dialled
from agent_sandbox.egress.channel import SocketChannel
from agent_sandbox.egress.http1 import LAST_CHUNK, Fields, MalformedHttp, MessageReader, ReaderMark, ResponseHead, write_chunk
from agent_sandbox.egress.http2_upstream import Http2Upstream
from agent_sandbox.egress.rules import FlowRefused, Origin
from agent_sandbox.egress.web import Passage
from agent_sandbox.policy.network import NetworkRules, is_address

Resolve = Callable[[str], Awaitable[Iterable[str]]]
Connect = Callable[[str, int], Awaitable[SocketChannel]]
_MOST_ADDRESSES = 4  # that are tried
_MOST_IDLE = 512  # connections that wait for their next use: as many as clients may have, so that none is opened anew for each request
_MOST_INFORMATIONAL = 16


@dataclass(frozen=True)
class Patience:
    """Seconds that are waited: for a client's first bytes, a whole head, the next piece of a body, a dialled host, and its response."""

    first: float = 20.0
    head: float = 20.0
    between: float = 120.0
    dial: float = 20.0
    response: float = 600.0
    tunnel: float = 3600.0  # without a byte, in a connection that is not HTTP
    idle: float = 60.0  # between two requests, and for a connection beyond that waits for its next use


async def connect(address: str, port: int) -> SocketChannel:
    """Open a connection to an address. Raises OSError."""
    _, channel = await asyncio.get_running_loop().create_connection(SocketChannel, address, port)
    return channel


@dataclass(eq=False)
class UpstreamConnection:
    """A connection to a host beyond that speaks HTTP/1.1. `used` says that it has served a request before."""

    channel: SocketChannel
    origin: Origin
    patience: Patience
    used: bool = False
    since: float = 0.0  # when it was last used
    _reader: MessageReader = field(default_factory=lambda: MessageReader(responses=True))
    whole: bool = False  # the response was read to its end
    trailers: Fields = ()  # after the response: none, those of HTTP/1.1 are not passed on
    _chunked: bool = False

    def begin(self, passage: Passage, first: bytes, length: int | None, *, ended: bool) -> None:
        """Send the head of a request and the first piece of its body. Raises OSError."""
        self._chunked = length is None
        self.channel.write(passage.onward(length) + (write_chunk(first) if self._chunked else first))

    async def send(self, piece: bytes, *, last: bool) -> None:
        """Send a piece of the request's body. Raises OSError and TimeoutError."""
        if self._chunked:
            piece = write_chunk(piece) + (LAST_CHUNK if last else b"")
        if piece:
            self.channel.write(piece)
            await self.channel.drain(self.patience.between)

    async def response(self, method: bytes, seconds: float) -> ResponseHead:
        """Return the head of the response to a request with this method. Raises OSError, TimeoutError and MalformedHttp."""
        self._reader.answers, self.whole = method, False
        for _ in range(_MOST_INFORMATIONAL):
            head = await self._next(seconds)
            if not isinstance(head, ResponseHead):
                raise ConnectionResetError("it closed the connection instead of an answer")
            if head.status == 101 or head.status >= 200:
                return head
            await self._next(seconds)  # the end of what only informs
        raise MalformedHttp("it answered without end that the answer follows")

    async def read(self) -> bytes:
        """Return the next piece of the response's body; nothing at its end. Raises OSError, TimeoutError and MalformedHttp."""
        piece = await self._next(self.patience.between)
        if isinstance(piece, bytes):
            return piece
        self.whole = True
        return b""

    async def _next(self, seconds: float) -> object:
        while (event := self._reader.next()) is ReaderMark.MORE:
            self._reader.receive(await self.channel.read(seconds))
        return event

    def leave(self) -> tuple[SocketChannel, bytes]:
        """Return the connection and the bytes that were read too far, for another protocol."""
        return self.channel, self._reader.rest

    @property
    def reusable(self) -> bool:
        """Whether another request can be sent, as far as is known."""
        return self.whole and self.channel.open and not self._reader.rest


AnyUpstream = UpstreamConnection | Http2Upstream


@dataclass(eq=False)
class Upstreams:
    """The connections of one run to the hosts beyond."""

    rules: NetworkRules
    context: ssl.SSLContext
    resolve: Resolve
    connect: Connect
    patience: Patience
    check_name: Callable[[str], None]  # raises `FlowRefused` for a name that must not be asked of a resolver
    own_roots: Mapping[str, ssl.SSLContext] = field(default_factory=dict)  # what verifies hosts with roots of their own
    _idle: dict[tuple[Origin, bool], list[AnyUpstream]] = field(default_factory=dict)

    def waiting(self, origin: Origin, *, http2: bool = False) -> AnyUpstream | None:
        """Return a connection to a host that waits for its next use; None if there is none."""
        now = asyncio.get_running_loop().time()
        waiting = self._idle.get((origin, http2), [])
        while waiting:
            upstream = waiting.pop()
            if upstream.reusable and now - upstream.since < self.patience.idle:
                upstream.used = True
                return upstream
            upstream.channel.close()
        return None

    def put_back(self, upstream: AnyUpstream, *, keep: bool, http2: bool = False) -> None:
        """Let a connection wait for its next use, or close it."""
        waiting = self._idle.setdefault((upstream.origin, http2), [])
        if not (keep and upstream.reusable):
            upstream.channel.close()
            return
        upstream.since = asyncio.get_running_loop().time()
        waiting.append(upstream)
        if sum(map(len, self._idle.values())) > _MOST_IDLE:
            oldest = min((each for each in self._idle.values() if each), key=lambda each: each[0].since)
            oldest.pop(0).channel.close()

    def forget(self) -> None:
        """Close all connections that wait: the rules have changed."""
        for waiting in self._idle.values():
            for each in waiting:
                each.channel.close()
        self._idle.clear()

    async def open(self, origin: Origin, *, http2: bool = False) -> AnyUpstream:
        """Open a connection to a host, over verified TLS where the origin says so. Raises `FlowRefused`.

        With `http2`, the host is offered HTTP/2 as well.
        """
        channel = await self.dial(origin.name, origin.port)
        if origin.tls:
            context = self.own_roots.get(origin.name, self.context)
            context.set_alpn_protocols(["h2", "http/1.1"] if http2 else ["http/1.1"])  # taken over by the connection made next
            try:
                await channel.start_tls(context, self.patience.dial, hostname=origin.name)
            except ssl.SSLCertVerificationError as error:
                channel.abort()
                raise FlowRefused(502, f"the certificate of {origin} is not valid: {error.verify_message}") from None
            except TimeoutError:
                channel.abort()
                raise FlowRefused(504, f"{origin} did not complete the handshake of TLS in time") from None
            except (OSError, ValueError) as error:
                channel.abort()
                raise FlowRefused(502, f"{origin} does not speak TLS as it should: {said(error)}") from None
        if channel.spoken == "h2":
            return Http2Upstream(channel, origin, self.patience.between)
        return UpstreamConnection(channel, origin, self.patience)

    async def dial(self, name: str, port: int) -> SocketChannel:
        """Connect to a canonical host at an address that was judged. Raises `FlowRefused` where none may be dialled or none answers."""
        addresses = await self._addresses(name, port)
        problem = "it does not answer"
        late = False
        for address in addresses[:_MOST_ADDRESSES]:
            try:
                async with asyncio.timeout(self.patience.dial):
                    return await self.connect(address, port)
            except TimeoutError:
                late, problem = True, "it does not answer in time"
            except OSError as error:
                problem = said(error)
        raise FlowRefused(504 if late else 502, f"{name} cannot be reached at port {port}: {problem}")

    async def _addresses(self, name: str, port: int) -> tuple[str, ...]:
        self.check_name(name)
        private = self.rules.may_be_private(name, port)
        if is_address(name):
            answers: Iterable[str] = (name,)
        else:
            try:
                async with asyncio.timeout(self.patience.dial):
                    answers = await self.resolve(name)
            except TimeoutError:
                raise FlowRefused(504, f"{name} could not be resolved in time") from None
            except Exception as error:  # whatever breaks the supervisor's resolver ends this request, and no other
                raise FlowRefused(502, f"{name} could not be resolved: {said(error)}") from None
        addresses, why = dialled(answers, named=(name,) if is_address(name) and private else (), private=private)
        if not addresses:
            raise FlowRefused(502 if why == "it has no address" else 403, f"{name} cannot be reached: {why}")
        return addresses


def said(error: BaseException) -> str:
    """Return what an error says, in one line."""
    if isinstance(error, ssl.SSLError) and error.reason:
        return error.reason.lower().replace("_", " ")
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return " ".join(str(error).split()) or type(error).__name__
