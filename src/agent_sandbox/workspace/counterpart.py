"""The real side of what a layer holds, entry by entry: what is there, and whether it has the same content.

Done for each of what may be a hundred thousand files, so that every call that is spared counts: one directory is open at a time, and a
file that will have to be read is opened once, for its attributes and its content.
"""

from __future__ import annotations

import os
import stat
from types import TracebackType

from agent_sandbox.workspace import beneath
from agent_sandbox.workspace.merged import Merged
from agent_sandbox.workspace.nodes import Node, describe, same_content
from agent_sandbox.workspace.reality import Reality
from agent_sandbox.workspace.seen import Seen, digest_of_open


class Counterpart:
    """What is real beside an overlay's layers. A context manager. `left` is how many bytes may still be read to compare."""

    def __init__(self, reality: Reality, *, prefix: str, left: int) -> None:
        self.left = left
        self._reality = reality
        self._prefix = prefix
        self._path: str | None = None
        self._directory: int | None = None
        self._file = -1  # the one looked at last, if it had to be opened

    def __enter__(self) -> Counterpart:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._close_file()

    def status(self, path: str, name: str) -> os.stat_result | None:
        """The status of a name in the directory at `path`, of a link itself. What follows is about this entry."""
        self._close_file()
        if path != self._path:
            self._path, self._directory = path, self._reality.directory(path)
        if self._directory is None:
            return None
        try:
            return os.stat(name, dir_fd=self._directory, follow_symlinks=False)
        except OSError:
            return None

    def node(self, name: str, status: os.stat_result, ours: Merged | None = None) -> Node | None:
        """The node of that status; None when it has gone. `ours` is what it will be compared with."""
        directory = self._directory
        if directory is None:
            return None
        try:
            attributes = self._attributes_of_file(directory, name, status, ours) if ours is not None else None
            if attributes is None:
                attributes = beneath.xattrs(directory, name)
            return describe(directory, name, status, attributes, own_prefix=self._prefix)
        except FileNotFoundError:
            return None

    def has_content_of(self, ours: Merged, status: os.stat_result | None, seen: Seen | None) -> bool | None:
        """Whether a file of a layer has the content that is real, or that was `seen`; None when that cannot be told."""
        own = ours.own
        try:
            if own is None:
                own = beneath.open_file(ours.directory, ours.name, unlock=True)
            if status is not None and (seen is None or seen.untouched(status)):
                return self._same_as_real(own, ours, status)
            if seen is None or not seen.digest or ours.status.st_size > self.left:
                return None
            self.left -= ours.status.st_size
            return digest_of_open(own) == seen.digest
        except OSError:
            return None
        finally:
            if own is not None and own != ours.own:
                os.close(own)

    def forget(self) -> None:
        """To be called when somebody else has used the same `Reality`."""
        self._path = None

    def _attributes_of_file(self, directory: int, name: str, status: os.stat_result, ours: Merged) -> dict[str, bytes] | None:
        if ours.own is None or not 0 < ours.status.st_size == status.st_size:
            return None
        if not stat.S_ISREG(status.st_mode) or not stat.S_ISREG(ours.status.st_mode):
            return None
        try:
            self._file = beneath.open_seen_file(directory, name)[0]
        except OSError:
            return None
        return beneath.xattrs_of(self._file)

    def _same_as_real(self, own: int, ours: Merged, status: os.stat_result) -> bool | None:
        if self._file < 0 and self._directory is not None and stat.S_ISREG(status.st_mode):
            self._file = beneath.open_seen_file(self._directory, ours.name)[0]
        if self._file < 0:
            return None
        same, read = same_content(own, self._file, ours.status.st_size, most=self.left)
        self.left -= read
        return same

    def _close_file(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
