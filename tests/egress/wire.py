"""A door and a host beyond it, in one event loop, for tests of what passes between them.

The host has the public address 11.0.0.1, whichever name is resolved; dialling it leads to a server of the test on loopback, which writes
down every byte and answers as the test says.
"""

from __future__ import annotations

import asyncio
import datetime
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from agent_sandbox.egress.authority import Authority
from agent_sandbox.egress.channel import SocketChannel
from agent_sandbox.egress.server import Egress
from agent_sandbox.egress.upstream import Patience
from agent_sandbox.policy.network import NetworkRules, network_rules

T = TypeVar("T")
PUBLIC = "11.0.0.1"
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
BEYOND = Authority(datetime.datetime.now(datetime.UTC))  # the authority of the hosts beyond
INSIDE = Authority(datetime.datetime.now(datetime.UTC))  # that of the sandbox


def run(test: Coroutine[Any, Any, T]) -> T:
    """Run a test in an event loop of its own."""
    return asyncio.run(asyncio.wait_for(test, 60))


@dataclass
class Beyond:
    """The host beyond: the bytes that reached it, one entry for each connection, and how it answers."""

    answer: Callable[[bytes], bytes | None] = lambda _: OK  # of all bytes so far; None: wait for more; b"": close
    received: list[bytearray] = field(default_factory=list)

    @property
    def all(self) -> bytes:
        """Every byte that arrived."""
        return b"".join(self.received)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        own = bytearray()
        self.received.append(own)
        new = bytearray()
        with suppress(OSError):
            while piece := await reader.read(65536):
                own += piece
                new += piece
                answer = self.answer(bytes(new))
                if answer is not None:
                    new.clear()
                    writer.write(answer)
                    if not answer:
                        break
        writer.close()


@dataclass
class Door:
    """A door with a host beyond it."""

    egress: Egress
    port: int
    proxy_port: int
    flows: list[dict[str, Any]]
    asked: list[str]
    inside: Authority

    async def send(self, data: bytes, *, proxy: bool = False, end: bool = True) -> bytes:
        """Send bytes on a new connection, and return everything that comes back."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.proxy_port if proxy else self.port)
        writer.write(data)
        if end:
            writer.write_eof()
        try:
            return await reader.read()
        finally:
            writer.transport.abort()

    async def open_tls(
        self, name: str, *, sni: str | None = None, speaks: str = "http/1.1"
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open TLS to a name through the proxy door, and verify the certificate of the sandbox's authority."""
        context = ssl.create_default_context(cadata=self.inside.certificate.decode())
        context.set_alpn_protocols([speaks])
        sock = socket.create_connection(("127.0.0.1", self.proxy_port))
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(sock, f"CONNECT {name}:443 HTTP/1.1\r\nHost: {name}:443\r\n\r\n".encode())
        answer = await loop.sock_recv(sock, 4096)
        if not answer.startswith(b"HTTP/1.1 200 "):
            sock.close()
            raise ConnectionRefusedError(answer.decode())
        return await asyncio.open_connection(sock=sock, ssl=context, server_hostname=sni or name)

    async def send_tls(self, name: str, data: bytes, *, sni: str | None = None) -> bytes:
        """Send bytes inside of TLS, and return everything that comes back."""
        reader, writer = await self.open_tls(name, sni=sni)
        writer.write(data)
        try:
            return await reader.read()
        finally:
            writer.transport.abort()


@asynccontextmanager
async def door(
    rules: NetworkRules | None = None,
    beyond: Serve | None = None,
    *,
    resolve: Callable[[str], Any] | None = None,
    certified: str = "web.test",
    speaks: str = "http/1.1",
    patience: Patience | None = None,
    **options: Any,
) -> AsyncIterator[Door]:
    """Open a door. `rules` allow `web.test` by default, also at the port of the door that knows no names."""
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    ports = [each.getsockname()[1] for each in listeners]
    talk = beyond or Beyond().serve
    served: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        served[task] = writer
        with suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            await talk(reader, writer)

    plain = await asyncio.start_server(serve, "127.0.0.1", 0)
    certificate = BEYOND.context_for(certified)
    certificate.set_alpn_protocols([speaks])
    secure = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=certificate)
    flows: list[dict[str, Any]] = []
    asked: list[str] = []

    async def lookup(name: str) -> list[str]:
        asked.append(name)
        return list(resolve(name)) if resolve else [PUBLIC]

    async def connect(address: str, port: int) -> SocketChannel:
        assert address == PUBLIC, address
        real = (secure if port == 443 else plain).sockets[0].getsockname()[1]
        _, channel = await asyncio.get_running_loop().create_connection(SocketChannel, "127.0.0.1", real)
        return channel

    if rules is None:
        rules = network_rules(outbound=True, hosts=["web.test", "*.web.test", f"web.test:{ports[0]}"])
    context = ssl.create_default_context(cadata=BEYOND.certificate.decode())
    egress = Egress(rules, INSIDE, context, lookup, flows.append, patience=patience, connect=connect, **options)
    for each in listeners:
        each.setblocking(False)
    tasks = [asyncio.ensure_future(egress.accept(each, proxy=place == 1)) for place, each in enumerate(listeners)]
    try:
        yield Door(egress, ports[0], ports[1], flows, asked, INSIDE)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for task in egress._connections:
            task.cancel()
        await asyncio.gather(*egress._connections, return_exceptions=True)
        egress.close()
        for task in served:
            task.cancel()
        for server in (plain, secure):
            server.close()
        await asyncio.gather(*served, return_exceptions=True)
        for writer in served.values():
            with suppress(AttributeError):  # of a transport of TLS that is closed already
                writer.transport.abort()
        await asyncio.sleep(0.01)  # the event loop closes the sockets
        for each in listeners:
            each.close()
