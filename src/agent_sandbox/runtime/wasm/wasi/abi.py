"""The parts of WASI preview 1 used here: signatures, constants, structures, guest memory, and `Shim` to call the engine's functions.

Numbers are those of the specification.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable

import wasmtime

MODULE = "wasi_snapshot_preview1"

# Parameters of each function: i for a 32-bit number or address, l for a 64-bit number. All return an error number.
SIGNATURES = {
    "clock_res_get": "ii",
    "clock_time_get": "ili",
    "fd_close": "i",
    "fd_fdstat_get": "ii",
    "fd_filestat_get": "ii",
    "fd_filestat_set_times": "illi",
    "fd_read": "iiii",
    "fd_readdir": "iiili",
    "fd_renumber": "ii",
    "fd_seek": "ilii",
    "fd_tell": "ii",
    "path_create_directory": "iii",
    "path_filestat_get": "iiiii",
    "path_filestat_set_times": "iiiilli",
    "path_link": "iiiiiii",
    "path_open": "iiiiillii",
    "path_remove_directory": "iii",
    "path_rename": "iiiiii",
    "path_symlink": "iiiii",
    "path_unlink_file": "iii",
    "poll_oneoff": "iiii",
    "random_get": "ii",
}

OK, BAD_FD, INVALID = 0, 8, 28  # __WASI_ERRNO_*
FOLLOW = 1  # a lookup flag
CREATE, OPEN_DIRECTORY, TRUNCATE = 1, 2, 8  # open flags
RIGHT_TO_WRITE = 1 << 6  # a right of a descriptor
DIRECTORY = 3  # a file type
ACCESSED, ACCESSED_NOW, MODIFIED, MODIFIED_NOW = 1, 2, 4, 8  # which times to set

WORD = struct.Struct("<I")
LONG = struct.Struct("<Q")
VECTOR = struct.Struct("<II")  # address, length
FDSTAT = struct.Struct("<BxH4xQQ")  # type, flags, rights, rights of what is opened in it
FILESTAT = struct.Struct("<QQB7xQQQQQ")  # device, inode, type, links, size, accessed, modified, changed
DIRENT = struct.Struct("<QQIB3x")  # next cookie, inode, length of the name, type; the name follows

CLOCK, READABLE = 0, 1  # event types; 2 is writable
SUBSCRIPTION = 48  # bytes
SUBSCRIBED_TO = struct.Struct("<QB7x")  # user data, event type
TO_CLOCK = struct.Struct("<I4xQQH6x")  # clock, time, precision, flags
TO_FD = struct.Struct("<I28x")
ABSOLUTE = 1  # flag: the time is a moment, not a duration
EVENT = struct.Struct("<QHB5xQH6x")  # user data, error, event type, bytes available, flags

_TYPES = {"i": "i32", "l": "i64"}
_OWN_PAGES = 16  # of 64 KiB: room for a listing of many thousand names
OWN_BYTES = _OWN_PAGES << 16

Call = Callable[..., int]


def unsigned(number: int) -> int:
    """Return an address or length as unsigned; the engine passes it as a signed number."""
    return number & 0xFFFFFFFF


class OutOfBounds(Exception):
    """The program passed an address outside its memory. Not caught: the run ends, as it would in the engine."""


class GuestMemory:
    """The memory of an instance. Reads and writes stay within bounds or raise `OutOfBounds`."""

    def __init__(self, store: wasmtime.Store, memory: wasmtime.Memory) -> None:
        self._store, self._memory = store, memory

    def read(self, address: int, length: int) -> bytes:
        """Read exactly `length` bytes."""
        start, size = unsigned(address), unsigned(length)
        self._check(start, size)
        return bytes(self._memory.read(self._store, start, start + size)) if size else b""

    def write(self, address: int, data: bytes) -> None:
        """Write all of `data`."""
        start = unsigned(address)
        self._check(start, len(data))
        if data:
            self._memory.write(self._store, data, start)

    def write_word(self, address: int, value: int) -> None:
        """Write a 32-bit number."""
        self.write(address, WORD.pack(value))

    def _check(self, start: int, size: int) -> None:
        if start + size > self._memory.data_len(self._store):
            raise OutOfBounds(f"{size} bytes at {start:#x}")


class Shim:
    """A module that exports WASI functions of the engine, so that we can call them. Compiled once, before any fork.

    With `own_memory` the functions work on memory of the shim, not of the program.
    """

    def __init__(self, engine: wasmtime.Engine, names: Iterable[str], *, own_memory: bool = False) -> None:
        self._names = tuple(names)
        self._own = own_memory
        self._linker = wasmtime.Linker(engine)
        self._linker.define_wasi()
        self._module = wasmtime.Module(engine, _text(self._names, own_memory))

    def instance(self, store: wasmtime.Store, memory: wasmtime.Memory) -> tuple[dict[str, Call], GuestMemory]:
        """Return the functions and the memory they work on. `memory` is the program's; a shim with its own memory does not touch it."""
        functions = [self._linker.get(store, MODULE, name) for name in self._names]
        exports = wasmtime.Instance(store, self._module, functions if self._own else [*functions, memory]).exports(store)
        used = exports["memory"]
        assert isinstance(used, wasmtime.Memory)
        return {name: _bound(exports[name], store) for name in self._names}, GuestMemory(store, used)


def _bound(function: object, store: wasmtime.Store) -> Call:
    assert isinstance(function, wasmtime.Func)
    return lambda *arguments: int(function(store, *arguments))


def _text(names: tuple[str, ...], own_memory: bool) -> str:
    lines = []
    for name in names:
        parameters = " ".join(_TYPES[each] for each in SIGNATURES[name])
        lines.append(f'(import "{MODULE}" "{name}" (func ${name} (param {parameters}) (result i32)))')
    lines.append(
        f'(memory (export "memory") {_OWN_PAGES})' if own_memory else '(import "program" "memory" (memory 0)) (export "memory" (memory 0))'
    )
    for name in names:
        parameters = " ".join(_TYPES[each] for each in SIGNATURES[name])
        arguments = " ".join(f"(local.get {index})" for index in range(len(SIGNATURES[name])))
        lines.append(f'(func (export "{name}") (param {parameters}) (result i32) (call ${name} {arguments}))')
    return f"(module {' '.join(lines)})"
