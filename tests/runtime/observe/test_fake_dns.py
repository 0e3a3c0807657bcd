"""Answers to the names that an observed program asks for: strict, and never out of step."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_sandbox.runtime.observe import fake_dns
from agent_sandbox.runtime.observe.fake_dns import FakeDns

A, AAAA, TXT = 1, 28, 16


def question(
    name: str, kind: int = A, *, identity: int = 7, flags: int = 0x0100, network: int = 1, counts: tuple[int, ...] = (1, 0, 0, 0)
) -> bytes:
    labels = b"".join(bytes((len(label),)) + label.encode("latin-1") for label in name.split(".")) if name else b""
    return struct.pack("!6H", identity, flags, *counts) + labels + b"\0" + struct.pack("!HH", kind, network)


def told(answer: bytes) -> tuple[int, int, int]:
    """Identity, code and number of records of an answer."""
    identity, flags, questions, records, *_ = struct.unpack_from("!6H", answer)
    assert flags & 0x8000 and questions == 1
    return identity, flags & 0xF, records


def test_a_name_has_one_address_of_each_kind_and_the_address_leads_back_to_it() -> None:
    names = FakeDns()
    answer, name = names.answer(question("API.Example.com"))
    assert name == "api.example.com" and told(answer) == (7, 0, 1)
    assert answer[-4:] == bytes((198, 18, 1, 0)) and names.named("198.18.1.0") == "api.example.com"
    assert names.answer(question("api.example.com"))[0][-4:] == answer[-4:], "the same again"
    six, _ = names.answer(question("api.example.com", AAAA))
    assert six[-16:].hex().startswith("20010db8") and names.named("2001:db8::100") == "api.example.com"
    assert names.answer(question("other.example.com"))[0][-4:] == bytes((198, 18, 1, 1))
    assert names.named("::ffff:198.18.1.1") == "other.example.com"


@pytest.mark.parametrize("host", ["192.0.2.1", "198.18.0.255", "198.18.1.9", "2001:db8::ffff", "::1", "no address"])
def test_an_address_that_was_given_to_nobody_is_itself(host: str) -> None:
    names = FakeDns()
    names.answer(question("api.example.com"))
    assert names.named(host) == host


def test_what_resolvers_append_does_not_exist_so_that_the_name_itself_is_asked_for() -> None:
    names = FakeDns(("svc.cluster.local",))
    assert told(names.answer(question("api.example.com.svc.cluster.local"))[0])[1] == 3
    assert told(names.answer(question("api.example.com"))[0]) == (7, 0, 1)


def test_other_kinds_of_questions_have_an_empty_answer() -> None:
    answer, name = FakeDns().answer(question("example.com", TXT))
    assert name == "example.com" and told(answer) == (7, 0, 0)


def test_a_dot_inside_a_label_and_other_bytes_are_spelt_out() -> None:
    raw = struct.pack("!6H", 1, 0, 1, 0, 0, 0) + b"\x05a.b\x1b\n\x03com\0" + struct.pack("!HH", A, 1)
    assert FakeDns().answer(raw)[1] == "a\\046b\\027\\010.com"


@pytest.mark.parametrize(
    "packet",
    [
        b"",
        question("a.b")[:11],
        question("a.b")[:-1],
        question("a.b", flags=0x8000),
        question("a.b", flags=0x2800),
        question("a.b", network=3),
        question("a.b", counts=(0, 0, 0, 0)),
        question("a.b", counts=(2, 0, 0, 0)),
        question("a.b", counts=(1, 1, 0, 0)),
        question(""),
        question("a" * 64),
        question(".".join(["a" * 60] * 5)),
        struct.pack("!6H", 1, 0, 1, 0, 0, 0) + b"\xc0\x0c" + struct.pack("!HH", A, 1),
        question("a.b") + b"x" * 2000,
    ],
    ids=lambda packet: packet[:24].hex(),
)
def test_what_is_no_plain_question_has_no_answer(packet: bytes) -> None:
    names = FakeDns()
    assert names.answer(packet) == (b"", "")
    assert told(names.answer(question("still.there"))[0]) == (7, 0, 1)


def test_there_is_an_end_to_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_dns, "MOST_NAMES", 3)
    names = FakeDns()
    codes = [told(names.answer(question(f"n{number}.example.com"))[0])[1] for number in range(5)]
    assert codes == [0, 0, 0, 2, 2]


@given(st.binary(max_size=600))
def test_any_packet_at_all_is_answered_or_not_and_raises_nothing(packet: bytes) -> None:
    answer, name = FakeDns().answer(packet)
    assert bool(answer) == bool(name)
    assert name.isascii() and name.isprintable()


@given(st.data())
def test_a_question_with_some_bytes_changed_raises_nothing(data: st.DataObject) -> None:
    packet = bytearray(question("some.longer.example.com", AAAA))
    for place in data.draw(st.lists(st.integers(0, len(packet) - 1), max_size=4)):
        packet[place] = data.draw(st.integers(0, 255))
    answer, _ = FakeDns().answer(bytes(packet))
    assert not answer or told(answer)[0] == struct.unpack_from("!H", packet)[0]
