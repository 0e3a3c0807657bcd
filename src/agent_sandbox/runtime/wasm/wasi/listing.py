"""Directory listings, and the table of files and descriptors of a deterministic run.

A directory is read whole when a program begins to list it, and returned in pieces from there. The engine would read the whole directory,
and stat every entry, for each piece: thousands of names took minutes. `FileTable` gives the files of a deterministic run their inode
numbers and times.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from agent_sandbox._fast.values import dataclass
from agent_sandbox.runtime.wasm.wasi.abi import DIRENT, OK, OWN_BYTES, WORD, Call, GuestMemory, unsigned
from agent_sandbox.runtime.wasm.wasi.clock import START_NS, VirtualClock

_USED = 0  # address, in the shim's memory, of the number of bytes that the engine wrote
_ENTRIES = 8  # address of these bytes


@dataclass(frozen=True)
class DirectoryEntry:
    """A directory entry."""

    name: bytes
    number: int
    type: int


class Listings:
    """The directory listings by descriptor, each as it was when the program began to list that directory."""

    def __init__(self, fd_readdir: Call, memory: GuestMemory) -> None:
        """Take the engine's `fd_readdir` and the memory it writes to, which is not the program's."""
        self._fd_readdir, self._memory = fd_readdir, memory
        self._kept: dict[int, Sequence[DirectoryEntry]] = {}

    def read(self, fd: int) -> list[DirectoryEntry] | int:
        """Read all entries of a directory, in the engine's order; or return an error number."""
        entries: list[DirectoryEntry] = []
        cookie = 0
        while True:
            error = self._fd_readdir(fd, _ENTRIES, OWN_BYTES - _ENTRIES, cookie, _USED)
            if error:
                return error
            used = WORD.unpack(self._memory.read(_USED, WORD.size))[0]
            cookie = _parse(self._memory.read(_ENTRIES, used), entries) or cookie
            if used < OWN_BYTES - _ENTRIES:  # the last piece: all others fill the buffer
                return entries

    def keep(self, fd: int, entries: Sequence[DirectoryEntry]) -> None:
        """Set the entries that the program gets when it lists this descriptor."""
        self._kept[fd] = entries

    def kept(self, fd: int) -> Sequence[DirectoryEntry] | None:
        """Return the entries set for this descriptor; None if its listing has not begun."""
        return self._kept.get(fd)

    def save(self) -> list[Any]:
        """Return the listings as JSON data."""
        return [[fd, [[each.name.hex(), each.number, each.type] for each in entries]] for fd, entries in self._kept.items()]

    def restore(self, saved: list[Any]) -> None:
        """Set the listings that were saved. Raises ValueError or TypeError for anything else."""
        self._kept = {
            int(fd): [DirectoryEntry(bytes.fromhex(name), int(number), int(kind)) for name, number, kind in entries]
            for fd, entries in saved
        }

    def forget(self, fd: int) -> None:
        """Drop the listing of a closed descriptor."""
        self._kept.pop(fd, None)


def hand_out(memory: GuestMemory, entries: Sequence[DirectoryEntry], address: int, length: int, cookie: int, used: int) -> int:
    """Write entries, beginning with number `cookie`, to the program's buffer, as `fd_readdir` does. The last one may be cut off."""
    room = unsigned(length)
    written = bytearray()
    for index in range(max(0, cookie), len(entries)):
        entry = entries[index]
        written += DIRENT.pack(index + 1, entry.number, len(entry.name), entry.type) + entry.name
        if len(written) >= room:
            break
    memory.write(address, bytes(written[:room]))
    memory.write_word(used, min(len(written), room))
    return OK


def _parse(data: bytes, entries: list[DirectoryEntry]) -> int:
    """Append the complete entries in `data`; return the cookie of the next entry, 0 if no entry was complete."""
    position = after = 0
    while position + DIRENT.size <= len(data):
        following, number, length, kind = DIRENT.unpack_from(data, position)
        end = position + DIRENT.size + length
        if end > len(data):
            break
        entries.append(DirectoryEntry(data[position + DIRENT.size : end], number, kind))
        position, after = end, following
    return after


@dataclass
class UsedFile:
    """The inode number and times of a file or directory. If the file is older than the run, all its times are the start of the run."""

    number: int
    accessed: int = START_NS
    modified: int = START_NS
    changed: int = START_NS
    ours: bool = False  # the run created it, or opened it for writing


