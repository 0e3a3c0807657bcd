"""The layers of a sandbox, seen as one: a run's own, and below it those that snapshots froze.

A generation is a directory that holds `<key>/upper` for each overlay (see `layers`); the newest comes first. Whoever renders, compares or
promotes asks here and never by path, so that what they get is what the guest saw.
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


class Stack:
    """Opened generations, uppermost first. A context manager, and `changes.Contents`. Not for two threads at once.

    `userxattr` says how the overlays are mounted; `owner_shift` is what the ids in the layers are moved by.
    """

    def __init__(self, generations: tuple[int, ...], *, userxattr: bool, owner_shift: int = 0) -> None:
        self._generations = generations
        self.userxattr = userxattr
        self.owner_shift = owner_shift
        self.prefix = "user.overlay." if userxattr else "trusted.overlay."
        self.targets = tuple(sorted({target for generation in generations for target in layer_targets(generation)}))
        self._open: tuple[str, str] | None = None  # target and directory that were asked for last: files come directory by directory
        self._parts: list[int] = []

    @classmethod
    def of(cls, generations: Sequence[int], *, userxattr: bool, owner_shift: int = 0) -> Stack:
        """The stack of these descriptors. They are duplicated: the caller closes its own, and closing the stack closes ours."""
        with ExitStack() as undo:
            own: list[int] = []
            for generation in generations:
                own.append(os.dup(generation))
                undo.callback(os.close, own[-1])
            made = cls(tuple(own), userxattr=userxattr, owner_shift=owner_shift)
            undo.pop_all()
        return made

    def __enter__(self) -> Stack:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._forget()
        for fd in self._generations:
            os.close(fd)
        self._generations = ()

    def uppers(self, target: str) -> list[int]:
        """The top directories of the layers of an overlay, for the caller to close. Raises `WorkspaceError` when one is damaged."""
        key = quote_target(target)
        found: list[int] = []
        try:
            for generation in self._generations:
                upper = _open_upper(generation, key, target)
                if upper is not None:
                    found.append(upper)
        except BaseException:
            _close_all(found)
            raise
        return found

    def walk(self, target: str, *, limit: int = beneath.ENTRY_LIMIT) -> Generator[Merged, None, None]:
        """Everything that the layers of an overlay hold, merged: see `merged.walk`."""
        uppers = self.uppers(target)
        try:
            yield from overlay_tree.walk(uppers, self.prefix, limit=limit)
        finally:
            _close_all(uppers)

    def open_file(self, change: Change) -> int:
        """A descriptor to read a changed file as the guest last saw it. Raises OSError for what is no regular file of these layers."""
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
        """The directories that make up a merged one, by the rules of `merged`."""
        parts = self.uppers(target)
        while where and parts:
            name, _, rest = (where, "", "") if len(parts) == 1 else where.partition("/")  # in a single layer marks do not matter
            outer = parts
            try:
                parts = self._below(outer, name)
            finally:
                _close_all(outer)
            where = rest
        return parts

    def _below(self, parts: list[int], name: str) -> list[int]:
        found: list[int] = []
        try:
            for part in parts:
                try:
                    found.append(beneath.open_beneath(part, name, os.O_PATH | os.O_DIRECTORY))
                except OSError as error:
                    if error.errno == errno.ENOENT:
                        continue
                    if error.errno in beneath.SWAPPED:
                        break  # a whiteout, or something else that is no directory
                    raise
                if overlay_tree.mark(f"/proc/self/fd/{found[-1]}", self.prefix) == b"y":
                    break
        except BaseException:
            _close_all(found)
            raise
        return found


def _open_upper(generation: int, key: str, target: str) -> int | None:
    try:
        return beneath.open_directory(generation, f"{key}/upper")
    except OSError as error:
        # Killed while it was being made, there is only the empty directory, or nothing: then nobody has written to it either.
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


_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@contextmanager
def stacked(top: int, numbers: Iterable[int], *, userxattr: bool, owner_shift: int) -> Iterator[Stack]:
    """The stack of these generations, uppermost first. One that is not there has nothing in it."""
    with ExitStack() as opened:
        found: list[int] = []
        for number in numbers:
            with suppress(FileNotFoundError):
                found.append(os.open(str(number), _DIRECTORY, dir_fd=top))
                opened.callback(os.close, found[-1])
        yield opened.enter_context(Stack.of(found, userxattr=userxattr, owner_shift=owner_shift))


@contextmanager
def made(top: int, number: int) -> Iterator[int]:
    """A new, empty generation to fill, on the disk at the end of the block. What an abandoned attempt left at its number is moved aside."""
    _move_aside(top, str(number))
    os.mkdir(str(number), 0o700, dir_fd=top)
    generation = os.open(str(number), _DIRECTORY, dir_fd=top)
    try:
        yield generation
        syscalls.syncfs(generation)
    finally:
        os.close(generation)


def tidy(top: int, history: History, *, until: float = math.inf) -> None:
    """Remove what nothing refers to, as far as there is time; the rest stays aside for the next who tidies. Raises `WorkspaceError`."""
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
            number += 1  # an earlier one is still there
