"""Decoding for the search: the texts that are hidden in a text by base64, base32, hex, percent and other escapes, or compression.

`hidden_in` returns every decoded text with the place of what it was decoded from. One call undoes one layer; the scanner calls it again on
the result, to a bounded depth. Texts in which a decoder can find nothing are told by the signs of its encoding, in one pass over all of
them.
"""

from __future__ import annotations

import base64
import binascii
import html
import re
import unicodedata
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple
from urllib.parse import unquote_to_bytes

from agent_sandbox.egress.dlp import signs
from agent_sandbox.egress.dlp.compression import Overfull, begins_compressed, compressed_in
from agent_sandbox.egress.dlp.prefilter import Prefilter, Sought
from agent_sandbox.egress.dlp.signs import RUN, TEXT

Signs = dict[int, list[int]]  # the numbers of signs, with the places where they end

_WRITTEN_WRAPPED = rb"(?:[A-Za-z0-9+/_-]{8,120}\r?\n[ \t>]{0,16}){1,}[A-Za-z0-9+/_-]{2,120}={0,2}"
_WRITTEN_RUN = rb"[A-Za-z0-9+/_-]{16,}={0,6}"
_WRITTEN_HEX_PAIRS = rb"(?:[0-9a-fA-F]{2}[:, \t-]){7,}[0-9a-fA-F]{2}|(?:\\x[0-9a-fA-F]{2}){6,}|(?:0x[0-9a-fA-F]{2}[, ]{0,3}){6,}"
_NEWLINE = 10
_LONGEST_LINE, _LONGEST_INDENT = 120, 17  # characters of base64 on a line, and before it
_SHORTEST_RUN = 16
_RUN_ON = re.compile(rb"[A-Za-z0-9+/_-]*")
_LONG = 4096  # bytes: a longer run is decoded as a whole only if its first quarter can be part of something readable
_BASE32 = bytes.maketrans(b"ABCDEFGHIJKLMNOPQRSTUVWXYZ234567", b"0123456789ABCDEFGHIJKLMNOPQRSTUV")
_BASE64_URL = bytes.maketrans(b"-_", b"+/")
_ESCAPE = re.compile(rb"\\(?:u([0-9a-fA-F]{4})|u\{([0-9a-fA-F]{1,6})\}|x([0-9a-fA-F]{2})|([0-7]{3})|([nrtbf\"'/\\]))")
_LETTERS = {b"n": b"\n", b"r": b"\r", b"t": b"\t", b"b": b"\b", b"f": b"\f"}
# Characters that cannot be seen, and letters of other scripts that look like Latin ones.
_INVISIBLE = (
    *(0xAD, 0x34F, 0x61C, 0xFEFF),
    *(*range(0x180B, 0x180F), *range(0x200B, 0x2010), *range(0x202A, 0x202F), *range(0x2060, 0x2070)),
    *(*range(0x300, 0x370), *range(0xFE00, 0xFE10), *range(0xE0000, 0xE0080)),
)
_LATIN = zip("аеорсухіјѕԁһԛԝАВЕКМНОРСТХІЈЅαοινρτυκΑΒΕΖΗΙΚΜΝΟΡΤΥΧ", "aeopcyxijsdhqwABEKMHOPCTXIJSaoivptukABEZHIKMNOPTYX", strict=True)
_NO_CHARACTER = "\ufffd"  # where bytes are no UTF-8
_ALIKE = {**dict.fromkeys(map(chr, _INVISIBLE), ""), **dict(_LATIN)}


class Hidden(NamedTuple):
    """A text that was decoded, how, and the place of what it was decoded from."""

    text: bytes
    by: str
    start: int
    end: int
    of_bytes: bool = True  # it can hold compressed data: its encoding is one of bytes, in plain characters


def signs_in(text: bytes) -> Signs:
    """Return the signs of encodings that are in a text, with the places where they end."""
    return {**_sought(_prefilter(), _SIGNS, text), **(_sought(_null_prefilter(), _NULL_SIGNS, text) if b"\0" in text else {})}


def _sought(prefilter: Prefilter, sought: tuple[Sought, ...], text: bytes) -> Signs:
    ends = prefilter.ends(text)
    if ends is None:  # no prefilter: each sign is sought by itself
        ends = {}
        for sign in sought:
            if found := [match.end() for match in _pattern(sign.expression).finditer(text)]:
                ends.setdefault(sign.number, []).extend(found)
    return ends


