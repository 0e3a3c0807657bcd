"""One canonical form for each value, so that equal values have equal digests.

Approvals, the ledger and caches identify a policy or an action by its digest. It must not depend on the order of a set, on `30` versus
`30.0`, or on the Python version. A value without a canonical form is a programming error and raises `TypeError`.
"""

from __future__ import annotations

from enum import Enum

from agent_sandbox._fast.encoding import as_json, sha256
from agent_sandbox._fast.values import TYPE_CHECKING, fields, is_dataclass

if TYPE_CHECKING:
    from typing import Any


def plain(value: Any) -> Any:
    """Return the value as JSON types. Each dataclass carries its name, so that two kinds with the same fields differ."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, int | float):
        return int(value) if value == int(value) else value
    if is_dataclass(value) and not isinstance(value, type):
        return {"kind": type(value).__name__} | {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, frozenset):
        return sorted((plain(item) for item in value), key=_spelt)
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    raise TypeError(f"{type(value).__name__} has no canonical form")


def digest(value: Any) -> str:
    """Return the SHA-256 of the canonical bytes, in hexadecimal."""
    return digest_of_plain(plain(value))


def digest_of_plain(value: Any) -> str:
    """Return the digest of a value that is already plain."""
    return sha256(_spelt(value)).hexdigest()


def _spelt(value: Any) -> bytes:
    # ASCII escapes keep names that are not UTF-8 (surrogates in Python) distinct and encodable, with one exception: two adjacent surrogates
    # have the same escapes as the one character that they form in UTF-16, and two actions would share a digest. A value that may hold such
    # a pair is encoded without escapes. That encoding has characters that the other never has, so no two values collide.
    text = as_json(value, sort_keys=True)
    if "\\ud" not in text:
        return text.encode("ascii")
    from json import dumps  # rarely needed

    return dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("utf-8", "surrogatepass")
