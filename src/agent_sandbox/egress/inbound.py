"""Inbound connections: programs of the machine, such as a browser, reach servers of a sandbox at ports that a person published.

A browser also runs pages of strangers, and each of them can make it send requests to 127.0.0.1. So every request is read, on every
connection again and again, and must name this very port of this machine as its host: a page that has its own name resolve to 127.0.0.1
names another. A WebSocket, which no browser keeps a page from opening, must come from a page of this sandbox. What passes is written
afresh, one connection into the sandbox for each request. Answers are read as strictly, because they end where the next one begins.

The decisions are functions of values; `Inbound` has the sockets. It connects nowhere but to the sandbox's own loopback.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field

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
    write_request,
    write_response,
)
from agent_sandbox.kernel import wire
from agent_sandbox.kernel.doors import FOURTH, SIXTH
from agent_sandbox.policy.publications import Publication

MOST_CONNECTIONS = 100  # at once; more wait, and those without a request give way
_LOOPBACK = ((FOURTH, "127.0.0.1"), (SIXTH, "::1"))  # of the sandbox: a server may listen on one of them only
_NAMES = ("localhost", "127.0.0.1", "[::1]")
_HOP_BY_HOP = frozenset(b"connection proxy-connection keep-alive te trailer upgrade transfer-encoding http2-settings".split())
_AT_ONCE = struct.pack("ii", 1, 0)  # SO_LINGER: closing leaves nothing behind in the sandbox's network
_MOST_INFORMATIONAL = 16
_LONGEST_WHY = 200
_GENTLY = 1.0, 1 << 20  # seconds and bytes in which a client closes its side
_PEACE = 0.25  # seconds in which a server closes its side
_EVER = 1e9  # seconds: a WebSocket may be silent


@dataclass(frozen=True)
class InboundPatience:
    """Seconds that are waited: for a whole head, the next request, the next piece, and a client that says that it has said everything."""

    head: float = 20.0
    idle: float = 60.0
    between: float = 300.0
    connect: float = 20.0
    farewell: float = 30.0
    slice: float = 5.0  # after which it is looked whether the client is still there; an answer may take as long as the run


class TurnedAway(Exception):
    """A request that does not reach the sandbox, or gets no answer there. The message is for the client; `status` is its answer's."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


@dataclass
class Visits:
    """How a published port was used: requests that reached the sandbox, those that were turned away, and bytes of bodies and messages."""

    requests: int = 0
    turned_away: int = 0
    received: int = 0
    sent: int = 0


@dataclass(frozen=True)
class Admitted:
    """A request that may pass: its head as it is written to the sandbox's server, and whether it asks for a WebSocket."""

    head: bytes
    websocket: bool = False


def admit(head: RequestHead, port: int, published: Iterable[int]) -> Admitted:
    """Return how a request to a published port passes. `published` are all ports of this run. Raises `TurnedAway`."""
    target = head.target
    if head.method == b"CONNECT":
        raise TurnedAway(405, "this is no proxy")
    hosts = head.values(b"host")
    if len(hosts) != 1:
        raise TurnedAway(400, "the request names no host, or two")
    _check_host(hosts[0], port)
    if not target.startswith(b"/") and target != b"*":
        scheme, found, rest = target.partition(b"://")
        authority, slash, path = rest.partition(b"/")
        if not found or scheme.lower() != b"http" or b"?" in authority or b"#" in authority:
            raise TurnedAway(400, "its target is no path of this server")
        _check_host(authority, port)
        target = slash + path or b"/"
    named = {each.strip().lower() for value in head.values(b"connection") for each in value.split(b",")}
    websocket = _asks_for_websocket(head, named)
    if websocket:
        _check_origin(head.values(b"origin"), published)
    fields = tuple(each for each in _kept(head.fields, named) if each[0] != b"content-length")
    if head.length is None:
        fields = (*fields, (b"transfer-encoding", b"chunked"))
    elif head.length or head.values(b"content-length"):
        fields = (*fields, (b"content-length", b"%d" % head.length))
    ending: Fields = ((b"connection", b"Upgrade"), (b"upgrade", b"websocket")) if websocket else ((b"connection", b"close"),)
    return Admitted(write_request(head.method, target, (*fields, *ending)), websocket)


