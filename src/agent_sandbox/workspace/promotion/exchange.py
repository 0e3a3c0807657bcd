"""Make moves, one after the other, and look each time at what came out of the tree. `taking_back` undoes them."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable

from agent_sandbox.kernel.syscalls import RENAME_EXCHANGE, RENAME_NOREPLACE, renameat2
from agent_sandbox.workspace.fingerprint import Seen
from agent_sandbox.workspace.nodes import EntryType
from agent_sandbox.workspace.promotion.steps import Move, carried, split
from agent_sandbox.workspace.promotion.target import Anchor, Surprise
from agent_sandbox.workspace.promotion.verify import glance, is_inode, status_of, surprise, touched


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


Rescue = Callable[[Move], None]  # keeps what lies in the slot of a move, which is not ours to remove
_PATIENCE = 1000  # times that somebody may replace a file while we give it back


def take_back(move: Move, anchor: Anchor, staging: int | None, rescue: Rescue) -> None:
    """Undo one move, or what has been done of it.

    Without a staging directory only moves that were not made can be taken back. Raises `Surprise` when the old cannot be brought back.
    """
    if move.in_place:
        assert move.old is not None and move.new is not None
        dress(anchor.directory(move.path), move.old, move.new)
        return
    parent, name = split(move.path)
    from_the_tree = staging is not None and status_of(staging, move.slot) is not None and not _pristine(move, staging)
    try:
        directory = anchor.directory(parent)
    except Surprise:  # somebody has moved or removed the directory: it is theirs, and what is not in it any more is kept
        if from_the_tree:
            rescue(move)
        return
    there = status_of(directory, name)
    if staging is not None and from_the_tree:
        _give_back(move, directory, name, staging, there, rescue)
    elif move.old is None and is_inode(there, move.new):
        if staging is None:
            raise Surprise(move.path, "the staging directory is gone, so what is new there cannot be taken away safely")
        _withdraw(move, directory, name, staging, rescue)
    elif move.old is not None and not is_inode(there, move.old) and (there is None or is_inode(there, move.new)):
        raise Surprise(move.path, "what was there before is neither in its place nor in the staging directory")
    if move.old is not None and move.old.node.type is EntryType.DIRECTORY and not move.old.node.mode & 0o200:
        chmod(directory, name, move.old, move.old.node.mode)  # it may have been opened up to be moved


def _pristine(move: Move, staging: int) -> bool:
    """Whether what lies in the slot is what we staged there, and nobody has touched it."""
    if move.new is None or not is_inode(status_of(staging, move.slot), move.new):
        return False
    return not surprise(staging, move.slot, move.new, move.within)


def _withdraw(move: Move, directory: int, name: str, staging: int, rescue: Rescue) -> None:
    """Take away what we added, unless somebody has made it theirs."""
    rename(directory, name, staging, move.slot, RENAME_NOREPLACE, move.new)
    if not _pristine(move, staging):
        _return(move, directory, name, staging, rescue)


def _return(move: Move, directory: int, name: str, staging: int, rescue: Rescue) -> None:
    """Put what lies in the slot where nothing is."""
    try:
        rename(staging, move.slot, directory, name, RENAME_NOREPLACE, move.old or move.new)
    except FileExistsError:
        rescue(move)


def _give_back(move: Move, directory: int, name: str, staging: int, there: os.stat_result | None, rescue: Rescue) -> None:
    """Put what came out of the tree, and lies in the slot, back in its place."""
    if there is None or move.new is None:
        _return(move, directory, name, staging, rescue)
        return
    if not is_inode(there, move.new):
        rescue(move)  # somebody has put something else there: theirs stays
        return
    ours = _fingerprint(staging, move.slot)
    rename(staging, move.slot, directory, name, RENAME_EXCHANGE, move.old, move.new)
    if _pristine(move, staging):
        return
    # What came out is not what we had put there: somebody has saved since. Theirs goes back, and whatever then comes out that we have not
    # put there ourselves is newer still and goes back too.
    for _ in range(_PATIENCE):
        newer = _fingerprint(staging, move.slot)
        renameat2(staging, move.slot, directory, name, RENAME_EXCHANGE)
        if _fingerprint(staging, move.slot) == ours:
            break
        ours = newer
    rescue(move)


def _fingerprint(directory: int, name: str) -> tuple[int, int, int] | None:
    """What tells a file from another one that has got its inode number after it was removed."""
    status = status_of(directory, name)
    return (status.st_ino, status.st_size, status.st_mtime_ns) if status else None
