"""Walk several layers as the one tree that overlayfs makes of them.

The rules are the kernel's own. The uppermost layer that has a name decides its type. A whiteout means that nothing is there. Directories of
the same name are merged from the top down, until a whiteout, a non-directory or a directory marked opaque ends the merge. Marks count only
under the prefix of this mount, because a guest can set all others.

The guarantees of `beneath` hold for each layer: one descriptor goes down and up again, and a step up is accepted only if it arrives where
it came from. A layer without the current directory stays at the last one it has. However deep the tree, there is one descriptor per layer,
plus some that save the way up in trees of common depth.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

from agent_sandbox.workspace import beneath
from agent_sandbox.workspace.beneath import SWAPPED, enter, identity, parent

_NOT_OURS_TO_OPEN = (errno.EACCES, errno.EPERM, errno.EXDEV)  # EXDEV: a mount
_KEPT = 64  # descriptors of outer directories, all layers together


@dataclass(slots=True)
class Merged:
    """One name of the merged tree, as in its uppermost layer. `directory` is a descriptor of the directory that holds it there.

    Descriptors and `names` are valid until the next entry is taken.
    """

    name: str
    depth: int
    status: os.stat_result
    directory: int
    attributes: dict[str, bytes]  # including the overlay's own
    whiteout: bool = False
    own: int | None = None  # a directory or regular file, open in that layer; None when it may not be opened
    opaque: bool = False  # for a directory: nothing below the layers shows through
    names: Sequence[str] = ()  # for a directory: its entries, including whiteouts


@dataclass(slots=True)
class _Part:
    """The part of a merged directory that is in one layer."""

    layer: int
    identity: tuple[int, int]
    outer: int = -1  # descriptor of the directory it was entered from; -1 if that was closed
    above: tuple[int, int] | None = None  # identity of that directory; None at the top
    mode: int | None = None  # restored on leaving
    whiteouts_by_attribute: bool = False
    types: dict[str, int] = field(default_factory=dict)  # its entries, as `beneath.names` returns them


@dataclass(slots=True)
class _Level:
    parts: list[_Part]
    names: list[str]
    holders: dict[str, list[_Part]] | None = None  # the parts that have each name; None when there is only one part


def walk(uppers: Sequence[int], prefix: str, *, limit: int = beneath.ENTRY_LIMIT) -> Generator[Merged, None, None]:
    """Yield every entry of the merged tree of these directories, uppermost first: directories before their contents, sorted by name.

    Whiteouts are included. Directories that their owner may not read are made readable while the walk is in them. Raises `TooMany` after
    `limit` entries, and `Moved` when a directory is moved away during the walk.
    """
    walker = _Walker(prefix, [os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=upper) for upper in uppers], limit)
    try:
        yield from walker.walk()
    finally:
        walker.close()


def mark(directory: int | str, prefix: str) -> bytes:
    """Return the overlay's mark on a directory: b"y" for opaque, b"x" if it contains whiteouts by attribute, else b""."""
    name = prefix + "opaque"
    try:
        return os.getxattr(directory, name) if name in os.listxattr(directory) else b""
    except OSError as error:
        if error.errno == errno.ENOTSUP:
            return b""
        raise


