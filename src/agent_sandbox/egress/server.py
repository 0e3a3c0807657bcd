"""The egress server: accepts a sandbox's connections and queries, finds out what they speak and whom they are for, and passes them on.

It runs in a process of its own. It resolves no name itself: it asks the supervisor, after the rules have allowed the name. Decisions lie
in classes without sockets (`rules`, `web`, `inspection`, `secrets`, `names`); here are the sockets. Every flow is reported when it ends,
rests, or is refused.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, NoReturn

from agent_sandbox.egress.authority import Authority
from agent_sandbox.egress.channel import SocketChannel
from agent_sandbox.egress.client import ClientConnection, ClientRequest
from agent_sandbox.egress.client_hello import MOST, ClientHello, NotTls, read_hello
from agent_sandbox.egress.consent import Ask, Consent
from agent_sandbox.egress.dlp.scanner import Search
from agent_sandbox.egress.exchange import Exchanges, Requester, copy, method_of
from agent_sandbox.egress.flows import Budgets, Flow, OverBudget, RequestRecord
from agent_sandbox.egress.fragments import texts_of_name
from agent_sandbox.egress.http1 import RequestHead, ResponseHead
from agent_sandbox.egress.http2 import PREFACE, Http2Connection, StreamRequest
from agent_sandbox.egress.inspection import Inspection
from agent_sandbox.egress.names import NameServer
from agent_sandbox.egress.recorder import ExchangeRecorder, RecordedAnswers
from agent_sandbox.egress.rules import FlowRefused, Origin, allowing_rule, read_absolute, read_authority
from agent_sandbox.egress.secrets import Broker
from agent_sandbox.egress.upstream import Connect, Patience, Resolve, UpstreamConnection, Upstreams, connect, said
from agent_sandbox.egress.web import Customs, Passage
from agent_sandbox.egress.websocket import MalformedFrame, Relay, accept_key, close_message, write_message
from agent_sandbox.errors import PolicyError
from agent_sandbox.policy.bound_secrets import BoundSecret
from agent_sandbox.policy.hosts import canonical_host
from agent_sandbox.policy.intents import known_intent
from agent_sandbox.policy.network import NetworkRules, is_address

MOST_CONNECTIONS = 512
_RESOLVER_PORT = 53
_LINGER_SECONDS, _LINGER_BYTES = 2.0, 4 << 20
_Pass = Callable[[bytes], bytes]
_Objection = Callable[[NetworkRules], str]  # why rules no longer allow a connection that is no HTTP
_Still = Callable[[], Awaitable[str]] | None
_ESTABLISHED = b"HTTP/1.1 200 Connection established\r\n\r\n"


class Egress:
    """The doors of one sandbox, and what passes through them.

    `resolve` asks the supervisor for the addresses of an allowed name, and `ask` whether something may leave; `report` takes the record of
    a flow. `upstream` verifies the certificates of hosts, except those in `own_roots`.
    """

    def __init__(
        self,
        rules: NetworkRules,
        authority: Authority,
        upstream: ssl.SSLContext,
        resolve: Resolve,
        report: Callable[[dict[str, Any]], None],
        *,
        ask: Ask | None = None,
        secrets: tuple[BoundSecret, ...] = (),
        search: Search | None = None,
        own_roots: Mapping[str, ssl.SSLContext] | None = None,
        patience: Patience | None = None,
        connect: Connect = connect,
        clock: Callable[[], float] = time.monotonic,
        recorder: ExchangeRecorder | None = None,
        replay: RecordedAnswers | None = None,
        tell: Callable[[dict[str, Any]], Awaitable[None]] | None = None,
        hold: bool = False,
    ) -> None:
        self._authority, self._report = authority, report
        self._patience = patience or Patience()
        self._inspection = Inspection(search, ((each.name, each.placeholder) for each in secrets), os.urandom(32))
        self._customs = Customs(rules, self._inspection, Broker(secrets))
        if replay is not None:
            resolve = connect = _nowhere  # whatever else is done wrong: nothing leaves
        self._upstreams = Upstreams(rules, upstream, resolve, connect, self._patience, self._check_leaving, own_roots or {})
        self._budgets = Budgets(rules.budgets, clock)
        self._consent = Consent(ask, lambda: self.rules)
        shared = (self._customs, self._upstreams, self._budgets, self._switch, self._consent)
        self._exchanges = Exchanges(*shared, recorder, replay, tell, hold)
        self._room = asyncio.Semaphore(MOST_CONNECTIONS)
        self._connections: set[asyncio.Task[None]] = set()
        self._streams = asyncio.Semaphore(MOST_CONNECTIONS)  # requests of HTTP/2 that are carried at the same time
        self._tunnels: dict[tuple[SocketChannel, SocketChannel], tuple[Flow, _Objection]] = {}
        self._clock = clock
        self._expiry: asyncio.TimerHandle | None = None
        self.resolver = NameServer(self._allows)
        self.rules = rules

    @property
    def rules(self) -> NetworkRules:
        """The rules in force."""
        return self._customs.rules

    @rules.setter
    def rules(self, rules: NetworkRules) -> None:
        """Put other rules in force: the next request is judged by them, and connections that they forbid and that are no HTTP end.

        What expires ends by itself. A connection that somebody agreed to goes on, if the rules still ask for its host.
        """
        rules = rules.at(self._clock())
        self._customs.rules = rules
        self._upstreams.rules = rules.widest()  # an intent that a request declares for itself has been judged before
        self._budgets.put_in_force(rules.budgets)
        self._upstreams.forget()
        for channels, (flow, objection) in list(self._tunnels.items()):
            if why := objection(rules):
                _end(channels, flow, why)
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        if (until := rules.expires) is not None:
            self._expiry = asyncio.get_running_loop().call_later(max(0.0, until - self._clock()), self._expire)

    def _expire(self) -> None:
        self._expiry = None
        self.rules = self.rules

    def answer_query(self, sock: socket.socket) -> None:
        """Answer one query for a name, from the address that it was sent to."""
        try:
            data, ancillary, _, sender = sock.recvmsg(4096, socket.CMSG_SPACE(64))
        except OSError:
            return
        if answer := self.answer(data):
            with suppress(OSError):
                sock.sendmsg([answer], [(level, kind, value) for level, kind, value in ancillary], 0, sender)

    def answer(self, data: bytes) -> bytes:
        """Return the answer to a query for a name, and report a name that is not allowed."""
        answer, name, allowed = self.resolver.answer(data)
        if not allowed and name:
            why, withheld = self._why(name)
            if shown := self.resolver.news_of(name, withheld=withheld):
                self._report({"name": shown, "port": 0, "how": "dns", "refused": why})
        return answer

    def _allows(self, name: str) -> bool:
        try:
            self._check_name(name)
        except FlowRefused:
            return False
        return not self.rules.widest().refusal(name)  # a request may declare its intent, and is answered why it is refused

    def _check_name(self, name: str) -> None:
        notes: list[str] = []
        self._inspection.name(name, notes)

    def _check_leaving(self, name: str) -> None:
        """Raise `FlowRefused` for a name that must not be asked of a resolver, by itself or with the names before it."""
        self._check_name(name)
        if self._inspection.joins and not is_address(name):
            domain, texts = texts_of_name(name)
            self._inspection.join(domain, texts, [])

    def _why(self, name: str) -> tuple[str, bool]:
        """Return why a name does not resolve, and whether the name holds data that is not to be recorded."""
        try:
            canonical = canonical_host(name)
            self._check_name(canonical)
        except PolicyError:
            return "it cannot be the name of a host", True
        except FlowRefused as error:
            return str(error), True
        return self.rules.widest().refusal(canonical) or "no address is left for it", False

    async def accept(self, listener: socket.socket, *, proxy: bool = False) -> None:
        """Accept the connections of one port, until cancelled. With `proxy`, they are asked for other hosts by name.

        Connections that were accepted go on afterwards, as tasks of the event loop.
        """
        loop = asyncio.get_running_loop()
        port: int = listener.getsockname()[1]
        while True:
            await self._room.acquire()
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError:  # out of descriptors, or the client has gone
                self._room.release()
                await asyncio.sleep(0.05)
                continue
            except BaseException:
                self._room.release()
                raise
            task = loop.create_task(self._serve(connection, port, proxy))
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)
            task.add_done_callback(lambda _: self._room.release())

    def close(self) -> None:
        """Close the connections to hosts that wait for their next use."""
        self._upstreams.forget()

    async def _serve(self, connection: socket.socket, port: int, proxy: bool) -> None:
        connection.setblocking(False)
        try:
            _, channel = await asyncio.get_running_loop().connect_accepted_socket(SocketChannel, connection)
        except OSError:
            connection.close()
            return
        flow = Flow(self._report, "", port)
        try:
            if proxy:
                await self._serve_proxy(channel, flow)
                return
            name = self.resolver.name_of(channel.address)
            opened = name or _canonical_address(channel.address)
            if port == _RESOLVER_PORT and self.rules.objection(opened, port):
                await self._serve_names(channel)  # whichever server it meant
            else:
                flow.name = opened
                await self._serve_target(channel, flow, name)
        except (FlowRefused, OverBudget) as why:
            flow.refuse(str(why))
            if isinstance(why, FlowRefused) and why.withheld and flow.how in ("tls", "opaque") and not flow.findings:
                flow.name = "(withheld)"
            channel.abort()
        except (OSError, ssl.SSLError, TimeoutError) as error:
            if flow.how not in ("http", "https", "h2"):
                flow.refuse(f"it broke: {said(error)}")
            channel.abort()
        except Exception as error:  # a fault of ours: nothing more of this connection leaves, and the others go on
            flow.refuse(f"the egress failed at it: {type(error).__name__}")
            channel.abort()
        finally:
            channel.close()
            flow.flush()

    async def _serve_target(self, channel: SocketChannel, flow: Flow, name: str | None) -> None:
        """Serve a connection to a name, or to an address that somebody wrote down. Raises `FlowRefused`."""
        flow.rule = allowing_rule(self.rules, flow.name)
        read = self._exchanges.replay is not None  # a record answers requests, and holds no other bytes
        if not read and self.rules.passes_opaque(flow.name, flow.port) and not self.rules.refusal(flow.name, flow.port):
            flow.how = "opaque"
            await self._tunnel(channel, flow, flow.name)
            return
        first = await self._first(channel)
        if not first:
            return
        channel.put_back(first)
        if first[0] == 0x16:
            await self._serve_tls(channel, flow, first, name)
        elif first.startswith(PREFACE[:4]) and name:
            await self._serve_streams(channel, flow, Origin(name, flow.port, False))
        elif 0x41 <= first[0] <= 0x5A:
            flow.how = "http"
            await self._serve_web(channel, flow, Origin(name, flow.port, False) if name else None)
        else:
            why = self.rules.refusal(flow.name, flow.port)
            raise FlowRefused(400, why or "it speaks neither HTTP nor TLS, and is not allowed as opaque")

    async def _first(self, channel: SocketChannel) -> bytes:
        """Return the first bytes of a client: of TLS the whole first message. Nothing, if it says nothing in time."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self._patience.first
        data = b""
        while True:
            try:
                piece = await channel.read(max(0.0, until - loop.time()))
            except TimeoutError:
                if data:
                    raise FlowRefused(408, "its first message did not arrive in time") from None
                return b""
            data += piece
            if not piece or data[0] != 0x16 or len(data) > MOST or _hello(data) is not None:
                return data

    async def _serve_tls(self, channel: SocketChannel, flow: Flow, first: bytes, name: str | None) -> None:
        hello = _hello(first)
        if hello is None:
            raise FlowRefused(400, "it is broken TLS: it ends in the first message")
        asked = _canonical(hello.name) if hello.name is not None else flow.name
        opened = flow.name
        self._name(flow, asked)
        flow.rule = allowing_rule(self.rules, asked)
        wrong: FlowRefused | None = None
        read = self._exchanges.replay is not None  # a record answers requests, and holds no other bytes
        if name is not None and asked != name:
            wrong = FlowRefused(421, f"the connection was opened to {opened}, and its TLS asks for {asked}")
        elif not read and self.rules.passes_uninspected(asked, flow.port) and not self.rules.refusal(asked, flow.port):
            flow.how = "tls"
            if hello.encrypted:
                raise FlowRefused(403, f"its TLS hides a name behind {asked}, and is not read here")
            await self._tunnel(channel, flow, asked)
            return
        flow.how = "https"
        try:
            await channel.start_tls(self._authority.context_for(asked), self._patience.head)
        except (OSError, TimeoutError) as error:
            raise FlowRefused(400, f"its TLS broke: {said(error)}; a program that pins certificates needs {asked} uninspected") from None
        origin = Origin(asked, flow.port, True)
        if channel.spoken == "h2":
            await self._serve_streams(channel, flow, origin, wrong)
        else:
            await self._serve_web(channel, flow, origin, wrong)

    async def _serve_web(self, channel: SocketChannel, flow: Flow, origin: Origin | None, wrong: FlowRefused | None = None) -> None:
        """Serve requests, one after another. Without an origin, the first request's host is whom the connection is for."""
        client = ClientConnection(channel, self._patience)
        try:
            while (asking := await client.next(flow.flush)) is not None:
                if wrong is not None:
                    raise wrong
                if origin is None:
                    origin = _origin_of(asking.head, flow.port)
                    self._name(flow, origin.name)
                    flow.rule = allowing_rule(self.rules, origin.name)
                await self._exchanges.carry(asking, origin, flow)
                if not asking.reusable:
                    break
        except FlowRefused as why:
            flow.refuse(str(why))
            await client.refuse(why)
        await channel.close_gently(_LINGER_SECONDS, _LINGER_BYTES)

    async def _serve_streams(self, channel: SocketChannel, flow: Flow, origin: Origin, wrong: FlowRefused | None = None) -> None:
        """Serve requests of HTTP/2, side by side."""
        flow.how = "h2"

        async def serve(asking: StreamRequest) -> None:
            if wrong is not None:
                await self._exchanges.refuse(asking, flow, flow.begin(RequestRecord(method_of(asking.head, searched=False))), wrong)
            else:
                async with self._streams:
                    await self._exchanges.carry(asking, origin, flow)

        await Http2Connection(channel, self._patience, serve).run(flow.flush)
        await channel.close_gently(_LINGER_SECONDS, _LINGER_BYTES)

    async def _serve_proxy(self, channel: SocketChannel, flow: Flow) -> None:
        """Serve a program that uses a proxy: CONNECT opens a way to a host, other requests name theirs in full."""
        client = ClientConnection(channel, self._patience)
        flow.how = "http"
        try:
            while (asking := await client.next(flow.flush)) is not None:
                head = asking.head
                if head.method == b"CONNECT":
                    self._connect(head, flow)
                    channel.write(_ESTABLISHED)
                    channel.put_back(client.reader.rest)
                    flow.how = ""
                    await self._serve_target(channel, flow, flow.name)
                    return
                origin = _absolute_origin(head)
                if (flow.name, flow.port) != (origin.name, origin.port):
                    flow.flush()
                    flow.port = origin.port
                    self._name(flow, origin.name)
                    flow.rule = allowing_rule(self.rules, origin.name)
                await self._exchanges.carry(asking, origin, flow)
                if not asking.reusable:
                    break
        except FlowRefused as why:
            flow.refuse(str(why))
            if flow.how == "http":
                await client.refuse(why)
        await channel.close_gently(_LINGER_SECONDS, _LINGER_BYTES)

    def _name(self, flow: Flow, name: str) -> None:
        """Give the flow the name of the host that a client asks for. Raises `FlowRefused` where it holds data; then it is withheld."""
        flow.name = "(withheld)"
        self._check_name(name)
        flow.name = name

    def _connect(self, head: RequestHead, flow: Flow) -> None:
        """Give the flow the host and port that CONNECT asks for. Raises `FlowRefused` where they may not be reached."""
        asked = read_authority(head.target, 0)
        if asked is None or head.length != 0:
            raise FlowRefused(400, "CONNECT needs a host and a port")
        if [read_authority(each, asked[1]) for each in head.values(b"host")] not in ([asked], []):
            raise FlowRefused(400, "CONNECT asks for another host than its Host field")
        flow.port = asked[1]
        self._name(flow, asked[0])
        if why := self.rules.widest().refusal(*asked):
            raise FlowRefused(403, why)

    async def _serve_names(self, channel: SocketChannel) -> None:
        """Answer queries for names over TCP: each has its length before it."""
        data = b""
        while piece := await channel.read(self._patience.first):
            data += piece
            while len(data) >= 2 and len(data) >= 2 + (length := int.from_bytes(data[:2], "big")):
                answer = self.answer(data[2 : 2 + length])
                data = data[2 + length :]
                if not answer:
                    return
                channel.write(len(answer).to_bytes(2, "big") + answer)
            if len(data) > 4096:
                return

    async def _switch(self, asking: Requester, passage: Passage, upstream: UpstreamConnection, head: ResponseHead, flow: Flow) -> None:
        """Carry on as WebSocket: the client's messages are read, searched and written afresh, the server's are relieved of secrets."""
        assert isinstance(asking, ClientRequest)
        key = b"".join(asking.head.values(b"sec-websocket-key"))
        if head.values(b"sec-websocket-accept") != [accept_key(key)] or head.values(b"sec-websocket-extensions"):
            raise FlowRefused(502, f"{passage.origin} answered the handshake of WebSocket wrongly")
        await asking.switch(passage.response(head))
        channel, (beyond, rest) = asking.connection.channel, upstream.leave()
        channel.put_back(asking.connection.reader.rest)
        beyond.put_back(rest)
        flow.flush()
        flow.how = "websocket"
        relay = Relay(passage, flow.findings)
        limit = None
        if passage.intent:
            intent = known_intent(passage.rules, passage.intent)
            why = f"the intent {intent.name!r} has expired"
            limit = asyncio.get_running_loop().call_later(intent.seconds, _end, (channel, beyond), flow, why)
        try:
            await self._both(channel, beyond, passage.origin.name, relay.onward, relay.back, flow, passage.objection)
        except MalformedFrame as error:
            flow.refuse(f"it is malformed WebSocket: {error}")
            with suppress(OSError):
                channel.write(write_message(close_message(error.code, str(error)), None))
        except FlowRefused as error:
            flow.refuse(str(error))
            with suppress(OSError):
                channel.write(write_message(close_message(1008, f"refused by the sandbox: {error}"), None))
        finally:
            if limit is not None:
                limit.cancel()

    async def _tunnel(self, channel: SocketChannel, flow: Flow, name: str) -> None:
        """Pass bytes both ways until both ends are done, or the rules no longer allow it. Raises `FlowRefused` for found data."""
        self._budgets.request(name)
        if self._exchanges.hold:
            raise FlowRefused(403, f"a simulation opens no connection to {name} that is not read here; --send would")
        if self._exchanges.recorder is not None:
            self._exchanges.recorder.skip("a connection that is not read")
        still = await self._consent.host(name, flow.port, lambda: channel.alive)
        beyond = await self._upstreams.dial(name, flow.port)
        searched = self._inspection.stream(flow.findings) if flow.how == "opaque" else None
        port, opaque = flow.port, flow.how == "opaque"

        def objection(rules: NetworkRules) -> str:
            passes = rules.passes_opaque(name, port) if opaque else rules.passes_uninspected(name, port)
            return rules.refusal(name, port) or ("" if passes else "it may no longer pass unread")

        await self._both(channel, beyond, name, searched.feed if searched else bytes, bytes, flow, objection, still)

    async def _both(
        self,
        channel: SocketChannel,
        beyond: SocketChannel,
        name: str,
        onward: _Pass,
        back: _Pass,
        flow: Flow,
        objection: _Objection,
        still: _Still = None,
    ) -> None:
        """Pass on what `onward` and `back` make of the bytes of each side, until both have ended, or new rules or `still` object."""

        def end(why: str) -> None:
            _end((channel, beyond), flow, why)

        def sent(piece: bytes) -> bytes:
            flow.sent += len(piece)
            self._budgets.count(name, sent=len(piece))
            return onward(piece)

        def received(piece: bytes) -> bytes:
            flow.received += len(piece)
            self._budgets.count(name, received=len(piece))
            return back(piece)

        if why := objection(self.rules):  # they may have changed while the host was dialled
            beyond.abort()
            raise FlowRefused(403, why)
        seconds = self._patience.tunnel
        tasks = [asyncio.ensure_future(each) for each in (copy(channel, beyond, seconds, sent), copy(beyond, channel, seconds, received))]
        self._tunnels[channel, beyond] = (flow, objection)
        watching = None if still is None else asyncio.ensure_future(self._consent.watch(still, end))
        try:
            await asyncio.gather(*tasks)
        except BaseException:
            beyond.abort()
            raise
        finally:
            del self._tunnels[channel, beyond]
            if watching is not None:
                watching.cancel()
            for task in tasks:
                task.cancel()
            beyond.close()


