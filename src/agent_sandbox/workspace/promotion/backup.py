"""Keep the replaced entries for an undo: as a rule by moving the staging directory into the state directory, in one step.

If that is on another filesystem, everything is copied, and the copy counts only once it is complete and on disk.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress

from agent_sandbox.kernel.syscalls import RENAME_NOREPLACE, renameat2, syncfs
from agent_sandbox.workspace import beneath
from agent_sandbox.workspace.copy import copy
from agent_sandbox.workspace.durable import sync_directory
from agent_sandbox.workspace.promotion.journal import Journal
from agent_sandbox.workspace.removal import remove_tree

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def keep_olds(journal: Journal, place: int, staging: str) -> None:
    """Move the contents of the staging directory to `journal.olds` and remove it. Can be interrupted and repeated."""
    home = os.open(journal.path, _DIRECTORY)
    try:
        if not os.path.isdir(journal.olds):
            _move(home, place, staging)
        remove_tree(place, staging)
        os.fsync(home)
    finally:
        os.close(home)


def _move(home: int, place: int, staging: str) -> None:
    if not _exists(home, "olds.copied"):
        try:
            os.rename(staging, "olds", src_dir_fd=place, dst_dir_fd=home)
            return
        except FileNotFoundError:  # it was removed, and with it the undo; the promotion stands
            os.mkdir("olds", 0o700, dir_fd=home)
            return
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
        remove_tree(home, "olds.copying")
        replicate(place, staging, home, "olds.copying")
        syncfs(home)
        os.rename("olds.copying", "olds.copied", src_dir_fd=home, dst_dir_fd=home)
        os.fsync(home)
    remove_tree(place, staging)
    os.rename("olds.copied", "olds", src_dir_fd=home, dst_dir_fd=home)


def rescue(journal: Journal, staging: int, slot: str, name: str) -> None:
    """Keep an entry of the staging directory that is not ours to remove."""
    os.makedirs(journal.kept, mode=0o700, exist_ok=True)
    new_name = f"{slot}-{os.fsdecode(os.fsencode(name)[:200])}"
    kept = os.open(journal.kept, _DIRECTORY)
    try:
        try:
            renameat2(staging, slot, kept, new_name, RENAME_NOREPLACE)
        except FileNotFoundError:
            return  # kept already, before an interruption
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            remove_tree(kept, new_name)  # left by an interrupted copy
            replicate(staging, slot, kept, new_name)
            syncfs(kept)
        os.fsync(kept)
    finally:
        os.close(kept)
    sync_directory(os.path.dirname(journal.kept))


def replicate(source: int, name: str, target: int, new: str) -> None:
    """Copy a file, or a tree of our own making, with modes, owners, times and attributes. Raises OSError."""
    status = os.stat(name, dir_fd=source, follow_symlinks=False)
    if not stat.S_ISDIR(status.st_mode):
        _copy_entry(source, name, status, target, new)
        return
    top = beneath.open_directory(source, name)
    opened: list[tuple[int, int, str, os.stat_result]] = []  # directories being filled, and the sources of their metadata
    try:
        opened.append((_make_directory(target, new), source, name, status))
        for item in beneath.walk(top):
            while len(opened) > item.depth + 1:
                _finish(*opened.pop())
            if stat.S_ISDIR(item.status.st_mode):
                fd = os.dup(item.directory)
                opened.append((_make_directory(opened[-1][0], item.name), fd, item.name, item.status))
            else:
                _copy_entry(item.directory, item.name, item.status, opened[-1][0], item.name)
        while len(opened) > 1:
            _finish(*opened.pop())
        copied, _, _, _ = opened.pop()
        _copy_metadata(copied, source, name, status)
        os.close(copied)
    finally:
        for fd, directory, _, _ in opened:
            os.close(fd)
            if directory != source:
                os.close(directory)
        os.close(top)


def _exists(directory: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _make_directory(directory: int, name: str) -> int:
    os.mkdir(name, 0o700, dir_fd=directory)
    return beneath.open_directory(directory, name)


def _finish(copied: int, directory: int, name: str, status: os.stat_result) -> None:
    try:
        _copy_metadata(copied, directory, name, status)
    finally:
        os.close(copied)
        os.close(directory)


def _copy_entry(source: int, name: str, status: os.stat_result, target: int, new: str) -> None:
    if stat.S_ISREG(status.st_mode):
        content = beneath.open_file(source, name)
        try:
            copied = os.open(new, _NEW_FILE, 0o600, dir_fd=target)
            try:
                copy(content, copied, os.fstat(content).st_size, path=name)
                _copy_metadata(copied, source, name, status)
            finally:
                os.close(copied)
        finally:
            os.close(content)
        return
    if stat.S_ISLNK(status.st_mode):
        os.symlink(os.readlink(name, dir_fd=source), new, dir_fd=target)
    else:
        os.mknod(new, status.st_mode, status.st_rdev, dir_fd=target)
    with suppress(PermissionError):
        os.chown(new, status.st_uid, status.st_gid, dir_fd=target, follow_symlinks=False)
    os.utime(new, ns=(status.st_atime_ns, status.st_mtime_ns), dir_fd=target, follow_symlinks=False)


def _copy_metadata(copied: int, source: int, name: str, status: os.stat_result) -> None:
    with suppress(PermissionError):  # the owner is in the journal too
        os.fchown(copied, status.st_uid, status.st_gid)
    for attribute, value in beneath.xattrs(source, name).items():
        with suppress(OSError):  # not every filesystem has every attribute; they are in the journal too
            os.setxattr(copied, attribute, value)
    os.fchmod(copied, stat.S_IMODE(status.st_mode))
    os.utime(copied, ns=(status.st_atime_ns, status.st_mtime_ns))
