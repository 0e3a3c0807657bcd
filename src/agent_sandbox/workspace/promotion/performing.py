"""Make moves, and take them back.

Both look at what is there before they do anything, and can be repeated from wherever they were interrupted: what has been done is not
written down step by step, it is seen from which inode lies where.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable

from agent_sandbox.kernel.syscalls import RENAME_EXCHANGE, RENAME_NOREPLACE, renameat2
from agent_sandbox.workspace.nodes import EntryType
from agent_sandbox.workspace.promotion.anchor import Anchor, Surprise
from agent_sandbox.workspace.promotion.looks import carried
from agent_sandbox.workspace.promotion.steps import Move, split
from agent_sandbox.workspace.promotion.verifying import glance, is_inode, status_of, surprise
from agent_sandbox.workspace.seen import Seen

Rescue = Callable[[Move], None]  # keeps what lies in the slot of a move, which is somebody else's
_PATIENCE = 1000  # times that somebody may replace a file while we give it back


def check(move: Move, anchor: Anchor) -> None:
    """Raise `Surprise` if a look at the tree already shows that a move cannot be made. Changes nothing."""
    parent, name = split(move.path)
    directory = anchor.directory(parent)
    status = os.fstat(anchor.directory(move.path)) if move.in_place else status_of(directory, name)
    if words := glance(status, move.old):
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
            _rename(directory, name, staging, move.slot, RENAME_NOREPLACE, move.old)
        elif move.old is None:
            _rename(staging, move.slot, directory, name, RENAME_NOREPLACE, move.new)
        else:
            _rename(staging, move.slot, directory, name, RENAME_EXCHANGE, move.new, move.old)
    except FileExistsError as error:
        raise Surprise(move.path, "something is there now") from error
    except FileNotFoundError as error:
        raise Surprise(move.path, "it is gone") from error
    if move.new is not None and not is_inode(status_of(directory, name), move.new):
        raise Surprise(move.path, "it was replaced as soon as it was there")
    if move.old is not None and (words := surprise(staging, move.slot, move.old, move.beside)):
        raise Surprise(move.path, words)


def take_back(move: Move, anchor: Anchor, staging: int | None, rescue: Rescue) -> None:
    """Undo one move, or what has been done of it. What somebody else has put there meanwhile stays; the old is then kept by `rescue`.

    Without a staging directory only moves that were not made can be taken back. Raises `Surprise` when the old cannot be brought back.
    """
    if move.in_place:
        assert move.old is not None and move.new is not None
        directory = anchor.directory(move.path)
        _dress(directory, move.old, move.new)
        return
    parent, name = split(move.path)
    here = status_of(staging, move.slot) if staging is not None else None
    try:
        directory = anchor.directory(parent)
    except Surprise:  # somebody has moved or removed the directory: it is theirs, and what is not in it any more is kept
        if is_inode(here, move.old):
            rescue(move)
        return
    there = status_of(directory, name)
    if move.old is None:
        if is_inode(there, move.new) and staging is not None:
            _withdraw(move, directory, name, staging, rescue)
        elif is_inode(there, move.new):
            raise Surprise(move.path, "the staging directory is gone, so what is new there cannot be taken away safely")
        return
    if is_inode(here, move.old):
        assert staging is not None
        _give_back(move, directory, name, staging, there, rescue)
    elif not is_inode(there, move.old) and (there is None or is_inode(there, move.new)):
        raise Surprise(move.path, "what was there before is neither in its place nor in the staging directory")
    if move.old.node.type is EntryType.DIRECTORY and not move.old.node.mode & 0o200:
        _chmod(directory, name, move.old, move.old.node.mode)  # it may have been opened up to be moved


def _withdraw(move: Move, directory: int, name: str, staging: int, rescue: Rescue) -> None:
    """Take away what we added, unless somebody has made it theirs."""
    assert move.new is not None
    _rename(directory, name, staging, move.slot, RENAME_NOREPLACE, move.new)
    if is_inode(status_of(staging, move.slot), move.new) and not surprise(staging, move.slot, move.new, move.within):
        return
    try:
        _rename(staging, move.slot, directory, name, RENAME_NOREPLACE, move.new)  # theirs stays where they put it
    except FileExistsError:
        rescue(move)


def _give_back(move: Move, directory: int, name: str, staging: int, there: os.stat_result | None, rescue: Rescue) -> None:
    """Put the old back, which lies in the slot."""
    assert move.old is not None
    if there is None or move.new is None:
        try:
            _rename(staging, move.slot, directory, name, RENAME_NOREPLACE, move.old)
        except FileExistsError:
            if move.new is not None:  # it has come since we looked
                _give_back(move, directory, name, staging, status_of(directory, name), rescue)
                return
            rescue(move)  # somebody has made a file of this name: theirs stays
        return
    _rename(staging, move.slot, directory, name, RENAME_EXCHANGE, move.old, move.new)
    if is_inode(status_of(staging, move.slot), move.new) and not surprise(staging, move.slot, move.new, move.within):
        return
    # What came out is not what we had put there: somebody has saved since. Theirs goes back, and whatever then comes out that we have not
    # put there ourselves is newer still and goes back too.
    ours = (move.old.device, move.old.inode)
    for _ in range(_PATIENCE):
        newer = status_of(staging, move.slot)
        assert newer is not None
        renameat2(staging, move.slot, directory, name, RENAME_EXCHANGE)
        came = status_of(staging, move.slot)
        if came is not None and (came.st_dev, came.st_ino) == ours:
            break
        ours = newer.st_dev, newer.st_ino
    rescue(move)


def _rename(source: int, name: str, target: int, new: str, flags: int, *moved: Seen | None) -> None:
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
            _chmod(directory, entry, seen, seen.node.mode | 0o200)
        try:
            renameat2(source, name, target, new, flags)
        finally:
            for _, _, seen in opened:
                for place, called in ((source, name), (target, new)):
                    _chmod(place, called, seen, seen.node.mode)


def _chmod(directory: int, name: str, seen: Seen, mode: int) -> None:
    """Of this very directory, if it has this name."""
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
    _dress(directory, new, old)


def _dress(directory: int, wanted: Seen, other: Seen) -> None:
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
