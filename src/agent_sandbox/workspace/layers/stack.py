"""The stack: the layers of a sandbox, read as one tree. A run's own layer is on top, over the layers that snapshots froze.

A generation is a directory that holds `<key>/upper` for each overlay (see `layers.history`); the newest comes first. Rendering, comparing
and promoting read layers through a `Stack`, never by path, so they get what the guest saw. `stacked`, `new_generation` and `tidy` open,
create and remove generations.

`walk_layers` walks several layers as the one tree that overlayfs makes of them, by the kernel's own rules. The uppermost layer that has a
name decides its type. A whiteout means that nothing is there. Directories of the same name are merged from the top down, until a whiteout,
a non-directory or a directory marked opaque ends the merge. Marks count only under the prefix of this mount, because a guest can set all
others.

The guarantees of `beneath` hold for each layer: one descriptor goes down and up again, and a step up is accepted only if it arrives at the
directory that the step down left. A layer that lacks the current directory stays at the deepest directory on the way that it has. However
deep the tree, there is one descriptor per layer. A bounded number of outer directories stay open too, which makes steps up faster.
"""

from __future__ import annotations

import errno
import math
import os
import stat
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

from agent_sandbox._fast.values import dataclass, field
from agent_sandbox.errors import WorkspaceError
from agent_sandbox.kernel import syscalls
from agent_sandbox.kernel.mount_plan import quote_target
from agent_sandbox.workspace import beneath
from agent_sandbox.workspace.beneath import SWAPPED, enter, identity, parent, remove_tree
from agent_sandbox.workspace.changes import Change
from agent_sandbox.workspace.layers.history import History, garbage, layer_targets
from agent_sandbox.workspace.layers.image import TRASH

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NOT_OURS_TO_OPEN = (errno.EACCES, errno.EPERM, errno.EXDEV)  # EXDEV: a mount
_MOST_KEPT = 64  # descriptors of outer directories, all layers together
Skip = Callable[[str, int], bool]  # whether to skip the file of this name, at this depth


class Stack:
    """Opened generations, uppermost first. A context manager, and `changes.Contents`. Not thread-safe.

    `userxattr` says whether the overlays are mounted with that option; `owner_shift` is the offset of the owner ids in the layers.
    `numbers` are the numbers of the generations, if they belong to a stored sandbox.
    """

    def __init__(self, generations: tuple[int, ...], *, userxattr: bool, owner_shift: int = 0, numbers: tuple[int, ...] = ()) -> None:
        self._generations = generations
        self.numbers = numbers
        self.userxattr = userxattr
        self.owner_shift = owner_shift
        self.prefix = "user.overlay." if userxattr else "trusted.overlay."
        self.targets = tuple(sorted({target for generation in generations for target in layer_targets(generation)}))
        self._open: tuple[str, str] | None = None  # target and directory of the last call: files come directory by directory
        self._parts: list[int] = []

    @classmethod
    def of(cls, generations: Sequence[int], *, userxattr: bool, owner_shift: int = 0, numbers: tuple[int, ...] = ()) -> Stack:
        """Return the stack of these open generations. The stack duplicates the descriptors; the caller closes its own."""
        with ExitStack() as undo:
            own: list[int] = []
            for generation in generations:
                own.append(os.dup(generation))
                undo.callback(os.close, own[-1])
            stack = cls(tuple(own), userxattr=userxattr, owner_shift=owner_shift, numbers=numbers)
            undo.pop_all()
        return stack

    def __enter__(self) -> Stack:
        return self

    def __exit__(self, *ended: object) -> None:
        self._forget()
        for fd in self._generations:
            os.close(fd)
        self._generations = ()

    def uppers(self, target: str) -> list[int]:
        """Open the upper directories of the overlay at `target`. The caller closes them. Raises `WorkspaceError` if one is damaged."""
        key = quote_target(target)
        uppers: list[int] = []
        try:
            for generation in self._generations:
                upper = _open_upper(generation, key, target)
                if upper is not None:
                    uppers.append(upper)
        except BaseException:
            _close_all(uppers)
            raise
        return uppers

    @property
    def blank(self) -> bool:
        """Whether no layer has an entry: nothing was changed. Raises `WorkspaceError` if a layer is damaged."""
        return not any(self._holds_something(target) for target in self.targets)

    def _holds_something(self, target: str) -> bool:
        uppers = self.uppers(target)
        try:
            for upper in uppers:
                with os.scandir(upper) as entries:
                    if next(entries, None) is not None:
                        return True
            return False
        except OSError:  # whoever reads it says why it cannot be read
            return True
        finally:
            _close_all(uppers)

    def walk(self, target: str, *, limit: int = beneath.ENTRY_LIMIT, skip: Skip | None = None) -> Generator[LayerEntry, None, None]:
        """Yield the merged entries of all layers of the overlay at `target`; see `walk_layers`."""
        uppers = self.uppers(target)
        try:
            yield from walk_layers(uppers, self.prefix, limit=limit, skip=skip)
        finally:
            _close_all(uppers)

    def open_file(self, change: Change) -> int:
        """Open a changed file as the guest last saw it. Raises OSError unless it is a regular file in these layers."""
        relative = change.path.removeprefix(change.target.rstrip("/"))
        where, _, name = relative.lstrip("/").rpartition("/")
        if not relative.startswith("/"):
            raise OSError(errno.EINVAL, "not below its overlay", change.path)
        if self._open != (change.target, where):
            self._forget()
            self._parts = self._resolve(change.target, where)
            self._open = (change.target, where)
        for part in self._parts:
            try:
                return beneath.open_seen_file(part, name)[0]
            except FileNotFoundError:
                continue
            except PermissionError:
                return beneath.open_file(part, name, unlock=True)
        raise FileNotFoundError(errno.ENOENT, "not in the layers of this sandbox", change.path)

    def _forget(self) -> None:
        _close_all(self._parts)
        self._open, self._parts = None, []

    def _resolve(self, target: str, where: str) -> list[int]:
        """Open each layer's part of the merged directory `where` in the overlay at `target`, by the rules of `walk_layers`."""
        parts = self.uppers(target)
        while where and parts:
            name, _, rest = (where, "", "") if len(parts) == 1 else where.partition("/")  # in a single layer, marks do not matter
            outer = parts
            try:
                parts = self._below(outer, name)
            finally:
                _close_all(outer)
            where = rest
        return parts

    def _below(self, parts: list[int], name: str) -> list[int]:
        directories: list[int] = []
        try:
            for part in parts:
                try:
                    directories.append(beneath.open_beneath(part, name, os.O_PATH | os.O_DIRECTORY))
                except OSError as error:
                    if error.errno == errno.ENOENT:
                        continue
                    if error.errno in beneath.SWAPPED:
                        break  # a whiteout or another non-directory
                    raise
                if mark(f"/proc/self/fd/{directories[-1]}", self.prefix) == b"y":
                    break
        except BaseException:
            _close_all(directories)
            raise
        return directories


