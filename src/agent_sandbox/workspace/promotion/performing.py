"""Make moves, one after the other, and look each time at what came out of the tree. `taking_back` undoes them."""

from __future__ import annotations

import errno
import os
import stat

from agent_sandbox.kernel.syscalls import RENAME_EXCHANGE, RENAME_NOREPLACE, renameat2
from agent_sandbox.workspace.nodes import EntryType
from agent_sandbox.workspace.promotion.anchor import Anchor, Surprise
from agent_sandbox.workspace.promotion.looks import carried
from agent_sandbox.workspace.promotion.steps import Move, split
from agent_sandbox.workspace.promotion.verifying import glance, is_inode, status_of, surprise, touched
from agent_sandbox.workspace.seen import Seen


def check(move: Move, anchor: Anchor) -> None:
    """Raise `Surprise` if a look at the tree already shows that a move cannot be made. Changes nothing."""
    parent, name = split(move.path)
    directory = anchor.directory(parent)
    status = os.fstat(anchor.directory(move.path)) if move.in_place else status_of(directory, name)
    if words := glance(status, move.old) or touched(directory, name, status, move.old):
        raise Surprise(move.path, words)


def make(move: Move, anchor: Anchor, staging: int) -> None:
    """Make one move and look at what came out. Raises `Surprise` or OSError; it may have been made then, and has to be taken back."""
    if move.in_place:
        assert move.old is not None and move.new is not None
        _adjust(anchor.directory(move.path), move.path, move.old, move.new)
        return
    parent, name = split(move.path)
    directory = anchor.directory(parent)
    try:
        if move.new is None:
            rename(directory, name, staging, move.slot, RENAME_NOREPLACE, move.old)
        elif move.old is None:
            rename(staging, move.slot, directory, name, RENAME_NOREPLACE, move.new)
        else:
            rename(staging, move.slot, directory, name, RENAME_EXCHANGE, move.new, move.old)
    except FileExistsError as error:
        raise Surprise(move.path, "something is there now") from error
    except FileNotFoundError as error:
        raise Surprise(move.path, "it is gone") from error
    if move.new is not None and not is_inode(status_of(directory, name), move.new):
        raise Surprise(move.path, "it was replaced as soon as it was there")
    if move.old is not None and (words := surprise(staging, move.slot, move.old, move.beside)):
        raise Surprise(move.path, words)


def rename(source: int, name: str, target: int, new: str, flags: int, *moved: Seen | None) -> None:
    """Rename; a directory whose owner we are and that we may not write to is opened up meanwhile, since its `..` changes."""
    try:
        renameat2(source, name, target, new, flags)
    except PermissionError:
        opened = [
            (directory, entry, seen)
            for (directory, entry), seen in zip(((source, name), (target, new)), moved, strict=False)
            if seen is not None and seen.node.type is EntryType.DIRECTORY and not seen.node.mode & 0o200
        ]
        if not opened:
            raise
        for directory, entry, seen in opened:
            chmod(directory, entry, seen, seen.node.mode | 0o200)
        try:
            renameat2(source, name, target, new, flags)
        finally:
            for _, _, seen in opened:
                for place, called in ((source, name), (target, new)):
                    chmod(place, called, seen, seen.node.mode)


def chmod(directory: int, name: str, seen: Seen, mode: int) -> None:
    """Set the mode of this very directory, if it has this name."""
    try:
        fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=directory)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return
        raise
    try:
        if is_inode(os.fstat(fd), seen):
            os.chmod(f"/proc/self/fd/{fd}", mode)
    finally:
        os.close(fd)


def _adjust(directory: int, path: str, old: Seen, new: Seen) -> None:
    status = os.fstat(directory)
    if not is_inode(status, old) or stat.S_IMODE(status.st_mode) != old.node.mode:
        raise Surprise(path, "its mode has changed, or it is another directory now")
    dress(directory, new, old)


def dress(directory: int, wanted: Seen, other: Seen) -> None:
    """Give a directory a mode and attributes; those that only the other look has are taken away."""
    for name, value in wanted.node.xattrs.items():
        if carried(name, powers=True) and other.node.xattrs.get(name) != value:
            os.setxattr(directory, name, value)
    for name in other.node.xattrs:
        if carried(name, powers=True) and name not in wanted.node.xattrs:
            try:
                os.removexattr(directory, name)
            except OSError as error:
                if error.errno != errno.ENODATA:
                    raise
    if wanted.node.mode != other.node.mode:
        os.fchmod(directory, wanted.node.mode)
