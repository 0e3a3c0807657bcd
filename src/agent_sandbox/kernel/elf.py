"""A reader of program files: the loader and libraries of an ELF file, the interpreter of a script, and the loader's cache.

It reads the machine's own files, never a guest's. For an unreadable or unknown file it names no loader and no library, so no
further file becomes executable. It knows 64-bit little-endian files only, as on the machines whose system calls are known.
"""

from __future__ import annotations

import os
import struct

from agent_sandbox._fast.values import TYPE_CHECKING, dataclass

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

CACHE = "/etc/ld.so.cache"
_MAGIC, _CACHE_MAGIC = b"\x7fELF\x02\x01", b"glibc-ld.so.cache1.1"
_LOAD, _DYNAMIC, _INTERPRETER = 1, 2, 3  # segment types
_NEEDED, _STRINGS, _STRINGS_SIZE, _RPATH, _RUNPATH, _FLAGS_1 = 1, 5, 10, 15, 29, 0x6FFFFFFB  # dynamic entry tags
_PIE = 0x08000000  # in DT_FLAGS_1: a program, although its type is that of a library
_FIXED_ADDRESS = 2  # ET_EXEC
_LONGEST_STRINGS = 1 << 24
_LONGEST_LINE = 256  # bytes of a script's first line that the kernel reads


@dataclass(frozen=True)
class Object:
    """The parsed headers of an ELF program or shared library."""

    machine: int
    program: bool  # can be started: names a loader, has a fixed address, or is flagged as a program
    loader: str
    needed: tuple[str, ...]
    search: tuple[str, ...]  # directories searched first for its libraries (RUNPATH or RPATH)
    inherited: bool  # whether `search` also applies to the libraries of its libraries


def read(path: str) -> Object | None:
    """Parse an ELF file. Return None if it is not a 64-bit little-endian program or library, or cannot be read."""
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
    """Return the string table, given by its memory address; empty if no segment contains it."""
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
    """Return the path of a program's dynamic loader, as the program names it, and the resolved path if that differs.

    The kernel executes the loader too. Empty if the program has no loader.
    """
    parsed = read(binary)
    return tuple(dict.fromkeys((parsed.loader, os.path.realpath(parsed.loader)))) if parsed is not None and parsed.loader else ()


def interpreter_of(script: str) -> tuple[str, ...]:
    """Return the words of a script's `#!` line; empty if it is not a script."""
    try:
        with open(script, "rb") as file:
            line = file.read(_LONGEST_LINE).partition(b"\n")[0]
    except OSError:
        return ()
    return tuple(os.fsdecode(line[2:]).split()) if line.startswith(b"#!") else ()


def cached_libraries(content: bytes) -> dict[bytes, list[bytes]]:
    """Return the paths of every library in the loader's cache, by name. A library with variants has several paths.

    Empty if the content is not a valid cache.
    """
    cache = content[max(content.find(_CACHE_MAGIC), 0) :]
    if not cache.startswith(_CACHE_MAGIC):
        return {}
    libraries: dict[bytes, list[bytes]] = {}
    try:
        (count,) = struct.unpack_from("<I", cache, 20)
        for _, key, value, _, _ in struct.iter_unpack("<iIIIQ", cache[48 : 48 + 24 * count]):
            libraries.setdefault(cache[key : cache.index(0, key)], []).append(cache[value : cache.index(0, value)])
    except (ValueError, struct.error):
        return {}
    return libraries
