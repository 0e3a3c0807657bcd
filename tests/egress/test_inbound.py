"""Requests to published ports: which pass, in which form, and what becomes of a broken client or server."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

import h11
import pytest
from hypothesis import assume, event, example, given, settings
from hypothesis import strategies as st

from agent_sandbox.egress import inbound
from agent_sandbox.egress.http1 import MalformedHttp, MessageReader, RequestHead
from agent_sandbox.egress.inbound import Admitted, Inbound, InboundPatience, TurnedAway, admit
from agent_sandbox.egress.websocket import accept_key
from agent_sandbox.kernel import doors
from agent_sandbox.policy.publications import Publication
from tests.patience import until

PORT = 8000
KEY = b"dGhlIHNhbXBsZSBub25jZQ=="
UPGRADE = b"Connection: keep-alive, Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: " + KEY + b"\r\n"


def parsed(written: bytes) -> RequestHead:
    reader = MessageReader()
    reader.receive(written)
    head = reader.next()
    assert isinstance(head, RequestHead)
    return head


def judged(line: bytes, fields: bytes) -> Admitted | int:
    try:
        return admit(parsed(line + b"\r\n" + fields + b"\r\n"), PORT, (PORT, 9000))
    except TurnedAway as why:
        return why.status


@pytest.mark.parametrize("host", [b"localhost:8000", b"LocalHost:8000", b"127.0.0.1:8000", b"[::1]:8000"])
def test_a_request_for_this_port_of_this_machine_passes(host: bytes) -> None:
    passed = judged(b"GET /a?b HTTP/1.1", b"Host: " + host + b"\r\nCookie: c=d\r\n")
    assert passed == Admitted(b"GET /a?b HTTP/1.1\r\nHost: " + host + b"\r\nCookie: c=d\r\nConnection: close\r\n\r\n")
    assert judged(b"GET http://" + host + b"/a?b HTTP/1.1", b"Host: " + host + b"\r\nCookie: c=d\r\n") == passed, "written in full, too"


@pytest.mark.parametrize(
    "host",
    [
        *(b"evil.example:8000", b"evil.example", b"localhost", b"127.0.0.1", b"localhost:9000", b"localhost:80000", b"localhost.:8000"),
        *(b"localhost.evil.example:8000", b"127.0.0.1.evil.example:8000", b"127.0.0.2:8000", b"0.0.0.0:8000", b"[::]:8000", b"::1:8000"),
        *(b"", b":8000", b"user@localhost:8000", b"localhost:8000@evil.example", b"localhost:8000,evil.example:8000", b"2130706433:8000"),
    ],
)
def test_a_request_for_any_other_host_is_turned_away(host: bytes) -> None:
    """A page whose own name resolves to 127.0.0.1 (DNS rebinding) makes the browser send that name."""
    assert judged(b"GET / HTTP/1.1", b"Host: " + host + b"\r\n") == 421
    assert judged(b"GET / HTTP/1.0", b"Host: " + host + b"\r\n") == 421
    assert judged(b"GET http://" + host + b"/ HTTP/1.1", b"Host: localhost:8000\r\n") in (400, 421)


def test_a_request_without_a_host_or_with_two_or_for_a_proxy_is_turned_away() -> None:
    assert judged(b"GET / HTTP/1.0", b"") == 400
    assert judged(b"GET / HTTP/1.1", b"") == 400
    assert judged(b"GET / HTTP/1.1", b"Host: localhost:8000\r\nHost: evil.example\r\n") == 400
    assert judged(b"CONNECT evil.example:443 HTTP/1.1", b"Host: localhost:8000\r\n") == 405
    assert judged(b"GET ftp://localhost:8000/ HTTP/1.1", b"Host: localhost:8000\r\n") == 400
    assert judged(b"GET x HTTP/1.1", b"Host: localhost:8000\r\n") == 400
    assert isinstance(judged(b"OPTIONS * HTTP/1.1", b"Host: localhost:8000\r\n"), Admitted), "the control"


def test_a_websocket_passes_for_pages_of_the_sandbox_and_for_programs_that_are_no_browser() -> None:
    for origin in (b"", b"Origin: http://localhost:8000\r\n", b"Origin: http://127.0.0.1:9000\r\n", b"Origin: http://[::1]:8000\r\n"):
        passed = judged(b"GET /ws HTTP/1.1", b"Host: localhost:8000\r\n" + UPGRADE + origin)
        assert isinstance(passed, Admitted) and passed.websocket and b"\r\nUpgrade: websocket\r\n" in passed.head


@pytest.mark.parametrize(
    "origin", [b"http://evil.example", b"https://localhost:8000", b"http://localhost:8001", b"http://localhost", b"null", b"", b"file://"]
)
def test_a_websocket_of_another_page_is_turned_away(origin: bytes) -> None:
    assert judged(b"GET /ws HTTP/1.1", b"Host: localhost:8000\r\n" + UPGRADE + b"Origin: " + origin + b"\r\n") == 403
    plain = judged(b"GET /ws HTTP/1.1", b"Host: localhost:8000\r\nOrigin: " + origin + b"\r\n")
    assert isinstance(plain, Admitted), "the control: other requests are for the server to judge"


@pytest.mark.parametrize("other", [b"h2c", b"websocket, h2c", b"foo"])
def test_no_other_protocol_is_asked_for(other: bytes) -> None:
    fields = (
        b"Host: localhost:8000\r\nConnection: Upgrade, HTTP2-Settings, X-Own\r\nHTTP2-Settings: AA\r\nX-Own: 1\r\nUpgrade: "
        + other
        + b"\r\n"
    )
    assert judged(b"GET / HTTP/1.1", fields) == Admitted(b"GET / HTTP/1.1\r\nHost: localhost:8000\r\nConnection: close\r\n\r\n")


_HOSTS = st.sampled_from(["localhost:8000", "127.0.0.1:8000", "evil.example", "localhost:8000, evil.example", "localhost"])
_LINES = st.one_of(
    st.builds("Host: {}".format, _HOSTS),
    st.builds("Host :{}".format, _HOSTS),
    st.builds("X-Forwarded-Host: {}".format, _HOSTS),
    st.builds(
        "Connection: {}".format, st.sampled_from(["close", "Host", "Upgrade", "content-length", "keep-alive, host, transfer-encoding"])
    ),
    st.builds("Transfer-Encoding: {}".format, st.sampled_from(["chunked", "identity", "chunked, chunked", "xchunked"])),
    st.builds("Content-Length: {}".format, st.sampled_from(["0", "5", "5, 5", "+5", "05"])),
    st.builds("Upgrade: {}".format, st.sampled_from(["websocket", "h2c"])),
    st.just("Sec-WebSocket-Key: x"),
    st.text("aA:\t \x0b\r\nHost", max_size=12),
)
_TARGETS = st.one_of(
    st.sampled_from(["/", "*", "/?http://evil.example/"]), st.builds("http://{}/".format, _HOSTS), st.builds("{}:443".format, _HOSTS)
)


@settings(max_examples=400)
@example("POST", "/", "1", ["Content-Length: 05"])
@given(st.sampled_from(["GET", "POST", "OPTIONS", "CONNECT", "HEAD"]), _TARGETS, st.sampled_from("01"), st.lists(_LINES, max_size=4))
def test_whatever_passes_is_one_request_for_this_port_in_the_eyes_of_another_reader(
    method: str, target: str, minor: str, lines: list[str]
) -> None:
    reader = MessageReader()
    reader.receive("\r\n".join((f"{method} {target} HTTP/1.{minor}", "Host: localhost:8000", *lines, "", "")).encode("latin-1"))
    try:
        head = reader.next()
        assume(isinstance(head, RequestHead))
        assert isinstance(head, RequestHead)
        passed = admit(head, PORT, (PORT,))
    except (MalformedHttp, TurnedAway):
        event("turned away")
        return
    event("passed")
    server = h11.Connection(h11.SERVER)
    server.receive_data(passed.head)
    seen = server.next_event()
    assert isinstance(seen, h11.Request)
    fields = list(seen.headers)
    assert [value for name, value in fields if name == b"host"] in ([b"localhost:8000"], [b"127.0.0.1:8000"])
    assert seen.method == method.encode() != b"CONNECT" and (seen.target == b"*" or seen.target.startswith(b"/"))
    chunked, lengths = (b"transfer-encoding", b"chunked") in fields, [value for name, value in fields if name == b"content-length"]
    assert chunked == (head.length is None) and lengths in ([], [b"%d" % (head.length or 0)]) and not (chunked and lengths)


class Published:
    """A published port without a sandbox: the sockets of "its" network are those of this one."""

    def __init__(self, port: int, inner: socket.socket) -> None:
        self.port, self.server = port, inner
        self.reasons: list[str] = []
        self.inbound: Inbound

    def connect(self) -> socket.socket:
        made = socket.create_connection(("127.0.0.1", self.port), 60)
        made.settimeout(60)
        return made

    def ask(self, request: bytes) -> bytes:
        """Send bytes, and return all that comes back until the end."""
        with self.connect() as client:
            client.sendall(request.replace(b"{host}", b"localhost:%d" % self.port))
            return everything(client)

    @property
    def get(self) -> bytes:
        return b"GET / HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"


def everything(sock: socket.socket) -> bytes:
    data = b""
    with suppress(ConnectionError):
        while piece := sock.recv(65536):
            data += piece
    return data


@contextmanager
def published(patience: InboundPatience | None = None, *, family: int = socket.AF_INET, listen: bool = True) -> Iterator[Published]:
    """Publish a port that leads to a server of the caller's. Without `listen`, nobody listens there."""
    with ExitStack() as ends:
        listener = ends.enter_context(socket.create_server(("127.0.0.1", 0)))
        listener.setblocking(False)
        inner = ends.enter_context(socket.socket(family, socket.SOCK_STREAM))
        inner.bind(("::1" if family == socket.AF_INET6 else "127.0.0.1", 0))
        inner.settimeout(60)
        if listen:
            inner.listen()
        asking, asked = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

        def act_as_init() -> None:
            with asked:
                while doors.give_sockets(asked):
                    pass

        giver = threading.Thread(target=act_as_init)
        giver.start()
        ends.callback(giver.join)
        made = Published(listener.getsockname()[1], inner)
        publication = Publication(made.port, inner.getsockname()[1])
        made.inbound = Inbound((publication,), lambda _, why: made.reasons.append(why), patience or InboundPatience())
        loop, stop = asyncio.new_event_loop(), asyncio.Event()

        def serve() -> None:
            loop.run_until_complete(made.inbound.serve([listener], asking, stop))
            loop.close()

        server = threading.Thread(target=serve)
        server.start()
        ends.callback(server.join)
        ends.callback(loop.call_soon_threadsafe, stop.set)
        yield made


