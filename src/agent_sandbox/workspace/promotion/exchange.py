"""Make the moves of a promotion one by one, and take them back if the promotion does not finish.

A move exchanges an entry of the real tree with an entry of the staging directory (`plan.Move`). The entry that comes out of the tree is
checked after the exchange: it must be the same inode, unchanged, and not open for writing. Only a program that already had the file open
could still change it, and a file lease reveals such a program.

Single moves are not recorded: the inodes in the tree and in the staging directory show which moves were made. So taking moves back can be
interrupted and repeated, even by another process after a crash. One rule decides. If the place of a move in the staging directory (its
slot) holds another entry than the one we staged there, that entry came out of the tree, so it goes back. If another program has put a new
entry at the path meanwhile, the new entry stays, and the old entry is kept in the state directory.
"""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import stat
from collections.abc import Callable, Mapping

from agent_sandbox.kernel.syscalls import RENAME_EXCHANGE, RENAME_NOREPLACE, renameat2
from agent_sandbox.workspace import beneath
from agent_sandbox.workspace.beneath import status_of
from agent_sandbox.workspace.nodes import EntryType
from agent_sandbox.workspace.promotion.plan import Move, carried, split
from agent_sandbox.workspace.promotion.target import Surprise, TargetTree
from agent_sandbox.workspace.reality import Fingerprint, digest_of, digest_of_open, is_settled

Rescue = Callable[[Move], None]  # keeps the entry in the slot of a move, which is not ours to remove
_PATIENCE = 1000  # times that another program may replace a file while we put the old file back
_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


def check(move: Move, anchor: TargetTree) -> None:
    """Raise `Surprise` if the entry at the move's path is not the expected one. Changes nothing."""
    parent, name = split(move.path)
    directory = anchor.directory(parent)
    status = os.fstat(anchor.directory(move.path)) if move.in_place else status_of(directory, name)
    if words := glance(status, move.old) or touched(directory, name, status, move.old):
        raise Surprise(move.path, words)


def make(move: Move, anchor: TargetTree, staging: int) -> None:
    """Make one move, and check the entry that came out of the tree.

    After `Surprise` or OSError the move may have been made, and the caller must take it back.
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


def rename(source: int, name: str, target: int, new: str, flags: int, *moved: Fingerprint | None) -> None:
    """Rename an entry. `moved` are the fingerprints of the renamed entries.

    A directory without write permission for its owner is made writable during the rename, because the kernel must update its `..`.
    """
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


def chmod(directory: int, name: str, seen: Fingerprint, mode: int) -> None:
    """Set the mode of the directory `name`, if it is still the inode `seen`."""
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


def _adjust(directory: int, path: str, old: Fingerprint, new: Fingerprint) -> None:
    status = os.fstat(directory)
    if not is_inode(status, old) or stat.S_IMODE(status.st_mode) != old.node.mode:
        raise Surprise(path, "its mode has changed, or it is another directory now")
    dress(directory, new, old)


def dress(directory: int, wanted: Fingerprint, other: Fingerprint) -> None:
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


def take_back(move: Move, anchor: TargetTree, staging: int | None, rescue: Rescue) -> None:
    """Undo one move, if it was made. An entry that cannot return to the tree is passed to `rescue`, which keeps it.

    Raises `Surprise` if the old entry cannot be restored. `staging` is None if the staging directory is gone.
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
    """Return whether the move's slot in the staging directory still holds the entry that we staged there, unchanged."""
    if move.new is None or not is_inode(status_of(staging, move.slot), move.new):
        return False
    return not surprise(staging, move.slot, move.new, move.within)


def _withdraw(move: Move, directory: int, name: str, staging: int, rescue: Rescue) -> None:
    """Move an entry that we added back into the staging directory. If another program has changed the entry, leave it in the tree."""
    rename(directory, name, staging, move.slot, RENAME_NOREPLACE, move.new)
    if not _pristine(move, staging):
        _return(move, directory, name, staging, rescue)


def _return(move: Move, directory: int, name: str, staging: int, rescue: Rescue) -> None:
    """Move an entry from its slot in the staging directory to its path. If the path is taken, pass the entry to `rescue`."""
    try:
        rename(staging, move.slot, directory, name, RENAME_NOREPLACE, move.old or move.new)
    except FileExistsError:
        rescue(move)


def _give_back(move: Move, directory: int, name: str, staging: int, there: os.stat_result | None, rescue: Rescue) -> None:
    """Put the old entry, which is in the staging directory, back at its path. `there` is the status of the entry at the path now.

    A new entry of another program stays at the path; then the old entry is passed to `rescue`.
    """
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
    # The entry that came out is not ours: another program has saved a file since. That file goes back. If the next entry that comes out is
    # not ours either, it is newer still and goes back too.
    for _ in range(_PATIENCE):
        newer = _fingerprint(staging, move.slot)
        renameat2(staging, move.slot, directory, name, RENAME_EXCHANGE)
        if _fingerprint(staging, move.slot) == ours:
            break
        ours = newer
    rescue(move)


