"""Compressed data: looked through as it arrives, wherever it begins; bombs are held within bounded memory, and never skipped."""

from __future__ import annotations

import gzip
import io
import random
import tracemalloc
import zipfile
import zlib

import brotli
import pytest
import zstandard

from agent_sandbox.egress.dlp.compression import MOST_AT_FIRST, Allowance, Carver, Overfull
from bench.encodings import COMPRESSED, DECLARED
from tests.egress.dlp.samples import OWN, find, rules_found

RULE = "own-secret:DEPLOY"
SECRET = b"the value is " + OWN.encode() + b", keep it.\n"
_noise = random.Random(5)
WORDS = b"alder birch cedar elm fir hazel juniper larch maple oak pine rowan spruce willow yew".split()
LOG = b"".join(b"%s said a line of a log\n" % b" ".join(_noise.choices(WORDS, k=6)) for _ in range(20_000))
FORM = b'--frontier\r\nContent-Disposition: form-data; name="file"\r\nContent-Type: application/octet-stream\r\n\r\n%s\r\n--frontier--\r\n'


def _zip(**files: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return file.getvalue()


def _pack(*contents: bytes) -> bytes:
    """Return a pack of git: a header, and for each blob its size and its content, deflated."""
    pack = b"PACK" + (2).to_bytes(4, "big") + len(contents).to_bytes(4, "big")
    for content in contents:
        size, first = len(content) >> 4, 0x30 | len(content) & 15
        sizes = [first | (0x80 if size else 0)]
        while size:
            sizes.append(size & 127 | (0x80 if size >> 7 else 0))
            size >>= 7
        pack += bytes(sizes) + zlib.compress(content)
    return pack


@pytest.mark.parametrize("encoding", COMPRESSED)
@pytest.mark.parametrize("place", [0, 16_000, 700_000])
def test_a_secret_deep_in_a_long_compressed_stream_is_found(encoding: str, place: int) -> None:
    assert RULE in rules_found(COMPRESSED[encoding](LOG[:place] + SECRET + LOG[place:]))
    assert rules_found(COMPRESSED[encoding](LOG)) == set()


@pytest.mark.parametrize("encoding", COMPRESSED)
def test_a_secret_in_a_compressed_file_of_a_form_is_found(encoding: str) -> None:
    assert RULE in rules_found(FORM % COMPRESSED[encoding](SECRET))
    assert rules_found(FORM % COMPRESSED[encoding](LOG)) == set()


def test_a_secret_in_any_member_of_a_gzip_stream_is_found() -> None:
    assert RULE in rules_found(gzip.compress(LOG) + gzip.compress(SECRET))


def test_a_secret_after_compressed_data_that_breaks_off_is_found() -> None:
    assert RULE in rules_found(gzip.compress(LOG)[:-4000] + _noise.randbytes(40_000) + gzip.compress(SECRET))
    assert RULE in rules_found(gzip.compress(SECRET + LOG)[:-400])


def test_a_secret_in_a_zip_archive_is_found() -> None:
    assert RULE in rules_found(_zip(readme=LOG, settings=SECRET, more=LOG))
    assert RULE in rules_found(FORM % _zip(readme=LOG, settings=SECRET, more=LOG))
    assert rules_found(_zip(readme=LOG, more=LOG)) == set()


def test_a_zip_archive_that_needs_a_password_is_held() -> None:
    archive = bytearray(_zip(settings=SECRET))
    archive[6] |= 1
    assert rules_found(bytes(archive)) == {"unreadable"}


def test_a_secret_in_a_pack_of_git_is_found() -> None:
    pack = _pack(b"print(1)\n", LOG, SECRET, b"tree")
    assert RULE in rules_found(b"00a8" + b"0" * 40 + b" refs/heads/main\0 report-status\n0000" + pack)
    assert rules_found(_pack(b"print(1)\n", LOG, b"tree")) == set()


@pytest.mark.parametrize("encoding", DECLARED)
def test_a_declared_coding_is_undone_and_a_false_one_is_held(encoding: str) -> None:
    coding, pack = DECLARED[encoding]
    some = LOG[: 100 << 10]  # some take long to pack more
    assert RULE in rules_found(pack(some + SECRET), coding=coding)
    assert rules_found(pack(some), coding=coding) == set()
    assert "unreadable" in rules_found(b"\xfe\xfe this is something else" * 40, coding=coding)


def test_codings_are_undone_in_their_order_and_an_unknown_one_is_held() -> None:
    packed = gzip.compress(brotli.compress(SECRET))
    assert RULE in rules_found(packed, coding="br, gzip")
    assert "unreadable" in rules_found(packed, coding="rot, gzip")
    assert rules_found(SECRET, coding="compress") == {RULE, "unreadable"}
    assert rules_found(SECRET, coding="identity") == {RULE}


BOMB = b"\0" * (24 << 20)
BOMBS = {
    "gzip": (gzip.compress(BOMB), ""),
    "deflate": (zlib.compress(BOMB, 9), ""),
    "zstd": (bytes(zstandard.ZstdCompressor(level=3).compress(BOMB)), ""),
    "brotli": (brotli.compress(BOMB, quality=5), "br"),
    "gzip in gzip": (gzip.compress(gzip.compress(BOMB)), ""),
    "many": (b"".join(gzip.compress(BOMB[: 8 << 20]) + b"\xff" for _ in range(4)), ""),
    "zip": (_zip(a=BOMB), ""),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_bomb_is_held_and_takes_bounded_memory(bomb: str) -> None:
    data, coding = BOMBS[bomb]
    tracemalloc.start()
    try:
        assert "unreadable" in rules_found(data, coding=coding)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 32 << 20
    (held,) = (finding for finding in find(data, coding=coding) if finding.rule == "unreadable")
    assert held.action == "block"


def test_a_secret_before_a_bomb_is_told_as_well() -> None:
    assert {RULE, "unreadable"} <= rules_found(gzip.compress(SECRET + BOMB))


def test_compressed_data_that_is_nested_too_deep_is_held() -> None:
    data = SECRET
    for _ in range(3):
        data = gzip.compress(data)
    assert rules_found(data) == {RULE}
    for _ in range(17):
        data = gzip.compress(data)
    assert rules_found(data) == {"unreadable"}


def test_a_budget_is_one_for_all_depths() -> None:
    budget = Allowance()
    with pytest.raises(Overfull):
        for _ in range(MOST_AT_FIRST // (8 << 20) + 1):
            assert sum(map(len, Carver(budget).feed(gzip.compress(BOMB[: 8 << 20])))) > 8 << 20


def test_bytes_that_only_look_compressed_are_held_when_they_are_many() -> None:
    assert rules_found(b"x\x9c" * 60_000) == {"unreadable"}
    assert "unreadable" not in rules_found(random.Random(1).randbytes(1 << 20))