def answer_head(head: ResponseHead, request: RequestHead, *, keep: bool, websocket: bool = False) -> bytes:
    """Return the head of an answer as it goes to the client."""
    named = {each.strip().lower() for value in head.values(b"connection") for each in value.split(b",")}
    fields = _kept(head.fields, named)
    if websocket:
        fields = (*fields, (b"connection", b"Upgrade"), (b"upgrade", b"websocket"))
    elif head.status >= 200:
        if head.length is None and request.minor:
            fields = (*fields, (b"transfer-encoding", b"chunked"))
        if not keep:
            fields = (*fields, (b"connection", b"close"))
    return write_response(head.status, head.reason, fields)


def _kept(fields: Fields, named: set[bytes]) -> Fields:
    """Return the fields that go on: those of the connection stay behind, except its framing, which `http1` has checked."""
    dropped = _HOP_BY_HOP | (named - {b"host", b"content-length", b"cookie", b"authorization", b"origin", b"content-type"})
    return tuple((key, value) for key, value in fields if key not in dropped)


def _check_host(host: bytes, port: int) -> None:
    name, _, number = host.decode("latin-1").lower().rpartition(":")
    if name not in _NAMES or number != str(port):
        what = f"{host.decode('latin-1')!r}"[:_LONGEST_WHY]
        raise TurnedAway(421, f"the request is for the host {what}, and this is localhost:{port}")


def _asks_for_websocket(head: RequestHead, named: set[bytes]) -> bool:
    asked = [value.strip().lower() for value in head.values(b"upgrade")]
    return (
        (head.method, head.minor, head.length) == (b"GET", 1, 0)
        and b"upgrade" in named
        and asked == [b"websocket"]
        and len(head.values(b"sec-websocket-key")) == 1
    )


def _check_origin(origins: list[bytes], published: Iterable[int]) -> None:
    """A program that is no browser names no origin, and no page can leave it out."""
    ours = {f"http://{name}:{port}" for name in _NAMES for port in published}
    if len(origins) > 1 or any(each.decode("latin-1").lower() not in ours for each in origins):
        what = f"{origins[0].decode('latin-1')!r}"[:_LONGEST_WHY]
        raise TurnedAway(403, f"the page {what} may not open a WebSocket to this sandbox: it is not a page of it")


class SandboxSockets:
    """Sockets of a sandbox's network, asked of its init one by one. Made in the event loop that uses them."""

    def __init__(self, link: socket.socket) -> None:
        link.setblocking(False)
        self._link = link
        self._waiting: dict[bytes, deque[asyncio.Future[socket.socket]]] = {FOURTH: deque(), SIXTH: deque()}
        asyncio.get_running_loop().add_reader(link, self._take)

    async def connect(self, port: int) -> socket.socket:
        """Return a connection to a port of the sandbox's own loopback. Raises OSError."""
        loop = asyncio.get_running_loop()
        problem: OSError = ConnectionRefusedError(errno.ECONNREFUSED, "nobody listens")
        for family, address in _LOOPBACK:
            try:
                made = await self._make(family)
            except OSError as error:
                problem = error if family == FOURTH else problem  # not every kernel has IPv6
                continue
            try:
                made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
                await loop.sock_connect(made, (address, port))
                return made
            except ConnectionRefusedError:
                made.close()
            except OSError as error:
                made.close()
                problem = error if family == FOURTH else problem
            except BaseException:
                made.close()
                raise
        raise problem

    async def _make(self, family: bytes) -> socket.socket:
        future: asyncio.Future[socket.socket] = asyncio.get_running_loop().create_future()
        self._link.send(family)
        self._waiting[family].append(future)
        return await future

    def _take(self) -> None:
        try:
            asked, received = wire.receive_descriptors(self._link, 1)
        except BlockingIOError:
            return
        except OSError:
            asked, received = b"", []
        if not asked:
            self.close()
            return
        waiting = self._waiting.get(asked)
        future = waiting.popleft() if waiting else None
        if future is None or future.done():  # whoever asked has gone
            wire.close_all(received)
        elif received:
            future.set_result(socket.socket(fileno=received[0]))
        else:
            future.set_exception(OSError(errno.ENOBUFS, "it can make no socket"))

    def close(self) -> None:
        """Let whoever waits for a socket wait no longer."""
        if self._link.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._link)
            self._link.close()
        for waiting in self._waiting.values():
            while waiting:
                future = waiting.popleft()
                if not future.done():
                    future.set_exception(ConnectionResetError(errno.ECONNRESET, "the sandbox has ended"))


