"""The inspection without sockets: bodies in any division, packed bodies, bombs, and what is not recorded."""

from __future__ import annotations

import base64
import gzip
import random
import zlib
from collections.abc import Callable

import brotli
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_sandbox.egress.dlp.own_secrets import OwnSecrets
from agent_sandbox.egress.dlp.rules import SearchRule
from agent_sandbox.egress.dlp.scanner import Search
from agent_sandbox.egress.http1 import RequestHead
from agent_sandbox.egress.inspection import HELD, MOST_COMPRESSED, MOST_DECOMPRESSED, Inspection
from agent_sandbox.egress.rules import FlowRefused, Origin
from agent_sandbox.egress.secrets import Broker
from agent_sandbox.egress.web import Customs
from agent_sandbox.policy.network import network_rules

BLOCK = SearchRule("test-token", "a token", "tok-[0-9]{8}")
REDACT = SearchRule("test-mail", "a mail", r"[a-z]{3,20}@[a-z]{3,20}\.test", kind="personal", action="redact")
ASK = SearchRule("test-ask", "a word", "ask-[0-9]{8}", action="ask")
INSPECTION = Inspection(Search.of((BLOCK, REDACT, ASK), OwnSecrets.of(()), b"k" * 32), (), b"k" * 32)
TEXT = b"some words, and tok-12345678 among them"


