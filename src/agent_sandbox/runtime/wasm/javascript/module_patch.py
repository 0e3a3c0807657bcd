"""What is changed in QuickJS's module before it is compiled: functions of its own are exported, and a text that it is given gets a name.

Its maker exports a function that starts it and runs one file, but none that runs what promises have left to do. The functions are in the
module all the same, with their names. And it calls every text that it evaluates `<evalScript>`; ours is `main.js`, and lies in the working
directory as far as its imports go.
"""

from __future__ import annotations

from collections.abc import Iterator

EXPORTED = ("JS_Eval", "JS_ExecutePendingJob", "JS_GetRuntime", "js_std_await", "js_std_dump_error")
NAME = "main.js"


_UNNAMED = b"\0<evalScript>\0"
_CUSTOM, _EXPORTS, _FUNCTION = 0, 7, 0
_HEADER = 8


class Unknown(ValueError):
    """A module that is not the one we know."""


def adapted(module: bytes) -> bytes:
    """The module, changed. Raises `Unknown` when it is not what it should be."""
    if module.count(_UNNAMED) != 1:
        raise Unknown("it does not name what it evaluates as expected")
    return _with_exports(module.replace(_UNNAMED, f"\0{NAME}".encode().ljust(len(_UNNAMED), b"\0")))


def _with_exports(module: bytes) -> bytes:
    """Add to the section of exports; everything else stays where it is, byte for byte."""
    try:
        numbers = _function_names(module)
        missing = [name for name in EXPORTED if name not in numbers]
        if missing:
            raise Unknown(f"it has no {', '.join(missing)}")
        new = b"".join(_text(name) + bytes([_FUNCTION]) + _number(numbers[name]) for name in EXPORTED)
        made = bytearray(module[:_HEADER])
        for kind, start, end in _sections(module):
            content = module[start:end]
            if kind == _EXPORTS:
                count, at = _read(content, 0)
                content = _number(count + len(EXPORTED)) + content[at:] + new
            made += bytes([kind]) + _number(len(content)) + content
        return bytes(made)
    except IndexError as error:
        raise Unknown("it ends too early") from error


def _sections(module: bytes) -> Iterator[tuple[int, int, int]]:
    at = _HEADER
    while at < len(module):
        size, start = _read(module, at + 1)
        yield module[at], start, start + size
        at = start + size


def _function_names(module: bytes) -> dict[str, int]:
    """From the section `name`: functions by what they are called in their source."""
    for kind, start, end in _sections(module):
        if kind != _CUSTOM:
            continue
        length, at = _read(module, start)
        if module[at : at + length] == b"name":
            return dict(_named(module, at + length, end))
    return {}


def _named(module: bytes, at: int, end: int) -> Iterator[tuple[str, int]]:
    while at < end:
        kind = module[at]
        size, at = _read(module, at + 1)
        following = at + size
        if kind == 1:  # functions
            count, at = _read(module, at)
            for _ in range(count):
                number, at = _read(module, at)
                length, at = _read(module, at)
                yield module[at : at + length].decode("utf-8", "replace"), number
                at += length
        at = following


def _read(data: bytes, at: int) -> tuple[int, int]:
    """An unsigned LEB128 number and where it ends."""
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


def _number(value: int) -> bytes:
    made = bytearray()
    while value >= 0x80:
        made.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*made, value])


def _text(text: str) -> bytes:
    data = text.encode()
    return _number(len(data)) + data
