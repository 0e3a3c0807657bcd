"""Squash several generations into one: for long chains, for rootless snapshots, and to drop promoted changes.

Mounted over the same base, the new generation shows the same tree as the old generations. The old generations are not touched. The new
generation must not be used before `squash` has returned; after a crash, throw its remains away. The caller syncs the new generation
(syncfs) before the history refers to it.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Collection, Mapping

from agent_sandbox._fast.values import dataclass, field
from agent_sandbox.kernel.mount_plan import place_below, quote_target
from agent_sandbox.workspace import beneath
from agent_sandbox.workspace.copy import copy_file, copy_special, dress
from agent_sandbox.workspace.durable import explained
from agent_sandbox.workspace.layers.stack import LayerEntry, Stack
from agent_sandbox.workspace.nodes import EntryType, describe
from agent_sandbox.workspace.reality import Reality

_MAKE = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def squash(stack: Stack, into: int, *, link: bool, without: Collection[str] = (), machine_root: str = "/") -> None:
    """Write the merged content of a stack into the empty directory `into`, a new generation. Raises `WorkspaceError`.

    With `link`, files are hard links to the files of the old generations. That requires that old and new generations are on one filesystem,
    and that neither is ever written to. Without `link`, files are copies; files that shared an inode share an inode again.

    `without` are the absolute paths of promoted changes. They are left out, so that the machine at `machine_root` shows there again. A
    directory among them stays if entries below it remain.
    """
    dropped = _Dropped.of(without)
    with explained("write the layers of this sandbox as one"):
        for target in stack.targets:
            uppers = stack.uppers(target)
            try:
                if uppers:
                    with Reality(place_below(target, machine_root)) as reality:
                        _write_target(stack, target, uppers[0], into, reality, dropped.at(target), link)
            finally:
                for fd in uppers:
                    os.close(fd)


@dataclass(slots=True)
class _Dropped:
    """A tree of names that holds the paths to leave out."""

    below: dict[str, _Dropped] = field(default_factory=dict)
    itself: bool = False

    @classmethod
    def of(cls, paths: Collection[str]) -> _Dropped:
        top = cls()
        for path in paths:
            place = top
            for name in path.strip("/").split("/"):
                place = place.below.setdefault(name, cls())
            place.itself = True
        return top

    def at(self, path: str) -> _Dropped | None:
        place: _Dropped | None = self
        for name in path.strip("/").split("/"):
            if name and place is not None:
                place = place.below.get(name)
        return place


def _write_target(stack: Stack, target: str, top: int, into: int, reality: Reality, dropped: _Dropped | None, link: bool) -> None:
    key = quote_target(target)
    for name in (key, f"{key}/work", f"{key}/upper"):
        os.mkdir(name, 0o700, dir_fd=into)
    with open(os.open(f"{key}/target", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=into), "wb") as file:
        file.write(os.fsencode(target))
    upper = os.open(f"{key}/upper", _MAKE, dir_fd=into)
    try:
        writer = _Writer(stack, reality, upper, link, os.dup(upper), [_Level("", None, dropped, made=True)])
        try:
            for entry in stack.walk(target, skip=writer.leaves_out if dropped is not None else None):
                writer.write(entry)
            writer.leave_to(0)
        finally:
            os.close(writer.here)
        dress(upper, os.fstat(top), writer.without_marks(beneath.xattrs_of(top)))
    finally:
        os.close(upper)


@dataclass(slots=True)
class _Level:
    """A directory of the new generation that is being written."""

    name: str
    entry: LayerEntry | None  # None for the top
    dropped: _Dropped | None  # paths to leave out below it
    hidden: bool = False  # nothing real shows through here in the old layers
    sealed: bool = False  # nothing real shows through here in the new layer either
    made: bool = False  # False for a directory that may be superfluous, until an entry below it is written


@dataclass(slots=True)
class _Writer:
    stack: Stack
    reality: Reality
    top: int
    link: bool
    here: int  # descriptor of the innermost directory that is made
    levels: list[_Level]
    first_links: dict[tuple[int, int], str] = field(default_factory=dict)

    def write(self, entry: LayerEntry) -> None:
        """Write one entry to the new generation, or leave it out. Entries must come in the order of `walk`."""
        self.leave_to(entry.depth)
        level = self.levels[-1]
        dropped = level.dropped.below.get(entry.name) if level.dropped is not None else None
        if stat.S_ISDIR(entry.status.st_mode):
            self._begin(entry, level, dropped)
        elif self.leaves_out(entry.name, entry.depth):
            return
        elif not entry.whiteout:
            self._make_pending()
            self._copy(entry)
        elif not level.sealed:  # in a sealed directory there is nothing to cover, and the kernel would list the whiteout
            self._make_pending()
            self._white_out(entry.name)

    def leaves_out(self, name: str, depth: int) -> bool:
        """Return whether an entry that is no directory is left out. Entries must come in the order of `walk`."""
        self.leave_to(depth)
        level = self.levels[-1]
        dropped = level.dropped.below.get(name) if level.dropped is not None else None
        return dropped is not None and dropped.itself and not level.sealed

    def leave_to(self, depth: int) -> None:
        """Finish the directories deeper than `depth`, and go up."""
        while len(self.levels) > depth + 1:
            level = self.levels.pop()
            if level.made and level.entry is not None:
                above = os.open("..", _MAKE, dir_fd=self.here)
                try:
                    attributes = self.without_marks(level.entry.attributes)
                    if level.sealed and not self.levels[-1].sealed:
                        attributes[self.stack.prefix + "opaque"] = b"y"
                    dress(self.here, level.entry.status, attributes)
                finally:
                    os.close(self.here)
                    self.here = above

    def without_marks(self, attributes: Mapping[str, bytes]) -> dict[str, bytes]:
        """Return the attributes without the overlay's own."""
        return {name: value for name, value in attributes.items() if not name.startswith(self.stack.prefix)}

    def _begin(self, entry: LayerEntry, above: _Level, dropped: _Dropped | None) -> None:
        if entry.own is None:
            raise OSError(errno.EACCES, "a directory of the sandbox cannot be read", entry.name)
        hidden = above.hidden or entry.opaque
        level = _Level(entry.name, entry, dropped, hidden, above.sealed or (hidden and dropped is None))
        self.levels.append(level)
        if dropped is None or not (dropped.itself or self._is_real(entry)):
            self._make_pending()
        if hidden and dropped is not None:
            # The machine must show again in places below, so the directory can no longer be opaque: cover the rest by name.
            covered = {*entry.names, *(name for name, place in dropped.below.items() if place.itself)}
            for name in self.reality.names(self._path()):
                if name not in covered:
                    self._make_pending()
                    self._white_out(name)

    def _path(self) -> str:
        return "/".join(level.name for level in self.levels[1:])

    def _is_real(self, entry: LayerEntry) -> bool:
        """Return whether a real directory with the same metadata is at the entry's path. Contents are not compared."""
        path, _, name = self._path().rpartition("/")
        directory, status = self.reality.directory(path), self.reality.status(path, name)
        if directory is None or status is None or not stat.S_ISDIR(status.st_mode):
            return False
        real = describe(directory, name, status, beneath.xattrs(directory, name), own_prefix=self.stack.prefix)
        ours = describe(
            entry.directory, name, entry.status, entry.attributes, own_prefix=self.stack.prefix, owner_shift=self.stack.owner_shift
        )
        return real == ours and ours.type is EntryType.DIRECTORY

    def _make_pending(self) -> None:
        count = len(self.levels)
        while not self.levels[count - 1].made:
            count -= 1
        for level in self.levels[count:]:
            os.mkdir(level.name, 0o700, dir_fd=self.here)
            below = os.open(level.name, _MAKE, dir_fd=self.here)
            os.close(self.here)
            self.here, level.made = below, True

    def _white_out(self, name: str) -> None:
        os.mknod(name, stat.S_IFCHR, os.makedev(0, 0), dir_fd=self.here)

    def _copy(self, entry: LayerEntry) -> None:
        if self.link and self._hard_link(entry.directory, entry.name, entry.name):
            return
        attributes = self.without_marks(entry.attributes)
        if not stat.S_ISREG(entry.status.st_mode):
            copy_special(entry.directory, entry.name, self.here, entry.status, attributes)
            return
        if entry.status.st_nlink > 1:
            path = f"{self._path()}/{entry.name}".lstrip("/")
            first = self.first_links.setdefault((entry.status.st_dev, entry.status.st_ino), path)
            if first != path and self._link_to(first, entry.name):
                return
        old = entry.own if entry.own is not None else beneath.open_file(entry.directory, entry.name, unlock=True)
        try:
            copy_file(old, entry.name, self.here, entry.status, attributes)
        finally:
            if old != entry.own:
                os.close(old)

    def _link_to(self, first: str, name: str) -> bool:
        try:
            handle = beneath.open_beneath(self.top, first, os.O_PATH)
        except PermissionError:  # below a directory whose mode denies us access; our copy has that mode by now
            return False
        try:
            return self._hard_link(None, f"/proc/self/fd/{handle}", name)
        finally:
            os.close(handle)

    def _hard_link(self, directory: int | None, source: str, name: str) -> bool:
        try:
            os.link(source, name, src_dir_fd=directory, dst_dir_fd=self.here, follow_symlinks=directory is None)
        except OSError as error:
            if error.errno == errno.EMLINK:  # the filesystem's limit of links
                return False
            raise
        return True
