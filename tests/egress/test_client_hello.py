"""The first message of TLS: the name in it, and that no bytes break the reader."""

from __future__ import annotations

import ssl
from contextlib import suppress
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_sandbox.egress.client_hello import ClientHello, NotTls, read_hello


@cache  # it loads the certificates of the machine, which takes long
def hello(name: str | None) -> bytes:
    """Return the first message that this machine's TLS sends."""
    context = ssl.create_default_context()
    context.check_hostname = False
    inward, outward = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context.wrap_bio(inward, outward, server_hostname=name)
    with pytest.raises(ssl.SSLWantReadError):
        tls.do_handshake()
    return outward.read()


def test_the_name_is_read() -> None:
    assert read_hello(hello("web.test")) == ClientHello("web.test", False)
    assert read_hello(hello(None)) == ClientHello(None, False)


def test_the_name_is_read_as_soon_as_the_message_is_whole_and_not_before() -> None:
    data = hello("web.test")
    assert all(read_hello(data[:end]) is None for end in range(len(data)))
    record = data[5:]
    halves = b"".join(b"\x16\x03\x01" + len(part).to_bytes(2, "big") + part for part in (record[:30], record[30:]))
    assert read_hello(halves) == ClientHello("web.test", False)


def test_a_hidden_name_is_noticed() -> None:
    data = hello("web.test")
    extension = b"\xfe\x0d\x00\x02ab"
    body = data[9:]
    place = 2 + 32
    place += 1 + body[place]
    place += 2 + int.from_bytes(body[place : place + 2], "big")
    place += 1 + body[place]
    length = int.from_bytes(body[place : place + 2], "big") + len(extension)
    body = body[:place] + length.to_bytes(2, "big") + body[place + 2 :] + extension
    record = b"\x01" + len(body).to_bytes(3, "big") + body
    assert read_hello(b"\x16\x03\x01" + len(record).to_bytes(2, "big") + record) == ClientHello("web.test", True)


@given(st.one_of(st.binary(max_size=60), st.binary(max_size=60).map(lambda data: b"\x16\x03\x01" + data)))
@settings(max_examples=300, deadline=None)
def test_no_bytes_break_the_reader(data: bytes) -> None:
    with suppress(NotTls):
        assert read_hello(data) is None or data[:1] == b"\x16"


@given(st.integers(0, 600), st.integers(0, 255))
@settings(max_examples=300, deadline=None)
def test_one_wrong_byte_breaks_nothing(place: int, byte: int) -> None:
    data = bytearray(hello("web.test"))
    data[place % len(data)] = byte
    with suppress(NotTls):
        found = read_hello(bytes(data))
        assert found is None or isinstance(found, ClientHello)
