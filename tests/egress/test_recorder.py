"""Recorded exchanges and answers from a record, over sockets: what is kept, what is left out, and that nothing leaves a replay."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_sandbox.egress import recorder as recorders
from agent_sandbox.egress.dlp.own_secrets import OwnSecrets
from agent_sandbox.egress.dlp.rules import SearchRule
from agent_sandbox.egress.dlp.scanner import Search
from agent_sandbox.egress.recorded_exchange import BodyDigest, RecordedExchange, read_exchange
from agent_sandbox.egress.recorder import ExchangeRecorder, RecordedAnswers
from agent_sandbox.policy.bound_secrets import BoundSecret
from agent_sandbox.policy.network import network_rules
from tests.egress.test_http2 import ASKED, client
from tests.egress.wire import OK, Beyond, Door, door, run

SALT = bytes(32)
CANARY = "canary-5b1f02d7"
EMAIL = SearchRule("mail", "an address", r"[a-z]+@[a-z]+\.test", kind="personal", action="alert")
TOKEN = SearchRule("token", "a token", r"tok_[0-9]{8}", action="alert")
SEARCH = Search.of((EMAIL, TOKEN), OwnSecrets.of(()), b"key")


class Shelf:
    """Keeps what a recorder sends, as the supervisor does, and answers from it."""

    def __init__(self) -> None:
        self.exchanges: list[RecordedExchange] = []
        self.skipped: list[str] = []
        self._parts: dict[str, bytes] = {}
        self._taken: list[RecordedExchange] = []

    async def send(self, part: str, data: bytes) -> None:
        if part == "begin":
            self._parts = {}
        elif part == "end":
            bodies = {
                name: base64.b64encode(self._parts[name]).decode() if name in self._parts else None for name in ("request_body", "body")
            }
            self.exchanges.append(read_exchange({**json.loads(self._parts["head"]), **bodies}))
        else:
            self._parts[part] = self._parts.get(part, b"") + data

    async def ask(self, key: str) -> RecordedExchange | None:
        found = next((each for each in self.exchanges if each.key == key and each not in self._taken), None)
        if found is not None:
            self._taken.append(found)
        return found

    def recorder(self, *, bodies: bool = True, search: Search | None = SEARCH, secrets: tuple[BoundSecret, ...] = ()) -> ExchangeRecorder:
        return ExchangeRecorder(SALT, bodies, search, self.send, self.skipped.append, secrets)

    def replay(self, secrets: tuple[BoundSecret, ...] = ()) -> RecordedAnswers:
        return RecordedAnswers(SALT, self.ask, secrets)


def request(line: str, *fields: str, body: bytes = b"") -> bytes:
    length = (f"Content-Length: {len(body)}",) if body else ()
    return "\r\n".join((f"{line} HTTP/1.1", "Host: web.test", *fields, *length, "Connection: close", "", "")).encode() + body


def answer(body: bytes, *fields: str) -> Callable[[bytes], bytes]:
    head = "\r\n".join(("HTTP/1.1 200 OK", f"Content-Length: {len(body)}", *fields, "", "")).encode()
    return lambda _: head + body


async def recorded(shelf: Shelf, *requests: bytes, beyond: Beyond | None = None, **options: Any) -> Beyond:
    host = beyond or Beyond()
    recorder = shelf.recorder(**options)
    async with door(beyond=host.serve, recorder=recorder, secrets=recorder.secrets) as opened:
        for each in requests:
            await opened.send_tls("web.test", each)
        while recorder.ending:
            await asyncio.wait(set(recorder.ending))
    return host


async def replayed(shelf: Shelf, *requests: bytes, **options: Any) -> tuple[list[bytes], Door, Beyond]:
    host = Beyond()
    async with door(beyond=host.serve, replay=shelf.replay(**options), **options) as opened:
        return [await opened.send_tls("web.test", each) for each in requests], opened, host


def test_what_was_recorded_answers_the_same_requests_and_nothing_leaves() -> None:
    async def test() -> None:
        shelf, count = Shelf(), iter(range(9))
        beyond = Beyond(answer=lambda _: answer(f"answer {next(count)}".encode(), "X-Kind: real")(b""))
        again = (request("GET /a?b=c", "X-Run: 1"), request("POST /a", body=b"one"), request("GET /a?b=c", "X-Run: 2"))
        await recorded(shelf, *again, beyond=beyond)
        assert shelf.skipped == []
        second, opened, host = await replayed(shelf, again[1], again[0], request("GET /a?b=c", "X-Run: other"))
        assert [each.rpartition(b"\r\n")[2] for each in second] == [b"answer 1", b"answer 0", b"answer 2"], "matched, and in order"
        assert all(b"X-Kind: real" in each for each in second)
        assert opened.asked == [] and host.received == [], "no name was resolved, and no connection opened"

    run(test())


@pytest.mark.parametrize(
    "other",
    [
        request("GET /a?b=d"),
        request("HEAD /a?b=c"),
        request("GET /b?b=c"),
        request("GET /a?b=c", body=b"x"),
        request("GET /a?b=c").replace(b"GET", b"DELETE"),
    ],
)
def test_a_request_that_is_not_in_the_record_is_refused_and_does_not_leave(other: bytes) -> None:
    async def test() -> None:
        shelf = Shelf()
        await recorded(shelf, request("GET /a?b=c"))
        (refused, known, spent), opened, host = await replayed(shelf, other, request("GET /a?b=c"), request("GET /a?b=c"))
        assert refused.startswith(b"HTTP/1.1 403 "), refused
        assert b" 200 OK" in known, "the control: the recorded one is answered"
        assert spent.startswith(b"HTTP/1.1 403 ") and b"holds no further GET https://web.test:443/a" in spent
        assert opened.asked == [] and host.received == []
        assert any("from a record" in flow["refused"] for flow in opened.flows)

    run(test())


def test_the_same_host_over_another_protocol_or_an_opaque_port_is_not_answered() -> None:
    async def test() -> None:
        shelf = Shelf()
        await recorded(shelf, request("GET /"))
        host = Beyond()
        rules = network_rules(outbound=True, hosts=["web.test", "web.test:443"], opaque=["web.test:443"], uninspected=["web.test"])
        async with door(rules, host.serve, replay=shelf.replay()) as opened:
            assert b" 403 " in await opened.send(request("GET http://web.test/"), proxy=True)
            assert b" 200 OK" in await opened.send_tls("web.test", request("GET /")), "not passed on unread: the record answers"
            upgrade = request("GET /", "Upgrade: websocket").replace(b"Connection: close", b"Connection: close, upgrade")
            assert b"WebSocket is not recorded" in await opened.send_tls("web.test", upgrade)
        assert host.received == [] and opened.asked == []

    run(test())


def test_nobody_is_asked_for_a_host_that_a_record_answers_for() -> None:
    async def test() -> None:
        shelf, host, asked = Shelf(), Beyond(), []
        await recorded(shelf, request("GET /"))

        async def ask(question: dict[str, Any]) -> dict[str, Any]:
            asked.append(question)
            return {"allowed": False, "why": "no", "seconds": 0.0, "watched": False}

        rules = network_rules(outbound=True, hosts=[], asked=["web.test"])
        async with door(rules, host.serve, replay=shelf.replay(), ask=ask) as opened:
            assert b" 200 OK" in await opened.send_tls("web.test", request("GET /")) and asked == []
        async with door(rules, host.serve, ask=ask) as opened:
            assert b" 403 " in await opened.send_tls("web.test", request("GET /")), "the control: without a record it is asked for"
        assert len(asked) == 1 and host.received == []

    run(test())


def test_credentials_and_found_data_are_not_in_a_record() -> None:
    async def test() -> None:
        shelf = Shelf()
        held = f"Cookie: {CANARY}", f"Authorization: Bearer {CANARY}", f"X-Api-Key: {CANARY}", f"X-Auth-Token: {CANARY}"
        body = f"write to someone{CANARY[:0]}@web.test with tok_12345678, dG9rXzEyMzQ1Njc4IHRva18xMjM0NTY3OA==\n".encode()
        beyond = Beyond(answer=answer(body, f"Set-Cookie: s={CANARY}", "Location: /x?a=tok_12345678", "WWW-Authenticate: Basic"))
        host = await recorded(shelf, request(f"GET /a?access_token={CANARY}&b=1", *held, "X-Plain: tok_12345678"), beyond=beyond)
        assert host.all.count(CANARY.encode()) == 5, "the control: all of it was sent"
        (made,) = shelf.exchanges
        text = json.dumps(made.plain()) + str(made.body)
        assert CANARY not in text and "tok_1234" not in text and "dG9rX" not in text and "someone@" not in text
        assert made.body is not None and made.body.startswith(b"write to ****************") and len(made.body) == len(body)
        assert made.target == f"/a?access_token={'*' * len(CANARY)}&b=1"
        assert (b"www-authenticate", b"Basic") in made.answered and set(made.redacted) == {"mail", "token"}

    run(test())


def test_without_bodies_only_heads_are_recorded_and_the_replay_says_so() -> None:
    async def test() -> None:
        shelf = Shelf()
        beyond = Beyond(answer=answer(CANARY.encode()))
        await recorded(shelf, request("POST /a", body=CANARY.encode()), request("HEAD /a"), beyond=beyond, bodies=False)
        assert CANARY not in json.dumps([each.plain() for each in shelf.exchanges])
        assert [(each.sent, each.received, each.body) for each in shelf.exchanges] == [(len(CANARY), len(CANARY), None), (0, 0, None)]
        (first, second), _, _ = await replayed(shelf, request("POST /a", body=CANARY.encode()), request("HEAD /a"))
        assert first.startswith(b"HTTP/1.1 403 ") and b"does not hold the body" in first and b"bodies were not recorded" in first
        assert second.startswith(b"HTTP/1.1 200 "), "an answer without a body needs none"

    run(test())


@pytest.mark.parametrize("secret", [True, False])
def test_a_compressed_body_is_searched_and_what_cannot_be_searched_is_not_kept(secret: bool) -> None:
    async def test() -> None:
        shelf = Shelf()
        plain = b"a tok_12345678 here" if secret else b"nothing of note"
        packed = gzip.compress(plain, mtime=0)
        await recorded(shelf, request("GET /"), beyond=Beyond(answer=answer(packed, "Content-Encoding: gzip")))
        await recorded(shelf, request("GET /2"), beyond=Beyond(answer=answer(b"\0not gzip", "Content-Encoding: gzip")))
        await recorded(shelf, request("GET /3"), beyond=Beyond(answer=answer(b"\0\1" + packed)))
        first, second, third = shelf.exchanges
        if secret:
            assert first.body == b"a ************ here" and not any(key == b"content-encoding" for key, _ in first.answered)
            assert third.body is None and "a secret that cannot be replaced" in third.why
        else:
            assert first.body == packed and (b"content-encoding", b"gzip") in first.answered
            assert third.body == b"\0\1" + packed
        assert second.body is None and "cannot be searched" in second.why
        (back, *_), _, _ = await replayed(shelf, request("GET /"))
        assert back.endswith(first.body or b"?")

    run(test())


def test_a_body_beyond_the_bound_is_counted_and_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        shelf = Shelf()
        monkeypatch.setattr(recorders, "MOST_BODY", 1000)
        await recorded(shelf, request("POST /", body=b"x" * 5000), request("GET /"), beyond=Beyond(answer=answer(b"y" * 4000)))
        long, other = shelf.exchanges
        assert (long.sent, long.request_body, other.received, other.body) == (5000, None, 4000, None)
        assert "longer than" in other.why
        monkeypatch.setattr(recorders, "MOST_HELD", 50)
        monkeypatch.setattr(recorders, "MOST_BODY", 1 << 20)
        shelf = Shelf()
        recorder = shelf.recorder()
        async with door(beyond=Beyond(answer=answer(b"y" * 40)).serve, recorder=recorder) as opened:
            for _ in range(3):
                await opened.send_tls("web.test", request("GET /"))
            while recorder.ending:
                await asyncio.wait(set(recorder.ending))
        assert [each.body for each in shelf.exchanges] == [b"y" * 40] * 3, "what was held is freed"
        assert recorder._held == 0

    run(test())


def test_what_breaks_off_is_said_to_be_missing() -> None:
    async def cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(OK[:-1])
        writer.close()

    async def test() -> None:
        shelf = Shelf()
        recorder = shelf.recorder()
        async with door(beyond=cut, recorder=recorder) as opened:
            await opened.send_tls("web.test", request("GET /"))
        assert shelf.exchanges == [] and shelf.skipped == ["an exchange that was refused, or broke off"]
        assert recorder._held == 0

    run(test())


def test_what_cannot_be_written_down_is_said_to_be_missing_and_the_program_has_its_answer() -> None:
    async def test() -> None:
        shelf = Shelf()
        recorder = shelf.recorder()
        async with door(beyond=Beyond().serve, recorder=recorder) as opened:
            assert (await opened.send_tls("web.test", request("X" * 50 + " /"))).endswith(b"ok")
            assert (await opened.send_tls("web.test", request("GET /"))).endswith(b"ok")
            while recorder.ending:
                await asyncio.wait(set(recorder.ending))
        assert shelf.skipped == ["an exchange that could not be searched or written down"]
        assert [each.method for each in shelf.exchanges] == ["GET"] and recorder._held == 0

    run(test())


def test_what_is_not_http_is_carried_and_said_not_to_be_in_the_record() -> None:
    async def test() -> None:
        shelf, beyond = Shelf(), Beyond()
        rules = network_rules(outbound=True, hosts=["web.test", "web.test:8443"], opaque=["web.test:8443"])
        async with door(rules, beyond.serve, recorder=shelf.recorder()) as opened:
            upgrade = request(f"GET /{CANARY}", "Upgrade: websocket").replace(b"Connection: close", b"Connection: close, upgrade")
            await opened.send_tls("web.test", upgrade)
            await opened.send(f"CONNECT web.test:8443 HTTP/1.1\r\n\r\n{CANARY}".encode(), proxy=True)
        assert beyond.all.count(CANARY.encode()) == 2, "both went on"
        assert shelf.exchanges == [] and shelf.skipped == ["WebSocket", "a connection that is not read"]

    run(test())


def test_a_secret_of_the_broker_is_in_no_record_and_its_request_is_found_again_with_another_placeholder() -> None:
    def bound(placeholder: str) -> tuple[BoundSecret, ...]:
        return (BoundSecret("KEY", placeholder, CANARY, ("web.test",), "body:key"),)

    def form(placeholder: str) -> bytes:
        kind = "Content-Type: application/x-www-form-urlencoded"
        return request("POST /", kind, body=f"a=1&key={placeholder}".encode())

    async def test() -> None:
        shelf = Shelf()
        first, second = "agent-sandbox-secret-key-0001", "agent-sandbox-secret-key-0002"
        echo = Beyond(answer=answer(f"you sent {CANARY}".encode()))
        host = await recorded(shelf, form(first), beyond=echo, secrets=bound(first))
        assert CANARY.encode() in host.all, "the control: the host had it"
        text = json.dumps(shelf.exchanges[0].plain()) + str((shelf.exchanges[0].request_body, shelf.exchanges[0].body))
        assert CANARY not in text and first not in text
        (back,), _, beyond = await replayed(shelf, form(second), secrets=bound(second))
        assert back.startswith(b"HTTP/1.1 200 ") and beyond.received == []

    run(test())


@given(st.lists(st.binary(max_size=20), max_size=8))
def test_the_digest_of_a_body_does_not_depend_on_how_it_is_cut(pieces: list[bytes]) -> None:
    names = ((b"placeholder-1", b"{secret A}"),)
    body = b"placeholder-1".join(pieces) + b"placeholder-1"
    whole, cut = BodyDigest(names), BodyDigest(names)
    whole.feed(body)
    for place in range(len(body)):
        cut.feed(body[place : place + 1])
    assert whole.digest() == cut.digest()


def test_a_request_over_http2_is_recorded_and_answered_from_a_record() -> None:
    async def test() -> None:
        shelf = Shelf()
        recorder = shelf.recorder()
        async with door(beyond=Beyond().serve, recorder=recorder) as opened, client(opened) as speaking:
            first = speaking.ask(ASKED)
            await speaking.until(lambda: first.ended)
            assert first.body == b"ok"
            while recorder.ending:
                await asyncio.wait(set(recorder.ending))
        host = Beyond()
        async with door(beyond=host.serve, replay=shelf.replay()) as opened, client(opened) as speaking:
            answers = [speaking.ask(ASKED), speaking.ask(ASKED)]
            await speaking.until(lambda: all(each.ended for each in answers))
            assert sorted(each.status for each in answers) == [200, 403]
        assert host.received == []

    run(test())