def _fingerprint(directory: int, name: str) -> tuple[int, int, int] | None:
    """Return inode, size and modification time, which tell a file from a later file with the same inode number."""
    status = status_of(directory, name)
    return (status.st_ino, status.st_size, status.st_mtime_ns) if status else None


def is_inode(status: os.stat_result | None, seen: Fingerprint | None) -> bool:
    """Return whether a status belongs to the inode of a fingerprint, even if the inode has changed since."""
    return status is not None and seen is not None and (status.st_dev, status.st_ino) == (seen.device, seen.inode)


def glance(status: os.stat_result | None, seen: Fingerprint | None) -> str:
    """Compare a status with an earlier fingerprint. Return the difference in words; an empty string if there is none."""
    if status is None or seen is None:
        return "" if status is None and seen is None else "it is gone" if status is None else "something is there now"
    node = seen.node
    if not is_inode(status, seen) or EntryType.of(status.st_mode) is not node.type:
        return "something else is there now"
    if node.type is EntryType.FILE and (status.st_size, status.st_mtime_ns) != (node.size, seen.mtime_ns):
        return "its content has changed"
    mode = stat.S_IMODE(status.st_mode)
    if node.type is EntryType.DIRECTORY and mode == node.mode | 0o200:
        mode = node.mode  # made writable by us for the move: see `exchange.rename`
    if (mode, status.st_uid, status.st_gid) != (node.mode, node.uid, node.gid):
        return "its mode or owner has changed"
    return ""


def touched(directory: int, name: str, status: os.stat_result | None, seen: Fingerprint | None) -> str:
    """Return a complaint if a file's ctime has changed and its content may have changed too; otherwise an empty string. Raises OSError."""
    if status is None or seen is None or seen.node.type is not EntryType.FILE or status.st_ctime_ns == seen.ctime_ns:
        return ""
    if seen.digest and digest_of(directory, name) == seen.digest:
        return ""
    return "it has been touched, and what was in it is not known"


def surprise(directory: int, name: str, seen: Fingerprint, inside: Mapping[str, Fingerprint]) -> str:
    """Compare an entry, and the entries `inside` it, with their fingerprints. Return the first difference in words; "" if there is none.

    Raises OSError.
    """
    if words := glance(status_of(directory, name), seen):
        return words
    node = seen.node
    if node.type is EntryType.FILE:
        return _file(directory, name, seen)
    if node.type is EntryType.SYMLINK:
        return "" if os.readlink(name, dir_fd=directory) == node.target else "it leads elsewhere now"
    return _tree(directory, name, inside) if node.type is EntryType.DIRECTORY else ""


def _file(directory: int, name: str, seen: Fingerprint) -> str:
    fd = _opened(directory, name, seen)
    if fd is None:
        return "" if is_settled(seen.ctime_ns, seen.looked_ns) else "it cannot be read, so whether it has changed cannot be told"
    try:
        if words := glance(os.fstat(fd), seen):
            return words
        if _written_to(fd):
            return "a program has it open for writing"
        if not is_settled(seen.ctime_ns, seen.looked_ns) and seen.digest and digest_of_open(fd) != seen.digest:
            return "its content has changed"
        return ""
    finally:
        os.close(fd)


def _opened(directory: int, name: str, seen: Fingerprint) -> int | None:
    try:
        return os.open(name, _OPEN, dir_fd=directory)
    except PermissionError:
        return None


def _written_to(fd: int) -> bool:
    """Return whether a program has the file open for writing; False if we are not allowed to find out.

    The kernel refuses a read lease on a file that is open for writing.
    """
    # The kernel announces a broken lease by a signal. SIGURG is ignored by default; SIGIO would kill us.
    fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError as error:
        return error.errno == errno.EAGAIN
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return False


def _tree(directory: int, name: str, inside: Mapping[str, Fingerprint]) -> str:
    top = beneath.open_directory(directory, name)
    count = 0
    try:
        for entry in beneath.walk(top, limit=len(inside) + 1, unlock=False):
            path = entry.path
            expected = inside.get(path)
            if expected is None:
                return f"{path!r} is in it, which was not there"
            if entry.own is None or expected.node.type is not EntryType.DIRECTORY:
                words = surprise(entry.directory, entry.name, expected, {})
            else:
                words = glance(entry.status, expected)
            if words:
                return f"{path!r} in it: {words}"
            count += 1
    except beneath.TooMany:
        return "there is more in it than there was"
    except beneath.MovedAway:
        return "it is being rearranged"
    finally:
        os.close(top)
    return "" if count == len(inside) else "some of what was in it is gone"
