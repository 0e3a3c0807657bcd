"""The answering resolver: who gets an address, who does not, and what is recorded."""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_sandbox.egress import names, server
from agent_sandbox.egress.names import FIRST_ADDRESS, Malformed, NameServer, read_query
from agent_sandbox.policy.network import network_rules
from tests.egress.wire import Door, door, run

A, AAAA, HTTPS, SVCB, TXT = 1, 28, 65, 64, 16


def query(name: str, kind: int = A, *, number: int = 7, flags: int = 0x0100) -> bytes:
    labels = b"".join(bytes((len(label),)) + label.encode("latin-1") for label in name.split("."))
    return struct.pack("!HHHHHH", number, flags, 1, 0, 0, 0) + labels + b"\0" + struct.pack("!HH", kind, 1)


def result(answer: bytes) -> tuple[int, int, int]:
    """Return the number, the code, and how many records an answer has."""
    number, flags, _, answers, _, _ = struct.unpack_from("!HHHHHH", answer)
    return number, flags & 15, answers


def test_an_allowed_name_has_an_address_of_its_own_that_leads_back_to_it() -> None:
    resolver = NameServer(lambda name: name.endswith("web.test"))
    first, again, second = (resolver.answer(query(each))[0] for each in ("web.test", "WEB.test", "a.web.test"))
    assert result(first) == (7, 0, 1)
    assert first[-4:] == again[-4:] == FIRST_ADDRESS.to_bytes(4, "big")
    assert second[-4:] != first[-4:]
    assert resolver.name_of("198.18.1.1") == "a.web.test"
    assert resolver.name_of("198.18.7.7") is None
    assert resolver.name_of("::1") is None


@pytest.mark.parametrize("kind", [AAAA, HTTPS, SVCB, TXT])
def test_an_allowed_name_has_no_other_records(kind: int) -> None:
    assert result(NameServer(lambda _: True).answer(query("web.test", kind))[0]) == (7, 0, 0)


def test_any_other_name_does_not_exist() -> None:
    resolver = NameServer(lambda name: name == "web.test")
    for name in ("other.test", "web.test.other.test", "xweb.test", "a b.test", "127.1", "\x00.web.test"):
        answer, _, allowed = resolver.answer(query(name))
        assert (result(answer), allowed) == ((7, 3, 0), False)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0" * 11,
        query("a.test", flags=0x8100),
        query("a.test", flags=0x2900),
        query("a.test")[:-1],
        query("a.test")[:4] + b"\0\2" + query("a.test")[6:],
        query("a.test").replace(b"\x01a", b"\xc0\x0c"),
        query(".".join("a" * 60 for _ in range(5))),
    ],
)
def test_what_is_no_query_is_not_answered(data: bytes) -> None:
    assert NameServer(lambda _: True).answer(data) == (b"", "", False)


@given(st.binary(max_size=80))
@settings(max_examples=300, deadline=None)
def test_no_bytes_break_the_resolver(data: bytes) -> None:
    answer, _, allowed = NameServer(lambda _: False).answer(data)
    assert not allowed
    try:
        found = read_query(data)
        assert result(answer)[1] == 3
        assert found.question in answer
    except Malformed:
        assert answer == b""


def test_memory_and_records_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "_MOST_NAMES", 3)
    resolver = NameServer(lambda _: True)
    codes = [result(resolver.answer(query(f"n{each}.test"))[0])[1] for each in range(5)]
    assert codes == [0, 0, 0, 5, 5]
    shown = [resolver.news_of(f"data{each}.tunnel.test") for each in range(1000)]
    assert [each for each in shown if each] == ["data0.tunnel.test"]
    assert resolver.news_of("x" * 60 + ".long.test") == "*.long.test"
    assert resolver.news_of("secret.hidden.test", withheld=True) == "*.hidden.test"
    others = [resolver.news_of(f"a.n{each}.test") for each in range(1000)]
    assert others.count("(more names)") == 1
    assert len([each for each in others if each]) < 300


def test_queries_are_answered_over_tcp_and_refused_ones_recorded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(opened: Door) -> None:
        data = b"".join(len(each).to_bytes(2, "big") + each for each in (query("web.test"), query("other.test"), query("other.test")))
        answer = await opened.send(data)
        assert answer[2:4] == b"\0\x07"
        assert answer.count(b"\x05other\x04test") == 2
        assert [flow for flow in opened.flows if flow["how"] == "dns"] == [
            {"name": "other.test", "port": 0, "how": "dns", "refused": "the policy does not allow other.test; --network other.test would"}
        ]
        assert await opened.send(b"\xff\xff" + b"x" * 5000) == b""

    async def main() -> None:
        async with door(network_rules(outbound=True, hosts=["web.test"])) as opened:
            monkeypatch.setattr(server, "_RESOLVER_PORT", opened.port)
            await test(opened)

    run(main())


def test_queries_are_answered_as_datagrams() -> None:
    async def main() -> None:
        async with door() as opened:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
                sock.setsockopt(socket.IPPROTO_IP, 8, 1)  # IP_PKTINFO
                sock.bind(("127.0.0.1", 0))
                sock.setblocking(False)
                opened.egress.answer_query(sock)  # nothing is there, and nothing happens
                loop: Any = asyncio.get_running_loop()
                loop.add_reader(sock, opened.egress.answer_query, sock)
                asker.setblocking(False)
                await loop.sock_sendto(asker, query("web.test"), sock.getsockname())
                assert result(await loop.sock_recv(asker, 512)) == (7, 0, 1)
                loop.remove_reader(sock)

    run(main())
