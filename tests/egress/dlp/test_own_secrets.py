"""The user's own secrets: found by exact match under every listed encoding, alone, in the middle of a text, nested, and cut."""

from __future__ import annotations

import pytest

from agent_sandbox.egress.dlp.own_secrets import OwnSecrets
from agent_sandbox.egress.dlp.rules import default_rules
from agent_sandbox.egress.dlp.scanner import STEP, Search
from bench.encodings import COMPRESSED, DECLARED, TEXTUAL
from tests.egress.dlp.samples import KEY, OWN, find, rules_found

VALUE = OWN.encode()
RULE = "own-secret:DEPLOY"
OTHER = OWN.replace("7", "8").encode()  # not a secret of this user: the control of every test here
TEXT = b"a letter about nothing much, with %s in the middle of it, and some more of it after that.\n"


@pytest.mark.parametrize("encoding", TEXTUAL)
def test_a_secret_is_found_under_every_encoding(encoding: str) -> None:
    encode = TEXTUAL[encoding]
    assert RULE in rules_found(b'{"data": "' + encode(VALUE) + b'"}')
    assert RULE not in rules_found(b'{"data": "' + encode(OTHER) + b'"}')


@pytest.mark.parametrize("encoding", TEXTUAL)
@pytest.mark.parametrize("before", range(5))
def test_a_secret_is_found_in_the_middle_of_an_encoded_text_at_every_alignment(encoding: str, before: int) -> None:
    encode = TEXTUAL[encoding]
    assert RULE in rules_found(encode(b"x" * before + TEXT % VALUE))
    assert RULE not in rules_found(encode(b"x" * before + TEXT % OTHER))


@pytest.mark.parametrize("encoding", COMPRESSED)
def test_a_secret_is_found_in_a_compressed_stream(encoding: str) -> None:
    pack = COMPRESSED[encoding]
    assert RULE in rules_found(pack(TEXT % VALUE))
    assert RULE not in rules_found(pack(TEXT % OTHER))


@pytest.mark.parametrize("encoding", DECLARED)
def test_a_secret_is_found_in_a_stream_whose_compression_is_declared(encoding: str) -> None:
    coding, pack = DECLARED[encoding]
    assert RULE in rules_found(pack(TEXT % VALUE), coding=coding)
    assert RULE not in rules_found(pack(TEXT % OTHER), coding=coding)


@pytest.mark.parametrize("first", ["base64", "base64 for URLs", "hex", "URL, every byte", "Unicode escapes", "base64 over lines"])
@pytest.mark.parametrize("second", ["base64", "base32", "hex", "URL, every byte", "Unicode escapes", "base64 over lines"])
@pytest.mark.parametrize("third", ["base64", "hex", "URL, every byte", "Unicode escapes"])
def test_a_secret_is_found_under_three_encodings(first: str, second: str, third: str) -> None:
    def hide(value: bytes) -> bytes:
        return b'{"data": "' + TEXTUAL[third](TEXTUAL[second](TEXTUAL[first](TEXT % value))) + b'"}'

    assert RULE in rules_found(hide(VALUE))
    assert RULE not in rules_found(hide(OTHER))


@pytest.mark.parametrize("pack", COMPRESSED)
@pytest.mark.parametrize("written", ["base64", "hex", "base64 over lines", "URL, every byte"])
def test_a_secret_is_found_in_compressed_data_that_a_text_holds(pack: str, written: str) -> None:
    def hide(value: bytes) -> bytes:
        return b'{"data": "' + TEXTUAL[written](COMPRESSED[pack](TEXT % value)) + b'"}'

    assert RULE in rules_found(hide(VALUE))
    assert RULE not in rules_found(hide(OTHER))


def test_a_secret_is_found_in_a_compressed_stream_in_a_compressed_stream() -> None:
    packed = COMPRESSED["gzip"](COMPRESSED["zstd"](TEXTUAL["base64"](TEXT % VALUE)))
    assert (RULE, ("compressed", "compressed", "base64")) in {(finding.rule, finding.layers) for finding in find(packed)}


@pytest.mark.parametrize("encoding", [each for each in TEXTUAL if each != "UTF-16"])
@pytest.mark.parametrize("place", [STEP - 40, STEP - 1, STEP, STEP + 8000, 2 * STEP - 20])
def test_a_secret_is_found_where_two_windows_meet(encoding: str, place: int) -> None:
    filler = b"nothing to see in here, \n" * (3 * STEP // 25)
    data = filler[:place] + b" " + TEXTUAL[encoding](VALUE) + b" " + filler[place:]
    assert RULE in {finding.rule for finding in find(data, cuts=tuple(range(0, len(data), 1000)))}
    assert find(filler) == []


def test_a_secret_is_found_one_byte_at_a_time() -> None:
    data = TEXT % VALUE
    assert {finding.rule for finding in find(data, cuts=tuple(range(len(data))))} == {RULE}


@pytest.mark.parametrize(
    "written", ["сorrect-Horse/7battery", "correct-\u200bHorse/7battery", "ｃorrect-Horse/7battery", "correct\u00ad-Horse/7battery"]
)
def test_a_secret_is_found_behind_look_alikes_and_invisible_characters(written: str) -> None:
    assert OWN not in written
    assert RULE in rules_found(f"so {written} it is".encode())


def test_a_value_too_short_to_be_told_from_chance_is_left_out() -> None:
    search = Search.of(default_rules(), OwnSecrets.of([("SHORT", "abc12"), ("LONG", "abc123")]), KEY)
    assert rules_found(b"abc12 abc123", search=search) == {"own-secret:LONG"}


def test_a_value_with_zero_bytes_and_expression_characters_is_sought_as_it_is() -> None:
    search = Search.of((), OwnSecrets.of([("ODD", "a.*\0(b]")]), KEY)
    assert rules_found(b"-- a.*\0(b] --", search=search) == {"own-secret:ODD"}
    assert rules_found(b"-- axx\0(b] --", search=search) == set()
