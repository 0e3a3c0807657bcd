"""Entries as lines, and back. One event is exactly one line, whatever it holds, and reading
gives what was written, with sequences as lists.

A line is JSON in ASCII, so control characters, line ends, escape sequences and bidirectional marks cannot act on whoever prints it. Its
last field is the SHA-256 of the line without that field, taken over the very bytes that are stored. What JSON cannot carry is wrapped in
an object with one `$` key; names of facts never start with `$`, so the wrapping cannot be forged. Long values are cut, with their length
and digest kept.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise

from agent_sandbox.ledger.event import KINDS, Entry, Event
from agent_sandbox.spelling import as_json, sha256
from agent_sandbox.values import TYPE_CHECKING, dataclass

if TYPE_CHECKING:
    from typing import Any

LONGEST_TEXT = 4096  # characters of one value
LONGEST_FIELD = 64 << 10  # bytes of one field of an event; above it, its JSON is kept as one cut text

_SEQUENCE_FIELD, _HASH_FIELD, _END = b'{"seq":', b',"$hash":"', b'"}'
_HASH_FIELD_LENGTH = len(_HASH_FIELD) + 64 + len(_END)
_HEXADECIMAL = frozenset(b"0123456789abcdef")


@dataclass(frozen=True)
class Cut:
    """What is left of a value that was too long: its beginning, and the length in bytes and SHA-256 of the whole (text as UTF-8)."""

    start: str
    length: int
    sha256: str


def encode(sequence: int, time: float, previous: str, event: Event) -> tuple[bytes, str]:
    """The line, with its line end, and its hash. Raises `ValueError` for facts of no known type or name: our mistake, not the guest's."""
    facts = {name: _wrapped(value) for name, value in vars(event).items()}
    line = as_json({"seq": sequence, "time": time, "prev": previous, "kind": event.kind, "event": facts})
    if len(line) > LONGEST_FIELD:
        facts = {name: _bounded(value) for name, value in facts.items()}
        line = as_json({"seq": sequence, "time": time, "prev": previous, "kind": event.kind, "event": facts})
    payload = line.replace("\x7f", "\\u007f").encode("ascii")  # DEL, the one control character that JSON leaves as it is
    digest = sha256(payload).hexdigest()
    return payload[:-1] + _HASH_FIELD + digest.encode() + _END + b"\n", digest


def decode(line: bytes) -> Entry:
    """The entry of a line without its line end. Raises `ValueError` when it is not exactly what `encode` wrote."""
    digest = _checked(line)
    from json import loads  # reading whole entries back is not on the way of a run

    try:
        raw = loads(line)
        kind = KINDS[raw["kind"]]
        return Entry(raw["seq"], raw["time"], raw["prev"], digest, kind(**_unwrapped(raw["event"])))
    except (KeyError, TypeError) as error:
        raise ValueError(f"not an entry of this version: {error}") from None


def place(line: bytes) -> tuple[int, str]:
    """The sequence number and the hash of an entry, which is all that the next one needs of it. Raises `ValueError` as `decode` does."""
    digest = _checked(line)
    number = line.removeprefix(_SEQUENCE_FIELD).partition(b",")[0]
    if not (line.startswith(_SEQUENCE_FIELD) and number.isdigit()):
        raise ValueError("not an entry of this version: it has no sequence number")
    return int(number), digest


def looks_whole(line: bytes) -> bool:
    """Whether a line ends as an entry does. A write that was cut short never does; a line that was changed afterwards may."""
    field = line[-_HASH_FIELD_LENGTH:]
    digest = field[len(_HASH_FIELD) : -len(_END)]
    return len(digest) == 64 and field.startswith(_HASH_FIELD) and field.endswith(_END) and _HEXADECIMAL.issuperset(digest)


def _checked(line: bytes) -> str:
    if not looks_whole(line):
        raise ValueError("not an entry")
    digest = line[-_HASH_FIELD_LENGTH + len(_HASH_FIELD) : -len(_END)].decode()
    if sha256(line[:-_HASH_FIELD_LENGTH] + b"}").hexdigest() != digest:
        raise ValueError("the hash does not fit")
    return digest


def _bounded(wrapped: Any) -> Any:
    text = as_json(wrapped)
    return wrapped if len(text) <= LONGEST_FIELD else _cut(text, text.encode("ascii"))


def _wrapped(value: object) -> Any:
    kind = type(value)
    if (kind is str and len(value) <= LONGEST_TEXT and value.isascii()) or kind is bool or value is None:  # type: ignore[arg-type, attr-defined]
        return value  # nearly all there is, without the questions that follow
    if isinstance(value, str):
        if len(value) > LONGEST_TEXT:
            return _cut(value, value.encode("utf-8", "surrogatepass"))
        # JSON reads two escaped surrogates as the one character they would be in UTF-16, which is not what was written.
        return {"$text": value.encode("utf-8", "surrogatepass").hex()} if _has_surrogate_pair(value) else value
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, bytes):
        return {"$bytes": value.hex()} if len(value) <= LONGEST_TEXT else _cut(value.decode("utf-8", "surrogateescape"), value)
    if isinstance(value, Mapping):
        if odd := [name for name in value if not isinstance(name, str) or not _is_name(name)]:
            raise ValueError(f"not a name of a fact: {odd[0]!r}")
        return {name: _wrapped(item) for name, item in value.items()}
    if isinstance(value, Sequence):
        return [_wrapped(item) for item in value]
    if isinstance(value, int | float) and math.isfinite(value) and abs(value) < 1 << 63:
        return value
    raise ValueError(f"not a fact: {value!r:.80}")


@lru_cache(maxsize=256)  # there are some dozens of names
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
        case {"$cut": {"start": start, "length": length, "sha256": sha256}}:
            return Cut(_unwrapped(start), length, sha256)
    return {name: _unwrapped(item) for name, item in value.items()}


def _cut(text: str, whole: bytes) -> dict[str, Any]:
    return {"$cut": {"start": _wrapped(text[:LONGEST_TEXT]), "length": len(whole), "sha256": sha256(whole).hexdigest()}}
