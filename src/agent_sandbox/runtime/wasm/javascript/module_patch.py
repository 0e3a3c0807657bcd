"""The patch of QuickJS's module before compilation: export more of its functions, and rename evaluated source.

The module as published exports a function that starts QuickJS and runs one file, but none that runs pending promise jobs; it contains such
functions, under their own names. It also names every evaluated source `<evalScript>`; the patch names it `main.js`, so that imports are
resolved from the working directory.
"""

from __future__ import annotations

from collections.abc import Iterator

EXPORTED = ("JS_Eval", "JS_ExecutePendingJob", "JS_GetRuntime", "js_std_await", "js_std_dump_error")
NAME = "main.js"


_UNNAMED = b"\0<evalScript>\0"
_CUSTOM, _EXPORTS, _FUNCTION = 0, 7, 0
_HEADER = 8


class Unknown(ValueError):
    """The module is not the version of QuickJS that this patch is for."""


def adapted(module: bytes) -> bytes:
    """Return the patched module. Raises `Unknown` if the module is not as expected."""
    if module.count(_UNNAMED) != 1:
        raise Unknown("it does not name what it evaluates as expected")
    return _with_exports(module.replace(_UNNAMED, f"\0{NAME}".encode().ljust(len(_UNNAMED), b"\0")))


def _with_exports(module: bytes) -> bytes:
    """Return the module with `EXPORTED` added to its export section. All other content stays in place, byte for byte."""
    try:
        numbers = _function_names(module)
        missing = [name for name in EXPORTED if name not in numbers]
        if missing:
            raise Unknown(f"it has no {', '.join(missing)}")
        new = b"".join(_text(name) + bytes([_FUNCTION]) + _number(numbers[name]) for name in EXPORTED)
        patched = bytearray(module[:_HEADER])
        for kind, start, end in _sections(module):
            content = module[start:end]
            if kind == _EXPORTS:
                count, at = _read(content, 0)
                content = _number(count + len(EXPORTED)) + content[at:] + new
            patched += bytes([kind]) + _number(len(content)) + content
        return bytes(patched)
    except IndexError as error:
        raise Unknown("it ends too early") from error


def _sections(module: bytes) -> Iterator[tuple[int, int, int]]:
    at = _HEADER
    while at < len(module):
        size, start = _read(module, at + 1)
        yield module[at], start, start + size
        at = start + size


def _function_names(module: bytes) -> dict[str, int]:
    """Return the indices of functions by their names in the source, from the section `name`."""
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
    """Read an unsigned LEB128 number; return it and the offset after it."""
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


def _number(value: int) -> bytes:
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])


def _text(text: str) -> bytes:
    data = text.encode()
    return _number(len(data)) + data