def serve(place: Published, *answers: bytes, hold: Callable[[socket.socket], None] | None = None) -> Callable[[], list[bytes]]:
    """Answer one connection after another: read a whole head, answer, close. Return a function that waits and gives what was read."""
    heard: list[bytes] = []

    def act() -> None:
        for answer in answers:
            connection, _ = place.server.accept()
            data = b""
            with connection, suppress(ConnectionError):
                connection.settimeout(60)
                while b"\r\n\r\n" not in data and (piece := connection.recv(65536)):
                    data += piece
                connection.sendall(answer)
                if hold is not None:
                    hold(connection)
            heard.append(data)

    thread = threading.Thread(target=act)
    thread.start()

    def wait() -> list[bytes]:
        thread.join(60)
        return heard

    return wait


HELLO = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_a_request_reaches_the_server_and_its_answer_the_client(family: int) -> None:
    with published(family=family) as place:
        heard = serve(place, HELLO)
        assert place.ask(place.get) == b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello"
        assert heard() == [b"GET / HTTP/1.1\r\nHost: localhost:%d\r\nConnection: close\r\n\r\n" % place.port]
    (visits,) = place.inbound.visits.values()
    assert (visits.requests, visits.turned_away, visits.sent) == (1, 0, 5)


def test_every_request_of_a_connection_is_judged() -> None:
    with published() as place:
        heard = serve(place, HELLO, HELLO)
        good = b"GET / HTTP/1.1\r\nHost: {host}\r\n\r\n"
        answer = place.ask(good + good + good.replace(b"{host}", b"evil.example") + good)
        assert answer.count(b"hello") == 2, "the control: what comes before passes"
        assert answer.count(b"HTTP/1.1 ") == 3 and b"HTTP/1.1 421 Misdirected Request" in answer
        assert b"the request is for the host 'evil.example', and this is localhost:%d\n" % place.port in answer
        assert len(heard()) == 2 and not any(b"evil" in each for each in heard())
    assert len(place.reasons) == 1


