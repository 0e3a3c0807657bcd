"""HTTP/2 through the door: heads as values, requests side by side, trailers, and what may not leave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import h2.config
import h2.connection
import h2.events
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_sandbox.egress.dlp.own_secrets import OwnSecrets
from agent_sandbox.egress.dlp.rules import SearchRule
from agent_sandbox.egress.dlp.scanner import Search
from agent_sandbox.egress.http1 import MalformedHttp, RequestHead
from agent_sandbox.egress.http2 import read_head
from agent_sandbox.egress.http2_upstream import FrameLengths
from agent_sandbox.policy.bound_secrets import BoundSecret, new_placeholder
from tests.egress.wire import OK, Beyond, Door, door, run

Pairs = list[tuple[bytes, bytes]]
ASKED: Pairs = [(b":method", b"GET"), (b":scheme", b"https"), (b":authority", b"web.test"), (b":path", b"/a?b")]


def test_a_head_becomes_the_values_of_http1() -> None:
    head = read_head([*ASKED, (b"cookie", b"a=b"), (b"accept", b"*/*"), (b"cookie", b"c=d")], ended=True)
    assert head == RequestHead(b"GET", b"/a?b", ((b"host", b"web.test"), (b"accept", b"*/*"), (b"cookie", b"a=b; c=d")), 0)
    assert read_head([*ASKED, (b"content-length", b"3")], ended=False).length == 3
    assert read_head(ASKED, ended=False).length is None


@pytest.mark.parametrize(
    "fields",
    [
        ASKED[1:],
        ASKED[:2] + ASKED[3:],
        ASKED[:3],
        [*ASKED, (b":path", b"/other")],
        [*ASKED, (b":protocol", b"websocket")],
        [*ASKED, (b"host", b"other.test")],
        [*ASKED, (b"x-a", b"b\r\nHost: other.test")],
        [*ASKED, (b"x-a", b"b\nc")],
        [*ASKED, (b"x-a", b"b\0c")],
        [*ASKED, (b"x a", b"b")],
        [*ASKED, (b"x-a:b", b"c\r\n")],
        [*ASKED, (b"content-length", b"1"), (b"content-length", b"2")],
        [*ASKED, (b"content-length", b"+1")],
        [*ASKED[:3], (b":path", b"/ HTTP/1.1\r\nHost: other.test")],
        [*ASKED[:3], (b":path", b"")],
        [(b":method", b"GET /x HTTP/1.1\r\n"), *ASKED[1:]],
        [*ASKED, *[(b"x", b"y")] * 300],
    ],
)
def test_a_head_that_could_be_understood_in_two_ways_is_refused(fields: Pairs) -> None:
    with pytest.raises(MalformedHttp):
        read_head(fields, ended=False)


@given(st.lists(st.tuples(st.sampled_from([b":method", b":path", b"host", b"x", b"X-\r\n", b""]), st.binary(max_size=8)), max_size=5))
@settings(max_examples=200, deadline=None)
def test_whatever_is_taken_has_no_line_ends(fields: Pairs) -> None:
    try:
        head = read_head([*ASKED, *fields], ended=True)
    except MalformedHttp:
        return
    assert not any(byte in key + value for key, value in head.fields for byte in b"\r\n\0")


@dataclass
class Answer:
    """The answer to one request, as far as it has come."""

    status: int = 0
    fields: Pairs = field(default_factory=list)
    body: bytes = b""
    trailers: Pairs = field(default_factory=list)
    ended: bool = False
    reset: bool = False


@dataclass
class Client:
    """A client of HTTP/2."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    h2: Any = field(
        default_factory=lambda: h2.connection.H2Connection(
            h2.config.H2Configuration(header_encoding=None, validate_outbound_headers=False, normalize_outbound_headers=False)
        )
    )
    answers: dict[int, Answer] = field(default_factory=dict)

    def ask(self, fields: Pairs, body: bytes | None = None, *, end: bool = True) -> Answer:
        number = self.h2.get_next_available_stream_id()
        self.h2.send_headers(number, fields, end_stream=body is None and end)
        if body is not None:
            for place in range(0, len(body) or 1, 16000):
                self.h2.send_data(number, body[place : place + 16000], end_stream=end and place + 16000 >= len(body))
        self.writer.write(self.h2.data_to_send())
        return self.answers.setdefault(number, Answer())

    async def until(self, done: Callable[[], bool]) -> None:
        while not done():
            data = await self.reader.read(65536)
            assert data, "the connection ended"
            for event in self.h2.receive_data(data):
                answer = self.answers.get(getattr(event, "stream_id", 0) or 0, Answer())
                if isinstance(event, h2.events.ResponseReceived):
                    answer.fields = list(event.headers)
                    answer.status = int(dict(answer.fields)[b":status"])
                elif isinstance(event, h2.events.DataReceived):
                    answer.body += event.data
                    self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                elif isinstance(event, h2.events.TrailersReceived):
                    answer.trailers = list(event.headers)
                elif isinstance(event, h2.events.StreamEnded):
                    answer.ended = True
                elif isinstance(event, h2.events.StreamReset):
                    answer.reset = True
            self.writer.write(self.h2.data_to_send())