def _end(channels: tuple[SocketChannel, SocketChannel], flow: Flow, why: str) -> None:
    """End a connection that is no HTTP, for this reason."""
    flow.refuse(why)
    for each in channels:
        each.abort()


async def _nowhere(*_: object) -> NoReturn:
    raise ConnectionRefusedError("this run is answered from a record, and reaches no host")


def _hello(data: bytes) -> ClientHello | None:
    try:
        return read_hello(data)
    except NotTls as error:
        raise FlowRefused(400, f"it is broken TLS: {error}") from None


def _canonical(name: str) -> str:
    try:
        return canonical_host(name)
    except PolicyError as error:
        raise FlowRefused(400, str(error)) from None


def _canonical_address(address: str) -> str:
    """Return an address that a connection was opened to as it is judged. One with a scope stays as it is, and is never dialled."""
    try:
        return canonical_host(address)
    except PolicyError:
        return address


def _origin_of(head: RequestHead, port: int) -> Origin:
    """Return the origin that a plain request names."""
    hosts = head.values(b"host")
    asked = read_authority(hosts[0], port) if len(hosts) == 1 else None
    if asked is None:
        raise FlowRefused(400, "the request has no host, or two, or one that is no host")
    return Origin(asked[0], port, False)


def _absolute_origin(head: RequestHead) -> Origin:
    """Return the origin of a request to a proxy."""
    absolute = read_absolute(head.target)
    asked = read_authority(absolute[1], 80) if absolute and not absolute[0] else None
    if asked is None:
        raise FlowRefused(400, "this is a proxy: it takes CONNECT, and requests with a whole address that begins with http://")
    return Origin(*asked, False)
