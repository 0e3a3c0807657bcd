"""Take moves back, when a promotion does not come to its end.

Nothing was written down step by step: which inode lies where tells what was made. So it can be interrupted and repeated, and it is the same
for a promotion that met a surprise and for one that died. One rule decides what to do: what lies in the slot of a move and is not what we
staged there came out of the tree, so it goes back; unless somebody has put something else in its place, which then stays, and it is kept.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from agent_sandbox.kernel.syscalls import RENAME_EXCHANGE, RENAME_NOREPLACE, renameat2
from agent_sandbox.workspace.nodes import EntryType
from agent_sandbox.workspace.promotion.anchor import Anchor, Surprise
from agent_sandbox.workspace.promotion.performing import chmod, dress, rename
from agent_sandbox.workspace.promotion.steps import Move, split
from agent_sandbox.workspace.promotion.verifying import is_inode, status_of, surprise

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