@asynccontextmanager
async def client(opened: Door, name: str = "web.test", sni: str | None = None) -> AsyncIterator[Client]:
    reader, writer = await opened.open_tls(name, sni=sni, speaks="h2")
    found = Client(reader, writer)
    found.h2.initiate_connection()
    writer.write(found.h2.data_to_send())
    try:
        yield found
    finally:
        writer.transport.abort()


def test_requests_go_side_by_side_and_on_as_http1() -> None:
    async def test() -> None:
        beyond = Beyond()
        async with door(beyond=beyond.serve) as opened, client(opened) as asking:
            answers = [asking.ask([*ASKED[:3], (b":path", b"/%d" % each)]) for each in range(5)]
            post = asking.ask([(b":method", b"POST"), *ASKED[1:], (b"content-length", b"3")], b"abc")
            await asking.until(lambda: all(each.ended for each in (*answers, post)))
            assert {(each.status, each.body) for each in answers} == {(200, b"ok")}
            assert all(b"GET /%d HTTP/1.1\r\nHost: web.test\r\n\r\n" % each in beyond.all for each in range(5))
            assert b"POST /a?b HTTP/1.1\r\nHost: web.test\r\nContent-Length: 3\r\n\r\nabc" in beyond.all
        assert {flow["how"] for flow in opened.flows} == {"h2"}
        assert sum(len(flow["requests"]) for flow in opened.flows) == 6

    run(test())


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ([*ASKED[:2], (b":authority", b"a.web.test"), ASKED[3]], 421),
        ([*ASKED[:2], (b":authority", b"other.test"), ASKED[3]], 421),
        ([(b":method", b"TRACE"), *ASKED[1:]], 405),
        ([*ASKED, (b"x-token", b"tok-12345678")], 403),
        ([*ASKED[:3], (b":path", b"/tok-12345678")], 403),
    ],
)
def test_a_request_that_may_not_leave_is_refused_and_its_neighbours_go_on(fields: Pairs, status: int) -> None:
    async def test() -> None:
        beyond = Beyond()
        search = Search.of((SearchRule("test-token", "a token", "tok-[0-9]{8}"),), OwnSecrets.of(()), b"k" * 32)
        async with door(beyond=beyond.serve, search=search) as opened, client(opened) as asking:
            bad, good = asking.ask(fields), asking.ask(ASKED)
            await asking.until(lambda: bad.ended and good.ended)
            assert (bad.status, good.status) == (status, 200)
            assert b"refused by the sandbox: " in bad.body
            assert len(beyond.received) == 1

    run(test())


