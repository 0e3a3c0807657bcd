"""The scanner: the same bytes give the same findings however they are cut; memory is bounded; findings never hold a value."""

from __future__ import annotations

import json
import random
from dataclasses import asdict

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent_sandbox.egress.dlp.rules import LONGEST
from agent_sandbox.egress.dlp.scanner import AHEAD, BEHIND, STEP, Scanner
from bench.encodings import COMPRESSED, TEXTUAL
from tests.egress.dlp.samples import OWN, SEARCH, TOKENS, find

_WORDS = [b"import os\n", b"password = ", b"'", b"\n", b" ", b"\x00\xff\x1f\x8b", b"%41%42", b"\\u0041", "é😀".encode(), b"AAAA" * 30]
pieces = st.one_of(
    st.sampled_from(_WORDS),
    st.binary(max_size=40),
    st.builds(lambda rule: TOKENS[rule]().encode(), st.sampled_from(sorted(TOKENS))),
    st.builds(lambda encoding: TEXTUAL[encoding](b"see " + OWN.encode() + b" there"), st.sampled_from(sorted(TEXTUAL))),
)
streams = st.builds(
    lambda parts, gap, pack: (COMPRESSED[pack] if pack else bytes)((b" " * gap).join(parts)),
    *(st.lists(pieces, min_size=1, max_size=8), st.sampled_from([0, 1, 5000, STEP // 3]), st.sampled_from(["", "", "", *COMPRESSED])),
)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(streams, st.lists(st.integers(0, STEP * 3), max_size=6))
def test_any_cutting_of_the_same_bytes_gives_the_same_findings(data: bytes, cuts: list[int]) -> None:
    assert find(data, cuts=tuple(cuts)) == find(data)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 300), st.binary(max_size=200))
def test_pieces_of_any_one_size_give_the_same_findings(size: int, noise: bytes) -> None:
    data = noise + b" " + OWN.encode() + b"\n" + TOKENS["github-token"]().encode() + b"\n" + noise
    found = find(data)
    assert find(data, cuts=tuple(range(0, len(data), size))) == found
    assert {"own-secret:DEPLOY", "github-token"} <= {each.rule for each in found}


def test_a_finding_says_where_its_value_is() -> None:
    token = TOKENS["github-token"]().encode()
    (finding,) = find(b"x" * 1000 + b" " + token + b" ")
    assert (finding.start, finding.end) == (1001, 1001 + len(token))


@pytest.mark.parametrize("encoding", ["plain", "base64", "hex", "URL, every byte"])
def test_findings_never_hold_the_value(encoding: str) -> None:
    token = TOKENS["stripe-key"]()
    found = find(TEXTUAL[encoding](f"use {token} and {OWN} now".encode()))
    assert {"stripe-key", "own-secret:DEPLOY"} <= {each.rule for each in found}
    for written in (repr(found), json.dumps([asdict(each) for each in found])):
        for value in (token, OWN):
            assert not any(TEXTUAL[each](value.encode()).decode("latin-1") in written for each in TEXTUAL)
            assert value[8:16] not in written


def test_equal_values_have_equal_digests_and_the_key_decides_them() -> None:
    token = TOKENS["npm-token"]().encode()
    other = type(SEARCH)(SEARCH.matcher, SEARCH.own, b"another key of thirty-two bytes.")
    (here,), (there,) = find(b"a " + token), find(b"some more " + token)
    (elsewhere,) = find(b"a " + token, search=other)
    assert here.digest == there.digest != elsewhere.digest


def test_a_value_is_told_once_for_a_stream_however_often_it_occurs() -> None:
    token = TOKENS["npm-token"]().encode()
    assert len(find((token + b" " * 5000) * 100)) == 1


def test_what_is_held_in_memory_is_bounded_and_what_is_cleared_moves_on() -> None:
    scanner = Scanner(SEARCH)
    total = 0
    for _ in range(64):
        scanner.feed(b"nothing of note. " * 1000)
        total += 17_000
        assert len(scanner._held) <= STEP + AHEAD + BEHIND
        assert total - scanner.cleared <= STEP + AHEAD + LONGEST
    assert scanner.cleared > STEP


def test_a_compressed_stream_is_cleared_as_its_content_is() -> None:
    noise = random.Random(3)
    packed = COMPRESSED["gzip"](b"".join(b"%016x line of a log\n" % noise.getrandbits(64) for _ in range(60_000)))
    scanner, cleared = Scanner(SEARCH), []
    for place in range(0, len(packed), 4096):
        scanner.feed(packed[place : place + 4096])
        cleared.append(scanner.cleared)
    assert cleared == sorted(cleared)
    assert 0 < cleared[-1] <= len(packed)


def test_a_value_in_cleared_bytes_was_already_told() -> None:
    """What may be passed on has been looked at: whatever `cleared` covers, its findings were returned before."""
    token = TOKENS["github-token"]().encode()
    for place in (10, STEP - 20, STEP + LONGEST, 2 * STEP - 5):
        data = b"." * place + b" " + token + b" " + b"." * (3 * STEP - place)
        scanner, told = Scanner(SEARCH), False
        for start in range(0, len(data), 5000):
            told = told or bool(scanner.feed(data[start : start + 5000]))
            assert told or scanner.cleared <= place + 1
        assert told
