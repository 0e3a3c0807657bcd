"""What a program file says of itself: the loader it names, the libraries it needs, or the interpreter in its first line.

Read from the machine's own files, never from a guest's. A file that cannot be understood says nothing, which is never a permission:
what is not named is not made executable. Programs of 64 bits, little-endian: those of the machines whose system calls are known.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence

from agent_sandbox._fast.values import dataclass

CACHE = "/etc/ld.so.cache"
_MAGIC, _CACHE_MAGIC = b"\x7fELF\x02\x01", b"glibc-ld.so.cache1.1"
_LOAD, _DYNAMIC, _INTERPRETER = 1, 2, 3  # kinds of segments
_NEEDED, _STRINGS, _STRINGS_SIZE, _RPATH, _RUNPATH, _FLAGS_1 = 1, 5, 10, 15, 29, 0x6FFFFFFB  # kinds of dynamic entries
_PIE = 0x08000000  # in DT_FLAGS_1: a program, although it looks like a library
_FIXED_ADDRESS = 2  # ET_EXEC
_LONGEST_STRINGS = 1 << 24
_LONGEST_LINE = 256  # of a script's first line, as the kernel reads it


@dataclass(frozen=True)
class Object:
    """A program or shared library."""

    machine: int
    program: bool  # something that can be started: it names a loader, has a fixed address, or says so
    loader: str
    needed: tuple[str, ...]
    search: tuple[str, ...]  # where it wants its libraries looked for, before anywhere else
    inherited: bool  # whether that also holds for the libraries of its libraries


def read(path: str) -> Object | None:
    """What the file says; None for one that is no program or library of this kind, or cannot be read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return _read(fd, os.path.dirname(path))
    except (OSError, ValueError, struct.error):
        return None
    finally:
        os.close(fd)


def _read(fd: int, origin: str) -> Object | None:
    head = os.pread(fd, 4096, 0)
    if not head.startswith(_MAGIC):
        return None
    kind, machine = struct.unpack_from("<HH", head, 16)
    (table,) = struct.unpack_from("<Q", head, 32)
    size, count = struct.unpack_from("<HH", head, 54)
    raw = head[table : table + size * count] if table + size * count <= len(head) else os.pread(fd, size * count, table)
    segments = [struct.unpack_from("<IIQQQQ", raw, index * size) for index in range(count)]
    loads = [(address, offset, length) for type_, _, offset, address, _, length in segments if type_ == _LOAD]
    loader = ""
    entries: list[tuple[int, int]] = []
    for type_, _, offset, _, _, length in segments:
        if type_ == _INTERPRETER:
            loader = os.fsdecode(os.pread(fd, min(length, 4096), offset).rstrip(b"\0"))
        elif type_ == _DYNAMIC:
            raw = os.pread(fd, min(length, 1 << 16), offset)
            entries = [(tag, value) for tag, value in struct.iter_unpack("<qQ", raw[: len(raw) & ~15])]
    values = dict(entries)
    strings = _strings(fd, loads, values.get(_STRINGS, 0), min(values.get(_STRINGS_SIZE, 0), _LONGEST_STRINGS))
    names = [(tag, strings[value : strings.find(b"\0", value)]) for tag, value in entries if tag in (_NEEDED, _RPATH, _RUNPATH)]
    runpath = [name for tag, name in names if tag == _RUNPATH]
    search = runpath or [name for tag, name in names if tag == _RPATH]
    return Object(
        machine,
        program=bool(loader) or kind == _FIXED_ADDRESS or bool(values.get(_FLAGS_1, 0) & _PIE),
        loader=loader,
        needed=tuple(os.fsdecode(name) for tag, name in names if tag == _NEEDED),
        search=tuple(_places(search, origin)),
        inherited=not runpath,
    )


def _strings(fd: int, loads: Sequence[tuple[int, int, int]], address: int, size: int) -> bytes:
    """The table of names, which is given by its address in memory."""
    for start, offset, length in loads:
        if start <= address < start + length:
            return os.pread(fd, size, offset + address - start)
    return b""


def _places(paths: Sequence[bytes], origin: str) -> Iterator[str]:
    for path in ":".join(map(os.fsdecode, paths)).split(":"):
        place = path.replace("${ORIGIN}", origin).replace("$ORIGIN", origin)
        if place.startswith("/") and "$" not in place:
            yield os.path.normpath(place)


def loader_of(binary: str) -> tuple[str, ...]:
    """The dynamic loader that a program names, under that name and its real one: the kernel executes that file too."""
    found = read(binary)
    return tuple(dict.fromkeys((found.loader, os.path.realpath(found.loader)))) if found is not None and found.loader else ()


def interpreter_of(script: str) -> tuple[str, ...]:
    """The words of a script's first line; empty for what is no script."""
    try:
        with open(script, "rb") as file:
            line = file.read(_LONGEST_LINE).partition(b"\n")[0]
    except OSError:
        return ()
    return tuple(os.fsdecode(line[2:]).split()) if line.startswith(b"#!") else ()


def cached_libraries(content: bytes) -> dict[bytes, list[bytes]]:
    """Every library that the loader's cache knows, by name: several where there are variants of it. Empty where there is no cache."""
    cache = content[max(content.find(_CACHE_MAGIC), 0) :]
    if not cache.startswith(_CACHE_MAGIC):
        return {}
    found: dict[bytes, list[bytes]] = {}
    try:
        (count,) = struct.unpack_from("<I", cache, 20)
        for _, key, value, _, _ in struct.iter_unpack("<iIIIQ", cache[48 : 48 + 24 * count]):
            found.setdefault(cache[key : cache.index(0, key)], []).append(cache[value : cache.index(0, value)])
    except (ValueError, struct.error):
        return {}
    return found