@pytest.mark.parametrize("answer", [HELLO, b"HTTP/1.1 426 Upgrade Required\r\nContent-Length: 0\r\n\r\n"])
def test_what_follows_a_websocket_that_the_server_did_not_open_is_judged_as_requests(answer: bytes) -> None:
    with published() as place:
        heard = serve(place, answer)
        asked = b"GET /ws HTTP/1.1\r\nHost: {host}\r\n" + UPGRADE + b"\r\n"
        assert b"421" in place.ask(asked + b"GET /secret HTTP/1.1\r\nHost: evil.example\r\n\r\n")
        assert len(heard()) == 1


def test_a_websocket_carries_bytes_both_ways_until_it_ends() -> None:
    opened = (
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: %b\r\n\r\n"
        % accept_key(KEY)
    )

    def echo(connection: socket.socket) -> None:
        while piece := connection.recv(100):
            connection.sendall(piece.upper())

    with published() as place:
        serve(place, opened + b"first", hold=echo)
        with place.connect() as client:
            client.sendall(
                (b"GET /ws HTTP/1.1\r\nHost: {host}\r\n" + UPGRADE + b"\r\nearly").replace(b"{host}", b"localhost:%d" % place.port)
            )
            data = b""
            while not data.endswith(b"firstEARLY"):
                data += client.recv(1000)
            assert data.startswith(b"HTTP/1.1 101 ") and b"Upgrade: websocket" in data
            client.sendall(b"late")
            client.shutdown(socket.SHUT_WR)
            assert everything(client) == b"LATE"


