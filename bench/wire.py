"""Measure requests through the egress: small GETs over kept connections, plain and over intercepted TLS, beside a direct connection.

The server, the egress and the client are a process each. The egress searches every request by the product's rules. The same client
measures mitmproxy, a peer that also reads TLS, if `run.sh` could install it.

Usage: python -m bench.wire [--seconds 3] [--connections 1 50 500]
"""

from __future__ import annotations

import argparse
import asyncio
import atexit
import datetime
import os
import socket
import ssl
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_sandbox.egress.authority import Authority, new_authority
from agent_sandbox.egress.channel import SocketChannel
from agent_sandbox.egress.dlp.own_secrets import OwnSecrets
from agent_sandbox.egress.dlp.rules import default_rules
from agent_sandbox.egress.dlp.scanner import Search
from agent_sandbox.egress.server import Egress
from agent_sandbox.policy.network import network_rules
from bench.network import CONNECTIONS, PROTOCOLS
from bench.peers import Missing

NAME = "localhost"
WAYS = ("direct", "egress", "mitmproxy")
MITMDUMP = (
    Path(__file__).resolve().parents[1] / ".bench" / "mitmproxy" / "bin" / "mitmdump"
)  # an environment of its own: it pins what it needs
_BODY = b'{"name": "agent-sandbox", "versions": ["0.1.0", "0.2.0"]}' * 4
_ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(_BODY) + _BODY
_FIELDS = "User-Agent: pip/24.0\r\nAccept: application/json\r\nAccept-Encoding: gzip, deflate\r\n"


class _Origin(asyncio.Protocol):
    """Answers every request with the same bytes."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport

    def data_received(self, data: bytes) -> None:
        self._transport.write(_ANSWER * data.count(b"\r\n\r\n"))


async def _serve(plain: socket.socket, secure: socket.socket, authority: Authority) -> None:
    loop = asyncio.get_running_loop()
    await loop.create_server(_Origin, sock=plain)
    await loop.create_server(_Origin, sock=secure, ssl=_context(authority))
    await asyncio.Event().wait()


def _context(authority: Authority) -> ssl.SSLContext:
    """Return a context that shows a certificate for whichever name is asked for."""

    def choose(tls: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> None:
        tls.context = authority.context_for(name or NAME)

    context = authority.context_for(NAME)
    context.sni_callback = choose
    return context


async def _egress(door: socket.socket, ports: dict[int, int], beyond: bytes, inside: Authority) -> None:
    async def resolve(_: str) -> list[str]:
        return ["11.0.0.1"]

    async def connect(_: str, port: int) -> SocketChannel:
        channel = (await asyncio.get_running_loop().create_connection(SocketChannel, "127.0.0.1", ports[port]))[1]
        return channel

    search = Search.of(default_rules(), OwnSecrets.of((("A", "an own secret of mine"),)), b"k" * 32)
    context = ssl.create_default_context(cadata=beyond.decode())
    egress = Egress(
        network_rules(outbound=True, hosts=["web.test"]), inside, context, resolve, lambda _: None, connect=connect, search=search
    )
    door.setblocking(False)
    await egress.accept(door, proxy=True)


async def _load(port: int, request: bytes, connect: bytes, context: ssl.SSLContext | None, count: int, seconds: float) -> list[float]:
    """Send requests on some connections for a time, and return how long each took."""
    took: list[float] = []
    end = [0.0]
    ready = asyncio.Barrier(count)

    async def one() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        if connect:
            writer.write(connect)
            await reader.readuntil(b"\r\n\r\n")
        if context is not None:
            await writer.start_tls(context, server_hostname=connect.split()[1].split(b":")[0].decode() if connect else NAME)
        for warm in (True, False):
            if not warm:
                await ready.wait()
                end[0] = end[0] or time.perf_counter() + seconds
            while True:
                begin = time.perf_counter()
                writer.write(request)
                head = await reader.readuntil(b"\r\n\r\n")
                if not head.startswith(b"HTTP/1.1 200"):
                    raise RuntimeError(head.decode())
                await reader.readexactly(len(_BODY))
                now = time.perf_counter()
                if warm:
                    break
                took.append(now - begin)
                if now > end[0]:
                    break
        writer.transport.abort()

    await asyncio.gather(*(one() for _ in range(count)))
    return took


@contextmanager
def _process(work: Any) -> Iterator[None]:
    """Run a coroutine in a process of its own."""
    child = os.fork()
    if child == 0:
        with suppress(KeyboardInterrupt):
            asyncio.run(work)
        os._exit(0)
    work.close()
    try:
        yield
    finally:
        os.kill(child, 15)
        os.waitpid(child, 0)


@contextmanager
def _mitmproxy(program: str, beyond: bytes, stack: ExitStack) -> Iterator[tuple[int, bytes]]:
    """Run the peer, and yield its port and the certificate of its authority."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    (place / "roots.pem").write_bytes(beyond)
    options = ["--set", f"confdir={place}", "--set", f"ssl_verify_upstream_trusted_ca={place / 'roots.pem'}"]
    with subprocess.Popen([program, "-q", "--listen-host", "127.0.0.1", "-p", str(port), *options]) as peer:
        try:
            for _ in range(300):
                with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                    break
                time.sleep(0.1)
            yield port, (place / "mitmproxy-ca-cert.pem").read_bytes()
        finally:
            peer.terminate()


