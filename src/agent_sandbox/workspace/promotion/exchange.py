"""Make moves one by one, check each entry that comes out of the tree, and take moves back if the promotion does not finish.

Single steps are not recorded: which inode lies where shows which moves were made. So taking back can be interrupted and repeated, and is
the same for a promotion that met a surprise and for one that died. One rule decides. An entry in the slot of a move that is not the one we
staged there came out of the tree, so it goes back. If another program has put something else in its place, that stays, and the entry is
kept.
"""

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

Rescue = Callable[[Move], None]  # keeps the entry in the slot of a move, which is not ours to remove
_PATIENCE = 1000  # times that another program may replace a file while we give it back


def check(move: Move, anchor: Anchor) -> None:
    """Raise `Surprise` if the tree already shows that a move cannot be made. Changes nothing."""
    parent, name = split(move.path)
    directory = anchor.directory(parent)
    status = os.fstat(anchor.directory(move.path)) if move.in_place else status_of(directory, name)
    if words := glance(status, move.old) or touched(directory, name, status, move.old):
        raise Surprise(move.path, words)


def make(move: Move, anchor: Anchor, staging: int) -> None:
    """Make one move and check the entry that came out.

    Raises `Surprise` or OSError; the move may have been made by then, and has to be taken back.
    """
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
    """Rename. A directory that we own but may not write to is made writable meanwhile, because its `..` changes."""
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
                for place, entry_name in ((source, name), (target, new)):
                    chmod(place, entry_name, seen, seen.node.mode)


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
    """Give a directory the mode and attributes of `wanted`. Attributes that only `other` has are removed."""
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


def take_back(move: Move, anchor: Anchor, staging: int | None, rescue: Rescue) -> None:
    """Undo one move, or the part of it that was made.

    Without a staging directory only moves that were not made can be taken back. Raises `Surprise` if the old entry cannot be restored.
    """
    if move.in_place:
        assert move.old is not None and move.new is not None
        dress(anchor.directory(move.path), move.old, move.new)
        return
    parent, name = split(move.path)
    from_the_tree = staging is not None and status_of(staging, move.slot) is not None and not _pristine(move, staging)
    try:
        directory = anchor.directory(parent)
    except Surprise:  # another program has moved or removed the directory: that stands, and the entry is kept
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
        chmod(directory, name, move.old, move.old.node.mode)  # it may have been made writable for the move


def _pristine(move: Move, staging: int) -> bool:
    """Return whether the slot holds the entry that we staged there, untouched."""
    if move.new is None or not is_inode(status_of(staging, move.slot), move.new):
        return False
    return not surprise(staging, move.slot, move.new, move.within)


def _withdraw(move: Move, directory: int, name: str, staging: int, rescue: Rescue) -> None:
    """Remove the entry that we added, unless another program has changed it."""
    rename(directory, name, staging, move.slot, RENAME_NOREPLACE, move.new)
    if not _pristine(move, staging):
        _return(move, directory, name, staging, rescue)


def _return(move: Move, directory: int, name: str, staging: int, rescue: Rescue) -> None:
    """Put the entry in the slot back where nothing is. If something is there, keep the entry."""
    try:
        rename(staging, move.slot, directory, name, RENAME_NOREPLACE, move.old or move.new)
    except FileExistsError:
        rescue(move)


def _give_back(move: Move, directory: int, name: str, staging: int, there: os.stat_result | None, rescue: Rescue) -> None:
    """Put the entry that came out of the tree, and lies in the slot, back in its place."""
    if there is None or move.new is None:
        _return(move, directory, name, staging, rescue)
        return
    if not is_inode(there, move.new):
        rescue(move)  # another program has put something else there, which stays
        return
    ours = _fingerprint(staging, move.slot)
    rename(staging, move.slot, directory, name, RENAME_EXCHANGE, move.old, move.new)
    if _pristine(move, staging):
        return
    # The entry that came out is not ours: another program has saved since. Its file goes back. If the next one that comes out is not ours
    # either, it is newer still and goes back too.
    for _ in range(_PATIENCE):
        newer = _fingerprint(staging, move.slot)
        renameat2(staging, move.slot, directory, name, RENAME_EXCHANGE)
        if _fingerprint(staging, move.slot) == ours:
            break
        ours = newer
    rescue(move)


def _fingerprint(directory: int, name: str) -> tuple[int, int, int] | None:
    """Return values that tell a file from a later one that reuses its inode number."""
    status = status_of(directory, name)
    return (status.st_ino, status.st_size, status.st_mtime_ns) if status else None
