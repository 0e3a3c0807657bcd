"""Walk several layers as the one tree that overlay makes of them.

The rules are the kernel's own: the uppermost layer that has a name decides what it is; a whiteout says that nothing is there; directories
of the same name become one, from the top down, until a whiteout, something that is no directory, or a directory marked opaque ends it.
Marks are believed only under the prefix of this mount, because a guest can set all others.

What `beneath` says of a single tree holds here for each layer: one descriptor goes down and up again, and going up is believed only if it
arrives where it came from. A layer that does not have a directory waits at the last one it has. However deep the tree is, there is one
descriptor for each layer, and some more that spare the way up in trees of a common depth.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

from agent_sandbox.workspace import beneath
from agent_sandbox.workspace.beneath import SWAPPED, enter, identity, parent

_NOT_OURS_TO_OPEN = (errno.EACCES, errno.EPERM, errno.EXDEV)  # a mount, too
_KEPT = 64  # descriptors of outer directories, of all layers together


@dataclass(slots=True)
class Merged:
    """One name of the merged tree, as its uppermost layer has it. `directory` is the descriptor of what holds it there.

    Descriptors and `names` are good until the next entry is taken.
    """

    name: str
    depth: int
    status: os.stat_result
    directory: int
    attributes: dict[str, bytes]  # with the overlay's own
    whiteout: bool = False
    own: int | None = None  # of a directory or a regular file: itself in that layer; None when it may not be opened
    opaque: bool = False  # of a directory: nothing below the layers shows through
    names: Sequence[str] = ()  # of a directory: what is in it, whiteouts too


@dataclass(slots=True)
class _Part:
    """What one layer contributes to a merged directory."""

    layer: int
    identity: tuple[int, int]
    outer: int = -1  # descriptor of the directory it was entered from, unless that had to be given up
    above: tuple[int, int] | None = None  # what that is; None at the top
    mode: int | None = None  # to be put back
    whiteouts_by_attribute: bool = False
    types: dict[str, int] = field(default_factory=dict)  # what is in it, as `beneath.names` tells it


@dataclass(slots=True)
class _Level:
    parts: list[_Part]
    names: list[str]
    holders: dict[str, list[_Part]] | None = None  # which layers have a name; None when there is only one part


def walk(uppers: Sequence[int], prefix: str, *, limit: int = beneath.ENTRY_LIMIT) -> Generator[Merged, None, None]:
    """Everything in the merged tree of these directories, uppermost first: each directory before what is in it, in the order of names.

    Whiteouts are given too. Directories that their owner may not read are made readable while the walk is in them. Raises `TooMany` after
    `limit` entries, and `Moved` when a directory is moved away under us.
    """
    walker = _Walker(prefix, [os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=upper) for upper in uppers], limit)
    try:
        yield from walker.walk()
    finally:
        walker.close()


def mark(directory: int | str, prefix: str) -> bytes:
    """What the overlay of this mount has marked a directory with: b"y" is opaque, b"x" has whiteouts by attribute in it."""
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
    here: list[int]  # a descriptor for each layer, as deep as that layer has what we are in
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
        """What a name is, and descriptors to close after that. None when it has gone, or is to be looked at again."""
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
            if level.holders is not None and len(holders) > 1:  # the next layer decides
                level.holders[name] = holders[1:]
                level.names.append(name)
            return None, ()
        kind = stat.S_IFMT(status.st_mode)
        if kind in (stat.S_IFREG, stat.S_IFDIR) and not closed and self.left > 0:  # it is being swapped
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
        """Go up to the top, putting modes back. Afterwards no descriptor is left."""
        try:
            while self.levels:
                self._leave()
        finally:
            for fd in self.here:
                if fd >= 0:
                    os.close(fd)

    def _enter(self, name: str, holders: list[_Part]) -> tuple[Merged, Sequence[int]]:
        """Go down into a directory in each layer that has a part in it. Returns what it is, and descriptors to close after that."""
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
                    opaque = True  # a whiteout, or something else that is no directory
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
        """Keep the descriptors of where we came from, or, when that are many already, give them back to be closed."""
        if self.kept + len(parts) <= _KEPT:
            self.kept += len(parts)
            return []
        outer = [part.outer for part in parts]
        for part in parts:
            part.outer = -1
        return outer

    def _leave(self) -> None:
        """Go up from the innermost directory in every layer that has a part in it."""
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
            # The way up is lost. `close` closes what is current; here, what was kept of the layers not yet reached and further up.
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
