"""The stack: the layers of a sandbox as one. A run's own layer is on top, over those that snapshots froze.

A generation is a directory that holds `<key>/upper` for each overlay (see `layers.names`); the newest comes first. Rendering, comparing and
promoting read layers through a `Stack`, never by path, so they get what the guest saw. `stacked`, `made` and `tidy` open, create and remove
generations.
"""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from types import TracebackType

from agent_sandbox.errors import WorkspaceError
from agent_sandbox.kernel import syscalls
from agent_sandbox.workspace import beneath
from agent_sandbox.workspace.changes import Change
from agent_sandbox.workspace.layers import overlay_tree
from agent_sandbox.workspace.layers.history import History, garbage
from agent_sandbox.workspace.layers.image import TRASH
from agent_sandbox.workspace.layers.names import layer_targets, quote_target
from agent_sandbox.workspace.layers.overlay_tree import Merged
from agent_sandbox.workspace.removal import remove_tree

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Stack:
    """Opened generations, uppermost first. A context manager, and `changes.Contents`. Not thread-safe.

    `userxattr` says how the overlays are mounted; `owner_shift` is the offset of the owner ids in the layers.
    """

    def __init__(self, generations: tuple[int, ...], *, userxattr: bool, owner_shift: int = 0) -> None:
        self._generations = generations
        self.userxattr = userxattr
        self.owner_shift = owner_shift
        self.prefix = "user.overlay." if userxattr else "trusted.overlay."
        self.targets = tuple(sorted({target for generation in generations for target in layer_targets(generation)}))
        self._open: tuple[str, str] | None = None  # target and directory of the last call: files come directory by directory
        self._parts: list[int] = []

    @classmethod
    def of(cls, generations: Sequence[int], *, userxattr: bool, owner_shift: int = 0) -> Stack:
        """Return the stack of these descriptors. They are duplicated: the caller closes its own, closing the stack closes the copies."""
        with ExitStack() as undo:
            own: list[int] = []
            for generation in generations:
                own.append(os.dup(generation))
                undo.callback(os.close, own[-1])
            stack = cls(tuple(own), userxattr=userxattr, owner_shift=owner_shift)
            undo.pop_all()
        return stack

    def __enter__(self) -> Stack:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._forget()
        for fd in self._generations:
            os.close(fd)
        self._generations = ()

    def uppers(self, target: str) -> list[int]:
        """Open the upper directories of an overlay, for the caller to close. Raises `WorkspaceError` when one is damaged."""
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

    def walk(self, target: str, *, limit: int = beneath.ENTRY_LIMIT) -> Generator[Merged, None, None]:
        """Yield the merged entries in the layers of an overlay: see `overlay_tree.walk`."""
        uppers = self.uppers(target)
        try:
            yield from overlay_tree.walk(uppers, self.prefix, limit=limit)
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
                return beneath.open_file(part, name, unlock=True)
            except FileNotFoundError:
                continue
        raise FileNotFoundError(errno.ENOENT, "not in the layers of this sandbox", change.path)

    def _forget(self) -> None:
        _close_all(self._parts)
        self._open, self._parts = None, []

    def _resolve(self, target: str, where: str) -> list[int]:
        """Open the directories that make up a merged one, by the rules of `overlay_tree`."""
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
                if overlay_tree.mark(f"/proc/self/fd/{directories[-1]}", self.prefix) == b"y":
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
def stacked(top: int, numbers: Iterable[int], *, userxattr: bool, owner_shift: int) -> Iterator[Stack]:
    """Open the stack of these generations, uppermost first, for a block. A missing generation counts as empty."""
    with ExitStack() as opened:
        generations: list[int] = []
        for number in numbers:
            with suppress(FileNotFoundError):
                generations.append(os.open(str(number), _DIRECTORY, dir_fd=top))
                opened.callback(os.close, generations[-1])
        yield opened.enter_context(Stack.of(generations, userxattr=userxattr, owner_shift=owner_shift))


@contextmanager
def made(top: int, number: int) -> Iterator[int]:
    """Create an empty generation for the block to fill, and sync it at the end. A leftover with its number is moved to the trash."""
    _move_aside(top, str(number))
    os.mkdir(str(number), 0o700, dir_fd=top)
    generation = os.open(str(number), _DIRECTORY, dir_fd=top)
    try:
        yield generation
        syscalls.syncfs(generation)
    finally:
        os.close(generation)


def tidy(top: int, history: History, *, until: float = math.inf) -> None:
    """Remove unreferenced generations until the time `until`; the rest waits in the trash for the next call.

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
