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

from agent_sandbox._fast.functions import cache
from agent_sandbox._fast.values import TYPE_CHECKING, fields, is_dataclass, is_member

if TYPE_CHECKING:
    from collections.abc import Callable
    from hashlib import sha256
    from typing import Any, Never
else:
    # The interpreter's built-in SHA-256. `random` uses it too, for the same reason. Python 3.12 has renamed the module.
    try:
        if sys.version_info >= (3, 12):
            from _sha2 import sha256
        else:
            from _sha256 import sha256
    except ImportError:
        from hashlib import sha256

__all__ = ["Seal", "as_json", "canonical_digest", "canonical_form", "digest_of_form", "quoted", "same", "sha256"]

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
    return _encoder(sort_keys)(value)


@cache
def _encoder(sort_keys: bool) -> Callable[[Any], str]:
    # The encoder of `json` itself, in C, and made once. Our values never contain themselves: checking that would take a third of the time.
    try:
        from _json import encode_basestring_ascii, make_encoder
    except ImportError:  # an interpreter that has it in Python only
        from json import JSONEncoder

        return JSONEncoder(separators=(",", ":"), sort_keys=sort_keys, allow_nan=False, check_circular=False).encode
    spell = make_encoder(None, _refuse, encode_basestring_ascii, None, ":", ",", sort_keys, False, False)
    return lambda value: "".join(spell(value, 0))


def _refuse(value: object) -> Never:
    raise TypeError(f"JSON has no {type(value).__name__}")


def quoted(text: str) -> str:
    """Encode a text as JSON, in ASCII."""
    if text.isascii() and text.isprintable() and '"' not in text and "\\" not in text:
        return f'"{text}"'
    return as_json(text)


def canonical_form(value: Any) -> Any:
    """Return the canonical form of a value, as JSON types. Each dataclass carries its name, so that two with the same fields differ."""
    kind = value.__class__
    if kind is str or value is None or isinstance(value, bool | str):
        return value
    if is_dataclass(kind):
        form = {"kind": type(value).__name__}
        for field in fields(kind):
            inner = getattr(value, field.name)
            form[field.name] = inner if inner.__class__ is str else canonical_form(inner)
        return form
    if isinstance(value, tuple):
        return [canonical_form(item) for item in value]
    if isinstance(value, frozenset):
        return sorted((canonical_form(item) for item in value), key=_form_bytes)
    if is_member(value):
        return canonical_form(value.value)
    if isinstance(value, int | float):
        return int(value) if value == int(value) else value
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
