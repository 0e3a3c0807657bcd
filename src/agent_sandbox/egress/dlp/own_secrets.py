"""The user's own secrets: exact values that must not leave, sought in every common encoding.

The decoders of the search find long encoded texts. A short secret in the middle of a longer encoded text, or encoded by itself, is found
here: each encoding of the value, at each alignment, is sought as it is.
"""

from __future__ import annotations

import base64
import codecs
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from urllib.parse import quote

from agent_sandbox.egress.dlp.prefilter import Prefilter, Sought
from agent_sandbox.egress.dlp.rules import SearchRule

SHORTEST = 6  # characters of a value that can be told from chance
_FEWEST = 6  # characters of an encoding that is sought


@dataclass(frozen=True)
class OwnSecrets:
    """Values with their names, as they may be written."""

    spellings: tuple[tuple[bytes, SearchRule], ...] = ()
    _filter: Prefilter = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "_filter", Prefilter([Sought(number, _literally(spelling)) for number, (spelling, _) in enumerate(self.spellings)])
        )

    @classmethod
    def of(cls, values: Iterable[tuple[str, str]]) -> OwnSecrets:
        """Return the search for these names and values. A value of fewer than six characters is left out: it would be found everywhere."""
        spellings: dict[bytes, SearchRule] = {}
        for name, value in values:
            if len(value) >= SHORTEST:
                rule = SearchRule(f"own-secret:{name}", f"the secret {name}", "")
                for spelling in spellings_of(value):
                    spellings.setdefault(spelling, rule)
        return cls(tuple(spellings.items()))

    def matches(self, text: bytes) -> Iterator[tuple[int, int, SearchRule]]:
        """Yield the places of all spellings in a text."""
        ends = self._filter.ends(text)
        for number in range(len(self.spellings)) if ends is None else sorted(ends):
            spelling, rule = self.spellings[number]
            place = text.find(spelling)
            while place >= 0:
                yield place, place + len(spelling), rule
                place = text.find(spelling, place + 1)


def spellings_of(value: str) -> tuple[bytes, ...]:
    """Return the ways to write a value: plain, reversed, in ROT13, and in the encodings that programs use, at every alignment."""
    plain = value.encode()
    wide = (value.encode("utf-16-le"), value.encode("utf-16-be"))
    written = [plain, plain[::-1], codecs.encode(value, "rot13").encode(), *wide]
    for data in (plain, plain[::-1], wide[0]):
        written += _in_base64(data)
        written += _in_base32(data)
        digits = data.hex()
        pairs = [digits[place : place + 2] for place in range(0, len(digits), 2)]
        for each in (digits, ":".join(pairs), " ".join(pairs), "-".join(pairs), ",".join(pairs), "".join(f"\\x{pair}" for pair in pairs)):
            written += [each.encode(), each.upper().replace("\\X", "\\x").encode()]
        written += ["".join(f"%{pair}" for pair in pairs).encode(), "".join(f"%{pair}".upper() for pair in pairs).encode()]
    written += [quote(value, safe="").encode(), quote(value).encode(), json.dumps(value)[1:-1].encode()]
    written += ["".join(f"\\u{ord(each):04x}" for each in value if ord(each) < 0x10000).encode()]
    written += ["".join(f"&#{ord(each)};" for each in value).encode(), "".join(f"&#x{ord(each):x};" for each in value).encode()]
    return tuple(dict.fromkeys(each for each in written if len(each) >= _FEWEST))


def _in_base64(data: bytes) -> list[bytes]:
    """Return what base64 makes of data wherever it begins in a longer text: the characters that its own bytes determine."""
    written = []
    for before in range(3):
        encoded = base64.b64encode(b"\0" * before + data)
        first = (0, 2, 3)[before]
        last = (before + len(data)) * 8 // 6
        certain = encoded[first:last]
        written += [certain, certain.replace(b"+", b"-").replace(b"/", b"_")]
    return written


def _in_base32(data: bytes) -> list[bytes]:
    written = []
    for before in range(5):
        encoded = base64.b32encode(b"\0" * before + data)
        certain = encoded[-(-before * 8 // 5) : (before + len(data)) * 8 // 5]
        written += [certain, certain.lower()]
    return written


def _literally(text: bytes) -> bytes:
    """Return an expression that matches exactly these bytes, NUL among them."""
    return b"".join(b"\\x%02x" % byte for byte in text)
