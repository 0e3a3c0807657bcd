"""Sources of the old side of a change: the machine, or the kept originals. Also the entries that go with a removed directory.

The new side is in the layers of a sandbox: see `layers.stack`.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import suppress

from agent_sandbox._fast.values import dataclass, field, replace
from agent_sandbox.errors import WorkspaceError
from agent_sandbox.workspace import beneath
from agent_sandbox.workspace.changes import Change, Kind
from agent_sandbox.workspace.fingerprint import Base, Bases, Seen, digest_of_open
from agent_sandbox.workspace.nodes import EntryType, describe


@dataclass(frozen=True)
class Machine:
    """The old content of files, as it is on the machine now. No link is followed: the overlay does not follow them either."""

    root: str = "/"

    def open_old(self, change: Change) -> int:
        """Open the old content; see `FormerContents`."""
        root = os.open(self.root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            return beneath.open_file(root, change.path.lstrip("/"), one_filesystem=False)
        finally:
            os.close(root)

    def below(self, change: Change, limit: int) -> tuple[Change, ...]:
        """Return the entries of a removed directory as deletions of their own.

        Empty if there are more than `limit` or if they cannot be read. Also empty if something in it was hidden from the guest: it cannot
        have meant to remove what it did not see.
        """
        was_directory = change.before is not None and change.before.type is EntryType.DIRECTORY
        still_directory = change.after is not None and change.after.type is EntryType.DIRECTORY
        if not was_directory or still_directory or not 0 < change.inside <= limit or change.masks_real:
            return ()
        try:
            return tuple(self._walk(change, limit))
        except (OSError, WorkspaceError):
            return ()

    def _walk(self, change: Change, limit: int) -> Iterator[Change]:
        root = os.open(self.root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            top = beneath.open_directory(root, change.path.lstrip("/"), one_filesystem=False)
        finally:
            os.close(root)
        try:
            for entry in beneath.walk(top, limit=limit, unlock=False):
                attributes = beneath.xattrs(entry.directory, entry.name)
                node = describe(entry.directory, entry.name, entry.status, attributes, own_prefix="trusted.overlay.")
                yield Change(f"{change.path}/{entry.path}", Kind.DELETED, node, None, change.target)
        finally:
            os.close(top)

    def one_by_one(self, change: Change, limit: int) -> tuple[Change, ...]:
        """Return the change, then the entries that it removes along with it, if they can be listed."""
        below = self.below(change, limit)
        return (replace(change, inside=0), *below) if below else (change,)


@dataclass(frozen=True)
class Formerly(Machine):
    """The old content as it was when a sandbox first changed it, if kept: the machine may have moved on since."""

    bases: Bases = field(default_factory=dict)
    open_base: Callable[[Base], int] | None = None

    def open_old(self, change: Change) -> int:
        """Open the old content; see `FormerContents`. If it was not kept, the real file is read, provided it is unchanged."""
        base = self.bases.get(change.path)
        if base is None or not base.known or base.seen is None:
            return super().open_old(change)
        if base.kept and self.open_base is not None:
            with suppress(WorkspaceError):
                return self.open_base(base)
        fd = super().open_old(change)
        if not _is_still(base.seen, fd):
            os.close(fd)
            raise OSError(errno.ESTALE, "the real file has changed since, and what it held before was not kept", change.path)
        return fd


def _is_still(seen: Seen, fd: int) -> bool:
    status = os.fstat(fd)
    if (seen.device, seen.inode, seen.ctime_ns) == (status.st_dev, status.st_ino, status.st_ctime_ns):
        return True
    return bool(seen.digest) and digest_of_open(fd) == seen.digest