def signs_of_each(signs: Signs, begins: Sequence[int]) -> dict[int, Signs]:
    """Return the signs of texts that were joined by line breaks and begin at these places, for each text that has any.

    `begins` ends with the place where one more text would begin.
    """
    if len(begins) == 2:
        return {0: signs} if signs else {}
    each: dict[int, Signs] = {}
    for number, ends in signs.items():
        for end in ends:
            text = bisect_right(begins, end - 1) - 1
            length = begins[text + 1] - 1 - begins[text]
            each.setdefault(text, {}).setdefault(number, []).append(min(end - begins[text], length))
        if number in _TOLD_ONCE:  # the first text that has such a sign may not be the only one
            for text in range(bisect_right(begins, ends[0] - 1), len(begins) - 1):
                each.setdefault(text, {}).setdefault(number, [begins[text + 1] - 1 - begins[text]])
    return each


def hidden_in(text: bytes, signs: Signs, *, compressed: bool = True) -> Iterator[Hidden]:
    """Yield the texts that one layer of encoding hides in a text. Raises `Overfull` for a compressed piece that is too large or cut off."""
    if _RUNS in signs:
        spans = list(_spans(text, signs[_RUNS]))
        yield from _runs(text, spans)
        yield from _wrapped(text, spans)
    if _HEX_PAIRS in signs:
        yield from _found(_pattern(_WRITTEN_HEX_PAIRS), text, "hex", _hex_pairs)
    for number, (_, by, decode) in enumerate(_IN_LINES, _LINES):
        if number in signs:
            lines = b"\n".join(_lines_before(text, signs[number]))
            if (decoded := decode(lines)) != lines:
                yield Hidden(decoded, by, 0, len(text), of_bytes=by in ("percent", "escapes") and lines.isascii())
    if _NULLS in signs and b"\0" in text:
        yield Hidden(text.replace(b"\0", b""), "UTF-16", 0, len(text), of_bytes=False)
    if compressed:
        for content, whole in compressed_in(text):
            if not whole and is_readable(content):
                raise Overfull
            yield Hidden(content, "compressed", 0, len(text))


@cache
def _pattern(written: bytes) -> Any:
    import re2  # the rules say what to install where it is missing

    options = re2.Options()
    options.encoding = re2.Options.Encoding.LATIN1
    return re2.compile(written, options)


def _found(pattern: Any, text: bytes, by: str, decode: Callable[[bytes], bytes]) -> Iterator[Hidden]:
    for found in pattern.finditer(text):
        start, end = found.span()
        if decoded := decode(text[start:end]):
            yield Hidden(decoded, by, start, end)


