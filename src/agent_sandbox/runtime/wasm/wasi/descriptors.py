"""The open descriptors of a program inside: list them to be saved, and open them again in a fresh instance under the same numbers.

The engine has no table of them that we could read. So every number is tried, and the path of an open file comes from the descriptors of
this process: the engine holds one for each of the program's. A path belongs to a descriptor if the engine describes both as the same file.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterable, Mapping
from typing import Any

from agent_sandbox._fast.values import dataclass
from agent_sandbox.runtime.wasm.wasi.abi import (
    BAD_FD,
    DIRECTORY,
    FDSTAT,
    FILESTAT,
    LONG,
    OPEN_DIRECTORY,
    WORD,
    Call,
    GuestMemory,
)

NEEDED = ("fd_close", "fd_fdstat_get", "fd_filestat_get", "fd_seek", "fd_tell", "path_filestat_get", "path_open")
_ANSWER, _PATH = 0, 256  # addresses in the memory of the shim
_LONGEST_PATH = 1 << 16
_MOST = 1 << 16  # descriptors that are tried
_REGULAR = 4  # a file type
_FROM_START = 0  # WASI's whence
_GONE = " (deleted)"  # after the name of a file that has none, in /proc


class NotKept(Exception):
    """Something of the program cannot be saved, or what was saved cannot be restored."""


@dataclass(frozen=True)
class OpenDescriptor:
    """A descriptor of the program: the preopened directory and the path it was opened by, how it was opened, and its offset."""

    number: int
    root: int
    path: str
    type: int
    flags: int
    rights: int
    offset: int

    def plain(self) -> list[Any]:
        """Return this descriptor as JSON data."""
        return [self.number, self.root, os.fsencode(self.path).hex(), self.type, self.flags, self.rights, self.offset]

    @classmethod
    def of(cls, saved: list[Any]) -> OpenDescriptor:
        """Return the descriptor that `plain` describes. Raises ValueError or TypeError for anything else."""
        number, root, path, *numbers = saved
        kind, flags, rights, offset = map(int, numbers)
        return cls(int(number), int(root), os.fsdecode(bytes.fromhex(path)), kind, flags, rights, offset)


class Descriptors:
    """The descriptors of one instance, by functions of the engine that work on a memory of their own."""

    def __init__(self, functions: Mapping[str, Call], memory: GuestMemory) -> None:
        self._call, self._memory = functions, memory

    def open_numbers(self) -> list[int]:
        """Return the numbers of all open descriptors, the standard streams and preopened directories included."""
        most = min(_MOST, resource.getrlimit(resource.RLIMIT_NOFILE)[0] % (1 << 32))
        return [number for number in range(most) if self._call["fd_fdstat_get"](number, _ANSWER) != BAD_FD]

    def describe(self, numbers: Iterable[int], roots: Mapping[int, str]) -> list[OpenDescriptor]:
        """Describe these descriptors. `roots` maps the preopened directories to their paths in this process.

        Raises `NotKept` for one that cannot be opened again: its file was removed or replaced.
        """
        named = {self._identity_of_path(root, path): (root, path) for root, path in _held_paths(roots)}
        found = []
        for number in numbers:
            self._checked("fd_fdstat_get", number, _ANSWER)
            kind, flags, rights, _ = FDSTAT.unpack(self._memory.read(_ANSWER, FDSTAT.size))
            if kind not in (_REGULAR, DIRECTORY):
                raise NotKept(f"descriptor {number} is neither a file nor a directory: close it")
            place = named.get(self._identity(number))
            if place is None:
                raise NotKept(f"descriptor {number} is open on a file that was removed: close it")
            offset = 0
            if kind == _REGULAR:
                self._checked("fd_tell", number, _ANSWER)
                (offset,) = LONG.unpack(self._memory.read(_ANSWER, LONG.size))
            found.append(OpenDescriptor(number, *place, kind, flags, rights, offset))
        return found

    def open_again(self, wanted: Iterable[OpenDescriptor], root: int) -> None:
        """Open descriptors under their numbers. `root` is a preopened directory. Raises `NotKept`.

        The engine gives out the lowest free number, so gaps are filled with descriptors of the root, which are closed afterwards.
        """
        fillers: list[int] = []
        for each in sorted(wanted, key=lambda each: each.number):
            while True:
                if not fillers and each.number >= _MOST:
                    raise NotKept(f"descriptor {each.number} is out of range")
                flags = OPEN_DIRECTORY if each.type == DIRECTORY else 0
                number = self._open(each.root, each.path, flags, each.rights, each.flags)
                if number == each.number:
                    break
                self._checked("fd_close", number)
                if number > each.number or len(fillers) >= _MOST:
                    raise NotKept(f"descriptor {each.number} cannot be opened again: its number is taken")
                fillers.append(self._open(root, ".", OPEN_DIRECTORY, 0, 0))
            if each.type == _REGULAR:
                self._checked("fd_seek", each.number, each.offset, _FROM_START, _ANSWER)
        for number in fillers:
            self._checked("fd_close", number)

    def close(self, number: int) -> None:
        """Close a descriptor. Raises `NotKept`."""
        self._checked("fd_close", number)

    def _open(self, root: int, path: str, flags: int, rights: int, how: int) -> int:
        length = self._write_path(path)
        # The types of the engine's functions are signed.
        rights -= (rights >> 63) << 64
        error = self._call["path_open"](root, 0, _PATH, length, flags, rights, rights, how, _ANSWER)
        if error:
            raise NotKept(f"its open file {path!r} cannot be opened again (WASI error {error})")
        return int(WORD.unpack(self._memory.read(_ANSWER, WORD.size))[0])

    def _identity(self, number: int) -> tuple[int, int]:
        self._checked("fd_filestat_get", number, _ANSWER)
        return self._answered()

    def _identity_of_path(self, root: int, path: str) -> tuple[int, int] | None:
        if self._call["path_filestat_get"](root, 0, _PATH, self._write_path(path), _ANSWER):
            return None  # a name that was removed, or that leads elsewhere now
        return self._answered()

    def _answered(self) -> tuple[int, int]:
        device, inode, *_ = FILESTAT.unpack(self._memory.read(_ANSWER, FILESTAT.size))
        return device, inode

    def _write_path(self, path: str) -> int:
        name = os.fsencode(path) or b"."
        if len(name) > _LONGEST_PATH or b"\0" in name:
            raise NotKept("the path of an open file is no path")
        self._memory.write(_PATH, name)
        return len(name)

    def _checked(self, name: str, number: int, *arguments: int) -> None:
        error = self._call[name](number, *arguments)
        if error:
            raise NotKept(f"descriptor {number} cannot be saved or restored ({name}: WASI error {error})")


def _held_paths(roots: Mapping[int, str]) -> Iterable[tuple[int, str]]:
    """Yield each path below a root that this process has open, with the root, and relative to it."""
    for number in os.listdir("/proc/self/fd"):
        try:
            path = os.readlink(f"/proc/self/fd/{number}")
        except OSError:  # of the listing itself
            continue
        for root, real in roots.items():
            if not path.endswith(_GONE) and (path == real or path.startswith(real + "/")):
                yield root, path[len(real) + 1 :]
