"""Decompression for the search, piece by piece and bounded: what is over a bound raises `Overfull`, and the scanner then holds the data."""

from __future__ import annotations

import bz2
import lzma
import re
import zlib
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import brotli
import zstandard

from agent_sandbox.egress.dlp.prefilter import Prefilter, Sought

MOST_DECOMPRESSED = 1 << 20  # bytes taken out of what is compressed in a text of a window
MOST_AT_FIRST, MOST_TIMES = 16 << 20, 100  # bytes taken out of a stream: so many, and for each of its own bytes so many more
PIECE = 64 << 10  # bytes that are decompressed at once
_ZSTD_WINDOW, _XZ_MEMORY = 8 << 20, 64 << 20
_BEGINNINGS = (
    (b"\x1f\x8b\x08", "gzip"),
    *((start, "deflate") for start in (b"x\x01", b"x\x5e", b"x\x9c", b"x\xda")),
    (b"\x28\xb5\x2f\xfd", "zstd"),
    (b"BZh", "bzip2"),
    (b"\xfd7zXZ\x00", "xz"),
)
ZIP, _ZIP_HEADER, _STORED, _DEFLATED = b"PK\x03\x04", 30, 0, 8
_ZIP_NEWEST = 63  # the version of the format that is needed to extract, tenfold
_ZIP_METHODS = frozenset((*range(11), 12, 14, 18, 19, 20, *range(93, 100)))  # that the format names
END = b"\n"  # told between two contents
MOST_TRIES, BYTES_A_TRY = 1000, 256  # places that only look like compressed data: chance makes one in 16,000 bytes
_LONGEST_SIGN = 5
CERTAIN = tuple(sign for sign in (*(start for start, _ in _BEGINNINGS), ZIP) if len(sign) > 2)  # two bytes occur by chance
MAGIC = (*(start for start, _ in _BEGINNINGS), ZIP)


class Overfull(Exception):
    """Compressed data holds more than the search looks through."""


class Undecodable(Exception):
    """Data is not compressed in the way it begins, or is said, to be."""


def coding_of(data: bytes) -> str:
    """Return the name of the compression that data begins with; nothing if it has no sign of one. Brotli has none."""
    return next((coding for start, coding in _BEGINNINGS if data.startswith(start)), "")


def begins_compressed(data: bytes) -> bool:
    """Return whether data begins with a sign of compression. The sign of deflate is two bytes, so that what follows has to fit too."""
    if not data.startswith(MAGIC):
        return False
    try:
        return data.startswith(CERTAIN) or zlib.decompressobj().decompress(data, 64) is not None
    except zlib.error:
        return False


@dataclass(frozen=True)
class Beginning:
    """A place in data where something compressed begins: its sign, its first byte, and its coding; no coding: it cannot be looked into."""

    place: int
    begin: int
    coding: str


def signs_in(data: bytes) -> list[tuple[int, bytes]]:
    """Return the places where signs of compression begin, in order, each with its sign."""
    if data.isascii():  # a sign may be; what it announces never is
        return []
    ends = _prefilter().ends(data)
    if ends is not None:
        return sorted((end - len(MAGIC[number]), MAGIC[number]) for number, places in ends.items() for end in places)
    return sorted((found.start(), found.group()) for sign in MAGIC for found in re.finditer(re.escape(sign), data))


@cache
def _prefilter() -> Prefilter:
    return Prefilter([Sought(number, b"".join(b"\\x%02x" % byte for byte in sign), places=True) for number, sign in enumerate(MAGIC)])


