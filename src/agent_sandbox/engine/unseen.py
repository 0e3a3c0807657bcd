"""What earlier runs of a sandbox changed and a run did not see, because its view was made of other trees.

Layers belong to the trees that a view is made of: to the whole machine, or to what `files.allowed` names. A run under other rules has other
layers, and the real files where the earlier ones were changed. That is said, because a program may decide on what it saw.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Collection, Iterable
from contextlib import suppress

from agent_sandbox.workspace.layers.names import layer_targets, quote_target
from agent_sandbox.workspace.view.draft import contains


def unseen(top: int, generations: Iterable[int], shown: Collection[str]) -> tuple[str, ...]:
    """Trees that a view of `shown` trees covers, and in which these generations hold something that it has not. Raises OSError."""
    found: set[str] = set()
    for generation in generations:
        with suppress(FileNotFoundError):
            here = os.open(str(generation), os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=top)
            try:
                for target in layer_targets(here):
                    if target not in shown:
                        found.update(_parts(here, target, shown))
            finally:
                os.close(here)
    return tuple(sorted(found))


def _parts(generation: int, target: str, shown: Collection[str]) -> list[str]:
    """Of one tree that is not shown as such: itself, where another covers it; and those in it that are shown by themselves."""
    upper = f"{quote_target(target)}/upper"
    if any(contains(tree, target) for tree in shown):
        return [target] if _holds(generation, upper) else []
    inner = [tree for tree in shown if contains(target, tree)]
    return [tree for tree in inner if _holds(generation, upper + tree[len(target.rstrip("/")) :])]


def _holds(generation: int, path: str) -> bool:
    """Whether a layer has anything in a directory."""
    from agent_sandbox.workspace import beneath  # slow to load, and nearly all runs of a sandbox are under the same rules

    try:
        directory = beneath.open_directory(generation, path)
    except OSError as error:
        return error.errno in (errno.ENOTDIR, errno.ELOOP)  # a whiteout, or something else that stands in its place
    try:
        return bool(os.listdir(directory))
    finally:
        os.close(directory)
