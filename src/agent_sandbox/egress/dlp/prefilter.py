"""The prefilter: tells in one pass over a text which expressions can match it, and where, so that the exact search looks only there.

It is Hyperscan where that is installed. Without it every expression may match anywhere: the search then takes longer and finds the same.
A needle is a short expression that every match of a pattern holds. The needles of tokens are written simply enough to be turned round:
characters, classes and counts, with `|` between alternatives.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

_PART = re.compile(r"(\[[^\]\\^]*(?:\\[tnrf][^\]\\^]*)*\]|\\[.$+/\\-]|[^\\\[\](){}^$.*+?|])(\{\d+\})?")
_store: dict[bytes, bytes] | None = None  # results by the digests of what they were made of, see `compiling_with`
_RANGE = re.compile(r"(.)-(.)|(.)", re.DOTALL)


@dataclass(frozen=True)
class Sought:
    """An expression of the prefilter, and the number by which it is told. Several may have one number.

    With `places`, every place where it ends is told; else only that it matches. Hyperscan joins some expressions into an automaton that is
    slower than both: such a one is put `apart`, into a database of its own.
    """

    number: int
    expression: bytes
    places: bool = False
    apart: bool = False


class Prefilter:
    """Several expressions, sought in one pass. One thread uses it at a time."""

    def __init__(self, sought: Sequence[Sought]) -> None:
        together = [each for each in sought if not each.apart]
        sets = [*([together] if together else []), *([each] for each in sought if each.apart)]
        self._databases = [_database(each) for each in sets]

    def ends(self, text: bytes) -> dict[int, list[int]] | None:
        """Return the numbers of the expressions that can match, with the places where they end. None: all can, anywhere."""
        found: dict[int, list[int]] = {}

        def note(number: int, _start: int, end: int, _flags: int, _context: object) -> None:
            found.setdefault(number, []).append(end)

        for database in self._databases:
            if database is None:
                return None
            database.scan(text, match_event_handler=note)
        return found


def regions(ends: Sequence[int], reach: int, length: int) -> Iterator[tuple[int, int]]:
    """Yield the parts of a text that lie within `reach` of a place, in order. Parts that overlap are one."""
    low, high = 0, -1
    for end in sorted(ends):
        if high < 0 or end - reach > high:
            if high >= 0:
                yield low, high
            low = max(0, end - reach)
        high = min(length, end + reach)
    if high >= 0:
        yield low, high


def parts_of(needle: str) -> list[list[tuple[str, str]]]:
    """Return the alternatives of a simple needle, each as its parts with their counts. Raises ValueError if it is not simple."""
    alternatives = []
    for alternative in needle.split("|"):
        parts = [(found[1], found[2] or "") for found in _PART.finditer(alternative)]
        if "".join(part + count for part, count in parts) != alternative or not parts:
            raise ValueError(f"{alternative!r} is more than characters, classes and counts")
        alternatives.append(parts)
    return alternatives


def reversed_needle(needle: str) -> str:
    """Return the needle of the same texts written backwards."""
    return "|".join("".join(part + count for part, count in reversed(parts)) for parts in parts_of(needle))


def rotated_needle(needle: str) -> str:
    """Return the needle of the same texts in ROT13."""
    return "|".join("".join(_rotated(part) + count for part, count in parts) for parts in parts_of(needle))


def _rotated(part: str) -> str:
    if not part.startswith("["):
        return part if part.startswith("\\") else codecs.encode(part, "rot13")
    inside = part[1:-1].encode().decode("unicode_escape")
    characters = set()
    for first, last, single in _RANGE.findall(inside):
        characters |= {single} if single else {chr(code) for code in range(ord(first), ord(last) + 1)}
    return "[" + "".join(f"\\x{ord(codecs.encode(each, 'rot13')):02x}" for each in sorted(characters)) + "]"


def _database(sought: Sequence[Sought]) -> Any:
    try:
        import hyperscan  # not every machine can have it
    except ImportError:  # no wheel for this machine: the exact search alone, which is slower
        return None
    expressions, ids = [each.expression for each in sought], [each.number for each in sought]
    flags = [hyperscan.HS_FLAG_PREFILTER | (0 if each.places else hyperscan.HS_FLAG_SINGLEMATCH) for each in sought]
    digest = sha256(repr((expressions, ids, flags)).encode()).digest()
    if (compiled := kept_result(digest)) is not None:
        database = hyperscan.loadb(compiled, hyperscan.HS_MODE_BLOCK)
        database.scratch = hyperscan.Scratch(database)
        return database
    database = hyperscan.Database(mode=hyperscan.HS_MODE_BLOCK)
    database.compile(expressions=expressions, ids=ids, flags=flags)
    keep_result(digest, hyperscan.dumpb(database))
    return database


def kept_result(digest: bytes) -> bytes | None:
    """Return what was kept under this digest, see `compiling_with`; None if nothing was."""
    return None if _store is None else _store.get(digest)


def keep_result(digest: bytes, result: bytes) -> None:
    """Keep a result under the digest of what it was made of, if there is a store."""
    if _store is not None:
        _store[digest] = result


@contextmanager
def compiling_with(store: dict[bytes, bytes]) -> Iterator[None]:
    """Take compiled expressions and checked rules from a store while the block lasts, and put those into it that it lacks.

    What is in the store must have been put there on this machine.
    """
    global _store
    _store = store
    try:
        yield
    finally:
        _store = None
