"""The real entries at the paths that a layer covers: the machine's side of a comparison.

No link is followed on the way down, because the overlay's lower layer does not follow links either: if the guest replaced a link with a
directory, the link's target has nothing to do with it. Unlike in a layer, mounts are crossed: a path means the same as on the machine.
"""

from __future__ import annotations

import os
from contextlib import suppress
from types import TracebackType

from agent_sandbox.workspace import beneath

_MOST_OPEN = 16  # directories


class Reality:
    """The real directory at `root`, which need not exist. Paths are relative to it, "" for itself. A context manager."""

    def __init__(self, root: str) -> None:
        self._root = -1
        with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            self._root = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._way: list[tuple[str, int]] = []  # open directories, each below the previous one; entries are looked up directory by directory

    def __enter__(self) -> Reality:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for fd in (*(fd for _, fd in self._way), self._root):
            if fd >= 0:
                os.close(fd)
        self._way, self._root = [], -1

    def directory(self, path: str) -> int | None:
        """Return a descriptor of a real directory, valid until the next call; None if none exists or it cannot be entered."""
        if not path:
            return self._root if self._root >= 0 else None
        way = self._way
        while way and way[-1][0] != path and not path.startswith(way[-1][0] + "/"):
            os.close(way.pop()[1])
        if not way or way[-1][0] != path:
            above, start = way[-1] if way else ("", self._root)
            if start < 0:
                return None
            below = path[len(above) + 1 :] if above else path
            try:
                if "/" in below or below in ("", ".", ".."):
                    opened = beneath.open_beneath(start, below, os.O_PATH | os.O_DIRECTORY, one_filesystem=False)
                else:  # for a single name the plain call is equivalent and faster
                    opened = os.open(below, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=start)
            except OSError:
                return None
            way.append((path, opened))
            if len(way) > _MOST_OPEN:
                os.close(way.pop(0)[1])
        return way[-1][1]

    def names(self, path: str) -> list[str]:
        """Return the sorted names in a real directory; an empty list if it cannot be listed."""
        directory = self.directory(path)
        if directory is None:
            return []
        try:
            listing = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=directory)
        except OSError:
            return []
        try:
            return sorted(os.listdir(listing))
        finally:
            os.close(listing)

    def status(self, path: str, name: str) -> os.stat_result | None:
        """Return the status of `name` in the directory at `path`, for a link its own; None if it does not exist."""
        directory = self.directory(path)
        if directory is None:
            return None
        try:
            return os.stat(name, dir_fd=directory, follow_symlinks=False)
        except OSError:
            return None