@dataclass(slots=True)
class _Walker:
    prefix: str
    here: list[int]  # one descriptor per layer, as deep as the layer reaches along the current path
    left: int
    levels: list[_Level] = field(default_factory=list)
    kept: int = 0  # descriptors of outer directories

    def walk(self) -> Generator[Merged, None, None]:
        levels, here = self.levels, self.here
        top = [_Part(layer, identity(fd), whiteouts_by_attribute=mark(fd, self.prefix) == b"x") for layer, fd in enumerate(here)]
        levels.append(self._list(top))
        while levels:
            level = levels[-1]
            if not level.names:
                self._leave()
                continue
            entry, opened = self._take(level, level.names.pop())
            if entry is not None:
                try:
                    yield entry
                finally:
                    for fd in opened:
                        os.close(fd)

    def _take(self, level: _Level, name: str) -> tuple[Merged | None, Sequence[int]]:
        """Return the entry of a name, and descriptors to close after use. None if it has gone, or will be tried again."""
        holders = level.parts if level.holders is None else level.holders[name]
        part, closed = holders[0], False
        kind = part.types[name]
        if kind:
            try:
                return self._open(part, name) if kind == stat.S_IFREG else self._enter(name, holders)
            except OSError as error:
                closed = error.errno in _NOT_OURS_TO_OPEN
                if not closed and error.errno not in (*SWAPPED, errno.EINVAL):
                    raise
        directory = self.here[part.layer]
        try:
            status = os.stat(name, dir_fd=directory, follow_symlinks=False)
            whiteout = stat.S_ISCHR(status.st_mode) and status.st_rdev == 0
            attributes = {} if whiteout else beneath.xattrs(directory, name)
        except FileNotFoundError:
            if level.holders is not None and len(holders) > 1:  # the next layer decides now
                level.holders[name] = holders[1:]
                level.names.append(name)
            return None, ()
        kind = stat.S_IFMT(status.st_mode)
        if kind in (stat.S_IFREG, stat.S_IFDIR) and not closed and self.left > 0:  # its type was swapped: try again
            part.types[name] = kind
            level.names.append(name)
            self.left -= 1
            return None, ()
        return Merged(name, len(self.levels) - 1, status, directory, attributes, whiteout), ()

    def _open(self, part: _Part, name: str) -> tuple[Merged, Sequence[int]]:
        directory = self.here[part.layer]
        own, status = beneath.open_seen_file(directory, name)
        try:
            attributes = beneath.xattrs_of(own)
        except BaseException:
            os.close(own)
            raise
        whiteout = part.whiteouts_by_attribute and status.st_size == 0 and self.prefix + "whiteout" in attributes
        return Merged(name, len(self.levels) - 1, status, directory, attributes, whiteout, own), (own,)

    def close(self) -> None:
        """Go up to the top, restoring modes. Afterwards no descriptor is left."""
        try:
            while self.levels:
                self._leave()
        finally:
            for fd in self.here:
                if fd >= 0:
                    os.close(fd)

    def _enter(self, name: str, holders: list[_Part]) -> tuple[Merged, Sequence[int]]:
        """Go down into a directory in each layer that has a part of it. Returns its entry, and descriptors to close after use."""
        parts: list[_Part] = []
        looks: list[tuple[os.stat_result, dict[str, bytes]]] = []
        opened: list[int] = []
        opaque = False
        try:
            for holder in holders:
                outer = self.here[holder.layer]
                try:
                    own, status, mode = enter(outer, name, 0o500)
                except OSError as error:
                    if not parts or error.errno not in SWAPPED:
                        raise
                    if error.errno == errno.ENOENT:
                        continue
                    opaque = True  # a whiteout or another non-directory
                    break
                opened.append(own)
                parts.append(_Part(holder.layer, (status.st_dev, status.st_ino), outer, holder.identity, mode))
                looks.append((status, beneath.xattrs_of(own)))
                marked = looks[-1][1].get(self.prefix + "opaque")
                parts[-1].whiteouts_by_attribute = marked == b"x"
                if marked == b"y":
                    opaque = True
                    break
            for part, own in zip(parts, opened, strict=True):
                self.here[part.layer] = own
            level = self._list(parts)
        except BaseException:
            for part, own in zip(parts, opened, strict=True):
                self.here[part.layer] = part.outer
                _close(own, part.mode)
            raise
        status, attributes = looks[0]
        entry = Merged(name, len(self.levels) - 1, status, parts[0].outer, attributes, False, opened[0], opaque, level.names)
        self.levels.append(level)
        return entry, self._keep(parts)

    def _keep(self, parts: list[_Part]) -> list[int]:
        """Keep the descriptors of the outer directories; if too many are open, return them to be closed."""
        if self.kept + len(parts) <= _KEPT:
            self.kept += len(parts)
            return []
        outer = [part.outer for part in parts]
        for part in parts:
            part.outer = -1
        return outer

    def _leave(self) -> None:
        """Go up from the innermost directory in every layer that has a part of it."""
        level = self.levels.pop()
        waiting = list(level.parts)
        try:
            while waiting:
                part = waiting.pop()
                current, self.here[part.layer] = self.here[part.layer], part.outer
                try:
                    if part.outer >= 0:
                        self.kept -= 1
                    elif part.above is not None:
                        self.here[part.layer] = parent(current, part.above)
                finally:
                    _close(current, part.mode)
        except BaseException:
            # The way up is lost. `close` closes the current descriptors; close here the outer ones of the remaining layers and levels.
            for lost in (*waiting, *(each for above in self.levels for each in above.parts)):
                if lost.outer >= 0:
                    os.close(lost.outer)
            self.levels.clear()
            raise

    def _list(self, parts: list[_Part]) -> _Level:
        holders: dict[str, list[_Part]] = {}
        for part in parts:
            part.types = beneath.names(self.here[part.layer], limit=self.left)
            self.left -= len(part.types)
            if len(parts) == 1:
                return _Level(parts, sorted(part.types, reverse=True))
            for name in part.types:
                holders.setdefault(name, []).append(part)
        return _Level(parts, sorted(holders, reverse=True), holders)


def _close(directory: int, mode: int | None) -> None:
    try:
        if mode is not None:
            os.fchmod(directory, mode)
    finally:
        os.close(directory)