@dataclass(frozen=True)
class Load:
    """One way to a server, over one protocol, with so many kept connections. Measured, it gives requests a second and the late ones."""

    way: str
    protocol: str
    connections: int
    door: tuple[str, int, bytes]  # the name to ask for, the port, and the certificate to trust
    ports: tuple[int, int]  # of the server

    def __call__(self) -> None:
        """Send for a moment, so that everything is warm."""
        self._took(0.2)

    def figures(self, *, what: str, seconds: float) -> list[float]:
        """Return requests a second, or the milliseconds within which 99 of 100 were answered."""
        took = sorted(self._took(seconds))
        return [len(took) / seconds] if what == "rate" else [took[int(len(took) * 0.99)] * 1000]

    def _took(self, seconds: float) -> list[float]:
        tls = self.protocol == "https"
        host, port, certificate = self.door
        target = f"{host}:{443 if tls else 80}" if self.way == "egress" else f"{NAME}:{self.ports[tls]}"
        address = f"http://{target}" if not tls and self.way != "direct" else ""
        request = f"GET {address}/simple/agent-sandbox/ HTTP/1.1\r\nHost: {target}\r\n{_FIELDS}\r\n".encode()
        connect = f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n".encode() if tls and self.way != "direct" else b""
        context = ssl.create_default_context(cadata=certificate.decode()) if tls else None
        return asyncio.run(_load(port or self.ports[tls], request, connect, context, self.connections, seconds))


def load(way: str, protocol: str, connections: int) -> Load:
    """Return a load on a server of its own, directly, through the egress with the search on, or through mitmproxy."""
    return _opened(way, (protocol,), (connections,), _STACK)[0]


_STACK = ExitStack()  # of this process: the servers end with it
atexit.register(_STACK.close)


def _opened(way: str, protocols: Sequence[str], connections: Sequence[int], stack: ExitStack) -> list[Load]:
    plain, secure = (socket.create_server(("127.0.0.1", 0), backlog=1024) for _ in range(2))
    ports = (plain.getsockname()[1], secure.getsockname()[1])
    beyond = Authority(datetime.datetime.now(datetime.UTC))
    stack.enter_context(_process(_serve(plain, secure, beyond)))
    door = ("", 0, beyond.certificate)
    if way == "egress":
        listening, inside = socket.create_server(("127.0.0.1", 0), backlog=1024), new_authority()
        stack.enter_context(_process(_egress(listening, {80: ports[0], 443: ports[1]}, beyond.certificate, inside)))
        door = ("web.test", listening.getsockname()[1], inside.certificate)
    elif way == "mitmproxy":
        if not MITMDUMP.is_file():
            raise Missing(f"there is no {MITMDUMP}")
        door = (NAME, *stack.enter_context(_mitmproxy(str(MITMDUMP), beyond.certificate, stack)))
    return [Load(way, protocol, count, door, ports) for count in connections for protocol in protocols]


def main() -> None:
    """Measure, and print a line for each way, protocol and number of connections."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--connections", type=int, nargs="+", default=list(CONNECTIONS))
    wanted = parser.parse_args()
    with ExitStack() as stack:
        ways = [_opened(way, PROTOCOLS, wanted.connections, stack) for way in WAYS if way != "mitmproxy" or MITMDUMP.is_file()]
        print(f"{'way':10} {'protocol':8} {'connections':>11} {'requests/s':>11} {'p99 ms':>8}")
        for same in zip(*ways, strict=True):
            for each in same:
                each()
                took = sorted(each._took(wanted.seconds))
                late = took[int(len(took) * 0.99)] * 1000
                print(f"{each.way:10} {each.protocol:8} {each.connections:11} {len(took) / wanted.seconds:11,.0f} {late:8.2f}", flush=True)


if __name__ == "__main__":
    main()