def test_before_the_server_listens_the_client_is_told() -> None:
    with published(listen=False) as place:
        answer = place.ask(place.get)
        assert (
            answer.startswith(b"HTTP/1.1 502 Bad Gateway") and b"nothing listens at port" in answer and b"may still be starting" in answer
        )
        place.server.listen()
        serve(place, HELLO)
        assert place.ask(place.get).endswith(b"hello"), "and once it listens, it is reached"


def test_a_kernel_without_the_sixth_version_serves_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(doors._FAMILIES, doors.SIXTH, 127)
    with published(listen=False) as place:
        assert [b"nothing listens at port" in place.ask(place.get) for _ in range(3)] == [True] * 3
        place.server.listen()
        serve(place, HELLO)
        assert place.ask(place.get).endswith(b"hello")


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"", b"closed the connection before it answered"),
        (b"HTTP/1.1 200 OK\r\n", b"malformed"),
        (b"SSH-2.0-server\r\n\r\n", b"malformed"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello", b"malformed"),
        (b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: foo\r\nConnection: Upgrade\r\n\r\n", b"was not asked to"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" * 20, b"without end"),
    ],
)
def test_a_broken_server_gives_a_clear_error_and_the_next_request_goes_on(answer: bytes, said: bytes) -> None:
    with published() as place:
        serve(place, answer, HELLO)
        told = place.ask(place.get)
        assert b"HTTP/1.1 502 Bad Gateway" in told and said in told
        assert place.ask(place.get).endswith(b"hello")


@pytest.mark.parametrize(
    "request_",
    [
        b"\x16\x03\x01\x02\x00",
        b"GET / HTTP/1.1\nHost: localhost\n\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET / HTTP/1.1\r\nA" + b"a" * 70000,
    ],
)
def test_what_is_no_request_of_http_1_is_told_so(request_: bytes) -> None:
    with published() as place:
        assert place.ask(request_).startswith(b"HTTP/1.1 4")
        serve(place, HELLO)
        assert place.ask(place.get).endswith(b"hello")