def _runs(text: bytes, spans: list[tuple[int, int]]) -> Iterator[Hidden]:
    """Yield what runs of letters and digits say in hex, base64 or base32."""
    pattern = _pattern(_WRITTEN_RUN)
    for start, stop in spans:
        if stop - start < _SHORTEST_RUN:
            continue
        end = pattern.match(text, start, stop + 6).end()
        run = text[start:end]
        bare = run.rstrip(b"=")
        if not bare.translate(None, b"0123456789abcdefABCDEF"):
            for skip in (0, 1):
                yield from _readable(binascii.unhexlify(bare[skip : len(bare) - (len(bare) - skip) % 2]), "hex", start, end)
            continue
        if not bare.islower() and not bare.isupper():  # base64 of a text has letters of both kinds; most names in programs have not
            for skip in range(4):
                if len(bare) < _LONG or not is_unreadable(
                    _base64(bare[skip : skip + len(bare) // 16 * 4], readable=False), len(bare) * 3 // 4
                ):
                    yield from _readable(_base64(bare[skip:], readable=False), "base64", start, end)
        elif bare.isupper() and not bare.translate(None, b"ABCDEFGHIJKLMNOPQRSTUVWXYZ234567"):
            for skip in range(8):
                yield from _readable(_base32(bare[skip:]), "base32", start, end)


def _spans(text: bytes, ends: list[int]) -> Iterator[tuple[int, int]]:
    """Yield the runs of letters and digits in which, or right before which, these places lie; each once."""
    done = 0
    for end in sorted(ends):
        if end <= done:
            continue
        place = end if text[end - 1] in RUN else end - 1
        stop = _run_end(text, place)
        done = max(end, stop)
        yield _run_start(text, place), stop


def _run_start(text: bytes, place: int) -> int:
    """Return where the run of letters and digits begins that goes on to a place."""
    step = 64
    while place:
        low = max(0, place - step)
        if (length := _run_end(text[low:place][::-1], 0)) < place - low:
            return place - length
        place, step = low, step * 8
    return 0


def _run_end(text: bytes, place: int) -> int:
    """Return where the run of letters and digits ends that a place lies in."""
    run = _RUN_ON.match(text, place)
    assert run is not None  # it may be empty
    return run.end()


def _wrapped(text: bytes, spans: list[tuple[int, int]]) -> Iterator[Hidden]:
    """Yield what base64 says that goes over several lines, on one of which is a run with a sign of text."""
    pattern = _pattern(_WRITTEN_WRAPPED)
    done = 0
    for start, stop in spans:
        line = text.rfind(b"\n", max(0, start - _LONGEST_INDENT), start) + 1
        first = not text[line:start].strip(b" \t>") and (line > 0 or start <= _LONGEST_INDENT)
        beside_break = first or text[stop : stop + 1] in (b"\n", b"\r")
        if stop <= done or not beside_break:
            continue
        place = _first_line(text, start, done)
        while place < stop and (found := pattern.search(text, place)) is not None and found.start() < stop:
            begin, done = found.span()
            place = done
            if decoded := _base64(b"".join(text[begin:done].translate(None, b">").split())):
                yield Hidden(decoded, "base64 over lines", begin, done)


def _first_line(text: bytes, start: int, done: int) -> int:
    """Return where the first of the lines begins that base64 around a place may go over: before it are only lines of nothing else."""
    begin = text.rfind(b"\n", done, start) + 1
    while begin > done:
        line = max(text.rfind(b"\n", done, begin - 1) + 1, done)
        if line <= done or begin - line > _LONGEST_LINE + 40 or text[line : begin - 1].rstrip(b"\r").lstrip(b" \t>").strip(RUN):
            return line if begin - line <= _LONGEST_LINE + 40 else max(done, begin - _LONGEST_LINE - 40)
        begin = line
    return max(done, start - _LONGEST_LINE - 40) if not begin else done


def _readable(decoded: bytes, by: str, start: int, end: int) -> Iterator[Hidden]:
    if is_readable(decoded):
        yield Hidden(decoded, by, start, end)


def is_readable(decoded: bytes) -> bool:
    """Return whether decoded bytes are text, or compressed. Letters and digits that are no code decode to neither."""
    if len(decoded) < 6:
        return False
    strange = len(decoded.translate(None, TEXT))
    if strange * 16 <= len(decoded) or begins_compressed(decoded):
        return True
    nulls = decoded.count(0)
    if nulls * 3 >= len(decoded) and (strange - nulls) * 16 <= len(decoded):
        return True  # UTF-16
    try:
        return decoded.decode("utf-8").isprintable()
    except UnicodeDecodeError:
        return False


def is_unreadable(beginning: bytes, length: int) -> bool:
    """Return whether data of this length cannot be readable, because of its beginning."""
    strange = beginning.translate(None, TEXT)
    if (len(strange) - strange.count(0)) * 16 <= length or begins_compressed(beginning):
        return False
    try:
        beginning.decode("utf-8")
    except UnicodeDecodeError as error:
        return error.start < len(beginning) - 3  # else a character goes on
    return False


def _base64(run: bytes, *, readable: bool = True) -> bytes:
    """Return what base64 says; nothing for what is no text. With `readable` off, return anything."""
    bare = run.rstrip(b"=").translate(_BASE64_URL)
    whole = len(bare) - (len(bare) % 4 == 1)
    try:
        decoded = base64.b64decode(bare[:whole] + b"=" * (-whole % 4))
    except binascii.Error:
        return b""
    return decoded if not readable or is_readable(decoded) else b""


def _base32(run: bytes) -> bytes:
    """Return what base32 says. As one number, since the standard library decodes it in Python."""
    bits = 5 * len(run)
    return (int(run.translate(_BASE32), 32) >> bits % 8).to_bytes(bits // 8, "big")


def _hex_pairs(written: bytes) -> bytes:
    digits = written.replace(b"\\x", b"").replace(b"0x", b"").translate(None, b":, \t-")
    decoded = binascii.unhexlify(digits[: len(digits) // 2 * 2])
    return decoded if is_readable(decoded) else b""


def _unescaped(text: bytes) -> bytes:
    """Return a text without the escapes of JSON and of programming languages. A pair of surrogates becomes one character."""

    def plain(found: re.Match[bytes]) -> bytes:
        unicode, braced, byte, octal, letter = found.groups()
        if letter:
            return _LETTERS.get(letter, letter)
        if byte or octal:
            return bytes((int(byte, 16) if byte else int(octal, 8) & 255,))
        return chr(min(int(unicode or braced, 16), 0x10FFFF)).encode("utf-8", "surrogatepass")

    return _ESCAPE.sub(plain, text)


def _unentitied(text: bytes) -> bytes:
    return html.unescape(text.decode("latin-1")).encode("utf-8")


def _folded(text: bytes) -> bytes:
    """Return a text whose look-alike letters are Latin ones, without invisible characters and lines that are no text."""
    try:
        plain = text.decode("utf-8")
    except UnicodeDecodeError:
        lines = [line.decode("utf-8", "replace") for line in _lines_of_text(text)]
        plain = "\n".join(line for line in lines if 4 * line.count(_NO_CHARACTER) < len(line)).replace(_NO_CHARACTER, "")
    for each in _ALIKE.keys() & set(plain):  # ten times as fast as str.translate, since few of them are there
        plain = plain.replace(each, _ALIKE[each])
    return unicodedata.normalize("NFKC", plain).encode("utf-8", "ignore")


def _lines_of_text(text: bytes) -> Iterator[bytes]:
    """Yield the lines that have enough characters of UTF-8 in a row: to decode what has not would take long."""
    for found in _pattern(signs.LINE_OF_CHARACTERS).finditer(text):
        start, end = found.span()
        yield text[text.rfind(b"\n", 0, start + 1) + 1 : end]


def _lines_before(text: bytes, ends: list[int]) -> Iterator[bytes]:
    """Yield the lines that end at these places, each once, without their line breaks."""
    for end in sorted(ends):
        stop = end - 1 if text[end - 1] == _NEWLINE else end
        yield text[text.rfind(b"\n", 0, stop) + 1 : stop]


_IN_LINES: tuple[tuple[bytes, str, Callable[[bytes], bytes]], ...] = (
    (rb"%[0-9a-fA-F]{2}", "percent", unquote_to_bytes),
    (rb"\\(?:u[0-9a-fA-F]{4}|u\{[0-9a-fA-F]|x[0-9a-fA-F]{2}|[0-7]{3}|/|n[A-Za-z0-9+/]{16})", "escapes", _unescaped),
    (rb"&(?:#[0-9]{1,7}|#[xX][0-9a-fA-F]{1,6}|quot|amp|lt|gt|apos);", "entities", _unentitied),
    (rb"[\x80-\xff]", "look-alikes", _folded),
)
_RUNS, _HEX_PAIRS, _NULLS, _LINES = range(4)  # the numbers of the signs
_SIGNS = (
    Sought(_RUNS, signs.GROUPS_OF_TEXT, places=True, apart=True),
    Sought(_RUNS, signs.BASE32, places=True, apart=True),
    *(Sought(_RUNS, sign, places=True) for sign in signs.OTHER_RUNS),
    *(Sought(_HEX_PAIRS, sign) for sign in signs.PAIRS_OF_TEXT),
    *(Sought(number, b"(?:" + written + rb")[^\n]*(?:\n|\z)", places=True) for number, (written, _, _) in enumerate(_IN_LINES, _LINES)),
)
_NULL_SIGNS = tuple(Sought(_NULLS, sign) for sign in signs.NULLS_IN_TEXT)
_TOLD_ONCE = {sign.number for sign in (*_SIGNS, *_NULL_SIGNS) if not sign.places}


@cache
def _prefilter() -> Prefilter:
    return Prefilter(_SIGNS)


@cache
def _null_prefilter() -> Prefilter:
    return Prefilter(_NULL_SIGNS)
