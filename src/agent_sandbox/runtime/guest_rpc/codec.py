"""Data as it crosses between a program inside and its supervisor: None, bool, int, float, str, bytes, lists, and dicts with text for keys.

From the inside it comes as JSON: whoever speaks there may be hostile, and a reader of JSON makes values and nothing else. JSON has no bytes
and, as read here, no numbers of thousands of digits, so these are objects with one marked key. To the inside it goes marshalled, as all
that we send there. The interpreter inside WebAssembly is given the text of this module, so it imports nothing of ours.
"""

from __future__ import annotations

import binascii
import marshal
from _json import encode_basestring  # and not `json`, which loads regular expressions, in a program that waits for its start

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

LARGEST = 16 << 20  # bytes of one message, either way
DEEPEST = 100  # lists and dicts in one another
MOST = 500_000  # lists and dicts in one message
MOST_ITEMS = 4_000_000  # in one list or dict
_LONG = 2000  # bits: a longer number is spelt in hexadecimal, which no setting of an interpreter limits
_INT, _BYTES, _DICT = "$int", "$bytes", "$dict"
_NO_NUMBERS = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}  # as Python's own reader of JSON takes them
_TOO_MUCH = f"too much data at once: at most {LARGEST >> 20} MiB, and {MOST} lists and dicts, cross"
_READER = 3  # version of marshal that every interpreter reads


def spell(value: Any) -> bytes:
    """The JSON of data. Raises TypeError for what is none, ValueError for too much of it. Tuples become lists."""
    message = _spelt(value, 0).encode("utf-8", "surrogatepass")
    if len(message) > LARGEST or message.count(b"[") + message.count(b"{") > MOST:
        raise ValueError(_TOO_MUCH)
    return message


def _spelt(value: Any, depth: int) -> str:
    if value is None or value is True or value is False:
        return "null" if value is None else "true" if value else "false"
    if isinstance(value, str):
        return encode_basestring(str.__str__(value))
    if isinstance(value, int):
        number = int(value)
        return int.__repr__(number) if number.bit_length() <= _LONG else f'{{"{_INT}":"{number:x}"}}'
    if isinstance(value, float):
        text = float.__repr__(value)
        return _NO_NUMBERS.get(text, text)
    if isinstance(value, list | tuple | dict):
        if len(value) > MOST_ITEMS:
            raise ValueError(_TOO_MUCH)
        _check_depth(depth + 1)
        return _spelt_dict(value, depth + 1) if isinstance(value, dict) else _spelt_list(value, depth + 1)
    if isinstance(value, bytes | bytearray | memoryview):
        return f'{{"{_BYTES}":"{binascii.b2a_base64(value, newline=False).decode()}"}}'
    raise TypeError(f"{type(value).__name__} is not data: None, bool, int, float, str, bytes, list and dict are")


def _spelt_list(value: Any, depth: int) -> str:
    return f"[{','.join([_spelt(item, depth) for item in value])}]"


def _spelt_dict(value: dict[Any, Any], depth: int) -> str:
    marked = False
    for key in value:
        if not isinstance(key, str):
            raise TypeError(f"a key of a dict must be text, not {type(key).__name__}")
        marked = marked or key.startswith("$")
    if marked:  # not to be taken for one of our marks
        return f'{{"{_DICT}":{_spelt_list([[key, item] for key, item in value.items()], depth)}}}'
    return f"{{{','.join([f'{encode_basestring(str.__str__(key))}:{_spelt(item, depth)}' for key, item in value.items()])}}}"


def _check_depth(depth: int) -> None:
    if depth > DEEPEST:
        raise ValueError(f"nested too deeply: at most {DEEPEST} lists and dicts in one another cross")


def understood(message: bytes) -> Any:
    """What somebody inside has spelt. Raises ValueError for whatever `spell` would not have written, or not have let pass."""
    from json import loads  # only outside

    if len(message) > LARGEST:
        raise ValueError("it is too large")
    brackets = message.count(b"[") + message.count(b"{")
    if brackets > MOST:  # each becomes an object: a small message must not become a large memory
        raise ValueError("it has too many lists and dicts")
    try:
        value = loads(message.decode("utf-8", "surrogatepass"), object_hook=_unmarked)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except (TypeError, AttributeError) as error:
        raise ValueError(f"a mark without its value: {error}") from None
    if brackets > DEEPEST:
        _check_depth(_depth(value))
    return value


def _unmarked(found: dict[str, Any]) -> Any:
    if len(found) == 1:
        if _INT in found:
            return int(found[_INT], 16)
        if _BYTES in found:
            return binascii.a2b_base64(found[_BYTES], strict_mode=True)
        if _DICT in found:
            return _with_text_for_keys(dict(found[_DICT]))
    return found


def _with_text_for_keys(found: dict[Any, Any]) -> dict[str, Any]:
    if not all(isinstance(key, str) for key in found):
        raise TypeError("a key is no text")
    return found


def _depth(value: Any) -> int:
    """How deep lists and dicts lie in one another: looked at level by level, for who nests them may mean to exhaust a stack."""
    level, depth = [value], 0
    while level := [item for item in level if isinstance(item, list | dict)]:
        depth += 1
        level = [inner for item in level for inner in (item if isinstance(item, list) else item.values())]
        if depth > DEEPEST:
            break
    return depth


def plain(value: Any, depth: int = 0) -> Any:
    """A copy in exactly the types that cross, for `packed`. Raises as `spell` does."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, list | tuple):
        _check_depth(depth + 1)
        return [plain(item, depth + 1) for item in value]
    if isinstance(value, dict):
        _check_depth(depth + 1)
        if odd := [key for key in value if not isinstance(key, str)]:
            raise TypeError(f"a key of a dict must be text, not {type(odd[0]).__name__}")
        return {str.__str__(key): plain(item, depth + 1) for key, item in value.items()}
    raise TypeError(f"{type(value).__name__} is not data: None, bool, int, float, str, bytes, list and dict are")


def packed(value: Any) -> bytes:
    """Plain data for the inside. Raises ValueError when it is too much."""
    message = marshal.dumps(value, _READER)
    if len(message) > LARGEST:
        raise ValueError(f"too much data at once: at most {LARGEST >> 20} MiB cross")
    return message
