"""JSON encoding, SHA-256 and HMAC for the start-up path, without slow imports; and the canonical form of a value, with its digest.

`json` imports `re`, and `hashlib` loads OpenSSL: several milliseconds for a few short lines and their digests. Decoding, and output for
people, use `json` itself.

Approvals, the ledger and caches identify a policy or an action by its digest. Equal values have one canonical form, and so one digest: the
order of a set, `30` or `30.0`, and the Python version make no difference. A value without a canonical form is a programming error and
raises `TypeError`.
"""

from __future__ import annotations

import sys

# Constant-time comparison, as in `hmac`: the time taken does not reveal where the texts differ.
from _operator import _compare_digest as same
from enum import Enum
from functools import cache

from agent_sandbox._fast.values import TYPE_CHECKING, fields, is_dataclass

if TYPE_CHECKING:
    from collections.abc import Callable
    from hashlib import sha256
    from typing import Any
else:
    # The interpreter's built-in SHA-256. `random` uses it too, for the same reason. The module has had two names.
    try:
        from _sha2 import sha256
    except ImportError:
        try:
            from _sha256 import sha256
        except ImportError:
            from hashlib import sha256

__all__ = ["Seal", "as_json", "canonical_digest", "canonical_form", "digest_of_form", "same", "sha256"]

_BLOCK = 64  # bytes in a SHA-256 block
_INNER, _OUTER = (bytes(byte ^ pad for byte in range(256)) for pad in (0x36, 0x5C))  # every byte value XORed with the HMAC pads


class Seal:
    """HMAC-SHA256 under one key. Only holders of the key can make or verify a seal.

    The key schedule is computed once, so sealing a short message costs a microsecond. The repr reveals nothing of the key.
    """

    __slots__ = ("_inner", "_outer")

    def __init__(self, key: bytes) -> None:
        padded = (key if len(key) <= _BLOCK else sha256(key).digest()).ljust(_BLOCK, b"\0")
        self._inner = sha256(padded.translate(_INNER))
        self._outer = sha256(padded.translate(_OUTER))

    def on(self, message: bytes) -> bytes:
        """Return the 32-byte seal of this message."""
        inner, outer = self._inner.copy(), self._outer.copy()
        inner.update(message)
        outer.update(inner.digest())
        return outer.digest()

    def derived(self, purpose: bytes) -> Seal:
        """Return a `Seal` with a key derived for this purpose. A seal made for one purpose proves nothing for another."""
        return Seal(self.on(b"for " + purpose))


def as_json(value: Any, *, sort_keys: bool = False) -> str:
    """Encode like `json.dumps`, in ASCII and without spaces.

    Raises `ValueError` for NaN and infinities, `TypeError` for types that JSON does not have.
    """
    return _encoder(sort_keys)(value) if "json" in sys.modules else _spelt(value, sort_keys)  # loaded already: use its C encoder


@cache  # `json.dumps` would make a new encoder for each call
def _encoder(sort_keys: bool) -> Callable[[Any], str]:
    from json import JSONEncoder

    # Our values never contain themselves. Checking for cycles would take a third of the time.
    return JSONEncoder(separators=(",", ":"), sort_keys=sort_keys, allow_nan=False, check_circular=False).encode


def _spelt(value: Any, sort_keys: bool) -> str:
    if isinstance(value, str):
        return _quoted(value)
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        if value != value or value in (float("inf"), float("-inf")):
            raise ValueError(f"JSON has no {value!r}")
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{','.join([_spelt(item, sort_keys) for item in value])}]"
    if isinstance(value, dict):
        items = sorted(value.items()) if sort_keys else value.items()
        return f"{{{','.join([f'{_quoted(name)}:{_spelt(item, sort_keys)}' for name, item in items])}}}"
    raise TypeError(f"JSON has no {type(value).__name__}")


def _quoted(text: str) -> str:
    if text.isascii() and text.isprintable() and '"' not in text and "\\" not in text:
        return f'"{text}"'
    from json import dumps  # escapes are rare: leave them to `json`

    return dumps(text)


def canonical_form(value: Any) -> Any:
    """Return the canonical form of a value, as JSON types. Each dataclass carries its name, so that two with the same fields differ."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Enum):
        return canonical_form(value.value)
    if isinstance(value, int | float):
        return int(value) if value == int(value) else value
    if is_dataclass(value) and not isinstance(value, type):
        return {"kind": type(value).__name__} | {field.name: canonical_form(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, frozenset):
        return sorted((canonical_form(item) for item in value), key=_form_bytes)
    if isinstance(value, tuple):
        return [canonical_form(item) for item in value]
    raise TypeError(f"{type(value).__name__} has no canonical form")


def canonical_digest(value: Any) -> str:
    """Return the SHA-256 of the canonical form of a value, in hexadecimal."""
    return digest_of_form(canonical_form(value))


def digest_of_form(form: Any) -> str:
    """Return the SHA-256 of a value that is already in canonical form, in hexadecimal."""
    return sha256(_form_bytes(form)).hexdigest()


def _form_bytes(form: Any) -> bytes:
    # ASCII escapes keep names that are not UTF-8 (surrogates in Python) distinct and encodable, with one exception: two adjacent surrogates
    # have the same escapes as the one character that they form in UTF-16, and two actions would share a digest. A value that may hold such
    # a pair is encoded without escapes. That encoding has characters that the other never has, so no two values collide.
    text = as_json(form, sort_keys=True)
    if "\\ud" not in text:
        return text.encode("ascii")
    from json import dumps  # rarely needed

    return dumps(form, ensure_ascii=False, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("utf-8", "surrogatepass")