def test_tls_for_another_name_than_the_connections_is_refused() -> None:
    async def test() -> None:
        beyond = Beyond()
        async with door(beyond=beyond.serve) as opened, client(opened, sni="a.web.test") as asking:
            answer = asking.ask([*ASKED[:2], (b":authority", b"a.web.test"), ASKED[3]])
            await asking.until(lambda: answer.ended)
            assert answer.status == 421
            assert beyond.all == b""

    run(test())


def test_a_body_with_found_data_does_not_leave() -> None:
    async def test() -> None:
        beyond = Beyond()
        search = Search.of((SearchRule("test-token", "a token", "tok-[0-9]{8}"),), OwnSecrets.of(()), b"k" * 32)
        async with door(beyond=beyond.serve, search=search) as opened, client(opened) as asking:
            post = [(b":method", b"POST"), *ASKED[1:]]
            bad, good = asking.ask(post, b"a tok-12345678 b"), asking.ask(post, b"a tak-12345678 b")
            await asking.until(lambda: bad.ended and good.ended)
            assert (bad.status, good.status) == (403, 200)
            assert b"tok-1" not in beyond.all
            assert b"tak-1" in beyond.all

    run(test())


def test_a_long_answer_comes_as_fast_as_it_is_read_and_a_long_body_goes() -> None:
    body = bytes(range(256)) * 2000

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"Content-Length: 50000\r\n" in head
        await reader.readexactly(50000)
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + body)
        writer.close()

    async def test() -> None:
        async with door(beyond=serve) as opened, client(opened) as asking:
            answer = asking.ask([(b":method", b"POST"), *ASKED[1:], (b"content-length", b"50000")], b"x" * 50000)
            await asking.until(lambda: answer.ended)
            assert answer.body == body

    run(test())


def test_a_stream_that_breaks_off_leaves_its_neighbours_alone() -> None:
    async def test() -> None:
        beyond = Beyond(lambda data: b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nab" if b"/cut" in data else OK)

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            data = await reader.readuntil(b"\r\n\r\n")
            writer.write(beyond.answer(data) or b"")
            writer.close()

        async with door(beyond=serve) as opened, client(opened) as asking:
            cut, good = asking.ask([*ASKED[:3], (b":path", b"/cut")]), asking.ask(ASKED)
            await asking.until(lambda: cut.reset and good.ended)
            assert good.body == b"ok"
            assert not cut.ended

    run(test())


def test_bytes_that_are_no_http2_end_the_connection_and_nothing_else() -> None:
    async def test() -> None:
        async with door() as opened:
            reader, writer = await opened.open_tls("web.test", speaks="h2")
            writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 500)
            await reader.read()
            writer.transport.abort()
            async with client(opened) as asking:
                answer = asking.ask(ASKED)
                await asking.until(lambda: answer.ended)
                assert answer.status == 200

    run(test())


@given(st.lists(st.integers(0, 16384), max_size=5), st.integers(16385, 1 << 24), st.lists(st.integers(1, 40000), max_size=6))
@settings(max_examples=100, deadline=None)
def test_a_frame_that_is_too_long_is_noticed_at_its_head_however_it_is_divided(lengths: list[int], long: int, cuts: list[int]) -> None:
    good = b"".join(each.to_bytes(3, "big") + b"\0" * (6 + each) for each in lengths)
    bad = good + (long & 0xFFFFFF).to_bytes(3, "big") + b"\0" * 6
    for data, fails in ((good, False), (bad, long < 1 << 24)):
        watched = FrameLengths()
        pieces = [*cuts, len(data)]
        try:
            for size in pieces:
                watched.check(data[:size])
                data = data[size:]
            assert not fails
        except MalformedHttp:
            assert fails


