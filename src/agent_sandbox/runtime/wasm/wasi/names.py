"""What a program can tell of files beyond their content, made up from nothing but its own doings: numbers, times, links.

The numbers that a filesystem gives differ between two layers of one, let alone between machines, and are used again when a file is gone.
Here a file has the number of its turn: the first one the program asks about is number 1. It keeps it when it is renamed or linked.
"""

from __future__ import annotations

from agent_sandbox.runtime.wasm.wasi.clock import START_NS, Clock
from agent_sandbox.values import dataclass


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