@dataclass
class OpenFile:
    """An open descriptor: its file, and the file's path, which follows renames."""

    path: str
    file: UsedFile
    writable: bool = False


class FileTable:
    """The table of files that a program has used, by path, and of its descriptors. Paths contain no symbolic links."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._files: dict[str, UsedFile] = {}
        self._last_number = 0
        self.open: dict[int, OpenFile] = {}

    def file(self, path: str) -> UsedFile:
        """Return the entry for a path. A path that was not used yet gets a new entry, with the next inode number."""
        file = self._files.get(path)
        if file is None:
            self._last_number += 1
            file = self._files[path] = UsedFile(self._last_number)
        return file

    def opened(self, fd: int, path: str, *, writable: bool = False) -> None:
        """Record a descriptor of the file at this path. If it is writable, the file's modification time becomes the present time."""
        self.open[fd] = OpenFile(path, self.file(path), writable)
        if writable:
            self.touched(self.open[fd].file)
            self.open[fd].file.ours = True

    def closed(self, fd: int) -> None:
        """Remove a descriptor. If it was writable, the file's modification time becomes the present time: writes are not observed."""
        opened = self.open.pop(fd, None)
        if opened is not None and opened.writable:
            self.touched(opened.file)

    def renumbered(self, old: int, new: int) -> None:
        """Move a descriptor to the number `new`, closing the descriptor that had this number."""
        self.closed(new)
        if old in self.open:
            self.open[new] = self.open.pop(old)

    def made(self, path: str) -> None:
        """Record that a new file was made at a path."""
        self._files.pop(path, None)
        self.touched(self.file(path))
        self.file(path).ours = True
        self._parent_touched(path)

    def linked(self, old: str, new: str) -> None:
        """Record a second name of a file."""
        self._files[new] = self.file(old)
        self._parent_touched(new)

    def removed(self, path: str) -> None:
        """Record that a path was removed."""
        self._files.pop(path, None)
        self._parent_touched(path)

    def renamed(self, old: str, new: str) -> None:
        """Record that a file, or a directory with its content, was moved."""
        self.file(old)
        self._files.pop(new, None)
        moved = [path for path in self._files if path == old or path.startswith(old + "/")]
        for path in moved:
            self._files[new + path[len(old) :]] = self._files.pop(path)
        for opened in self.open.values():
            if opened.path == old or opened.path.startswith(old + "/"):
                opened.path = new + opened.path[len(old) :]
        self._parent_touched(old)
        self._parent_touched(new)

    def save(self) -> dict[str, Any]:
        """Return the table as JSON data. Names of one file stay names of one file."""
        used: dict[int, int] = {}  # the place of each file in `files`
        files: list[list[int]] = []
        for file in (*self._files.values(), *(opened.file for opened in self.open.values())):
            if id(file) not in used:
                used[id(file)] = len(files)
                files.append([file.number, file.accessed, file.modified, file.changed, int(file.ours)])
        return {
            "files": files,
            "paths": [[os.fsencode(path).hex(), used[id(file)]] for path, file in self._files.items()],
            "open": [[fd, os.fsencode(opened.path).hex(), used[id(opened.file)], int(opened.writable)] for fd, opened in self.open.items()],
            "last": self._last_number,
        }

    def restore(self, saved: dict[str, Any]) -> None:
        """Set the table that was saved. Raises ValueError, KeyError, IndexError or TypeError for anything else."""
        files = [
            UsedFile(int(number), int(read), int(written), int(touched), bool(ours))
            for number, read, written, touched, ours in saved["files"]
        ]
        self._files = {os.fsdecode(bytes.fromhex(path)): files[place] for path, place in saved["paths"]}
        self.open = {
            int(fd): OpenFile(os.fsdecode(bytes.fromhex(path)), files[place], bool(writable)) for fd, path, place, writable in saved["open"]
        }
        self._last_number = int(saved["last"])

    def touched(self, file: UsedFile) -> None:
        """Set the times of a file that was written to just now."""
        file.modified = file.changed = self._clock.stamp()

    def _parent_touched(self, path: str) -> None:
        self.touched(self.file(path.rpartition("/")[0] or "/"))
