"""The service of one egress process: the doors of a run, and the messages to and from its supervisor."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import select
import socket
import ssl
from contextlib import suppress
from typing import Any

from agent_sandbox.egress.authority import Authority
from agent_sandbox.egress.dlp.rules import RuleMatcher
from agent_sandbox.egress.frames import FRAME, frame
from agent_sandbox.egress.orders import Orders, decode_rules
from agent_sandbox.egress.recorded_exchange import RecordedExchange, read_exchange
from agent_sandbox.egress.recorder import ExchangeRecorder, RecordedAnswers
from agent_sandbox.egress.search import search_of
from agent_sandbox.egress.server import Egress
from agent_sandbox.kernel.doors import OWN_ADDRESS
from agent_sandbox.policy.network import NetworkRules

RESOLVE_SECONDS = 20.0  # that the supervisor may take to resolve a name
RECORD_SECONDS = 60.0  # that the supervisor may take to write down or to look up an exchange
LINGER_SECONDS = 1.0  # that connections may take to end, once the run has ended
MOST_UNSENT = 1 << 20  # bytes of reports that the supervisor has not taken yet; further reports are counted only
_REHEARSED = bytes.fromhex("000101000001000000000000") + b"\x07example\x00\x00\x01\x00\x01"  # a query for a name
LONGEST_TEXT, LONGEST_LIST = 1000, 20  # of a report


def verifying(roots: str) -> ssl.SSLContext:
    """Return a context that verifies servers with these roots, in PEM."""
    upstream = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    upstream.minimum_version = ssl.TLSVersion.TLSv1_2
    upstream.set_alpn_protocols(["http/1.1"])
    if roots:
        upstream.load_verify_locations(cadata=roots)
    return upstream


def rehearse(authority: Authority, upstream: ssl.SSLContext, rules: RuleMatcher) -> None:
    """Serve a run that does not exist, so that what serving touches is in memory, and the first connection is answered sooner."""
    ours, theirs = socket.socketpair()

    async def attend() -> None:
        reader, writer = await asyncio.open_connection(sock=ours)
        channel = Channel(writer)
        orders = Orders.decoded(json.loads(json.dumps(Orders(NetworkRules(), 0).encoded())))
        waiting = (authority, upstream, channel.resolve, channel.report)
        egress = Egress(orders.rules, *waiting, ask=channel.ask, search=search_of(orders, rules))
        egress.answer(_REHEARSED)
        theirs.send(frame({"kind": "finish"}))
        await _obey(reader, channel, egress)
        await _settle(frozenset())
        writer.close()

    with theirs:
        asyncio.run(attend())


def serve(
    orders: Orders,
    doors: list[int],
    authority: Authority,
    upstream: ssl.SSLContext,
    rules: RuleMatcher,
    link: socket.socket,
    supervisor: int,
) -> None:
    """Serve the doors of one run until the supervisor asks to finish. Ends this process when the supervisor has gone."""
    sockets = [socket.socket(fileno=each) for each in doors]
    search = search_of(orders, rules)
    contexts = {roots: verifying(roots) for _, roots in orders.roots}
    own_roots = {host: contexts[roots] for host, roots in orders.roots}

    async def attend() -> None:
        reader, writer = await asyncio.open_connection(sock=link)
        channel = Channel(writer)
        wanted, secrets = orders.exchanges, orders.secrets
        recorder, replay = None, None
        if wanted.record:
            recorder = ExchangeRecorder(bytes.fromhex(wanted.record), wanted.bodies, search, channel.record, channel.skip, secrets)
        if wanted.replay:
            replay = RecordedAnswers(bytes.fromhex(wanted.replay), channel.replay, secrets)
        egress = Egress(
            *(orders.rules, authority, upstream, channel.resolve, channel.report),
            ask=channel.ask,
            secrets=secrets,
            search=search,
            own_roots=own_roots,
            recorder=recorder,
            replay=replay,
            tell=channel.tell if wanted.tell else None,
            hold=wanted.hold,
        )
        loop = asyncio.get_running_loop()
        loop.add_reader(supervisor, os._exit, 0)  # readable once the supervisor has gone, even if a fork of it holds the link
        for sock in sockets[: orders.resolvers]:
            loop.add_reader(sock, egress.answer_query, sock)
        listeners = sockets[orders.resolvers :]
        accepting = [loop.create_task(egress.accept(sock, proxy=sock.getsockname()[0] == OWN_ADDRESS)) for sock in listeners]
        await _obey(reader, channel, egress)
        await _take_in(sockets)
        for task in accepting:
            task.cancel()
        await _settle(frozenset(recorder.ending) if recorder else frozenset())
        if recorder and recorder.ending:
            await asyncio.wait(recorder.ending, timeout=RECORD_SECONDS)
        channel.send({"kind": "ended"})
        await writer.drain()
        os._exit(0)  # there is nothing to tidy: the kernel closes the doors

    with suppress(ConnectionError):
        asyncio.run(attend())


async def _obey(reader: asyncio.StreamReader, channel: Channel, egress: Egress) -> None:
    """Carry out the messages of the supervisor, until it asks to finish. Ends this process when the supervisor has gone."""
    try:
        while True:
            (length,) = FRAME.unpack(await reader.readexactly(FRAME.size))
            message = json.loads(await reader.readexactly(length))
            if message["kind"] in ("resolved", "replayed", "answered"):
                channel.hand(message)
            elif message["kind"] == "rules":
                egress.rules = decode_rules(message["rules"])
                channel.send({"kind": "obeyed", "revision": message["revision"]})
            elif message["kind"] == "finish":
                return
    except (asyncio.IncompleteReadError, ConnectionError):
        os._exit(0)


async def _take_in(doors: list[socket.socket]) -> None:
    """Let what waits at the doors be accepted, so that it is recorded. The guest has ended: nothing more comes."""
    poller = select.poll()
    for each in doors:
        poller.register(each, select.POLLIN)
    loop = asyncio.get_running_loop()
    until = loop.time() + LINGER_SECONDS
    await asyncio.sleep(0)  # what was accepted just now is served
    while poller.poll(0) and loop.time() < until:
        await asyncio.sleep(0)


async def _settle(besides: frozenset[asyncio.Task[None]]) -> None:
    """Let the connections end by themselves for a moment, then end them, so that each is reported. `besides` go on."""
    if others := asyncio.all_tasks() - {asyncio.current_task()} - besides:
        _, left = await asyncio.wait(others, timeout=LINGER_SECONDS)
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=LINGER_SECONDS)


class Channel:
    """This process's side of the link, once it serves: questions for addresses and for consent, and reports of flows."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._asked: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._count = 0
        self._unsent = 0  # reports that found the link full

    def send(self, message: dict[str, Any]) -> None:
        """Send a message, without waiting."""
        self._writer.write(frame(message))

    async def resolve(self, name: str) -> list[str]:
        """Return the addresses of a canonical name, as the supervisor resolves it. Raises OSError if it has none."""
        answer = await self._ask({"kind": "resolve", "name": name}, RESOLVE_SECONDS)
        if not answer["addresses"]:
            raise OSError(answer["why"] or "it has no address")
        return list(answer["addresses"])

    async def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """Return the answer of the supervisor to a question whether something may leave. Waits for as long as the caller does."""
        return await self._ask({"kind": "ask", **question}, None)

    async def _ask(self, question: dict[str, Any], seconds: float | None) -> dict[str, Any]:
        self._count += 1
        number = self._count
        self._asked[number] = asyncio.get_running_loop().create_future()
        try:
            self.send({**question, "number": number})
            return await asyncio.wait_for(self._asked[number], seconds)
        except asyncio.CancelledError:
            if question["kind"] == "ask":
                self.send({"kind": "withdraw", "number": number})
            raise
        finally:
            del self._asked[number]

    async def record(self, part: str, data: bytes) -> None:
        """Send a piece of a recorded exchange, and wait until the link has room for more."""
        self.send({"kind": "recorded", "part": part, "data": base64.b64encode(data).decode()})
        await self._writer.drain()

    async def tell(self, request: dict[str, Any]) -> None:
        """Tell the supervisor of a request, and wait until the link has room for more."""
        self.send({"kind": "request", **request})
        await self._writer.drain()

    def skip(self, why: str) -> None:
        """Tell the supervisor that something is not recorded."""
        self.send({"kind": "unrecorded", "why": why})

    async def replay(self, key: str) -> RecordedExchange | None:
        """Return the next recorded answer to the request with this key; None if there is none left."""
        answer = await self._ask({"kind": "replay", "key": key}, RECORD_SECONDS)
        return None if answer["exchange"] is None else read_exchange(answer["exchange"])

    def hand(self, answer: dict[str, Any]) -> None:
        """Hand an answer of the supervisor to whoever waits for it."""
        future = self._asked.get(answer["number"])
        if future is not None and not future.done():
            future.set_result(answer)

    def report(self, flow: dict[str, Any]) -> None:
        """Report a flow. A supervisor that does not keep up is told how many reports it missed."""
        if self._writer.transport.get_write_buffer_size() > MOST_UNSENT:
            self._unsent += 1
            return
        if self._unsent:
            self.send({"kind": "lost", "count": self._unsent})
            self._unsent = 0
        self.send({"kind": "flow", **bounded(flow)})


def bounded(flow: dict[str, Any]) -> dict[str, Any]:
    """Return a record of a flow whose texts and lists fit into one frame."""
    plain: dict[str, Any] = {}
    for name, value in flow.items():
        if isinstance(value, str):
            plain[name] = value[:LONGEST_TEXT]
        elif isinstance(value, list):
            more = [f"and {len(value) - LONGEST_LIST:,} more"] if len(value) > LONGEST_LIST else []
            plain[name] = [*(str(each)[:200] for each in value[:LONGEST_LIST]), *more]
        elif isinstance(value, bool | int | float | None):
            plain[name] = value
    return plain
