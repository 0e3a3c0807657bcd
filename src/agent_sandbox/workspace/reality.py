"""The machine's own side of a comparison: what is really at the place that a layer covers.

No link is followed on the way down, because in the overlay's lower layer a link is a link too: where the guest has made a directory out
of a link, what the link leads to has nothing to do with it. Unlike in a layer, mounts are crossed: a path means here what it means on the
machine.
"""

from __future__ import annotations

import os
from contextlib import suppress
from types import TracebackType

from agent_sandbox.workspace import beneath

_KEPT = 16  # opened directories


class Reality:
    """The real directory at `root`, which need not exist. Paths are relative to it, "" being itself. A context manager."""

    def __init__(self, root: str) -> None:
        self._root = -1
        with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            self._root = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._way: list[tuple[str, int]] = []  # opened directories, each below the one before: entries come directory by directory

    def __enter__(self) -> Reality:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for fd in (*(fd for _, fd in self._way), self._root):
            if fd >= 0:
                os.close(fd)
        self._way, self._root = [], -1

    def directory(self, path: str) -> int | None:
        """A descriptor of a real directory, good until the next call; None if there is none that can be entered."""
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
                else:  # for one name the plain call says the same, faster
                    opened = os.open(below, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=start)
            except OSError:
                return None
            way.append((path, opened))
            if len(way) > _KEPT:
                os.close(way.pop(0)[1])
        return way[-1][1]

    def names(self, path: str) -> list[str]:
        """What is in a real directory; nothing if it cannot be listed."""
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
        """The status of `name` in the directory at `path`, of a link itself; None if it is not there."""
        directory = self.directory(path)
        if directory is None:
            return None
        try:
            return os.stat(name, dir_fd=directory, follow_symlinks=False)
        except OSError:
            return None