def test_a_body_passes_both_ways_in_chunks_and_whole() -> None:
    body = bytes(range(256)) * 4096

    def take(connection: socket.socket) -> None:
        data = b""
        while not data.endswith(b"0\r\n\r\n"):
            data += connection.recv(65536)
        taken.append(data)

    taken: list[bytes] = []
    with published() as place:
        serve(place, b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n", hold=take)
        with place.connect() as client:
            client.sendall(b"POST / HTTP/1.1\r\nHost: localhost:%d\r\nTransfer-Encoding: chunked\r\n\r\n" % place.port)
            client.sendall(b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
            client.shutdown(socket.SHUT_WR)
            assert everything(client).endswith(b"3\r\nabc\r\n0\r\n\r\n")
    (visits,) = place.inbound.visits.values()
    assert (visits.received, visits.sent) == (len(body), 3)


def test_a_client_of_http_1_0_gets_the_plain_body_and_a_closed_connection() -> None:
    with published() as place:
        serve(place, b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n")
        assert place.ask(b"GET / HTTP/1.0\r\nHost: {host}\r\n\r\n") == b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nabc"


def test_an_answer_that_breaks_off_is_not_whole_for_the_client_either() -> None:
    with published() as place:
        serve(place, b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nhello")
        with place.connect() as client:
            client.sendall(place.get.replace(b"{host}", b"localhost:%d" % place.port))
            assert len(everything(client).partition(b"\r\n\r\n")[2]) < 50


def test_a_body_that_breaks_off_never_becomes_a_whole_request() -> None:
    rest: list[bytes] = []
    with published() as place:
        wait = serve(place, b"", hold=lambda connection: rest.append(everything(connection)))
        told = place.ask(b"POST / HTTP/1.1\r\nHost: {host}\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\nXX\r\n")
        assert b"400" in told and b"malformed" in told
        assert b"0\r\n\r\n" not in b"".join((*wait(), *rest))


def test_a_slow_reader_does_not_make_us_hold_the_answer() -> None:
    most = 64 << 20

    def pour(connection: socket.socket) -> None:
        connection.settimeout(1)
        with suppress(OSError):
            while sent[0] < most:
                sent[0] += connection.send(b"x" * 65536)

    sent = [0]
    with published() as place:
        wait = serve(place, b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % most, hold=pour)
        with place.connect() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.sendall(place.get.replace(b"{host}", b"localhost:%d" % place.port))
            wait()
            assert 0 < sent[0] < most // 2, "the server is held up, too"


def test_a_client_that_says_no_more_still_gets_its_answer_and_one_that_is_slow_to_speak_does_not() -> None:
    with published() as place:
        serve(place, HELLO)
        with place.connect() as client:
            client.sendall(place.get.replace(b"{host}", b"localhost:%d" % place.port))
            client.shutdown(socket.SHUT_WR)
            assert everything(client).endswith(b"hello")
    with published(InboundPatience(head=0.1, idle=1e6)) as place:
        assert place.ask(b"GET / HT").startswith(b"HTTP/1.1 408 ")
    with published(InboundPatience(head=1e6, idle=0.1)) as place:
        assert place.ask(b"") == b""


def test_a_client_that_has_gone_is_not_waited_for_without_end() -> None:
    gone: list[bytes] = []
    with published(InboundPatience(slice=0.05, farewell=0.1)) as place:
        wait = serve(place, b"", hold=lambda connection: gone.append(everything(connection)))
        with place.connect() as client:
            client.sendall(place.get.replace(b"{host}", b"localhost:%d" % place.port))
        wait()
    assert gone == [b""], "the server's connection has ended"


def test_connections_without_a_request_give_way_to_those_with_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbound, "MOST_CONNECTIONS", 3)
    with ExitStack() as ends, published(InboundPatience(idle=1e6)) as place:
        idle = [ends.enter_context(place.connect()) for _ in range(10)]
        serve(place, HELLO, HELLO)
        assert place.ask(place.get).endswith(b"hello")
        idle[-1].sendall(place.get.replace(b"{host}", b"localhost:%d" % place.port))
        assert everything(idle[-1]).endswith(b"hello"), "the last one is still served"
        assert idle[0].recv(1) == b"", "and the first was closed"


def test_the_end_closes_every_connection() -> None:
    held: list[bytes] = []
    with published() as place:
        serve(place, b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nhello", hold=lambda connection: held.append(everything(connection)))
        client = place.connect()
        client.sendall(place.get.replace(b"{host}", b"localhost:%d" % place.port))
        until(lambda: b"hello" in client.recv(1000, socket.MSG_PEEK))
    assert len(everything(client).partition(b"\r\n\r\n")[2]) <= 5
    client.close()
    with pytest.raises(ConnectionRefusedError):
        place.connect()


def test_init_gives_sockets_that_were_asked_for_and_stops_when_nobody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    asking, asked = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with asking, asked:
        asking.send(doors.FOURTH)
        assert doors.give_sockets(asked)
        data, (given,), _, _ = socket.recv_fds(asking, 1, 1)
        with socket.socket(fileno=given) as sock:
            assert (data, sock.family, sock.type) == (doors.FOURTH, socket.AF_INET, socket.SOCK_STREAM)
        monkeypatch.setitem(doors._FAMILIES, doors.SIXTH, 127)  # a family that no kernel has
        asking.send(doors.SIXTH)
        assert doors.give_sockets(asked) and socket.recv_fds(asking, 1, 1)[:2] == (doors.SIXTH, [])
        asking.send(b"?")
        assert not doors.give_sockets(asked)
        asking.close()
        assert not doors.give_sockets(asked)
