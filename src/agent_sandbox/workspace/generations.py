"""The directory of a sandbox's generations, opened: make one, open those that make up a state, remove those that nothing refers to.

It is the top of an image, or a directory on disk. What is removed is first moved aside in one step, so a crash leaves a whole generation
or none under its number.
"""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress

from agent_sandbox.kernel import syscalls
from agent_sandbox.workspace.history import History, garbage
from agent_sandbox.workspace.image import TRASH
from agent_sandbox.workspace.removal import remove_tree
from agent_sandbox.workspace.stack import Stack

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
