"""The signs of encoded text: expressions for the prefilter, by which base64, base32 and hex of a text are told from other words.

Most long words of programs are no base64. The bytes of a text use few of the 256 values, so its base64 uses few of the 64 characters at
each place of a group of four. A word with no three such groups in a row says nothing readable, and is not decoded.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable

from agent_sandbox.egress.dlp.compression import MAGIC

RUN = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/_-"
TEXT = bytes({7, 8, 9, 10, 12, 13, 27, *range(32, 127)})
_DIGITS = (b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/", b"-_")


def _base64_of(*groups: tuple[Iterable[int], Iterable[int], Iterable[int]]) -> bytes:
    """Return an expression for the base64 of bytes that have these values, three to a group."""
    written = b""
    for first, second, third in groups:
        written += _one_of({byte >> 2 for byte in first})
        written += _one_of({(high & 3) << 4 | low >> 4 for high in first for low in second})
        written += _one_of({(high & 15) << 2 | low >> 6 for high in second for low in third})
        written += _one_of({byte & 63 for byte in third})
    return written


def _one_of(values: set[int]) -> bytes:
    return _class(bytes(_DIGITS[0][value] for value in sorted(values)) + bytes(_DIGITS[1][value - 62] for value in values if value >= 62))


def _class(characters: bytes) -> bytes:
    return b"[" + b"".join(b"\\x%02x" % each for each in characters) + b"]"


_ZERO = (0,)
_GROUP = _base64_of((TEXT, TEXT, TEXT))
_WIDE = (_base64_of((TEXT, _ZERO, TEXT), (_ZERO, TEXT, _ZERO)), _base64_of((_ZERO, TEXT, _ZERO), (TEXT, _ZERO, TEXT)))  # UTF-16


def _beginning(magic: bytes) -> bytes:
    """Return an expression for the base64 of data that begins with these bytes: the characters that they determine, in whole or in part."""
    first, last = (base64.b64encode(magic + fill * 2) for fill in (b"\0", b"\xff"))
    whole, rest = divmod(len(magic) * 8, 6)
    values = range(_DIGITS[0].index(first[whole]), _DIGITS[0].index(last[whole]) + 1)
    return first[:whole].replace(b"+", rb"[+\x2d]").replace(b"/", b"[/_]") + (_one_of(set(values)) if rest else b"")


_COMPRESSED = tuple(map(_beginning, MAGIC))
_PAIR = rb"(?:[2-7][0-9a-fA-F]|0[7-9a-dA-D]|1[bB])"  # of a character of text, in hex
_BETWEEN = b"[:, \t-]"


def _in_hex(magic: bytes, between: bytes) -> bytes:
    return between.join(
        b"".join(b"[%c%c]" % (each, each & ~32) if each > 57 else b"%c" % each for each in b"%02x" % byte) for byte in magic
    )


# It is told once for a word, at its end: a long one would else be told at each of its groups.
GROUPS_OF_TEXT = b"(?:" + _GROUP + rb"){3}[A-Za-z0-9+/_-]*(?:[^A-Za-z0-9+/_-]|\z)"
OTHER_RUNS = (
    *_WIDE,
    *_COMPRESSED,
    _PAIR + b"{7}",
    b"(?:" + _PAIR + b"00){3}",
    b"(?:00" + _PAIR + b"){3}",
    *(_in_hex(magic, b"") for magic in MAGIC),
)
BASE32 = rb"(?:\A|[^A-Za-z0-9+/_-])[A-Z2-7]{16}"
PAIRS_OF_TEXT = (
    b"(?:[2-7][0-9a-fA-F]" + _BETWEEN + b"){4}",
    b"(?:[2-7][0-9a-fA-F]" + _BETWEEN + b"00" + _BETWEEN + b"){2}",
    rb"(?:\\x" + _PAIR + b"){6}",
    b"(?:0x" + _PAIR + b"[, ]{0,3}){6}",
    *(_in_hex(magic, between) for magic in MAGIC for between in (_BETWEEN, rb"\\x", b"[, ]{0,3}0x")),
)
_CHARACTER, _OR_NULL = _class(TEXT), _class(b"\0" + TEXT)
# Between characters of a text: UTF-16 and UTF-32 have them after or before each, and whoever cuts a word in two has one.
NULLS_IN_TEXT = tuple(
    before + _CHARACTER + rb"\x00+" + _CHARACTER + after
    for before, after in ((b"", _OR_NULL + b"{8}"), (_OR_NULL + b"{4}", _OR_NULL + b"{4}"), (_OR_NULL + b"{8}", b""))
)
_SEVERAL = rb"[\xc2-\xdf][\x80-\xbf]|[\xe0-\xef][\x80-\xbf]{2}|[\xf0-\xf4][\x80-\xbf]{3}"  # bytes for a character of UTF-8
_ANY = b"(?:" + _class(TEXT.replace(b"\n", b"")) + b"|" + _SEVERAL + b")"
# Text among other bytes: many characters in a row, some with a strange byte between them again and again, or a short line of nothing else.
LINE_OF_CHARACTERS = (
    b"(?:" + _ANY + b"{12}|" + _ANY + rb"{3,11}[\x80-\xff]{1,2}" + _ANY + rb"{3,11}[\x80-\xff]{1,2}" + _ANY + b"{3})[^\\n]*"
    b"|(?m:^" + _ANY + b"{1,11}$)"
)
