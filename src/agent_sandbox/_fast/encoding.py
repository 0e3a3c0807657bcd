"""How plain values are spelt (JSON), named (SHA-256) and sealed (HMAC) on the way of every run, without what is slow to load for it.

`json` brings regular expressions along, and `hashlib` loads OpenSSL: some milliseconds, for a few short lines and their digests. What is
read back, and what people are shown, goes through `json` itself.
"""

from __future__ import annotations

import sys

# What `hmac` has: whether two texts are the same, in time that does not tell where they differ.
from _operator import _compare_digest as same

TYPE_CHECKING = False  # see `values`
if TYPE_CHECKING:
    from collections.abc import Callable
    from hashlib import sha256
    from typing import Any
else:
    # The interpreter's own SHA-256 is what `random` takes too, and for the same reason. Its module has had two names.
    try:
        from _sha2 import sha256
    except ImportError:
        try:
            from _sha256 import sha256
        except ImportError:
            from hashlib import sha256

__all__ = ["Seal", "as_json", "same", "sha256"]

_BLOCK = 64  # bytes of a block of SHA-256
_INNER, _OUTER = (bytes(byte ^ pad for byte in range(256)) for pad in (0x36, 0x5C))  # every byte with the pads that HMAC prescribes


class Seal:
    """HMAC-SHA256 under one key: what only those who have the key can make, or find out to be made by another.

    The key's part is computed once; a seal on a short message then costs a microsecond. It prints nothing of the key.
    """

    __slots__ = ("_inner", "_outer")

    def __init__(self, key: bytes) -> None:
        padded = (key if len(key) <= _BLOCK else sha256(key).digest()).ljust(_BLOCK, b"\0")
        self._inner = sha256(padded.translate(_INNER))
        self._outer = sha256(padded.translate(_OUTER))

    def on(self, message: bytes) -> bytes:
        """The 32 bytes that seal this message."""
        inner, outer = self._inner.copy(), self._outer.copy()
        inner.update(message)
        outer.update(inner.digest())
        return outer.digest()

    def derived(self, purpose: bytes) -> Seal:
        """Another key for another purpose: what is sealed for one proves nothing for the other."""
        return Seal(self.on(b"for " + purpose))


def as_json(value: Any, *, sort_keys: bool = False) -> str:
    """What `json.dumps` writes in ASCII without spaces. Raises `ValueError` for a number that JSON has not, `TypeError` for other types."""
    if "json" in sys.modules:  # whoever has it loaded anyway has it in C
        return (_encoders.get(sort_keys) or _encoder(sort_keys))(value)
    return _spelt(value, sort_keys)


_encoders: dict[bool, Callable[[Any], str]] = {}  # `json.dumps` would make one for each call


def _encoder(sort_keys: bool) -> Callable[[Any], str]:
    from json import encoder

    # What is spelt is made by us and holds itself nowhere; to look for that would take a third of the time.
    made = encoder.JSONEncoder(separators=(",", ":"), sort_keys=sort_keys, allow_nan=False, check_circular=False)
    # `encode` makes the part that is in C anew for each call. It is the same one each time.
    in_c = getattr(encoder, "c_make_encoder", None)
    if in_c is None:
        return _encoders.setdefault(sort_keys, made.encode)
    pieces = in_c(None, made.default, encoder.encode_basestring_ascii, None, ":", ",", sort_keys, False, False)
    return _encoders.setdefault(sort_keys, lambda value: "".join(pieces(value, 0)))


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
    from json import dumps  # whoever needs escapes gets them from where everybody does

    return dumps(text)