class Grpc:
    """A host that speaks HTTP/2: it sends back each piece of a body as it comes, and trailers at the end."""

    def __init__(self) -> None:
        self.heads: list[Pairs] = []
        self.body = b""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        own = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False, header_encoding=None))
        own.initiate_connection()
        writer.write(own.data_to_send())
        while data := await reader.read(65536):
            for event in own.receive_data(data):
                if isinstance(event, h2.events.RequestReceived):
                    assert event.stream_id is not None
                    self.heads.append(list(event.headers or []))
                    own.send_headers(event.stream_id, [(b":status", b"200"), (b"content-type", b"application/grpc")])
                elif isinstance(event, h2.events.DataReceived):
                    assert event.stream_id is not None
                    self.body += event.data or b""
                    own.acknowledge_received_data(event.flow_controlled_length or 0, event.stream_id)
                    own.send_data(event.stream_id, event.data or b"")
                elif isinstance(event, h2.events.StreamEnded):
                    own.send_headers(event.stream_id, [(b"grpc-status", b"0"), (b"grpc-message", b"the-real-value-1")], end_stream=True)
            writer.write(own.data_to_send())


CALL: Pairs = [(b":method", b"POST"), *ASKED[1:], (b"content-type", b"application/grpc"), (b"te", b"trailers")]


def test_a_call_of_grpc_flows_both_ways_and_ends_in_trailers() -> None:
    async def test() -> None:
        beyond = Grpc()
        holder = new_placeholder("T", b"x" * 16)
        secret = BoundSecret("T", holder, "the-real-value-1", ("web.test",))
        async with door(beyond=beyond.serve, speaks="h2", secrets=(secret,)) as opened, client(opened) as asking:
            answer = asking.ask([*CALL, (b"authorization", b"Bearer " + holder.encode())], b"one", end=False)
            await asking.until(lambda: answer.body == b"one")  # the answer has begun before the request has ended
            asking.h2.send_data(1, b"two", end_stream=True)
            asking.writer.write(asking.h2.data_to_send())
            await asking.until(lambda: answer.ended)
            assert (answer.status, answer.body) == (200, b"onetwo")
            assert answer.trailers == [(b"grpc-status", b"0"), (b"grpc-message", holder.encode())]
            assert (b"te", b"trailers") in beyond.heads[0]
            assert (b"authorization", b"Bearer the-real-value-1") in beyond.heads[0]
            again = asking.ask(CALL, b"three")
            await asking.until(lambda: again.ended)
            assert again.body == b"three"

    run(test())


def test_a_call_of_grpc_is_cut_at_found_data() -> None:
    async def test() -> None:
        beyond = Grpc()
        search = Search.of((SearchRule("test-token", "a token", "tok-[0-9]{8}"),), OwnSecrets.of(()), b"k" * 32)
        async with door(beyond=beyond.serve, speaks="h2", search=search) as opened, client(opened) as asking:
            answer = asking.ask(CALL, b"one", end=False)
            await asking.until(lambda: answer.body == b"one")
            asking.h2.send_data(1, b" tok-12345678 ", end_stream=True)
            asking.writer.write(asking.h2.data_to_send())
            await asking.until(lambda: answer.reset or answer.ended)
            assert answer.trailers == []
            assert beyond.body == b"one"

    run(test())


def test_a_long_body_waits_for_the_hosts_window() -> None:
    async def test() -> None:
        beyond = Grpc()
        async with door(beyond=beyond.serve, speaks="h2") as opened, client(opened) as asking:
            plain = [each for each in CALL if each[0] not in (b"content-type", b"te")]
            answer = asking.ask(plain, b"x" * 60000, end=False)
            await asking.until(lambda: len(answer.body) == 60000)
            for _ in range(4):
                size = len(answer.body)
                asking.h2.send_data(1, b"y" * 15000)
                asking.writer.write(asking.h2.data_to_send())
                await asking.until(lambda size=size: len(answer.body) == size + 15000)  # type: ignore[misc]
            asking.h2.end_stream(1)
            asking.writer.write(asking.h2.data_to_send())
            await asking.until(lambda: answer.ended)
            assert answer.body == beyond.body == b"x" * 60000 + b"y" * 60000

    run(test())
