"""A small internet for tests, in a network namespace of its own: name servers, and web servers that record what arrives.

`in_world` forks, because a namespace is for good: the supervisor, its egress and its guests all live in the child. The addresses are those
that a test gives, public ones too, and belong to the loopback device of that namespace: no packet leaves it.
"""

from __future__ import annotations

import datetime
import os
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import TypeVar

from agent_sandbox.egress.authority import Authority
from agent_sandbox.engine.provisions import Provisions
from agent_sandbox.kernel import doors, notify
from tests.kernel.children import in_network_namespace

T = TypeVar("T")

PUBLIC, OTHER, PRIVATE, METADATA = "93.184.215.14", "93.184.215.15", "10.11.12.13", "169.254.169.254"


class World:
    """The servers of one test. `names` maps names to addresses; `asked` are the names that arrived, `heard` the requests.

    `authority` signs for every server, and `trusted` is what a test may give out as the certificates of this machine.
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        self.names = dict(names)
        self.asked: list[str] = []
        self.heard: list[str] = []
        self.authority = Authority(datetime.datetime.now(datetime.UTC))
        self.trusted = self.authority.certificate
        servers, _ = notify.configured()
        for address in {*servers, "127.0.0.1"}:
            if not address.startswith("127."):
                doors.give_loopback(address)
            self._answer_queries_at(address)
        for address in {*names.values()}:
            doors.give_loopback(address)
            self._serve_web(address, 80, None)
            self._serve_web(address, 443, self._certified())

    def _certified(self) -> ssl.SSLContext:
        context = self.authority.context_for("nobody.example")
        context.sni_callback = lambda sock, name, _: setattr(sock, "context", self.authority.context_for(name or "nobody.example"))
        return context

    def _answer_queries_at(self, address: str) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_DGRAM)
        sock.bind((address, 53))
        threading.Thread(target=self._answer, args=(sock,), daemon=True).start()

    def _answer(self, sock: socket.socket) -> None:
        while True:
            data, sender = sock.recvfrom(4096)
            labels, at = [], 12
            while data[at]:
                labels.append(data[at + 1 : at + 1 + data[at]].decode())
                at += 1 + data[at]
            name, kind = ".".join(labels).lower(), int.from_bytes(data[at + 1 : at + 3], "big")
            self.asked.append(name)
            address = self.names.get(name)
            answer = struct.pack("!HHHIH", 0xC00C, 1, 1, 60, 4) + socket.inet_aton(address) if address and kind == 1 else b""
            flags = 0x8180 if address else 0x8183
            sock.sendto(struct.pack("!2sHHHHH", data[:2], flags, 1, bool(answer), 0, 0) + data[12 : at + 5] + answer, sender)

    def _serve_web(self, address: str, port: int, context: ssl.SSLContext | None) -> None:
        world = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                world.heard.append(f"{self.command} {self.headers['Host']}{self.path} at {address}:{port}")
                text = f"hello from {address}\n".encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            do_POST = do_GET

            def log_message(self, *words: object) -> None:
                pass

        server = _Server((address, port), Handler)
        if context is not None:
            server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()


class _Server(ThreadingHTTPServer):
    def server_bind(self) -> None:
        TCPServer.server_bind(self)  # without asking for the name of its address


def kept_rules() -> Provisions:
    """A place for the compiled rules of the search that these tests share: the first one compiles them."""
    return Provisions(state=f"{os.environ['XDG_STATE_HOME']}/searches")


def in_world(names: Mapping[str, str], act: Callable[[World], T]) -> T:
    """Return what `act` returns, done in a child that lives in a world with these names. Skips where no namespace can be made."""
    return in_network_namespace(lambda: act(World(names)))
