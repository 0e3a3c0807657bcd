"""Intents on the wire: what a request may declare for itself, what never goes on, and what ends when an intent does."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import replace

import pytest

from agent_sandbox.policy.intents import FIELD, Declared, NetworkIntent, combined
from agent_sandbox.policy.network import NetworkRules, network_rules
from tests.egress.test_http2 import ASKED, client
from tests.egress.test_server import echo
from tests.egress.test_websocket import HANDSHAKE, Echo, frame
from tests.egress.wire import OK, Beyond, Door, door, run

PASSED = b"HTTP/1.1 200 "
CANARY = b"canary-51c0ffee"
READ = NetworkIntent("read docs", hosts=["web.test"], requests=["GET web.test"])
SEND = NetworkIntent("send", hosts=["web.test"], requests=["POST web.test"])
OTHER = NetworkIntent("other", hosts=["other.test"])


def rules(*intents: NetworkIntent, declared: str = "", opaque: tuple[str, ...] = ()) -> NetworkRules:
    base = network_rules(outbound=True, hosts=["web.test", "other.test", *opaque], opaque=opaque)
    return replace(base, intents=combined(intents), declared=Declared(declared) if declared else None)


def request(*fields: str, method: str = "GET", body: bytes = CANARY, host: str = "web.test") -> bytes:
    lines = [f"{method} /x HTTP/1.1", f"Host: {host}", f"Content-Length: {len(body)}", "Connection: close", *fields]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def test_a_request_that_declares_its_intent_passes_and_the_field_does_not() -> None:
    async def test() -> None:
        beyond = Beyond()
        async with door(rules(READ, SEND), beyond.serve) as opened:
            assert b" 403 " in await opened.send_tls("web.test", request())
            assert beyond.all == b"" and opened.asked == [], "nothing is dialled or resolved before"
            for field in (f"{FIELD}: send", "AGENT-SANDBOX-intent:   SEND ", f"Connection: {FIELD}\r\n{FIELD}: Send"):
                answer = await opened.send_tls("web.test", request(field, method="POST"))
                assert answer.startswith(PASSED), answer
            assert beyond.all.count(CANARY) == 3 and b"sandbox-intent" not in beyond.all.lower()
        assert [each for flow in opened.flows for each in flow["requests"] if "intent 'send'" in each]

    run(test())


@pytest.mark.parametrize(
    ("fields", "status", "why"),
    [
        ([f"{FIELD}: read docs"], 403, "allows only GET"),
        ([f"{FIELD}: other"], 403, "the intent 'other' does not open web.test:443"),
        ([f"{FIELD}: send", f"{FIELD}: send"], 400, "it can have one"),
        ([f"{FIELD}: read docs, send"], 403, "an intent that the policy does not name; it names 'read docs', 'send', 'other'"),
        ([f"{FIELD}: s%65nd"], 403, "does not name"),
        ([f"{FIELD}: \u0455end"], 403, "does not name"),
        ([f"{FIELD}: "], 403, "is empty"),
        ([f"{FIELD}: {'send' * 40}"], 403, "does not name"),
        (["X-Agent-Sandbox-Intent: send"], 403, "no intent is declared"),
    ],
)
def test_a_request_that_declares_another_or_none_does_not_leave(fields: list[str], status: int, why: str) -> None:
    async def test() -> None:
        beyond = Beyond()
        async with door(rules(READ, SEND, OTHER), beyond.serve) as opened:
            answer = await opened.send_tls("web.test", request(*fields, method="POST"))
            assert answer.startswith(f"HTTP/1.1 {status} ".encode()) and why in answer.decode()
            assert beyond.all == b""
            assert (await opened.send_tls("web.test", request(f"{FIELD}: send", method="POST"))).startswith(PASSED), (
                "the control: this one leaves"
            )

    run(test())


def test_the_refusal_of_an_unknown_intent_brings_nothing_of_the_field_into_the_record() -> None:
    async def test() -> None:
        async with door(rules(READ)) as opened:
            answer = await opened.send_tls("web.test", request(f"{FIELD}: {CANARY.decode()}"))
        assert CANARY not in answer and CANARY.decode() not in str(opened.flows)

    run(test())


def test_without_intents_the_field_is_refused_and_a_host_of_no_intent_stays_closed() -> None:
    async def test() -> None:
        beyond = Beyond()
        async with door(rules(), beyond.serve) as opened:
            assert b"it names none" in await opened.send_tls("web.test", request(f"{FIELD}: send"))
            assert beyond.all == b"" and (await opened.send_tls("web.test", request())).startswith(PASSED)
        async with door(rules(OTHER), beyond.serve) as opened:
            with pytest.raises(ConnectionRefusedError, match=r"no intent of the policy opens web\.test:443"):
                await opened.send_tls("web.test", request(f"{FIELD}: other"))

    run(test())


def test_a_request_cannot_change_what_was_declared_from_outside() -> None:
    async def test() -> None:
        beyond = Beyond()
        async with door(rules(READ, SEND, declared="read docs"), beyond.serve) as opened:
            answer = await opened.send_tls("web.test", request(f"{FIELD}: send", method="POST"))
            assert b"declared from outside" in answer and CANARY not in beyond.all
            assert (await opened.send_tls("web.test", request(body=b""))).startswith(PASSED)
            assert (await opened.send_tls("web.test", request(f"{FIELD}: read docs", body=b""))).startswith(PASSED)

    run(test())


def test_the_next_request_of_a_connection_declares_its_own() -> None:
    async def test() -> None:
        beyond = Beyond()
        async with door(rules(READ, SEND), beyond.serve) as opened:
            reader, writer = await opened.open_tls("web.test")
            first = request(f"{FIELD}: read docs", body=b"").replace(b"Connection: close\r\n", b"")
            writer.write(first + request(body=CANARY))  # both at once, as a client may send them
            answer = await reader.read()
            writer.transport.abort()
            assert answer.startswith(OK) and b" 403 " in answer and b"no intent is declared" in answer
            assert beyond.all.count(b"GET /x") == 1 and CANARY not in beyond.all

    run(test())


@pytest.mark.parametrize("declared", [True, False])
def test_a_program_that_uses_a_proxy_is_judged_the_same(declared: bool) -> None:
    async def test() -> None:
        beyond = Beyond()
        async with door(rules(READ, OTHER), beyond.serve) as opened:
            asked = request(*([f"{FIELD}: read docs"] if declared else []), body=b"").replace(b"GET /x", b"GET http://web.test/x")
            answer = await opened.send(asked, proxy=True)
            assert (b" 200 OK" in answer, b"GET /x" in beyond.all) == (declared, declared)
            assert b"sandbox-intent" not in beyond.all.lower()

    run(test())


def test_each_request_of_http2_declares_its_own() -> None:
    name = FIELD.lower().encode()

    async def test() -> None:
        beyond = Beyond()
        async with door(rules(READ, SEND), beyond.serve) as opened, client(opened) as asking:
            good = asking.ask([*ASKED[:3], (b":path", b"/one"), (name, b"Read Docs")])
            wrong = [asking.ask([*ASKED[:3], (b":path", b"/two"), *more]) for more in ([], [(name, b"send")], [(name, b"read docs")] * 2)]
            await asking.until(lambda: all(each.ended or each.reset for each in (good, *wrong)))
            assert good.status == 200 and [each.status for each in wrong] == [403, 403, 400]
            assert b"/two" not in beyond.all and b"/one" in beyond.all and b"sandbox-intent" not in beyond.all.lower()

    run(test())


async def opened_websocket(opened: Door, *fields: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, bytes]:
    reader, writer = await opened.open_tls("web.test")
    writer.write(HANDSHAKE.replace(b"\r\n\r\n", "".join(f"\r\n{each}" for each in fields).encode() + b"\r\n\r\n"))
    return reader, writer, await reader.readuntil(b"\r\n\r\n")


async def at_end(reader: asyncio.StreamReader) -> None:
    with suppress(ConnectionError):
        while await reader.read(65536):
            pass


def test_a_websocket_opens_by_its_own_intent_and_ends_with_its_time() -> None:
    async def test() -> None:
        beyond = Echo()
        short = NetworkIntent("read docs", hosts=["web.test"], seconds=0.2)
        async with door(rules(short, OTHER), beyond.serve) as opened:
            _, writer, answer = await opened_websocket(opened)
            assert b" 403 " in answer and beyond.head == b""
            writer.transport.abort()
            reader, writer, answer = await opened_websocket(opened, f"{FIELD}: READ docs")
            assert b" 101 " in answer and b"sandbox-intent" not in beyond.head.lower()
            await at_end(reader)
            writer.transport.abort()
        assert [flow["refused"] for flow in opened.flows if flow["how"] == "websocket"] == ["the intent 'read docs' has expired"]

    run(test())


@pytest.mark.parametrize("later", ["expired", "another"])
def test_a_websocket_ends_when_the_declared_intent_does(later: str) -> None:
    async def test() -> None:
        beyond = Echo()
        before = rules(NetworkIntent("read docs", hosts=["web.test"]), OTHER, declared="read docs")
        async with door(before, beyond.serve) as opened:
            reader, writer, answer = await opened_websocket(opened)
            assert b" 101 " in answer
            writer.write(frame(0x81, b"first"))
            await reader.readuntil(b"first")
            soon = Declared("read docs", time.monotonic() + 0.05) if later == "expired" else Declared("other")
            opened.egress.rules = replace(before, declared=soon)
            await at_end(reader)
            with suppress(ConnectionError):
                writer.write(frame(0x81, CANARY))
            writer.transport.abort()
            assert [each.payload for each in beyond.messages] == [b"first"]
        assert any("'read docs' has expired" in flow["refused"] or "'other' does not open" in flow["refused"] for flow in opened.flows)

    run(test())


def test_an_opaque_stream_ends_when_its_intent_expires() -> None:
    async def test() -> None:
        database = NetworkIntent("database", hosts=["web.test:5432"])
        before = rules(database, OTHER, declared="database", opaque=("web.test:5432",))
        connect = b"CONNECT web.test:5432 HTTP/1.1\r\n\r\n"
        async with door(before, echo) as opened:
            reader, writer = await asyncio.open_connection("127.0.0.1", opened.proxy_port)
            writer.write(connect + b"\x00one")
            await reader.readuntil(b"one")
            opened.egress.rules = replace(before, declared=Declared("database", time.monotonic() + 0.05))
            await at_end(reader)
            writer.transport.abort()
            with suppress(ConnectionError):
                assert CANARY not in await opened.send(connect + b"\x00" + CANARY, proxy=True), "nor does another begin"
        assert [flow["refused"] for flow in opened.flows if flow["how"] == "opaque"] == [
            "the intent 'database' has expired; --intent 'database' would open web.test:5432"
        ]

    run(test())


def test_the_rest_of_a_body_does_not_leave_once_the_intent_is_over() -> None:
    async def test() -> None:
        beyond, arrived = Beyond(answer=lambda data: OK if data.endswith(b"end") else None), asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while piece := await reader.read(65536):
                beyond.received.append(bytearray(piece))
                if b"first" in beyond.all:
                    arrived.set()

        before = rules(SEND, OTHER, declared="send")
        async with door(before, serve) as opened:
            reader, writer = await opened.open_tls("web.test")
            writer.write(request(method="POST", body=b"x" * 100)[:-100] + b"first")
            await arrived.wait()
            opened.egress.rules = replace(before, declared=Declared("send", 0.0))
            writer.write(CANARY + b"x" * (95 - len(CANARY)))
            answer = await reader.read()
            writer.transport.abort()
            assert b" 403 " in answer and b"'send' has expired" in answer and CANARY not in beyond.all

    run(test())


def test_the_rest_of_a_body_does_not_leave_once_the_time_of_the_requests_own_intent_is_over() -> None:
    async def test() -> None:
        for seconds, passes in ((0.2, False), (60, True)):
            beyond, arrived = Beyond(), asyncio.Event()

            async def serve(
                reader: asyncio.StreamReader, writer: asyncio.StreamWriter, beyond: Beyond = beyond, arrived: asyncio.Event = arrived
            ) -> None:
                while piece := await reader.read(65536):
                    beyond.received.append(bytearray(piece))
                    arrived.set()
                    if beyond.all.endswith(CANARY):
                        writer.write(OK)

            own = rules(NetworkIntent("send", hosts=["web.test"], seconds=seconds))
            async with door(own, serve) as opened:
                reader, writer = await opened.open_tls("web.test")
                writer.write(request(f"{FIELD}: send", method="POST", body=b"first" + CANARY)[: -len(CANARY)])
                await arrived.wait()
                await asyncio.sleep(0.4)
                writer.write(CANARY)
                answer = await reader.read()
                writer.transport.abort()
            assert (CANARY in beyond.all) is passes and answer.startswith(PASSED) is passes, answer
            assert passes or (b" 403 " in answer and b"'send' has expired" in answer)

    run(test())


def test_names_of_every_intent_have_an_address_of_ours_and_no_resolver_is_asked() -> None:
    async def test() -> None:
        async with door(rules(READ, OTHER, declared="other")) as opened:
            for name, code in (("web.test", 0), ("other.test", 0), ("third.test", 3)):
                question = b"\x00\x01\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00"
                question += b"".join(bytes((len(each),)) + each.encode() for each in name.split(".")) + b"\x00\x00\x01\x00\x01"
                answer, _, _ = opened.egress.resolver.answer(question)
                assert answer[3] & 15 == code
            assert opened.asked == []

    run(test())
