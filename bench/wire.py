"""Measure requests through the egress: small GETs over kept connections, plain and over intercepted TLS, beside a direct connection.

The server, the egress and the client are a process each. With `--mitmdump PROGRAM` the same client measures mitmproxy, a peer that also
reads TLS. With `--search` the egress searches every request by the product's rules.

Usage: python -m bench.wire [--seconds 3] [--connections 1 50] [--search] [--mitmdump PROGRAM]
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import os
import socket
import ssl
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from agent_sandbox.egress.authority import Authority
from agent_sandbox.egress.channel import SocketChannel
from agent_sandbox.egress.server import Egress, new_authority
from agent_sandbox.policy.network import network_rules

NAME = "localhost"
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


async def _egress(door: socket.socket, ports: dict[int, int], beyond: bytes, inside: Authority, search: bool) -> None:
    async def resolve(_: str) -> list[str]:
        return ["11.0.0.1"]

    async def connect(_: str, port: int) -> SocketChannel:
        channel = (await asyncio.get_running_loop().create_connection(SocketChannel, "127.0.0.1", ports[port]))[1]
        return channel

    options: dict[str, Any] = {}
    if search:
        from agent_sandbox.egress.dlp.own_secrets import OwnSecrets  # only where it is measured: it takes a while to compile
        from agent_sandbox.egress.dlp.rules import default_rules
        from agent_sandbox.egress.dlp.scanner import Search

        options["search"] = Search.of(default_rules(), OwnSecrets.of((("A", "an own secret of mine"),)), b"k" * 32)
    context = ssl.create_default_context(cadata=beyond.decode())
    egress = Egress(network_rules(outbound=True, hosts=["web.test"]), inside, context, resolve, lambda _: None, connect=connect, **options)
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


def main() -> None:
    """Measure, and print a line for each way, protocol and number of connections."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--connections", type=int, nargs="+", default=[1, 50])
    parser.add_argument("--search", action="store_true")
    parser.add_argument("--mitmdump", default="")
    wanted = parser.parse_args()
    plain, secure, door = (socket.create_server(("127.0.0.1", 0), backlog=1024) for _ in range(3))
    plain_port, secure_port, door_port = (each.getsockname()[1] for each in (plain, secure, door))
    beyond, inside = Authority(datetime.datetime.now(datetime.UTC)), new_authority()
    with ExitStack() as stack:
        stack.enter_context(_process(_serve(plain, secure, beyond)))
        ports = {80: plain_port, 443: secure_port}
        stack.enter_context(_process(_egress(door, ports, beyond.certificate, inside, wanted.search)))
        ways = [("direct", "", 0, beyond.certificate), ("egress", "web.test", door_port, inside.certificate)]
        if wanted.mitmdump:
            port, certificate = stack.enter_context(_mitmproxy(wanted.mitmdump, beyond.certificate, stack))
            ways.append(("mitmproxy", NAME, port, certificate))
        print(f"{'way':10} {'protocol':8} {'connections':>11} {'requests/s':>11} {'p50 ms':>8} {'p99 ms':>8}")
        for count in wanted.connections:
            for protocol in ("http", "https"):
                for way, host, port, certificate in ways:
                    _measure(way, host, port, certificate, protocol, count, wanted.seconds, (plain_port, secure_port))


def _measure(way: str, host: str, port: int, certificate: bytes, protocol: str, count: int, seconds: float, ports: tuple[int, int]) -> None:
    tls = protocol == "https"
    target = f"{host}:{443 if tls else 80}" if way == "egress" else f"{NAME}:{ports[tls]}"
    address = f"http://{target}" if not tls and way != "direct" else ""
    request = f"GET {address}/simple/agent-sandbox/ HTTP/1.1\r\nHost: {target}\r\n{_FIELDS}\r\n".encode()
    connect = f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n".encode() if tls and way != "direct" else b""
    context = ssl.create_default_context(cadata=certificate.decode()) if tls else None
    took = sorted(asyncio.run(_load(port or ports[tls], request, connect, context, count, seconds)))
    middle, late = took[len(took) // 2], took[int(len(took) * 0.99)]
    print(f"{way:10} {protocol:8} {count:11} {len(took) / seconds:11,.0f} {middle * 1000:8.2f} {late * 1000:8.2f}", flush=True)


if __name__ == "__main__":
    main()