def opening_in(data: bytes, start: int, signs: list[tuple[int, bytes]]) -> Beginning | None:
    """Return the first place from `start` on where compressed data begins, if there is one. Its first byte may lie beyond the data."""
    for place, sign in signs[bisect_left(signs, (start, b"")) :]:
        if sign != ZIP:
            return Beginning(place, place, coding_of(data[place : place + _LONGEST_SIGN + 1]))
        header = data[place : place + _ZIP_HEADER]
        if len(header) < _ZIP_HEADER:
            return Beginning(place, place + _ZIP_HEADER, "zip")
        flags, method, name, extra = (int.from_bytes(header[at : at + 2], "little") for at in (6, 8, 26, 28))
        if header[4] > _ZIP_NEWEST or method not in _ZIP_METHODS or not name:
            continue  # programs that write archives hold the sign, and no header
        if method != _STORED or flags & 1:  # else it is searched as it is, like all that is not compressed
            return Beginning(place, place + _ZIP_HEADER + name + extra, "zip" if method == _DEFLATED and not flags & 1 else "")
    return None


def compressed_in(text: bytes) -> Iterator[tuple[bytes, bool]]:
    """Yield the contents of what is compressed in a text, as far as it is undamaged, and whether each is whole. Raises `Overfull`."""
    contents: list[bytes] = []
    for piece in Carver(Allowance(MOST_DECOMPRESSED)).feed(text):
        if piece is END:
            yield b"".join(contents), True
            contents.clear()
        else:
            contents.append(piece)
    if contents:
        yield b"".join(contents), False


@dataclass
class Allowance:
    """How much is taken out of one stream, at all depths together: compressed data in compressed data cannot multiply it."""

    most: int = MOST_AT_FIRST

    def earn(self, count: int) -> None:
        """Allow more, for bytes of the stream itself."""
        self.most += MOST_TIMES * count

    def spend(self, count: int) -> None:
        """Take bytes. Raises `Overfull` if that is more than is allowed."""
        if count > self.most:
            raise Overfull
        self.most -= count


class Carver:
    """The compressed data in a stream, wherever it begins, decompressed as it arrives. With `coding`, the stream is all compressed."""

    def __init__(self, budget: Allowance, coding: str = "") -> None:
        self._budget = budget
        self._unpacker = Unpacker(coding) if coding else None
        self._declared = bool(coding)
        self._carried = b""
        self._tries = MOST_TRIES

    @property
    def is_open(self) -> bool:
        """Whether compressed data goes on."""
        return self._unpacker is not None

    def feed(self, block: bytes) -> Iterator[bytes]:
        """Yield what the next bytes hold, in pieces; `END` after each compressed part. Raises `Overfull`, and `Undecodable` if declared."""
        data, self._carried = self._carried + block, b""
        self._tries += len(block) // BYTES_A_TRY
        place = again = 0
        signs: list[tuple[int, bytes]] | None = None
        while place < len(data):
            if self._unpacker is None:
                signs = signs_in(data) if signs is None else signs
                opening = opening_in(data, place, signs)
                if opening is None or opening.begin >= len(data):
                    self._carried = data[max(place, len(data) - _LONGEST_SIGN) :] if opening is None else data[opening.place :]
                    return
                if not opening.coding or not self._tries:
                    raise Overfull
                self._tries -= 1
                self._unpacker, place, again = Unpacker(opening.coding), opening.begin, opening.place + 1
            try:
                for piece in self._unpacker.feed(data[place:]):
                    self._budget.spend(len(piece))
                    yield piece
            except Undecodable:
                if self._declared:
                    raise
                yield END
                self._unpacker, place = None, again
                continue
            if not self._unpacker.ended:
                return
            yield END
            place = len(data) - len(self._unpacker.rest)
            self._unpacker, self._declared = None, False


