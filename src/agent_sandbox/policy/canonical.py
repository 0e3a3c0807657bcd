"""One spelling for each value, so that equal values have equal digests.

Approvals, the ledger and caches name a policy or an action by its digest: it must not depend on the order of a set, on `30` against `30.0`,
or on the Python version. What has no canonical form is a programming error and raises `TypeError`.
"""

from __future__ import annotations

from enum import Enum

from agent_sandbox._fast.encoding import as_json, sha256
from agent_sandbox._fast.values import TYPE_CHECKING, fields, is_dataclass

if TYPE_CHECKING:
    from typing import Any


def plain(value: Any) -> Any:
    """The value as JSON types. Each dataclass carries its name, so that two kinds with the same fields stay apart."""
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
    """SHA-256 of the canonical bytes, in hexadecimal."""
    return digest_of_plain(plain(value))


def digest_of_plain(value: Any) -> str:
    """The same for who has made the value plain already."""
    return sha256(_spelt(value)).hexdigest()


def _spelt(value: Any) -> bytes:
    # ASCII escapes keep names that are not UTF-8 (surrogates in Python) distinct and encodable, but for one case: two surrogates that
    # stand side by side have the escapes of the one character that they would be in UTF-16, and two actions would have one digest. What
    # may hold such a pair is spelt without escapes; as it has characters that the other spelling never has, no two values meet.
    text = as_json(value, sort_keys=True)
    if "\\ud" not in text:
        return text.encode("ascii")
    from json import dumps  # nearly no value comes here

    return dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("utf-8", "surrogatepass")
