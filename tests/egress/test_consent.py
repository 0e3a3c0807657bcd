"""Requests that wait for somebody's yes, over sockets: what is asked, what leaves before the answer and after it, and what never does."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest

from agent_sandbox.egress import consent
from agent_sandbox.egress.dlp.own_secrets import OwnSecrets
from agent_sandbox.egress.dlp.rules import SearchRule
from agent_sandbox.egress.dlp.scanner import Search
from agent_sandbox.policy.network import network_rules
from tests.egress.wire import OK, Beyond, Door, door, run

RULES = network_rules(outbound=True, hosts=["plain.test"], asked=["web.test", "*.web.test", "web.test:5432"], opaque=["web.test:5432"])
ONCE = {"allowed": True, "why": "", "seconds": 0.0, "watched": False}
FOR_RUN = {"allowed": True, "why": "", "seconds": 3600.0, "watched": True}
NO = {"allowed": False, "why": "alice said no", "seconds": 0.0, "watched": False}


class Supervisor:
    """Answers questions, each when the test says so, and remembers them. A list of answers is given at once, in its order."""

    def __init__(self, *answers: dict[str, Any]) -> None:
        self.answers = list(answers)
        self.asked: list[dict[str, Any]] = []
        self.withdrawn = 0
        self.waiting: list[asyncio.Future[dict[str, Any]]] = []
        self.news = asyncio.Event()

    async def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(question)
        self.news.set()
        if self.answers:
            return self.answers.pop(0)
        self.waiting.append(asyncio.get_running_loop().create_future())
        try:
            return await self.waiting[-1]
        except asyncio.CancelledError:
            self.withdrawn += 1
            raise

    async def next(self) -> None:
        """Wait until something more is asked."""
        await self.news.wait()
        self.news.clear()


def get(path: str = "/", host: str = "web.test", *more: str) -> bytes:
    return "\r\n".join((f"GET {path} HTTP/1.1", f"Host: {host}", *more, "", "")).encode()


async def exchange(opened: Door, data: bytes, name: str = "web.test") -> bytes:
    """Send a request inside of TLS, and return the answer."""
    reader, writer = await opened.open_tls(name)
    writer.write(data)
    try:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next((int(line[16:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length: ")), 0)
        return head + await reader.readexactly(length)
    finally:
        writer.transport.abort()


def test_nothing_is_resolved_or_dialled_before_the_yes_and_once_is_one_request() -> None:
    async def test() -> None:
        beyond, boss = Beyond(), Supervisor()
        async with door(RULES, beyond.serve, ask=boss.ask) as opened:
            reader, writer = await opened.open_tls("web.test")
            writer.write(get("/one?secret=1"))
            await boss.next()
            about = {"host": "web.test", "port": 443, "method": "GET", "path": "/one?…", "data": "", "again": False}
            assert boss.asked == [about], "what the person is told: no query"
            assert opened.asked == [] and beyond.received == [], "while it waits, no resolver and no host hears of it"
            boss.waiting[0].set_result(ONCE)
            assert await reader.readexactly(len(OK)) == OK and b"/one?secret=1" in beyond.all
            writer.write(get("/two"))
            await boss.next()
            assert b"/two" not in beyond.all
            boss.waiting[1].set_result(NO)
            assert b" 403 " in (answer := await reader.readuntil(b"\r\n\r\n")), answer
            assert b"alice said no" in await reader.readline() and b"/two" not in beyond.all
            writer.transport.abort()
        assert any("alice said no" in flow["refused"] for flow in opened.flows)

    run(test())


def test_a_yes_for_the_run_is_asked_once_and_holds_for_the_host_alone() -> None:
    async def test() -> None:
        beyond, boss = Beyond(), Supervisor(FOR_RUN, NO)
        async with door(RULES, beyond.serve, ask=boss.ask) as opened:
            for path in ("/a", "/b", "/c"):
                assert b" 200 " in await exchange(opened, get(path))
            assert len(boss.asked) == 1
            assert b" 403 " in await exchange(opened, get("/d", "a.web.test"), "a.web.test")
            assert len(boss.asked) == 2 and b"/d" not in beyond.all

    run(test())


def test_a_host_that_is_denied_or_not_named_is_refused_without_a_question() -> None:
    async def test() -> None:
        beyond, boss = Beyond(), Supervisor(*[FOR_RUN] * 20)
        rules = network_rules(outbound=True, hosts=[], asked=["*"], denied=["evil.test"])
        async with door(rules, beyond.serve, ask=boss.ask) as opened:
            refused = (
                *("evil.test:80", "localhost:80", "127.0.0.1:80", "169.254.169.254:80", "10.0.0.5:80", "[::ffff:10.0.0.5]:80"),
                *("[fe80::1]:80", "web.test:22"),
            )
            for target in refused:
                connect = f"CONNECT {target} HTTP/1.1\r\n\r\nGET / HTTP/1.1\r\nHost: {target}\r\nConnection: close\r\n\r\n".encode()
                assert b" 403 " in await opened.send(connect, proxy=True, end=False)
            assert boss.asked == [] and beyond.received == [] and opened.asked == []
            assert b" 200 " in await exchange(opened, get()), "the rules do ask for others"
            assert len(boss.asked) == 1

    run(test())


def test_a_name_that_leads_inside_is_refused_although_somebody_agreed() -> None:
    async def test() -> None:
        boss = Supervisor(FOR_RUN)
        async with door(RULES, ask=boss.ask, resolve=lambda name: ["169.254.169.254"]) as opened:
            answer = await exchange(opened, get())
            assert b" 403 " in answer and b"cannot be reached" in answer and opened.asked == ["web.test"]

    run(test())


def test_who_is_asked_about_one_host_never_lets_another_be_reached() -> None:
    async def test() -> None:
        beyond, boss = Beyond(), Supervisor(*[FOR_RUN] * 9)
        async with door(RULES, beyond.serve, ask=boss.ask) as opened:
            assert b" 421 " in await exchange(opened, get("/", "a.web.test"))
            assert b" 421 " in await exchange(opened, get("http://a.web.test/"))
            assert b" 400 " in await exchange(opened, get("/", "web.test", "Host: a.web.test"))
            reader, writer = await opened.open_tls("web.test", sni="a.web.test")
            writer.write(get("/", "a.web.test"))
            assert b" 421 " in await reader.readline()
            writer.transport.abort()
            assert boss.asked == [] and beyond.received == [], "such a request is refused before anybody is asked"
            assert b" 200 " in await exchange(opened, get())
            assert [each["host"] for each in boss.asked] == ["web.test"]

    run(test())


def test_what_the_rules_forbid_is_refused_without_a_question_and_again_after_the_yes() -> None:
    async def test() -> None:
        beyond, boss = Beyond(), Supervisor()
        async with door(RULES, beyond.serve, ask=boss.ask) as opened:
            task = asyncio.ensure_future(exchange(opened, get("/held")))
            await boss.next()
            opened.egress.rules = RULES.narrowed(network_rules(outbound=True, hosts=["plain.test"]))
            boss.waiting[0].set_result(FOR_RUN)
            assert b" 403 " in await task and beyond.received == [], "the rules were narrowed while it waited"
            opened.egress.rules = RULES
            assert b" 200 " in await exchange(opened, get("/again")), "the yes stands, if the rules ask again"

    run(test())


def test_so_many_may_wait_and_one_whose_client_has_gone_waits_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consent, "MOST_HELD", 2)
    monkeypatch.setattr(consent, "_LOOK_SECONDS", 0.02)

    async def test() -> None:
        boss = Supervisor()
        async with door(RULES, ask=boss.ask) as opened:
            writers = []
            for each in range(2):
                _, writer = await opened.open_tls("web.test")
                writer.write(get(f"/{each}"))
                await boss.next()
                writers.append(writer)
            assert b" 429 " in await exchange(opened, get("/third")) and len(boss.asked) == 2
            for writer in writers:
                writer.transport.abort()
            while boss.withdrawn < 2:
                await asyncio.sleep(0.01)
            task = asyncio.ensure_future(exchange(opened, get("/fourth")))
            await boss.next()
            boss.waiting[-1].set_result(ONCE)
            assert b" 200 " in await task
        gone = [flow for flow in opened.flows if flow["refused"] == "the client has gone while it waited for an answer"]
        assert len(gone) == 2, "it is on record that nothing of them left"

    run(test())


def test_no_answer_is_a_no() -> None:
    async def test() -> None:
        beyond, boss = Beyond(), Supervisor()
        async with door(RULES, beyond.serve, ask=boss.ask) as opened:
            opened.egress._consent._seconds = 0.05
            answer = await exchange(opened, get())
            assert b" 403 " in answer and b"nobody answered in time" in answer and beyond.received == [] and boss.withdrawn == 1
        async with door(RULES, beyond.serve) as alone:
            assert b"nobody can be asked" in await exchange(alone, get()) and beyond.received == []

    run(test())


def test_streams_of_http2_are_asked_about_one_by_one_and_refused_when_the_answer_is_taken_back() -> None:
    pytest.importorskip("h2", reason="needs the extra `network`")
    from tests.egress.test_http2 import ASKED, client

    async def test() -> None:
        beyond = Beyond()
        by_capability = {**ONCE, "watched": True}
        boss = Supervisor(by_capability, by_capability, {**NO, "why": "the capability was revoked"})
        async with door(RULES, beyond.serve, ask=boss.ask) as opened:
            async with client(opened) as asking:
                answers = []
                for path in (b"/a", b"/b", b"/c"):
                    answers.append(asking.ask([*ASKED[:3], (b":path", path)]))
                    await asking.until(lambda: answers[-1].ended)
            assert [each.status for each in answers] == [200, 200, 403] and b"was revoked" in answers[-1].body
            assert b"/b" in beyond.all and b"/c" not in beyond.all

    run(test())


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while piece := await reader.read(65536):
            writer.write(piece)
        writer.close()


@pytest.mark.parametrize("watched", [True, False])
def test_a_connection_ends_when_its_approval_is_taken_back(watched: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consent, "WATCH_SECONDS", 0.02)

    async def test() -> None:
        boss = Supervisor({**ONCE, "watched": watched})
        async with door(RULES, echo, ask=boss.ask) as opened:
            reader, writer = await asyncio.open_connection("127.0.0.1", opened.proxy_port)
            writer.write(b"CONNECT web.test:5432 HTTP/1.1\r\n\r\n\x00one")
            assert (await reader.readuntil(b"one")).endswith(b"\x00one")
            if watched:
                while not boss.waiting:  # it is asked again, maybe before we get here
                    await boss.next()
                boss.answers = [{**NO, "why": "the capability was revoked"}]
                boss.waiting[0].set_result(ONCE)
                with suppress(ConnectionResetError):
                    assert await reader.read() == b""
                assert [each["again"] for each in boss.asked] == [False, True, True]
            else:  # once: nobody can take that back, and nothing more is asked
                opened.egress.rules = RULES.narrowed(network_rules(outbound=True))
                writer.write(b"two")
                assert await reader.readexactly(3) == b"two" and len(boss.asked) == 1
                opened.egress.rules = RULES.narrowed(network_rules(outbound=True, denied=["web.test"]))
                with suppress(ConnectionResetError):
                    assert await reader.read() == b"", "but the rules still end it"
            assert {(each["host"], each["port"], each["method"]) for each in boss.asked} == {("web.test", 5432, "")}
            writer.transport.abort()
        if watched:
            assert "the capability was revoked" in opened.flows[-1]["refused"]

    run(test())


def test_an_exchange_in_the_middle_ends_when_its_approval_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consent, "WATCH_SECONDS", 0.02)
    endless = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\none\r\n"

    async def test() -> None:
        boss = Supervisor({**ONCE, "watched": True}, ONCE, NO)
        async with door(RULES, Beyond(lambda _: endless).serve, ask=boss.ask) as opened:
            reader, writer = await opened.open_tls("web.test")
            writer.write(get())
            await reader.readuntil(b"one")
            with suppress(ConnectionResetError):
                assert b"0\r\n\r\n" not in await reader.read(), "it never looks whole"
            writer.transport.abort()

    run(test())


SEARCH = Search.of([SearchRule("test-ask", "a word", "ask-[0-9]{8}", action="ask")], OwnSecrets.of(()), b"k" * 32)
FOUND = b"ask-12345678"


def post(body: bytes, path: str = "/p") -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: plain.test\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


@pytest.mark.parametrize(
    ("data", "place"),
    [
        (post(b"x" * 100 + FOUND), "the body"),
        (post(b"x" * 700_000 + FOUND), "the body"),
        (post(b"", "/?q=ask-12345678"), "the address of the request"),
        (get("/", "plain.test", "X-Data: ask-12345678"), "the head of the request"),
    ],
)
def test_found_data_waits_for_an_answer_that_is_told_the_rule_and_the_place_and_not_the_value(data: bytes, place: str) -> None:
    async def test() -> None:
        for answer, status in ((NO, b" 403 "), (ONCE, b" 200 ")):
            beyond, boss = Beyond(lambda seen: OK if FOUND in seen else None), Supervisor()
            async with door(RULES, beyond.serve, ask=boss.ask, search=SEARCH, certified="plain.test") as opened:
                task = asyncio.ensure_future(exchange(opened, data, "plain.test"))
                await boss.next()
                assert boss.asked[0] | {"path": ""} == {
                    **{"host": "plain.test", "port": 443, "method": data[:4].decode().strip(), "path": "", "again": False},
                    "data": f"test-ask in {place}",
                }
                assert b"12345678" not in repr(boss.asked).encode() and FOUND not in beyond.all
                boss.waiting[0].set_result(answer)
                if answer is NO and len(data) > 700_000:
                    with suppress(asyncio.IncompleteReadError):
                        assert status in await task
                else:
                    assert status in await task
                assert (FOUND in beyond.all) == (answer is ONCE)
            assert b"12345678" not in repr(opened.flows).encode()
            assert any("test-ask" in each for flow in opened.flows for each in flow.get("findings", ()))

    run(test())


def test_a_yes_for_the_run_lets_a_rule_pass_to_its_host_alone() -> None:
    async def test() -> None:
        rules = network_rules(outbound=True, hosts=["plain.test", "*.plain.test"])
        boss = Supervisor(FOR_RUN, NO)
        async with door(rules, ask=boss.ask, search=SEARCH, certified="plain.test") as opened:
            for _ in range(3):
                assert b" 200 " in await exchange(opened, post(FOUND), "plain.test")
            assert len(boss.asked) == 1
            other = post(FOUND).replace(b"Host: plain", b"Host: a.plain")
            assert b" 403 " in await exchange(opened, other, "a.plain.test") and len(boss.asked) == 2

    run(test())


def test_data_that_must_not_leave_is_refused_before_anybody_is_asked_for_its_host() -> None:
    async def test() -> None:
        boss = Supervisor(FOR_RUN)
        search = Search.of([SearchRule("test-token", "a token", "tok-[0-9]{8}")], OwnSecrets.of(()), b"k" * 32)
        async with door(RULES, ask=boss.ask, search=search) as opened:
            assert b" 403 " in await exchange(opened, get("/tok-12345678")) and boss.asked == []

    run(test())
