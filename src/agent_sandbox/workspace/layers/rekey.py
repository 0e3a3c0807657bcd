"""Move the layer of a tree to a key of its own: a view that shows a frozen project has overlays that other views have not."""

from __future__ import annotations

import os
import stat

from agent_sandbox.kernel.mount_plan import quote_target
from agent_sandbox.policy.paths import contains
from agent_sandbox.workspace.durable import explained
from agent_sandbox.workspace.layers.history import layer_targets

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OPAQUE = ("user.overlay.opaque", "trusted.overlay.opaque")


def rekey(generation: int, tree: str) -> bool:
    """Let a tree, such as the project, be an overlay of its own in a generation of layers that another view wrote.

    Call it before anything runs on the generation. Returns False, and moves nothing, if the layers have removed or replaced the tree itself
    or a directory above it: then an overlay would show again what they hide.
    """
    with explained(f"prepare the layers of {tree!r}"):
        for target in layer_targets(generation):
            if target != tree and contains(target, tree):
                names = tree[len(target.rstrip("/")) + 1 :].split("/")
                if not _moved(generation, [quote_target(target), "upper"], names, tree):
                    return False
    return True


def _moved(generation: int, above: list[str], names: list[str], tree: str) -> bool:
    fd = os.dup(generation)
    try:
        for number, name in enumerate((*above, *names)):
            try:
                status = os.stat(name, dir_fd=fd, follow_symlinks=False)
            except FileNotFoundError:
                return True  # the layers hold nothing there
            if not stat.S_ISDIR(status.st_mode):
                return False
            outer, fd = fd, os.open(name, _DIRECTORY, dir_fd=fd)
            last = number == len(above) + len(names) - 1
            try:
                if number >= len(above) and _is_opaque(fd):
                    return False
                if last:
                    _move(outer, name, generation, tree)
            finally:
                os.close(outer)
    finally:
        os.close(fd)
    return True


def _is_opaque(fd: int) -> bool:
    for name in _OPAQUE:
        try:
            if os.getxattr(fd, name):
                return True
        except OSError:
            continue
    return False


def _move(parent: int, name: str, generation: int, tree: str) -> None:
    key = quote_target(tree)
    os.mkdir(key, 0o700, dir_fd=generation)
    home = os.open(key, _DIRECTORY, dir_fd=generation)
    try:
        with open(os.open("target", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=home), "wb") as file:
            file.write(os.fsencode(tree))  # the key of a long target is a digest
        os.rename(name, "upper", src_dir_fd=parent, dst_dir_fd=home)
    finally:
        os.close(home)