def _open_upper(generation: int, key: str, target: str) -> int | None:
    try:
        return beneath.open_directory(generation, f"{key}/upper")
    except OSError as error:
        # A run killed while it made the layer leaves the empty directory, or nothing. Then nothing was written to it.
        if error.errno == errno.ENOENT and not _holds_anything(generation, key):
            return None
        raise WorkspaceError(
            f"the layer of this sandbox over {target!r} is damaged: {error.strerror}",
            hint="go back to a snapshot that does not need it, or drop the sandbox with agent-sandbox reset",
        ) from error


def _holds_anything(generation: int, key: str) -> bool:
    try:
        directory = beneath.open_directory(generation, key)
    except FileNotFoundError:
        return False
    try:
        return bool(os.listdir(directory))
    finally:
        os.close(directory)


def _close_all(descriptors: list[int]) -> None:
    for fd in descriptors:
        os.close(fd)


@contextmanager
def stacked(top: int, numbers: tuple[int, ...], *, userxattr: bool, owner_shift: int) -> Iterator[Stack]:
    """Open the stack of these generations, uppermost first, for a block. A missing generation counts as empty."""
    with ExitStack() as opened:
        generations: list[int] = []
        for number in numbers:
            with suppress(FileNotFoundError):
                generations.append(os.open(str(number), _DIRECTORY, dir_fd=top))
                opened.callback(os.close, generations[-1])
        yield opened.enter_context(Stack.of(generations, userxattr=userxattr, owner_shift=owner_shift, numbers=numbers))


@contextmanager
def new_generation(top: int, number: int) -> Iterator[int]:
    """Create an empty generation for the block to fill, and sync it at the end. An old generation of this number goes to the trash."""
    _move_aside(top, str(number))
    os.mkdir(str(number), 0o700, dir_fd=top)
    generation = os.open(str(number), _DIRECTORY, dir_fd=top)
    try:
        yield generation
        syscalls.syncfs(generation)
    finally:
        os.close(generation)


def tidy(top: int, history: History, *, until: float = math.inf) -> None:
    """Remove unreferenced generations until the time `until` (monotonic clock). The rest waits in the trash for the next call.

    Raises `WorkspaceError` when something cannot be removed.
    """
    for name in garbage(history, os.listdir(top)):
        _move_aside(top, name)
    try:
        trash = os.open(TRASH, _DIRECTORY, dir_fd=top)
    except FileNotFoundError:
        return
    try:
        for name in os.listdir(trash):
            if not remove_tree(trash, name, until=until):
                return
    finally:
        os.close(trash)


def _move_aside(top: int, name: str) -> None:
    with suppress(FileExistsError):
        os.mkdir(TRASH, 0o700, dir_fd=top)
    number = 0
    while True:
        try:
            os.rename(name, f"{TRASH}/{name}.{number}", src_dir_fd=top, dst_dir_fd=top)
            return
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            number += 1  # an earlier one is still in the trash


