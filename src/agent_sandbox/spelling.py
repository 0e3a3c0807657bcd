"""How plain values are spelt (JSON) and named (SHA-256) on the way of every run, without what is slow to load for it.

`json` brings regular expressions along, and `hashlib` loads OpenSSL: some milliseconds, for a few short lines and their digests. What is
read back, and what people are shown, goes through `json` itself.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # see `values`
if TYPE_CHECKING:
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

__all__ = ["as_json", "sha256"]


def as_json(value: Any, *, sort_keys: bool = False) -> str:
    """What `json.dumps` writes in ASCII without spaces. Raises `ValueError` for a number that JSON has not, `TypeError` for other types."""
    if (json := sys.modules.get("json")) is not None:  # whoever has it loaded anyway has it in C
        return str(json.dumps(value, separators=(",", ":"), sort_keys=sort_keys, allow_nan=False))
    return _spelt(value, sort_keys)


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
