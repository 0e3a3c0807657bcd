"""Connections to the HTTP interface that say nothing, little, or two things at once, and those beside them that want something."""

from __future__ import annotations

import asyncio
import select
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from agent_sandbox.server import connections
from agent_sandbox.server.connections import BoundedProtocol
from agent_sandbox.server.http_api import LARGEST_REQUEST, application
from agent_sandbox.server.local_ports import listening_at
from tests.patience import until

TOKEN = "a-token-that-nobody-guesses"
BEARING = f"Host: 127.0.0.1:1\r\nAuthorization: Bearer {TOKEN}\r\n".encode()
MOST = 20


class Port:
    """A port that serves an application, and what is connected to it."""

    def __init__(self, app: Any, protocol: type[H11Protocol]) -> None:
        self.listener = listening_at("127.0.0.1", 0)
        self.number = self.listener.getsockname()[1]
        self.server = uvicorn.Server(uvicorn.Config(app, http=protocol, ws="none", lifespan="off", log_config=None))

    @property
    def connected(self) -> int:
        return len(self.server.server_state.connections)

    def connect(self, said: bytes = b"") -> socket.socket:
        link = socket.create_connection(("127.0.0.1", self.number))
        link.settimeout(120)
        link.sendall(said)
        return link

    def get(self, path: str = "/healthz") -> int:
        return httpx.get(f"http://127.0.0.1:{self.number}{path}", headers={"Authorization": f"Bearer {TOKEN}"}, timeout=None).status_code


@contextmanager
def serving(app: Any, protocol: type[H11Protocol] = BoundedProtocol) -> Iterator[Port]:
    port = Port(app, protocol)
    thread = threading.Thread(target=port.server.run, args=([port.listener],))
    thread.start()
    try:
        assert until(lambda: port.server.started)
        yield port
    finally:
        port.server.force_exit = port.server.should_exit = True
        thread.join()
        port.listener.close()


@pytest.fixture
def interface(tmp_path: Path) -> Any:
    return application(str(tmp_path), tmp_path, TOKEN)


def rest(link: socket.socket) -> bytes:
    """All that still comes, until the other side closes. What it has not read, the kernel answers with a reset."""
    said = b""
    with suppress(ConnectionResetError):
        while part := link.recv(4096):
            said += part
    return said


@pytest.mark.parametrize("said", [b"", b"GET /healthz HTTP/1.1\r\nX: "], ids=["silent", "half a head"])
@pytest.mark.parametrize(("protocol", "held"), [(BoundedProtocol, MOST), (H11Protocol, 3 * MOST)], ids=["bounded", "control"])
def test_connections_that_say_nothing_keep_nobody_out(
    said: bytes, protocol: type[H11Protocol], held: int, interface: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "most_connections", lambda: MOST)
    with serving(interface, protocol) as port, ExitStack() as stack:
        links = [stack.enter_context(port.connect(said)) for _ in range(3 * MOST)]
        assert until(lambda: port.connected == held), "the control arm has no bound"
        assert port.get() == 200
        if protocol is BoundedProtocol:
            assert rest(links[0])[:12] in (b"HTTP/1.1 503", b""), "the oldest one was told to come later, and closed"


def test_a_head_has_only_so_long_and_an_answer_may_last(monkeypatch: pytest.MonkeyPatch) -> None:
    async def slow(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(4 * connections.HEAD_SECONDS)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.25)
    with serving(slow) as port, ExitStack() as stack:
        answered = stack.enter_context(port.connect(b"GET / HTTP/1.1\r\n" + BEARING + b"\r\n"))
        for said in (b"", b"GET / HTTP/1.1\r\nX: a"):
            assert rest(stack.enter_context(port.connect(said))) == b""
        assert answered.recv(4096).startswith(b"HTTP/1.1 200"), "the control arm: it took longer, and was not closed"
        answered.sendall(b"GET / HTTP/1.1\r\n")
        assert rest(answered) == b"", "the next request has no longer"


def test_a_request_with_two_lengths_is_refused_and_what_follows_is_not_read(interface: Any) -> None:
    hidden = b"GET /healthz HTTP/1.1\r\n" + BEARING + b"\r\n"
    with serving(interface) as port:
        for lengths, answers in (
            (b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n", [b"400"]),
            (b"Content-Length: 5\r\nContent-Length: 6\r\n", [b"400"]),
            (b"Transfer-Encoding: ch\x13nked\r\n", [b"400"]),
            (b"Transfer-Encoding: chunked\r\nConnection: close\r\n", [b"405"]),
        ):
            with port.connect(b"PUT /healthz HTTP/1.1\r\n" + BEARING + lengths + b"\r\n0\r\n\r\n" + hidden) as link:
                said = rest(link)
                assert [part[:3] for part in said.split(b"HTTP/1.1 ")[1:]] == answers, (lengths, said)
        with port.connect(b"PUT /healthz HTTP/1.1\r\n" + BEARING + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + hidden) as link:
            assert until(lambda: link.recv(1 << 16, socket.MSG_PEEK).count(b"HTTP/1.1 ") == 2), "the control arm: two requests, two answers"


@pytest.mark.parametrize(
    "path",
    ["/v1/verbs/run/", "//v1/verbs/run", "/v1/verbs/run/../serve", "/v1/verbs/%2e%2e/state", "/v1/verbs/run%00", "/v1/verbs/run%2f", "/"],
)
def test_a_path_means_one_thing_or_nothing(path: str, interface: Any) -> None:
    with serving(interface) as port:
        with port.connect(
            b"POST " + path.encode() + b" HTTP/1.1\r\n" + BEARING + b"Content-Length: 2\r\nConnection: close\r\n\r\n{}"
        ) as link:
            assert rest(link).startswith(b"HTTP/1.1 404")
        assert port.get() == 200, "the control arm"


def test_a_hundred_megabytes_are_refused_before_they_are_there(interface: Any) -> None:
    part = b"%x\r\n" % (1 << 20) + bytes(1 << 20) + b"\r\n"
    with (
        serving(interface) as port,
        port.connect(b"POST /v1/verbs/run HTTP/1.1\r\n" + BEARING + b"Transfer-Encoding: chunked\r\n\r\n") as link,
    ):
        sent = 0
        with suppress(ConnectionError):
            while sent < 100:
                link.sendall(part)
                sent += 1
                if select.select([link], [], [], 0)[0]:
                    break
        assert LARGEST_REQUEST >> 20 <= sent < 100, f"it was refused after {sent} MiB"
        assert rest(link)[:12] in (b"HTTP/1.1 413", b"")
        assert port.get() == 200


def test_a_thousand_connections_are_answered_or_told_to_come_later(interface: Any) -> None:
    """Not all at a time: both ends are descriptors of this process, which commonly may have 1024."""
    with serving(interface) as port:
        answers: Counter[bytes] = Counter()
        for count in (400, 400, 200):
            with ExitStack() as stack:
                links = [stack.enter_context(port.connect()) for _ in range(count)]
                for link in links:
                    with suppress(OSError):
                        link.sendall(b"GET /healthz HTTP/1.1\r\n" + BEARING + b"Connection: close\r\n\r\n")
                answers += Counter(rest(link)[9:12] for link in links)
        assert sum(answers.values()) == 1000 and set(answers) <= {b"200", b"503", b""} and answers[b"200"], answers
        assert port.get() == 200
