"""Entries as lines, and back. One event is exactly one line, whatever it holds, and reading
gives what was written, with sequences as lists.

A line is JSON in ASCII, so control characters, line ends, escape sequences and bidirectional marks cannot act on whoever prints it. Its
last field is the SHA-256 of the line without that field, taken over the very bytes that are stored. What JSON cannot carry is wrapped in
an object with one `$` key; names of facts never start with `$`, so the wrapping cannot be forged. Long values are cut, with their length
and digest kept.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from agent_sandbox.ledger.event import KINDS, Entry, Event
from agent_sandbox.values import dataclass

LONGEST_TEXT = 4096  # characters of one value
LONGEST_FIELD = 64 << 10  # bytes of one field of an event; above it, its JSON is kept as one cut text

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_SURROGATE_PAIR = re.compile("[\ud800-\udbff][\udc00-\udfff]")
_HASH_FIELD = re.compile(rb',"\$hash":"([0-9a-f]{64})"}')
_json = json.JSONEncoder(separators=(",", ":"), ensure_ascii=True, allow_nan=False, check_circular=False).encode
_HASH_FIELD_LENGTH = len(b',"$hash":""}') + 64


@dataclass(frozen=True)
class Cut:
    """What is left of a value that was too long: its beginning, and the length in bytes and SHA-256 of the whole (text as UTF-8)."""

    start: str
    length: int
    sha256: str


def encode(sequence: int, time: float, previous: str, event: Event) -> tuple[bytes, str]:
    """The line, with its line end, and its hash. Raises `ValueError` for facts of no known type or name: our mistake, not the guest's."""
    facts = {name: _wrapped(value) for name, value in vars(event).items()}
    line = _json({"seq": sequence, "time": time, "prev": previous, "kind": event.kind, "event": facts})
    if len(line) > LONGEST_FIELD:
        facts = {name: _bounded(value) for name, value in facts.items()}
        line = _json({"seq": sequence, "time": time, "prev": previous, "kind": event.kind, "event": facts})
    payload = line.replace("\x7f", "\\u007f").encode("ascii")  # DEL, the one control character that JSON leaves as it is
    digest = hashlib.sha256(payload).hexdigest()
    return payload[:-1] + b',"$hash":"' + digest.encode() + b'"}\n', digest


def decode(line: bytes) -> Entry:
    """The entry of a line without its line end. Raises `ValueError` when it is not exactly what `encode` wrote."""
    found = _HASH_FIELD.fullmatch(line[-_HASH_FIELD_LENGTH:])
    if found is None:
        raise ValueError("not an entry")
    digest = found[1].decode()
    if hashlib.sha256(line[:-_HASH_FIELD_LENGTH] + b"}").hexdigest() != digest:
        raise ValueError("the hash does not fit")
    try:
        raw = json.loads(line)
        kind = KINDS[raw["kind"]]
        return Entry(raw["seq"], raw["time"], raw["prev"], digest, kind(**_unwrapped(raw["event"])))
    except (KeyError, TypeError) as error:
        raise ValueError(f"not an entry of this version: {error}") from None


def looks_whole(line: bytes) -> bool:
    """Whether a line ends as an entry does. A write that was cut short never does; a line that was changed afterwards may."""
    return _HASH_FIELD.fullmatch(line[-_HASH_FIELD_LENGTH:]) is not None


def _bounded(wrapped: Any) -> Any:
    text = _json(wrapped)
    return wrapped if len(text) <= LONGEST_FIELD else _cut(text, text.encode("ascii"))


def _wrapped(value: object) -> Any:
    if isinstance(value, str):
        if len(value) > LONGEST_TEXT:
            return _cut(value, value.encode("utf-8", "surrogatepass"))
        # JSON reads two escaped surrogates as the one character they would be in UTF-16, which is not what was written.
        return {"$text": value.encode("utf-8", "surrogatepass").hex()} if _SURROGATE_PAIR.search(value) else value
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, bytes):
        return {"$bytes": value.hex()} if len(value) <= LONGEST_TEXT else _cut(value.decode("utf-8", "surrogateescape"), value)
    if isinstance(value, Mapping):
        if odd := [name for name in value if not isinstance(name, str) or not _NAME.fullmatch(name)]:
            raise ValueError(f"not a name of a fact: {odd[0]!r}")
        return {name: _wrapped(item) for name, item in value.items()}
    if isinstance(value, Sequence):
        return [_wrapped(item) for item in value]
    if isinstance(value, int | float) and math.isfinite(value) and abs(value) < 1 << 63:
        return value
    raise ValueError(f"not a fact: {value!r:.80}")


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
    return {"$cut": {"start": _wrapped(text[:LONGEST_TEXT]), "length": len(whole), "sha256": hashlib.sha256(whole).hexdigest()}}
