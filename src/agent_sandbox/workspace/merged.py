"""Walk several layers as the one tree that overlay makes of them.

The rules are the kernel's own: the uppermost layer that has a name decides what it is; a whiteout says that nothing is there; directories
of the same name become one, from the top down, until a whiteout, something that is no directory, or a directory marked opaque ends it.
Marks are believed only under the prefix of this mount, because a guest can set all others.

What `beneath` says of a single tree holds here for each layer: one descriptor goes down and up again, and going up is believed only if it
arrives where it came from. A layer that does not have a directory waits at the last one it has, so however deep the tree is, there is
one descriptor for each layer.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

from agent_sandbox.workspace import beneath
from agent_sandbox.workspace.beneath import SWAPPED, enter, identity, parent


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
    own: int | None = None  # of a directory: itself in that layer; None when it cannot be entered
    opaque: bool = False  # of a directory: nothing below the layers shows through
    names: Sequence[str] = ()  # of a directory: what is in it, whiteouts too


@dataclass(slots=True)
class _Part:
    """What one layer contributes to a merged directory."""

    layer: int
    identity: tuple[int, int]
    above: tuple[int, int] | None = None  # of the directory it was entered from
    mode: int | None = None  # to be put back
    whiteouts_by_attribute: bool = False


@dataclass(slots=True)
class _Level:
    parts: list[_Part]
    names: list[str] = field(default_factory=list)
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

    def walk(self) -> Generator[Merged, None, None]:
        levels, here = self.levels, self.here
        top = [_Part(layer, identity(fd), whiteouts_by_attribute=mark(fd, self.prefix) == b"x") for layer, fd in enumerate(here)]
        levels.append(self._list(top))
        while levels:
            level = levels[-1]
            if not level.names:
                self._leave()
                continue
            name = level.names.pop()
            holders = level.parts if level.holders is None else level.holders[name]
            for part in holders:
                directory = here[part.layer]
                try:
                    status = os.stat(name, dir_fd=directory, follow_symlinks=False)
                    attributes = beneath.xattrs(directory, name)
                    break
                except FileNotFoundError:
                    continue  # gone meanwhile: the next layer decides
            else:
                continue
            entry = Merged(name, len(levels) - 1, status, directory, attributes)
            if not stat.S_ISDIR(status.st_mode):
                entry.whiteout = self._is_whiteout(part, status, attributes)
                yield entry
                continue
            try:
                outer = self._enter(entry, holders[holders.index(part) :])
            except OSError as error:
                if error.errno in SWAPPED and self.left > 0:
                    level.names.append(name)
                    self.left -= 1
                    continue
                yield entry
                continue
            try:
                yield entry
            finally:
                for fd in outer:
                    os.close(fd)

    def close(self) -> None:
        """Go up to the top, putting modes back. Afterwards no descriptor is left."""
        try:
            while self.levels:
                self._leave()
        finally:
            for fd in self.here:
                if fd >= 0:
                    os.close(fd)

    def _enter(self, entry: Merged, holders: list[_Part]) -> list[int]:
        """Go down into a directory in each layer that has a part in it. Returns the descriptors of where we were, still open."""
        parts: list[_Part] = []
        opened: list[int] = []
        try:
            for holder in holders:
                try:
                    own, status, mode = enter(self.here[holder.layer], entry.name, 0o500)
                except OSError as error:
                    if not parts or error.errno not in SWAPPED:
                        raise
                    if error.errno == errno.ENOENT:
                        continue
                    entry.opaque = True  # a whiteout, or something else that is no directory
                    break
                opened.append(own)
                if not parts:
                    entry.own, entry.status = own, status
                marked = mark(own, self.prefix)
                parts.append(_Part(holder.layer, (status.st_dev, status.st_ino), holder.identity, mode, marked == b"x"))
                if marked == b"y":
                    entry.opaque = True
                    break
            outer = [self.here[part.layer] for part in parts]
            for part, own in zip(parts, opened, strict=True):
                self.here[part.layer] = own
            try:
                level = self._list(parts)
            except BaseException:
                for part, fd in zip(parts, outer, strict=True):
                    self.here[part.layer] = fd
                raise
        except BaseException:
            for part, own in zip(parts, opened, strict=True):
                _close(own, part.mode)
            raise
        self.levels.append(level)
        entry.names = level.names
        return outer

    def _leave(self) -> None:
        """Go up from the innermost directory in every layer that has a part in it."""
        level = self.levels.pop()
        try:
            for part in level.parts:
                current = self.here[part.layer]
                self.here[part.layer] = -1
                try:
                    if part.above is not None:
                        self.here[part.layer] = parent(current, part.above)
                finally:
                    _close(current, part.mode)
        except BaseException:
            self.levels.clear()
            raise

    def _list(self, parts: list[_Part]) -> _Level:
        if len(parts) == 1:
            return _Level(parts, sorted(self._names(parts[0]), reverse=True))
        holders: dict[str, list[_Part]] = {}
        for part in parts:
            for name in self._names(part):
                holders.setdefault(name, []).append(part)
        return _Level(parts, sorted(holders, reverse=True), holders)

    def _names(self, part: _Part) -> list[str]:
        names = beneath.names(self.here[part.layer], limit=self.left)
        self.left -= len(names)
        return names

    def _is_whiteout(self, part: _Part, status: os.stat_result, attributes: dict[str, bytes]) -> bool:
        if stat.S_ISCHR(status.st_mode):
            return status.st_rdev == 0
        empty_file = stat.S_ISREG(status.st_mode) and status.st_size == 0
        return empty_file and part.whiteouts_by_attribute and self.prefix + "whiteout" in attributes


def _close(directory: int, mode: int | None) -> None:
    try:
        if mode is not None:
            os.fchmod(directory, mode)
    finally:
        os.close(directory)