def deflated(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(data) + packer.flush()


PACKED = {
    b"gzip": gzip.compress,
    b"x-gzip": lambda data: gzip.compress(data[:10]) + gzip.compress(data[10:]),
    b"deflate": deflated,
    b" Deflate ": zlib.compress,
    b"br": brotli.compress,
    b"zstd": lambda data: zstandard.ZstdCompressor().compress(data),
}


def inspect(coding: bytes, *pieces: bytes) -> bytes:
    body = INSPECTION.body(coding, [])
    assert body is not None
    return b"".join([body.feed(each) for each in pieces]) + body.finish()


@pytest.mark.parametrize("coding", PACKED)
def test_a_packed_body_is_unpacked_and_searched_and_goes_on_as_it_is(coding: bytes) -> None:
    packed = PACKED[coding](TEXT)
    with pytest.raises(FlowRefused, match="test-token"):
        inspect(coding, packed[:7], packed[7:])
    clean = PACKED[coding](TEXT.replace(b"tok", b"tak"))
    assert inspect(coding, clean[:7], clean[7:]) == clean


@pytest.mark.parametrize("coding", [*PACKED, b"gzip, br", b"aes128gcm", b"compress"])
def test_what_cannot_be_unpacked_is_refused(coding: bytes) -> None:
    with pytest.raises(FlowRefused, match="cannot be"):
        inspect(coding, b"\x78\x9cno such thing")


@pytest.mark.parametrize("coding", PACKED)
def test_a_bomb_is_refused_within_bounded_memory(coding: bytes) -> None:
    bomb = PACKED[coding](b"\0" * (MOST_DECOMPRESSED + 1))
    assert len(bomb) < MOST_COMPRESSED
    with pytest.raises(FlowRefused, match="cannot be"):
        inspect(coding, bomb)
    with pytest.raises(FlowRefused) as refused:
        inspect(coding, b"x" * (MOST_COMPRESSED + 1))
    assert refused.value.status == 413


@pytest.mark.parametrize("coding", PACKED)
def test_a_packed_body_that_is_cut_off_is_refused(coding: bytes) -> None:
    packed = PACKED[coding](bytes(range(256)) * 40)
    with pytest.raises(FlowRefused, match="cannot be"):
        inspect(coding, packed[: len(packed) - 6])


def test_a_packed_body_is_not_redacted_but_refused() -> None:
    with pytest.raises(FlowRefused, match="cannot be replaced in it"):
        inspect(b"gzip", gzip.compress(b"to joe@home.test"))


def test_text_beside_what_is_packed_is_searched() -> None:
    plain = gzip.compress(b"words", mtime=0)
    named = plain[:3] + b"\x08" + plain[4:10] + b"tok-12345678\0" + plain[10:]
    assert gzip.decompress(named) == b"words"
    with pytest.raises(FlowRefused, match="test-token"):
        inspect(b"gzip", named)


def test_what_a_rule_asks_about_is_noted_in_a_body_and_refused_where_nothing_can_be_held() -> None:
    notes: list[str] = []
    searched = INSPECTION.body(b"", notes)
    assert searched is not None
    assert searched.feed(b"ask-12345678") + searched.finish() == b"ask-12345678"
    assert notes == ["ask: test-ask in the body"]
    with pytest.raises(FlowRefused, match="test-ask"):
        INSPECTION.message(b"ask-12345678", "a message of WebSocket", [])
    with pytest.raises(FlowRefused, match="test-ask"):
        INSPECTION.name("ask-12345678.web.test", [])
    stream = INSPECTION.stream([])
    assert stream is not None
    with pytest.raises(FlowRefused, match="test-ask"):
        stream.feed(b"ask-12345678")


@given(
    st.lists(st.sampled_from([b"joe@home.test", b" ", b"words ", b"x" * 5000, b"\n"]), max_size=12),
    st.sets(st.integers(1, 40000), max_size=6),
)
@settings(max_examples=60, deadline=None)
def test_any_division_of_a_body_is_redacted_alike(parts: list[bytes], cuts: set[int]) -> None:
    body = b" ".join(parts)
    places = sorted(each for each in cuts if each < len(body))
    divided = inspect(b"", *(body[start:end] for start, end in zip((0, *places), (*places, len(body)), strict=True)))
    assert divided == body.replace(b"joe@home.test", b"*" * 13) or b"x" * 10 in body  # an x before it is part of the address
    assert len(divided) == len(body)
    assert b"joe@home.test" not in divided


def test_a_long_body_is_redacted_on_its_way() -> None:
    body = (b"line of words\n" * 7000 + b"to joe@home.test\n") * 6
    assert len(body) > 2 * HELD
    divided = inspect(b"", *(body[place : place + 50000] for place in range(0, len(body), 50000)))
    assert divided == body.replace(b"joe@home.test", b"*" * 13)


def test_nothing_goes_on_of_a_short_body_before_its_end() -> None:
    body = INSPECTION.body(b"", [])
    assert body is not None
    assert body.feed(b"x" * HELD) == b""
    assert len(body.finish()) == HELD


def test_what_was_found_is_noted_by_rule_and_place() -> None:
    notes: list[str] = []
    with pytest.raises(FlowRefused) as refused:
        INSPECTION.head(b"/" + TEXT.replace(b" ", b"+"), (), notes)
    assert notes == ["block: test-token in the address of the request"]
    assert refused.value.withheld
    assert "12345678" not in str(refused.value) + repr(notes)


def test_without_a_search_nothing_is_looked_at() -> None:
    idle = Inspection(None, (), b"")
    assert idle.body(b"gzip", []) is None
    assert idle.stream([]) is None
    assert idle.head(TEXT, (), []) == (TEXT, ())


@pytest.mark.parametrize("pack", [bytes, gzip.compress, lambda data: gzip.compress(gzip.compress(data))])
@pytest.mark.parametrize("cut", [1000, 60_000])
def test_what_is_compressed_in_a_stream_is_searched_however_many_pieces_it_comes_in(pack: Callable[[bytes], bytes], cut: int) -> None:
    text = base64.b85encode(random.Random(5).randbytes(150_000))

    def fed(data: bytes) -> bytes:
        stream = INSPECTION.stream([])
        assert stream is not None
        return b"".join(stream.feed(data[place : place + cut]) for place in range(0, len(data), cut))

    with pytest.raises(FlowRefused, match="test-token"):
        fed(pack(text + TEXT))
    clean = pack(text + TEXT.replace(b"tok", b"tak"))
    assert fed(clean) == clean


def test_a_body_is_no_stream_because_it_says_that_it_is_a_call_of_grpc() -> None:
    customs = Customs(network_rules(outbound=True), INSPECTION, Broker(()))
    body = brotli.compress(TEXT)
    fields = ((b"host", b"a.test"), (b"content-type", b"application/grpc"), (b"content-encoding", b"br"))
    for length in (None, len(body)):
        passage = customs.admit(Origin("a.test", 443, True), RequestHead(b"POST", b"/", fields, length))
        assert not passage.flows and passage.feed(body) == b""
        with pytest.raises(FlowRefused, match="test-token"):
            passage.finish()
    call = RequestHead(b"POST", b"/", fields[:2], None)
    assert customs.admit(Origin("a.test", 443, True), call).flows, "the control arm"
