"""The server at the door, over sockets: what reaches the host beyond, what does not, and that one broken flow leaves the others alone."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace

import pytest

from agent_sandbox.egress.dlp.own_secrets import OwnSecrets
from agent_sandbox.egress.dlp.rules import SearchRule
from agent_sandbox.egress.dlp.scanner import Search
from agent_sandbox.egress.inspection import HELD
from agent_sandbox.egress.upstream import Patience
from agent_sandbox.policy.bound_secrets import BoundSecret, new_placeholder
from agent_sandbox.policy.network import network_rules
from agent_sandbox.policy.traffic_budgets import read_budget
from tests.egress.wire import INSIDE, OK, PUBLIC, Beyond, Door, door, run

CANARY = b"canary-7f3a9c51"
QUICK = Patience(first=0.2, head=0.2, between=0.2, dial=0.2, response=0.2, idle=0.2)


def get(path: str = "/", host: str = "web.test", *more: str) -> bytes:
    return "\r\n".join((f"GET {path} HTTP/1.1", f"Host: {host}", *more, "Connection: close", "", "")).encode()


def through_proxy(path: str = "/", host: str = "web.test") -> bytes:
    return get(f"http://{host}{path}", host)


async def still_serves(opened: Door) -> None:
    """Fail unless a good request is answered."""
    assert b" 200 OK" in await opened.send(through_proxy("/good"), proxy=True)


def test_a_request_reaches_the_host_and_its_answer_comes_back() -> None:
    async def test() -> None:
        beyond = Beyond()
        async with door(beyond=beyond.serve) as opened:
            assert await opened.send(get("/a?b", f"web.test:{opened.port}")) == OK.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
            assert (await opened.send_tls("web.test", get("/secure"))).endswith(b"\r\n\r\nok")
            assert beyond.received[0] == f"GET /a?b HTTP/1.1\r\nHost: web.test:{opened.port}\r\n\r\n".encode()
            assert beyond.received[1] == b"GET /secure HTTP/1.1\r\nHost: web.test\r\n\r\n"
        first = opened.flows[0]
        assert (first["name"], first["how"], first["rule"], first["received"]) == ("web.test", "http", "web.test", 2)
        assert first["requests"] == ["GET /a 200, received 2"]

    run(test())


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET / HTTP/1.1\r\nHost: other.test\r\nX: " + CANARY + b"\r\n\r\n", 403),
        (b"POST / HTTP/1.1\r\nHost: web.test:%d\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n" + CANARY, 400),
        (b"GET / HTTP/1.1\nHost: web.test:%d\n\n" + CANARY, 400),
        (b"GET / HTTP/1.1\r\nHost: web.test:%d\r\nX : " + CANARY + b"\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: web.test:%d\r\n" + b"X: y\r\n" * 300 + CANARY + b": x\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\nHost: web.test:%d\r\nX: " + CANARY * 8000, 431),
        (b"TRACE /" + CANARY + b" HTTP/1.1\r\nHost: web.test:%d\r\n\r\n", 405),
        (b"CONNECT web.test:80 HTTP/1.1\r\nHost: web.test:%d\r\n\r\n" + CANARY, 405),
    ],
)
def test_what_may_not_leave_does_not(data: bytes, status: int) -> None:
    async def test() -> None:
        beyond = Beyond()
        async with door(beyond=beyond.serve) as opened:
            answer = await opened.send(data.replace(b"%d", str(opened.port).encode()))
            assert answer.startswith(f"HTTP/1.1 {status} ".encode()), answer
            assert b"by the sandbox: " in answer
            assert CANARY not in beyond.all
            await still_serves(opened)
            assert await opened.send(get("/" + CANARY.decode(), f"web.test:{opened.port}"))
            assert CANARY in beyond.all  # it can arrive: it was refused for what it was in
        assert any(flow["refused"] for flow in opened.flows)

    run(test())


def test_a_smuggled_request_is_not_the_second_of_its_connection() -> None:
    async def test() -> None:
        beyond = Beyond()
        async with door(beyond=beyond.serve) as opened:
            host = f"Host: web.test:{opened.port}\r\n".encode()
            inner = b"GET /" + CANARY + b" HTTP/1.1\r\n" + host + b"\r\n"
            await opened.send(
                b"POST / HTTP/1.1\r\n" + host + b"Content-Length: %d\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" % 5 + inner
            )
            assert CANARY not in beyond.all
            await opened.send(b"POST / HTTP/1.1\r\n" + host + b"Content-Length: %d\r\n\r\n" % len(inner) + inner)
        assert [each for flow in opened.flows for each in flow["requests"]] == [f"POST / 200, sent {len(inner)}, received 2"]

    run(test())


def test_requests_follow_one_another_on_both_sides() -> None:
    async def test() -> None:
        beyond = Beyond()
        async with door(beyond=beyond.serve) as opened:
            one = b"POST /%d HTTP/1.1\r\nHost: web.test\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n"
            reader, writer = await opened.open_tls("web.test")
            writer.write(b"".join(one % each for each in range(3)))
            assert [await reader.readexactly(len(OK)) for _ in range(3)] == [OK] * 3
            writer.transport.abort()
            assert len(beyond.received) == 1
            assert beyond.all.count(b"Content-Length: 2\r\n\r\nab") == 3  # written afresh, with its length

    run(test())


def test_a_proxy_opens_ways_and_takes_whole_addresses() -> None:
    async def test() -> None:
        beyond = Beyond()
        async with door(beyond=beyond.serve) as opened:
            assert b" 200 OK" in await opened.send(through_proxy("/a"), proxy=True)
            assert beyond.all == b"GET /a HTTP/1.1\r\nHost: web.test\r\n\r\n"
            assert b" 200 OK" in await opened.send_tls("a.web.test", get("/", "a.web.test")) or True
            for refused in (
                through_proxy("/", "other.test"),
                get("/"),
                get("https://web.test/"),
                get("ftp://web.test/"),
                b"CONNECT other.test:443 HTTP/1.1\r\nHost: other.test:443\r\n\r\n",
                b"CONNECT web.test:22 HTTP/1.1\r\n\r\n",
                b"CONNECT web.test HTTP/1.1\r\n\r\n",
                b"CONNECT web.test:443 HTTP/1.1\r\nHost: other.test:443\r\n\r\n",
                b"CONNECT 127.0.0.1:80 HTTP/1.1\r\n\r\n",
                b"CONNECT [::ffff:169.254.169.254]:80 HTTP/1.1\r\n\r\n",
                b"CONNECT web.test\x00.other.test:443 HTTP/1.1\r\n\r\n",
            ):
                answer = await opened.send(refused, proxy=True)
                assert answer[9:12] in (b"400", b"403"), (refused, answer)
            assert set(opened.asked) <= {"web.test", "a.web.test"}

    run(test())


def test_the_names_of_connection_tls_and_request_must_be_one() -> None:
    async def test() -> None:
        beyond = Beyond()
        async with door(beyond=beyond.serve) as opened:
            assert b"HTTP/1.1 421 " in await opened.send_tls("web.test", get("/"), sni="a.web.test")
            assert b"HTTP/1.1 421 " in await opened.send_tls("web.test", get("/", "a.web.test"))
            assert b"HTTP/1.1 421 " in await opened.send_tls("web.test", get("https://a.web.test/", "web.test"))
            assert beyond.all == b""
            assert b" 200 OK" in await opened.send_tls("web.test", get("/"))

    run(test())


def test_a_certificate_for_another_name_ends_in_a_clear_error() -> None:
    async def test() -> None:
        beyond = Beyond()
        async with door(beyond=beyond.serve, certified="false.test") as opened:
            answer = await opened.send_tls("web.test", get("/" + CANARY.decode()))
            assert answer.startswith(b"HTTP/1.1 502 ")
            assert b"certificate of web.test is not valid" in answer
            assert CANARY not in beyond.all
            await still_serves(opened)

    run(test())


def test_a_certificate_of_an_unknown_root_ends_in_a_clear_error() -> None:
    async def test() -> None:
        async with door() as opened:
            opened.egress._upstreams.context = ssl.create_default_context()
            assert b"is not valid" in await opened.send_tls("web.test", get("/"))

    run(test())


BROKEN = {
    "nothing": (b"", 502, b"closed the connection before it answered"),
    "no HTTP": (b"SSH-2.0-x\r\n\r\n", 502, b"malformed"),
    "a length and a coding": (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 502, b"malformed"),
    "a flood of fields": (b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 300 + b"\r\n", 502, b"malformed"),
    "informs without end": (b"HTTP/1.1 103 Early Hints\r\n\r\n" * 40, 502, b"malformed"),
    "another protocol": (b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n", 502, b"another protocol"),
}


@pytest.mark.parametrize(("answer", "status", "words"), BROKEN.values(), ids=BROKEN)
def test_a_host_that_answers_wrongly_is_a_clear_error(answer: bytes, status: int, words: bytes) -> None:
    async def test() -> None:
        beyond = Beyond(lambda data: OK if b"/good" in data else answer)
        async with door(beyond=beyond.serve) as opened:
            got = await opened.send(through_proxy("/bad"), proxy=True)
            assert got.startswith(f"HTTP/1.1 {status} ".encode())
            assert words in got
            await still_serves(opened)

    run(test())


def test_a_host_that_breaks_off_breaks_the_answer_and_nothing_else() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        data = await reader.readuntil(b"\r\n\r\n")
        writer.write(OK if b"/good" in data else b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc")
        writer.close()

    async def test() -> None:
        async with door(beyond=serve) as opened:
            with suppress(ConnectionResetError):
                assert b"Content-Length: 10" in await opened.send(through_proxy("/cut"), proxy=True)
            await still_serves(opened)
        assert "broke off in the middle" in opened.flows[0]["refused"]

    run(test())


def test_a_host_that_does_not_answer_is_given_up() -> None:
    async def test() -> None:
        beyond = Beyond(lambda data: OK if b"/good" in data else None)
        async with door(beyond=beyond.serve, patience=QUICK) as opened:
            answer = await opened.send(through_proxy("/never"), proxy=True, end=False)
            assert answer.startswith(b"HTTP/1.1 504 ")
            await still_serves(opened)

    run(test())


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HT",
        b"GET / HTTP/1.1\r\nHost: web.test:%d\r\nX: y\r\n",
        b"POST / HTTP/1.1\r\nHost: web.test:%d\r\nContent-Length: 10\r\n\r\nabc",
        b"POST / HTTP/1.1\r\nHost: web.test:%d\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab",
        b"\x16\x03\x01\x02",
        b"",
    ],
)
def test_a_client_that_is_slow_is_given_up(data: bytes) -> None:
    async def test() -> None:
        beyond = Beyond(lambda data: OK if b"/good" in data else None)
        async with door(beyond=beyond.serve, patience=QUICK) as opened:
            answer = await opened.send(data.replace(b"%d", str(opened.port).encode()), end=False)
            assert answer.startswith(b"HTTP/1.1 408 ") or (data[:1] != b"G" and data[:1] != b"P" and answer == b"")
            await still_serves(opened)

    run(test())


def test_a_client_that_sends_single_bytes_is_given_up_too() -> None:
    async def test() -> None:
        async with door(patience=QUICK) as opened:
            reader, writer = await asyncio.open_connection("127.0.0.1", opened.port)

            async def trickle() -> None:
                with suppress(OSError):
                    for byte in b"GET / HTTP/1.1\r\nX: " + b"a" * 100000:
                        writer.write(bytes((byte,)))
                        await writer.drain()
                        await asyncio.sleep(0.02)

            task = asyncio.ensure_future(trickle())
            assert (await reader.read()).startswith(b"HTTP/1.1 408 ")
            task.cancel()
            writer.transport.abort()

    run(test())


RESOLUTIONS: dict[str, tuple[Iterable[str] | Exception, bytes]] = {
    "a private address": (["10.0.0.5"], b"403"),
    "the metadata address": (["169.254.169.254"], b"403"),
    "loopback": (["127.0.0.1"], b"403"),
    "a public address and a private one": ([PUBLIC, "192.168.0.1"], b"403"),
    "a private address inside of IPv6": (["::ffff:10.0.0.5"], b"403"),
    "a private address behind NAT64": (["64:ff9b::a00:5"], b"403"),
    "no address": ([], b"502"),
    "a failure": (OSError("no such name"), b"502"),
    "a bug": (RuntimeError("broken"), b"502"),
}


@pytest.mark.parametrize(("answers", "status"), RESOLUTIONS.values(), ids=RESOLUTIONS)
def test_a_name_that_leads_elsewhere_is_not_dialled(answers: Iterable[str] | Exception, status: bytes) -> None:
    def resolve(name: str) -> Iterable[str]:
        if name == "web.test":
            return [PUBLIC]
        if isinstance(answers, Exception):
            raise answers
        return answers

    async def test() -> None:
        beyond = Beyond()
        async with door(beyond=beyond.serve, resolve=resolve) as opened:
            answer = await opened.send(through_proxy("/", "a.web.test"), proxy=True)
            assert answer[9:12] == status, answer
            assert beyond.all == b""
            await still_serves(opened)

    run(test())


def test_rules_that_are_narrowed_hold_for_the_next_request() -> None:
    async def test() -> None:
        beyond = Beyond()
        async with door(beyond=beyond.serve) as opened:
            reader, writer = await opened.open_tls("web.test")
            writer.write(get("/one").replace(b"Connection: close\r\n", b""))
            assert await reader.readexactly(len(OK)) == OK
            opened.egress.rules = opened.egress.rules.narrowed(network_rules(outbound=True, denied=["web.test"]))
            writer.write(get("/two"))
            assert b" 403 Forbidden" in await reader.read()
            writer.transport.abort()
            assert b"/two" not in beyond.all

    run(test())


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while piece := await reader.read(65536):
            writer.write(piece)
        writer.close()


def test_an_opaque_stream_passes_only_where_it_is_named_and_ends_when_the_rules_do() -> None:
    async def test() -> None:
        rules = network_rules(outbound=True, hosts=["web.test", "web.test:5432"], opaque=["web.test:5432"])
        async with door(rules, echo) as opened:
            connect = b"CONNECT web.test:5432 HTTP/1.1\r\n\r\n"
            answer = await opened.send(connect + b"\x00\x01" + CANARY, proxy=True)
            assert answer == b"HTTP/1.1 200 Connection established\r\n\r\n\x00\x01" + CANARY
            with suppress(ConnectionResetError):
                other = await opened.send(b"CONNECT web.test:80 HTTP/1.1\r\n\r\n\x00\x01" + CANARY, proxy=True)
                assert CANARY not in other
            reader, writer = await asyncio.open_connection("127.0.0.1", opened.proxy_port)
            writer.write(connect + b"\x00one")
            await reader.readuntil(b"one")
            opened.egress.rules = rules.narrowed(network_rules(outbound=True, denied=["web.test"]))
            with suppress(ConnectionResetError):
                assert await reader.read() == b""
            writer.transport.abort()
        assert [flow["how"] for flow in opened.flows].count("opaque") == 2

    run(test())


def test_tls_that_is_not_read_is_passed_only_where_it_is_named() -> None:
    async def test() -> None:
        rules = network_rules(outbound=True, hosts=["web.test"], uninspected=["web.test"])
        async with door(rules) as opened:
            with pytest.raises(ssl.SSLCertVerificationError):
                await opened.open_tls("web.test")  # the certificate is the host's own, which the sandbox does not trust here
        assert opened.flows[0]["how"] == "tls"

    run(test())


def searching(*rules: SearchRule, own: tuple[tuple[str, str], ...] = ()) -> Search:
    return Search.of(rules, OwnSecrets.of(own), b"k" * 32)


BLOCK = SearchRule("test-token", "a token", "tok-[0-9]{8}")
REDACT = SearchRule("test-mail", "a mail", r"[a-z]{3,20}@[a-z]{3,20}\.test", kind="personal", action="redact")
ALERT = SearchRule("test-word", "a word", "confidential-[0-9]{4}", action="alert")
TOKEN = b"tok-12345678"


@pytest.mark.parametrize(
    "data",
    [
        get(f"/{TOKEN.decode()}"),
        get(f"/?q={TOKEN.decode()}"),
        get("/", "web.test", f"X-A: {TOKEN.decode()}"),
        get("/", "web.test", f"Cookie: a={TOKEN.decode()}"),
        get().replace(b"GET", TOKEN),
        b"POST / HTTP/1.1\r\nHost: web.test\r\nConnection: close\r\nContent-Length: 12\r\n\r\n" + TOKEN,
        b"POST / HTTP/1.1\r\nHost: web.test\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"5\r\ntok-1\r\n7\r\n2345678\r\n0\r\n\r\n",
    ],
)
def test_found_data_is_refused_named_by_kind_and_recorded_without_its_value(data: bytes) -> None:
    async def test() -> None:
        beyond = Beyond()
        async with door(beyond=beyond.serve, search=searching(BLOCK)) as opened:
            answer = await opened.send_tls("web.test", data)
            assert answer.startswith(b"HTTP/1.1 403 "), answer
            assert b"test-token (secret)" in answer
            assert beyond.all == b""
            assert b" 200 OK" in await opened.send_tls("web.test", data.replace(b"tok-1", b"tak-1"))
            assert b"tak-1" in beyond.all
        assert b"12345678" not in repr(opened.flows[0]).encode()
        assert "test-token" in opened.flows[0]["refused"]

    run(test())


@pytest.mark.parametrize(
    ("data", "kept"),
    [
        (get(f"/{TOKEN.decode()}", "other.test"), "does not allow other.test"),
        (get("/", f"{TOKEN.decode()}.other.test"), "holds data that must not leave"),
        (get("/", "OwnSecretValue.other.test"), "holds data that must not leave"),
        (get("http://other.test/?q=a-query", "web.test:%d"), "is for other.test:80, and its connection for web.test"),
        (get(f"http://u:{TOKEN.decode()}@web.test/", "web.test:%d"), "is for no host"),
        (get("/a", "web.test:99").replace(b"GET", TOKEN.upper()), "is for web.test:99, and its connection for web.test"),
        (get("/" + TOKEN.decode(), "web.test:%d").replace(b"GET", b"TRACE"), "TRACE does not leave"),
    ],
)
def test_a_request_that_is_refused_before_it_is_searched_is_recorded_without_data(data: bytes, kept: str) -> None:
    async def test() -> None:
        search = Search.of((BLOCK, replace(BLOCK, id="upper", pattern="TOK-[0-9]{8}")), OwnSecrets.of([("OWN", "OwnSecretValue")]), b"k")
        async with door(search=search) as opened:
            answer = await opened.send(data.replace(b"%d", str(opened.port).encode()))
            assert b" by the sandbox: " in answer and b" 200 OK" not in answer
        (flow,) = opened.flows
        assert kept in flow["refused"]
        assert not any(each in repr(flow).lower() for each in ("12345678", "ownsecret", "a-query")), flow

    run(test())


def test_found_data_is_replaced_where_the_rule_says_so() -> None:
    async def test() -> None:
        beyond = Beyond()
        async with door(beyond=beyond.serve, search=searching(REDACT, ALERT)) as opened:
            body = b"from joe@home.test to joe@home.test: confidential-1234"
            head = b"POST /?m=joe@home.test HTTP/1.1\r\nHost: web.test\r\nX-M: a joe@home.test b\r\n"
            head += b"Connection: close\r\nContent-Length: %d\r\n\r\n"
            assert b" 200 OK" in await opened.send_tls("web.test", head % len(body) + body)
            assert b"joe@home" not in beyond.all
            assert b"POST /?m=************* " in beyond.all
            assert b"X-M: a ************* b\r\n" in beyond.all
            assert beyond.all.endswith(b"from ************* to *************: confidential-1234")
        assert opened.flows[0]["findings"] == [
            "redact: test-mail in the address of the request",
            "redact: test-mail in the head of the request",
            "redact: test-mail in the body",
            "alert: test-word in the body",
        ]

    run(test())


def test_a_long_body_goes_on_behind_the_search_and_is_never_complete_with_a_finding() -> None:
    async def test() -> None:
        beyond = Beyond(lambda data: OK if data.endswith(b"end") else None)
        async with door(beyond=beyond.serve, search=searching(BLOCK)) as opened:
            for inside in (b"nothing here", b" " + TOKEN + b" "):
                body = (b"line\n" * (HELD // 2)) + inside + b"line\n" * 1000 + b"end"
                head = b"POST / HTTP/1.1\r\nHost: web.test\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
                answer = await opened.send_tls("web.test", head + body)
                assert answer.startswith(b"HTTP/1.1 200 " if inside == b"nothing here" else b"HTTP/1.1 403 ")
            assert TOKEN not in beyond.all
            assert beyond.all.count(b"POST / ") == 2
            assert beyond.all.count(b"end") == 1

    run(test())


@pytest.mark.parametrize("data", [get("/a"), b"POST / HTTP/1.1\r\nHost: web.test\r\nConnection: close\r\nContent-Length: 3\r\n\r\nabc"])
def test_a_search_that_fails_lets_nothing_pass(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        beyond = Beyond()
        async with door(beyond=beyond.serve, search=searching(BLOCK)) as opened:
            with monkeypatch.context() as broken:
                place = "head" if data.startswith(b"GET") else "body"
                broken.setattr(opened.egress._inspection, place, lambda *_: 1 / 0)
                answer = await opened.send_tls("web.test", data)
                assert answer.startswith(b"HTTP/1.1 500 ")
                assert b"ZeroDivisionError" in answer
                assert beyond.all == b""
            assert b" 200 OK" in await opened.send_tls("web.test", data)

    run(test())


def test_an_opaque_stream_is_cut_before_found_data() -> None:
    async def test() -> None:
        beyond = Beyond(lambda data: data)
        rules = network_rules(outbound=True, hosts=["web.test:5432"], opaque=["web.test:5432"])
        async with door(rules, beyond.serve, search=searching(BLOCK)) as opened:
            with suppress(ConnectionResetError):
                await opened.send(b"CONNECT web.test:5432 HTTP/1.1\r\n\r\n\x00 " + TOKEN, proxy=True)
            assert TOKEN not in beyond.all
            await opened.send(b"CONNECT web.test:5432 HTTP/1.1\r\n\r\n\x00 tak-12345678", proxy=True)
            assert b"tak-12345678" in beyond.all

    run(test())


def test_a_name_that_holds_data_is_not_resolved() -> None:
    async def test() -> None:
        async with door(search=searching(BLOCK)) as opened:
            await opened.send(through_proxy("/", "tok-12345678.web.test"), proxy=True)
            await opened.send(through_proxy("/", "tok-1234.5678.web.test"), proxy=True)
            assert opened.asked == []
            await opened.send(through_proxy("/", "tak-12345678.web.test"), proxy=True)
            assert opened.asked == ["tak-12345678.web.test"]

    run(test())


def test_a_secret_is_put_in_and_taken_out_on_the_wire() -> None:
    holder, value = new_placeholder("T", b"x" * 16), "the-real-value-1"
    secret = BoundSecret("T", holder, value, ("web.test",))

    async def test() -> None:
        beyond = Beyond(lambda data: b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
        async with door(beyond=beyond.serve, secrets=(secret,)) as opened:
            answer = await opened.send_tls("web.test", get("/", "web.test", f"Authorization: Bearer {holder}"))
            assert f"Authorization: Bearer {value}\r\n".encode() in beyond.all
            assert value.encode() not in answer
            assert f"Bearer {holder}".encode() in answer
            assert b"HTTP/1.1 403 " in await opened.send(get("http://web.test/", "web.test", f"Authorization: Bearer {holder}"), proxy=True)
            assert len(beyond.received) == 1
        assert opened.flows[0]["secrets"] == ["T"]
        assert value not in repr(opened.flows)

    run(test())


def test_a_budget_that_is_used_up_ends_requests_and_bodies() -> None:
    async def test() -> None:
        beyond = Beyond(lambda data: OK if data.endswith(b"end") or data.endswith(b"\r\n\r\n") else None)
        budgets = (read_budget("a.web.test requests:1 1KB"), read_budget("* sent:1000B 4/min"))
        rules = network_rules(outbound=True, hosts=["web.test", "*.web.test"], budgets=budgets)
        async with door(rules, beyond.serve, clock=lambda: 0.0) as opened:
            assert b" 200 " in await opened.send(through_proxy("/", "a.web.test"), proxy=True)
            said = b"the budget a.web.test requests:1 1KB is used up: all 1 requests were made; left are 998 bytes"
            assert said in await opened.send(through_proxy("/", "a.web.test"), proxy=True)
            body = (
                b"POST http://web.test/ HTTP/1.1\r\nHost: web.test\r\nConnection: close\r\nContent-Length: 2000\r\n\r\n"
                + b"a" * 1997
                + b"end"
            )
            said = b"the budget * sent:1000B 4/min is used up: there were more than 1,000 bytes sent"
            assert said in await opened.send(body, proxy=True)
            assert b"end" not in beyond.all
            answers = [await opened.send(through_proxy("/"), proxy=True) for _ in range(3)]
            assert b"HTTP/1.1 429 " in answers[-1]

    run(test())


def test_an_answer_is_cut_where_the_bytes_of_its_budget_end() -> None:
    async def test() -> None:
        beyond = Beyond(lambda _: b"HTTP/1.1 200 OK\r\nContent-Length: 500000\r\n\r\n" + b"a" * 500_000)
        budgets = [read_budget("web.test received:100KB")]
        rules = network_rules(outbound=True, hosts=["web.test", "*.web.test"], budgets=budgets)
        async with door(rules, beyond.serve) as opened:
            assert (await opened.send(through_proxy("/", "a.web.test"), proxy=True)).count(b"a") == 500_000, "the control: another host"
            assert (await opened.send(through_proxy("/", "web.test"), proxy=True)).count(b"a") < 500_000
            assert b" 429 " in await opened.send(through_proxy("/", "web.test"), proxy=True)
            opened.egress.rules = replace(rules, budgets=(*budgets, read_budget("a.web.test requests:0")))
            assert b" 429 " in await opened.send(through_proxy("/", "web.test"), proxy=True), "what is spent stays spent"
            assert b" 429 " in await opened.send(through_proxy("/", "a.web.test"), proxy=True)

    run(test())


def test_a_host_with_roots_of_its_own_is_verified_with_them_and_others_with_the_systems() -> None:
    async def test() -> None:
        foreign = ssl.create_default_context(cadata=INSIDE.certificate.decode())
        async with door(beyond=Beyond().serve, own_roots={"web.test": foreign}, certified="*.web.test") as opened:
            answer = await opened.send_tls("a.web.test", b"GET / HTTP/1.1\r\nHost: a.web.test\r\nConnection: close\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 200 ")
            answer = await opened.send_tls("web.test", b"GET / HTTP/1.1\r\nHost: web.test\r\nConnection: close\r\n\r\n")
            assert b"the certificate of web.test is not valid" in answer

    run(test())