@dataclass(eq=False)
class Inbound:
    """The published ports of one run. `tell` hears each reason for which a request was turned away."""

    publications: tuple[Publication, ...]
    tell: Callable[[Publication, str], None]
    patience: InboundPatience = InboundPatience()
    visits: dict[Publication, Visits] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.visits = {each: Visits() for each in self.publications}
        self._ports = [each.port for each in self.publications]
        self._open: set[SocketChannel] = set()
        self._wanting = 0  # connections that have no room yet
        self._resting: dict[SocketChannel, None] = {}  # connections without a request, the oldest first

    async def serve(self, listeners: list[socket.socket], link: socket.socket, stop: asyncio.Event) -> None:
        """Serve until `stop`. The listeners are in the order of the publications; they and the link are closed afterwards."""
        self._room = asyncio.Semaphore(MOST_CONNECTIONS)
        self._sockets = SandboxSockets(link)
        tasks = {asyncio.ensure_future(self._accept(*each)) for each in zip(self.publications, listeners, strict=True)}
        self._tasks = tasks
        await stop.wait()
        for listener in listeners:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # also for a fork of this process that holds a copy
        for task in tuple(tasks):
            task.cancel()
        for channel in tuple(self._open):
            channel.abort()
        self._sockets.close()
        await asyncio.gather(*tasks, return_exceptions=True)
        for listener in listeners:
            listener.close()

    async def _accept(self, publication: Publication, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError:  # out of descriptors, or the client has gone
                await asyncio.sleep(0.05)
                continue
            self._wanting += 1
            self._make_room()
            try:
                await self._room.acquire()
            except BaseException:
                connection.close()
                raise
            finally:
                self._wanting -= 1
            task = loop.create_task(self._serve(publication, connection))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            task.add_done_callback(lambda _: self._room.release())

    async def _serve(self, publication: Publication, connection: socket.socket) -> None:
        connection.setblocking(False)
        try:
            channel = await self._channel(connection)
        except OSError:
            connection.close()
            return
        client = _Client(channel, self.patience)
        try:
            try:
                while (head := await self._next_request(client)) is not None:
                    if not await self._exchange(publication, client, head):
                        break
            except TurnedAway as why:
                self.visits[publication].turned_away += 1
                self.tell(publication, str(why))
                client.say(why)
            await channel.close_gently(*_GENTLY)
        except (OSError, TimeoutError, MalformedHttp):
            channel.abort()  # in the middle of an answer: the client sees that it is not whole
        finally:
            channel.close()
            self._open.discard(channel)

    def _make_room(self) -> None:
        """Close the connection that has rested longest, if another one has no room."""
        if self._wanting and self._room.locked() and self._resting:
            next(iter(self._resting)).close()

    async def _next_request(self, client: _Client) -> RequestHead | None:
        self._resting[client.channel] = None
        self._make_room()
        try:
            return await client.next()
        finally:
            del self._resting[client.channel]

    async def _channel(self, connection: socket.socket) -> SocketChannel:
        _, channel = await asyncio.get_running_loop().connect_accepted_socket(SocketChannel, connection)
        self._open.add(channel)
        return channel

    async def _exchange(self, publication: Publication, client: _Client, head: RequestHead) -> bool:
        """Carry one request and its answer. Return whether another request can follow. Raises `TurnedAway` if no answer has begun."""
        admitted = admit(head, publication.port, self._ports)
        server = await self._connect(publication)
        visits = self.visits[publication]
        visits.requests += 1
        upload = asyncio.ensure_future(client.upload(server, admitted.head, head, visits))
        try:
            keep = await self._answer(publication, client, server, head, admitted, upload)
            with suppress(OSError, TimeoutError):  # it was asked to close, and does so in peace
                while await server.read(_PEACE):
                    pass
            return keep
        finally:
            upload.cancel()
            with suppress(asyncio.CancelledError):
                await upload
            server.abort()
            self._open.discard(server)

    async def _connect(self, publication: Publication) -> SocketChannel:
        where = f"port {publication.inner} of the sandbox"
        try:
            async with asyncio.timeout(self.patience.connect):
                return await self._channel(await self._sockets.connect(publication.inner))
        except TimeoutError:
            raise TurnedAway(504, f"{where} does not accept the connection") from None
        except ConnectionRefusedError:
            raise TurnedAway(502, f"nothing listens at {where}; its server may still be starting") from None
        except OSError as error:
            raise TurnedAway(502, f"{where} cannot be reached: {error.strerror or error}") from None

    async def _answer(
        self,
        publication: Publication,
        client: _Client,
        server: SocketChannel,
        request: RequestHead,
        admitted: Admitted,
        upload: asyncio.Task[bool],
    ) -> bool:
        reader = MessageReader(responses=True)
        reader.answers = request.method
        try:
            head = await self._answer_head(reader, client, server, request)
        except MalformedHttp as error:
            raise TurnedAway(502, f"the answer of the sandbox's server is malformed: {error}") from None
        except (OSError, TimeoutError, EOFError):
            raise client.broken or TurnedAway(502, "the sandbox's server closed the connection before it answered") from None
        visits = self.visits[publication]
        if head.status == 101:
            if not admitted.websocket:
                raise TurnedAway(502, "the sandbox's server changed the protocol, and was not asked to")
            client.channel.write(answer_head(head, request, keep=False, websocket=True))
            client.channel.put_back(client.reader.rest)
            server.put_back(reader.rest)
            await self._relay(client.channel, server, visits)
            return False
        if not upload.done():
            await asyncio.sleep(0)
        whole = upload.done() and upload.result()
        keep = whole and request.minor == 1 and head.length != -1 and not _closes(request)
        await client.send(answer_head(head, request, keep=keep))
        chunked = head.length is None and bool(request.minor)
        while isinstance(piece := await self._next(reader, server, client), bytes):
            visits.sent += len(piece)
            await client.send(write_chunk(piece) if chunked else piece)
        if chunked:
            await client.send(LAST_CHUNK)
        return keep

    async def _answer_head(self, reader: MessageReader, client: _Client, server: SocketChannel, request: RequestHead) -> ResponseHead:
        """Return the head of the final answer, after passing on those that only inform. Raises what a malformed or broken one raises."""
        for _ in range(_MOST_INFORMATIONAL):
            head = await self._next(reader, server, client)
            if not isinstance(head, ResponseHead):
                raise EOFError
            if head.status == 101 or head.status >= 200:
                return head
            await self._next(reader, server, client)  # the end of what only informs
            if request.minor:
                client.channel.write(answer_head(head, request, keep=True))
        raise MalformedHttp("it says without end that the answer follows")

    async def _next(self, reader: MessageReader, server: SocketChannel, client: _Client) -> object:
        """Return the next part of an answer, however long it takes. Raises `MalformedHttp` and OSError.

        A client that says no more may have gone, and nobody could tell. It is waited for only a while.
        """
        waited = 0.0
        while (event := reader.next()) is ReaderMark.MORE:
            try:
                reader.receive(await server.read(self.patience.slice))
            except TimeoutError:
                waited = 0.0 if client.channel.alive else waited + self.patience.slice
                if waited >= self.patience.farewell:
                    raise ConnectionAbortedError("the client has gone") from None
        return event

    async def _relay(self, client: SocketChannel, server: SocketChannel, visits: Visits) -> None:
        """Pass the bytes of a WebSocket both ways, until both sides have ended."""

        async def copy(source: SocketChannel, sink: SocketChannel, *, outward: bool) -> None:
            while piece := await source.read(_EVER):
                if outward:
                    visits.sent += len(piece)
                else:
                    visits.received += len(piece)
                sink.write(piece)
                await sink.drain(self.patience.between)
            sink.write_end()

        tasks = [
            asyncio.ensure_future(copy(client, server, outward=False)),
            asyncio.ensure_future(copy(server, client, outward=True)),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if not any(task.exception() for task in done):
                await asyncio.wait(tasks, timeout=self.patience.farewell)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


class _Client:
    """A connection of a program of the machine."""

    def __init__(self, channel: SocketChannel, patience: InboundPatience) -> None:
        self.channel, self.patience = channel, patience
        self.reader = MessageReader()
        self.broken: TurnedAway | None = None  # why the body of its request is none

    async def next(self) -> RequestHead | None:
        """Return the head of the next request; None at the end. Raises `TurnedAway` for what is no request, and OSError."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self.patience.idle
        begun = False
        try:
            while (head := self.reader.next()) is ReaderMark.MORE:
                if self.reader.rest and not begun:
                    begun, until = True, loop.time() + self.patience.head
                self.reader.receive(await self.channel.read(max(0.0, until - loop.time())))
                if self.reader.rest[:1] == b"\x16":
                    raise TurnedAway(400, "this is a port for http://, and it was spoken to with TLS")
        except TimeoutError:
            if begun:
                raise TurnedAway(408, "the request did not arrive in time") from None
            return None
        except MalformedHttp as error:
            raise TurnedAway(error.status, f"the request is malformed: {error}") from None
        return head if isinstance(head, RequestHead) else None

    async def upload(self, server: SocketChannel, written: bytes, head: RequestHead, visits: Visits) -> bool:
        """Send a request on, its head as `written`. Return whether it is whole. A server may answer without having read all of it."""
        chunked = head.length is None
        with suppress(OSError, TimeoutError):  # the server takes no more
            server.write(written)
            while isinstance(piece := await self._piece(), bytes):
                visits.received += len(piece)
                server.write(write_chunk(piece) if chunked else piece)
                await server.drain(self.patience.between)
            if chunked and self.broken is None:
                server.write(LAST_CHUNK)
            if self.broken is not None:
                server.abort()  # what was sent of it never becomes a whole request
            return self.broken is None
        return False

    async def _piece(self) -> object:
        """Return the next piece of the body; something else at its end, or if it breaks."""
        try:
            while (event := self.reader.next()) is ReaderMark.MORE:
                self.reader.receive(await self.channel.read(self.patience.between))
        except TimeoutError:
            self.broken = TurnedAway(408, "the body of the request did not arrive in time")
        except MalformedHttp as error:
            self.broken = TurnedAway(error.status, f"the body of the request is malformed: {error}")
        except OSError:
            self.broken = TurnedAway(400, "the client broke off in the middle of the request")
        else:
            return event
        return None

    async def send(self, data: bytes) -> None:
        """Send bytes, as fast as they are taken. Raises OSError and TimeoutError."""
        if data:
            self.channel.write(data)
            await self.channel.drain(self.patience.between)

    def say(self, why: TurnedAway) -> None:
        """Answer that a request was turned away. Raises OSError."""
        text = f"agent-sandbox: {why}\n".encode()
        fields = ((b"content-type", b"text/plain; charset=utf-8"), (b"content-length", b"%d" % len(text)), (b"connection", b"close"))
        self.channel.write(write_response(why.status, reason_of(why.status), fields) + text)


def _closes(head: RequestHead) -> bool:
    return any(b"close" in value.lower() for value in head.values(b"connection"))
