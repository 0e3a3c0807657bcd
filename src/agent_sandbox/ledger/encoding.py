"""Entries as lines, and back.

Each event is exactly one line, whatever it contains. Decoding returns the same value, with sequences as lists.

A line is JSON in ASCII, so control characters, newlines, escape sequences and bidirectional marks cannot affect a terminal that prints it.
The last two fields are the SHA-256 of the line without them, over the exact bytes stored, and the ledger's seal on that hash. Anyone can
check the hash; only holders of the key can make the seal. A value that JSON cannot carry is wrapped in an object with one `$` key. Names of
facts never start with `$`, so the wrapping cannot be forged. Long values are cut, keeping their length and digest. Text that looks like a
secret is removed.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise

from agent_sandbox._fast.encoding import Seal, as_json, sha256
from agent_sandbox._fast.values import TYPE_CHECKING
from agent_sandbox.ledger import redaction
from agent_sandbox.ledger.event import KINDS, LONGEST_TEXT, Cut, Entry, Event, cut, fits
from agent_sandbox.ledger.redaction import is_suspicious

if TYPE_CHECKING:
    from hashlib import _Hash as HASH
    from typing import Any

LONGEST_FIELD = 64 << 10  # bytes of one event field; above it, the field's JSON is kept as one cut text

_SEQUENCE_FIELD, _HASH_FIELD, _SEAL_FIELD, _END = b'{"seq":', b',"$hash":"', b'","$seal":"', b'"}'
_SEAL_BYTES = 16  # truncated from the 32 of HMAC-SHA256, as its specification permits
# Offsets of the parts at the end of a line, counted from its end.
_SEAL_AT = -len(_END) - 2 * _SEAL_BYTES
_HASH_AT = _SEAL_AT - len(_SEAL_FIELD) - 64
_TAIL_AT = _HASH_AT - len(_HASH_FIELD)
_HEXADECIMAL = frozenset(b"0123456789abcdef")
_BIGGEST = 1 << 63
_MOST_DIGITS = 18  # digits of a number that is certainly smaller


class UnknownForm(ValueError):
    """A line that is whole, but holds something that this version does not know."""


def encode(sequence: int, time: float, previous: str, event: Event, seal: Seal) -> tuple[bytes, str, str]:
    """Return the line with its newline, its hash and its seal.

    Raises `ValueError` for facts of an unknown type or name: our mistake, not the guest's.
    """
    facts: Mapping[str, Any] = vars(event)
    if _is_plain(facts):
        body = as_json(facts)
    else:
        facts = redaction.without_secrets(facts)
        body = as_json({name: wrapped(value) for name, value in facts.items()})
    if len(body) > LONGEST_FIELD:
        body = as_json({name: _bounded(wrapped(value)) for name, value in facts.items()})
    payload = f'{{"seq":{sequence},"time":{time!r},"prev":"{previous}","kind":"{event.kind}","event":{body}}}'.encode("ascii")
    if b"\x7f" in payload:  # DEL is the one control character that JSON does not escape
        payload = payload.replace(b"\x7f", b"\\u007f")
    digest = _hashed(payload)
    name, mark = digest.hexdigest(), sealed(digest.digest(), seal)
    return b'%b,"$hash":"%b","$seal":"%b"}\n' % (payload[:-1], name.encode(), mark.encode()), name, mark


def _hashed(data: bytes) -> HASH:
    openssl = sys.modules.get("_hashlib")  # already loaded: OpenSSL's is faster
    return openssl.openssl_sha256(data) if openssl is not None else sha256(data)


def sealed(digest: bytes, seal: Seal) -> str:
    """Return the seal on a hash, in hexadecimal."""
    return seal.on(digest)[:_SEAL_BYTES].hex()


def decode(line: bytes) -> Entry:
    """Decode a line without its newline. The seal is not checked.

    Raises `ValueError` if it is not exactly what `encode` wrote, `UnknownForm` if another version wrote it.
    """
    digest, mark = _checked(line)
    from json import loads  # decoding is not on the path of a run

    try:
        raw = loads(line)
        sequence, time, previous = raw["seq"], raw["time"], raw["prev"]
        event = KINDS[raw["kind"]](**_unwrapped(raw["event"]))
    except (KeyError, TypeError, RecursionError) as error:
        raise UnknownForm(f"not an entry of this version: {type(error).__name__}") from None
    # The hash is no secret: anyone can write a line with a valid hash and any content.
    numbered = type(sequence) is int and 0 < sequence < _BIGGEST and type(time) in (int, float) and math.isfinite(time)
    if not (numbered and type(previous) is str and fits(event)):
        raise UnknownForm("not an entry of this version: its fields hold something else")
    return Entry(sequence, time, previous, digest, event, mark)


def place(line: bytes) -> tuple[int, str, str]:
    """Return the sequence number, hash and seal of an entry: all that the next entry needs. Raises `ValueError` as `decode` does."""
    digest, mark = _checked(line)
    number = line.removeprefix(_SEQUENCE_FIELD).partition(b",")[0]
    if not (line.startswith(_SEQUENCE_FIELD) and number.isdigit() and len(number) <= _MOST_DIGITS):
        raise ValueError("not an entry of this version: it has no sequence number")
    return int(number), digest, mark


def looks_whole(line: bytes) -> bool:
    """Return whether a line ends like an entry. A torn write never does; a line that was changed later may."""
    return (
        len(line) >= -_TAIL_AT
        and line.endswith(_END)
        and line[_TAIL_AT:_HASH_AT] == _HASH_FIELD
        and line[_HASH_AT + 64 : _SEAL_AT] == _SEAL_FIELD
        and _HEXADECIMAL.issuperset(line[_HASH_AT : _HASH_AT + 64] + line[_SEAL_AT : -len(_END)])
    )


def _checked(line: bytes) -> tuple[str, str]:
    if not looks_whole(line):
        raise ValueError("not an entry")
    digest = line[_HASH_AT : _HASH_AT + 64].decode()
    if _hashed(line[:_TAIL_AT] + b"}").hexdigest() != digest:
        raise ValueError("the hash does not fit")
    return digest, line[_SEAL_AT : -len(_END)].decode()


def _is_plain(value: Any) -> bool:
    """Return whether JSON can carry a value unchanged, with nothing to wrap, cut or remove. Nearly every value qualifies.

    Plain loops for speed: every entry passes here.
    """
    kind = type(value)
    if kind is dict:
        for name in value:
            if type(name) is not str or not _is_name(name):
                return False
        value = value.values()
    elif kind is not list and kind is not tuple:
        return _is_plain_item(value)
    for item in value:
        kind = type(item)
        if kind is str:
            if len(item) > LONGEST_TEXT or not item.isascii() or is_suspicious(item):
                return False
        elif kind is dict or kind is list or kind is tuple:
            if not _is_plain(item):
                return False
        elif not _is_plain_item(item):
            return False
    return True


def _is_plain_item(value: Any) -> bool:
    kind = type(value)
    return kind is bool or value is None or (kind is int and -_BIGGEST < value < _BIGGEST) or (kind is float and abs(value) < _BIGGEST)


def _bounded(value: Any) -> Any:
    text = as_json(value)
    return value if len(text) <= LONGEST_FIELD else wrapped(cut(text))


def wrapped(value: object) -> Any:
    """Return a fact as JSON types that can be decoded again."""
    if isinstance(value, str):
        if len(value) > LONGEST_TEXT:
            return wrapped(cut(value))
        # JSON decodes two escaped surrogates as the single character that they are in UTF-16: not the text that was written.
        return {"$text": value.encode("utf-8", "surrogatepass").hex()} if _has_surrogate_pair(value) else value
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, bytes):
        return {"$bytes": value.hex()} if len(value) <= LONGEST_TEXT else wrapped(cut(value))
    if isinstance(value, Cut):
        return {"$cut": {"start": wrapped(value.start[:LONGEST_TEXT]), "length": value.length, "sha256": value.sha256}}
    if isinstance(value, Mapping):
        if odd := [name for name in value if not isinstance(name, str) or not _is_name(name)]:
            raise ValueError(f"not a name of a fact: {odd[0]!r}")
        return {name: wrapped(item) for name, item in value.items()}
    if isinstance(value, Sequence):
        return [wrapped(item) for item in value]
    if isinstance(value, int | float) and math.isfinite(value) and abs(value) < _BIGGEST:
        return value
    raise ValueError(f"not a fact: {value!r:.80}")


@lru_cache(maxsize=256)  # there are a few dozen names
def _is_name(text: str) -> bool:
    return text.isascii() and text.replace("-", "_").isidentifier() and not text.startswith("-")


def _has_surrogate_pair(text: str) -> bool:
    return not text.isascii() and any("\ud800" <= one <= "\udbff" and "\udc00" <= next <= "\udfff" for one, next in pairwise(text))


def _unwrapped(value: Any) -> Any:
    if isinstance(value, list):
        return [_unwrapped(item) for item in value]
    if not isinstance(value, dict):
        return value
    match value:
        case {"$text": text}:
            return bytes.fromhex(text).decode("utf-8", "surrogatepass")
        case {"$bytes": text}:
            return bytes.fromhex(text)
        case {"$cut": {"start": start, "length": int(length), "sha256": str(sha256)}}:
            return Cut(_text(_unwrapped(start)), length, sha256)
    if any(name.startswith("$") for name in value):
        raise TypeError("wrapped in a way that is not known")
    return {name: _unwrapped(item) for name, item in value.items()}


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("not a text")
    return value