class Unpacker:
    """A stream that is decompressed as it arrives. Raises `Undecodable` for a coding that it does not know."""

    def __init__(self, coding: str) -> None:
        if coding not in _OPENERS:
            raise Undecodable(f"the search does not know the coding {coding}")
        self._coding = coding
        self._opened: Any = None
        self.ended = False  # what comes after is no part of the compressed data
        self.rest = b""  # the last bytes that were fed, as far as they come after

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield what the next bytes say, in pieces of bounded size. Raises `Undecodable`."""
        while data and not self.ended:
            if self._opened is None:
                self._opened = _OPENERS[self._coding](data)
            try:
                yield from self._opened.pieces(data)
            except _errors(self._coding) as error:
                raise Undecodable(str(error)) from None
            data = self._opened.rest
            if self._opened.ended:  # the next member, if there is one
                self._opened = None
                self.ended, self.rest = coding_of(data) != self._coding, data


class _Zlib:
    """gzip, zlib or deflate."""

    def __init__(self, bits: int) -> None:
        self._opened = zlib.decompressobj(bits)

    ended = property(lambda self: self._opened.eof)
    rest = property(lambda self: self._opened.unused_data)

    def pieces(self, data: bytes) -> Iterator[bytes]:
        while not self._opened.eof:
            piece = self._opened.decompress(data, PIECE)
            data = self._opened.unconsumed_tail
            yield piece
            if not data and len(piece) < PIECE:
                return


class _Blocks:
    """bzip2 or xz, as the standard library opens them."""

    def __init__(self, opened: Any) -> None:
        self._opened = opened

    ended = property(lambda self: self._opened.eof)
    rest = property(lambda self: self._opened.unused_data)

    def pieces(self, data: bytes) -> Iterator[bytes]:
        yield self._opened.decompress(data, PIECE)
        while not self._opened.eof and not self._opened.needs_input:
            yield self._opened.decompress(b"", PIECE)


class _Brotli:
    """Brotli."""

    rest = b""

    def __init__(self) -> None:
        self._opened = brotli.Decompressor()

    ended = property(lambda self: self._opened.is_finished())

    def pieces(self, data: bytes) -> Iterator[bytes]:
        for place in range(0, len(data), PIECE):
            piece = self._opened.process(data[place : place + PIECE], output_buffer_limit=PIECE)
            while piece:  # also when it takes more input: it may hold output back
                yield piece
                piece = b"" if self._opened.is_finished() else self._opened.process(b"", output_buffer_limit=PIECE)


class _Zstandard:
    """Zstandard. Its decompressor has no bound of its own, so it is fed so little that it cannot return much."""

    rest = b""
    _LITTLE = 256  # bytes, of which four can stand for 128 KiB

    def __init__(self) -> None:
        self._opened = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW).decompressobj()

    ended = property(lambda self: self._opened.eof)

    def pieces(self, data: bytes) -> Iterator[bytes]:
        for place in range(0, len(data), self._LITTLE):
            yield self._opened.decompress(data[place : place + self._LITTLE])
            if self._opened.eof:
                self.rest = self._opened.unused_data + data[place + self._LITTLE :]
                return


def _opened_deflate(data: bytes) -> _Zlib:
    """Return the decompressor of data that HTTP calls deflate: with the header of zlib, or, as some programs write it, without."""
    has_header = len(data) > 1 and data[0] & 15 == 8 and int.from_bytes(data[:2], "big") % 31 == 0
    return _Zlib(zlib.MAX_WBITS if has_header else -zlib.MAX_WBITS)


def _opened_bzip2(_: bytes) -> _Blocks:
    return _Blocks(bz2.BZ2Decompressor())


def _opened_xz(_: bytes) -> _Blocks:
    return _Blocks(lzma.LZMADecompressor(memlimit=_XZ_MEMORY))


_OPENERS: dict[str, Callable[[bytes], Any]] = {
    "gzip": lambda _: _Zlib(zlib.MAX_WBITS | 16),
    "deflate": _opened_deflate,
    "zip": lambda _: _Zlib(-zlib.MAX_WBITS),
    "br": lambda _: _Brotli(),
    "zstd": lambda _: _Zstandard(),
    "bzip2": _opened_bzip2,
    "xz": _opened_xz,
}
CODINGS = frozenset(_OPENERS) - {"zip"}  # that the header of a request may name


def _errors(coding: str) -> tuple[type[Exception], ...]:
    """Return the errors of the library that decompresses a coding."""
    usual = (zlib.error, OSError, EOFError, ValueError, RuntimeError, MemoryError)
    if coding == "br":
        return (*usual, brotli.error)
    if coding == "zstd":
        return (*usual, zstandard.ZstdError)
    if coding == "xz":
        return (*usual, lzma.LZMAError)
    return usual
