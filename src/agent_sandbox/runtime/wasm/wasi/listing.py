"""Directory listings: read whole when a program begins to list, and handed out in pieces from there.

The engine itself reads all of a directory, and asks about everything in it, for each piece it hands out: thousands of names took minutes.
"""

from __future__ import annotations

from collections.abc import Sequence

from agent_sandbox._fast.values import dataclass
from agent_sandbox.runtime.wasm.wasi.abi import DIRENT, OK, OWN_BYTES, WORD, Call, GuestMemory, unsigned
from agent_sandbox.runtime.wasm.wasi.clock import START_NS, Clock

_USED = 0  # where the engine puts how much it wrote, in memory of our own
_ENTRIES = 8  # and where it writes


@dataclass(frozen=True)
class Entry:
    """One name in a directory."""

    name: bytes
    number: int
    type: int


class Listings:
    """One for each descriptor that was listed, as it was when the listing began."""

    def __init__(self, fd_readdir: Call, memory: GuestMemory) -> None:
        """The engine's own, over memory that is not the program's."""
        self._fd_readdir, self._memory = fd_readdir, memory
        self._kept: dict[int, Sequence[Entry]] = {}

    def read(self, fd: int) -> list[Entry] | int:
        """All that is in a directory, in the engine's order; or an error number."""
        found: list[Entry] = []
        cookie = 0
        while True:
            error = self._fd_readdir(fd, _ENTRIES, OWN_BYTES - _ENTRIES, cookie, _USED)
            if error:
                return error
            used = WORD.unpack(self._memory.read(_USED, WORD.size))[0]
            cookie = _parse(self._memory.read(_ENTRIES, used), found) or cookie
            if used < OWN_BYTES - _ENTRIES:  # the last piece: any other is filled to the brim
                return found

    def keep(self, fd: int, entries: Sequence[Entry]) -> None:
        """What a program that lists this descriptor gets from here on."""
        self._kept[fd] = entries

    def kept(self, fd: int) -> Sequence[Entry] | None:
        """What it gets; None when it has not begun."""
        return self._kept.get(fd)

    def forget(self, fd: int) -> None:
        """The descriptor is gone."""
        self._kept.pop(fd, None)


def hand_out(memory: GuestMemory, entries: Sequence[Entry], address: int, length: int, cookie: int, used: int) -> int:
    """Write entries from `cookie` on, the last one cut where there is no more room, as a listing is to be written."""
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


def _parse(data: bytes, found: list[Entry]) -> int:
    """Add the whole entries in a piece; returns the cookie of what follows them, 0 when there was none."""
    position = after = 0
    while position + DIRENT.size <= len(data):
        following, number, length, kind = DIRENT.unpack_from(data, position)
        end = position + DIRENT.size + length
        if end > len(data):
            break
        found.append(Entry(data[position + DIRENT.size : end], number, kind))
        position, after = end, following
    return after


@dataclass
class File:
    """One file or directory. Whatever was there before the run was last touched when it began."""

    number: int
    accessed: int = START_NS
    modified: int = START_NS
    changed: int = START_NS
    ours: bool = False  # the run has made it, or could have written to it


@dataclass
class Opened:
    """A descriptor: where what it stands for was found, and has been moved to since."""

    path: str
    file: File
    writable: bool = False


class Names:
    """The files that a program has met, by path, and its descriptors. Paths have no symbolic links in them."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._files: dict[str, File] = {}
        self._met = 0
        self.open: dict[int, Opened] = {}

    def file(self, path: str) -> File:
        """The file at a path; a new one if nothing there was met yet."""
        found = self._files.get(path)
        if found is None:
            self._met += 1
            found = self._files[path] = File(self._met)
        return found

    def opened(self, fd: int, path: str, *, writable: bool = False) -> None:
        """A descriptor of what is at this path."""
        self.open[fd] = Opened(path, self.file(path), writable)
        if writable:
            self.touched(self.open[fd].file)
            self.open[fd].file.ours = True

    def closed(self, fd: int) -> None:
        """It is gone. What could be written through it counts as written now: nobody looks at each write."""
        gone = self.open.pop(fd, None)
        if gone is not None and gone.writable:
            self.touched(gone.file)

    def renumbered(self, old: int, new: int) -> None:
        """A descriptor has another number, in place of what had it."""
        self.closed(new)
        if old in self.open:
            self.open[new] = self.open.pop(old)

    def made(self, path: str) -> None:
        """Something new is at a path."""
        self._files.pop(path, None)
        self.touched(self.file(path))
        self.file(path).ours = True
        self._parent_touched(path)

    def linked(self, old: str, new: str) -> None:
        """One file has another name, too."""
        self._files[new] = self.file(old)
        self._parent_touched(new)

    def removed(self, path: str) -> None:
        """Nothing is there any more."""
        self._files.pop(path, None)
        self._parent_touched(path)

    def renamed(self, old: str, new: str) -> None:
        """Something is elsewhere now, and with it all that is in it."""
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

    def touched(self, file: File) -> None:
        """It was written to."""
        file.modified = file.changed = self._clock.stamp()

    def _parent_touched(self, path: str) -> None:
        self.touched(self.file(path.rpartition("/")[0] or "/"))