@dataclass(slots=True)
class LayerEntry:
    """One entry of the merged tree, as it is in the uppermost layer that has it.

    `directory` is a descriptor of the entry's directory in that layer. Descriptors and `names` are valid until the walk yields the next
    entry.
    """

    name: str
    depth: int
    status: os.stat_result
    directory: int
    attributes: dict[str, bytes]  # including those that the overlay set for itself
    whiteout: bool = False
    own: int | None = None  # a directory or regular file, open in that layer; None when it may not be opened
    opaque: bool = False  # for a directory: nothing below the layers shows through
    names: Sequence[str] = ()  # for a directory: its entries, including whiteouts


@dataclass(slots=True)
class _Part:
    """The part of a merged directory that is in one layer."""

    layer: int
    identity: tuple[int, int]
    outer: int = -1  # descriptor of the parent directory; -1 if that was closed
    above: tuple[int, int] | None = None  # identity of that directory; None at the top
    mode: int | None = None  # restored on leaving
    whiteouts_by_attribute: bool = False
    types: dict[str, int] = field(default_factory=dict)  # its entries, as `beneath.names` returns them


@dataclass(slots=True)
class _Level:
    parts: list[_Part]
    names: list[str]
    holders: dict[str, list[_Part]] | None = None  # the parts that have each name; None when there is only one part


def walk_layers(
    uppers: Sequence[int], prefix: str, *, limit: int = beneath.ENTRY_LIMIT, skip: Skip | None = None
) -> Generator[LayerEntry, None, None]:
    """Yield every entry of the tree that overlayfs would merge from these directories, given uppermost first.

    A directory comes before its contents; names are sorted. Whiteouts are included. Directories that their owner may not read are made
    readable while the walk is in them. A regular file that `skip` accepts is neither opened nor yielded. Raises `TooMany` after `limit`
    entries, and `MovedAway` when a directory is moved away during the walk.
    """
    walker = _Walker(prefix, [os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=upper) for upper in uppers], limit, skip)
    try:
        yield from walker.walk()
    finally:
        walker.close()


def mark(directory: int | str, prefix: str) -> bytes:
    """Return the overlay's mark on a directory: b"y" if it is opaque, b"x" if attributes mark whiteouts in it, else b""."""
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
    skip: Skip | None
    levels: list[_Level] = field(default_factory=list)
    kept: int = 0  # descriptors of outer directories

    def walk(self) -> Generator[LayerEntry, None, None]:
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

    def _take(self, level: _Level, name: str) -> tuple[LayerEntry | None, Sequence[int]]:
        """Return the entry of a name, and descriptors to close after use.

        The entry is None if it has gone. It is also None if the entry was swapped meanwhile: then the name is put back and taken again
        later.
        """
        holders = level.parts if level.holders is None else level.holders[name]
        part, closed = holders[0], False
        kind = part.types[name]
        if kind:
            if self.skip is not None and kind == stat.S_IFREG and self.skip(name, len(self.levels) - 1):
                return None, ()
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
        return LayerEntry(name, len(self.levels) - 1, status, directory, attributes, whiteout), ()

    def _open(self, part: _Part, name: str) -> tuple[LayerEntry, Sequence[int]]:
        directory = self.here[part.layer]
        own, status = beneath.open_seen_file(directory, name)
        try:
            attributes = beneath.xattrs_of(own)
        except BaseException:
            os.close(own)
            raise
        whiteout = part.whiteouts_by_attribute and status.st_size == 0 and self.prefix + "whiteout" in attributes
        return LayerEntry(name, len(self.levels) - 1, status, directory, attributes, whiteout, own), (own,)

    def close(self) -> None:
        """Leave all directories, restore their modes, and close all descriptors."""
        try:
            while self.levels:
                self._leave()
        finally:
            for fd in self.here:
                if fd >= 0:
                    os.close(fd)

    def _enter(self, name: str, holders: list[_Part]) -> tuple[LayerEntry, Sequence[int]]:
        """Go down into a directory in each layer that has it. Return the directory's entry, and descriptors to close after use."""
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
        entry = LayerEntry(name, len(self.levels) - 1, status, parts[0].outer, attributes, False, opened[0], opaque, level.names)
        self.levels.append(level)
        return entry, self._keep(parts)

    def _keep(self, parts: list[_Part]) -> list[int]:
        """Keep the descriptors of the parent directories open. If too many are open already, return them for the caller to close."""
        if self.kept + len(parts) <= _MOST_KEPT:
            self.kept += len(parts)
            return []
        outer = [part.outer for part in parts]
        for part in parts:
            part.outer = -1
        return outer

    def _leave(self) -> None:
        """Go up from the innermost directory, in every layer that has it."""
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
