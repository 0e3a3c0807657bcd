"""The staging directory of a promotion. It receives the new entries before any name in the tree changes, and later the old entries.

It lies in the tree, because names can only be exchanged within one mount. Its name says what it is, and no other user can enter it. Nothing
of a sandbox is linked or renamed into it: every new file in it is an inode that we made.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from contextlib import suppress

from agent_sandbox.errors import WorkspaceError
from agent_sandbox.kernel import syscalls
from agent_sandbox.workspace.beneath import open_directory
from agent_sandbox.workspace.changes import Contents
from agent_sandbox.workspace.contents import Mixed, ReadFile
from agent_sandbox.workspace.copy import copy, write_all
from agent_sandbox.workspace.nodes import EntryType, Node
from agent_sandbox.workspace.progress import NO_PROGRESS, Progress
from agent_sandbox.workspace.promotion.plan import Adjust, Item, Look, Move, Put, Remove, Step, carried, seen_from, split
from agent_sandbox.workspace.promotion.target import Surprise, TargetTree
from agent_sandbox.workspace.reality import Fingerprint

PREFIX = ".agent-sandbox-promotion-"
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_FORMATS = {EntryType.FIFO: stat.S_IFIFO, EntryType.SOCKET: stat.S_IFSOCK, EntryType.DEVICE: stat.S_IFCHR}
_ACCESS_LIST = "system.posix_acl_access"
_CHANGED = "the file in the sandbox has changed since it was looked at"
_NOT_APPROVED = "the file in the sandbox is not the one that was approved"


def make(place: int, name: str) -> int:
    """Make the staging directory and return its descriptor. Raises OSError; `WorkspaceError` if the filesystem cannot exchange names."""
    os.mkdir(name, 0o700, dir_fd=place)
    staging = open_directory(place, name)
    try:
        for probe in ("a", "b"):
            os.close(os.open(probe, _NEW_FILE, 0o600, dir_fd=staging))
        try:
            syscalls.renameat2(staging, "a", staging, "b", syscalls.RENAME_EXCHANGE)
        except OSError as error:
            raise WorkspaceError(
                f"names cannot be exchanged on this filesystem: {os.strerror(error.errno or 0)}",
                hint="a promotion needs ext4, XFS, Btrfs, tmpfs or another one with RENAME_EXCHANGE; diff --patch makes a patch",
            ) from error
        for probe in ("a", "b"):
            os.unlink(probe, dir_fd=staging)
    except BaseException:
        os.close(staging)
        raise
    return staging


def stage(step: Step, slot: str, anchor: TargetTree, staging: int, contents: Contents, progress: Progress = NO_PROGRESS) -> Move:
    """Make the new entries of a step in the staging directory, with their final metadata. Return the move that puts them in the tree.

    Raises OSError, and `Surprise` if a file of the sandbox has changed.
    """
    match step:
        case Put():
            within = _fill(step, slot, anchor, staging, contents, progress)
            new = within.pop("")
            return Move(step.path, slot, step.expected, new, step.inside, within)
        case Remove():
            return Move(step.path, slot, step.expected, None, step.inside)
        case Adjust():
            old = step.expected
            node = old.node
            kept = {name: value for name, value in node.xattrs.items() if not carried(name, powers=True)}
            wanted = Node(node.type, step.look.mode, node.uid, node.gid, xattrs={**kept, **step.look.xattrs})
            return Move(step.path, "", old, Fingerprint(wanted, old.device, old.inode, old.mtime_ns, old.ctime_ns, old.looked_ns))


def _fill(step: Put, slot: str, anchor: TargetTree, staging: int, contents: Contents, progress: Progress) -> dict[str, Fingerprint]:
    """Make all entries that a step will put in the tree. Return them by path relative to the step's path; "" is the entry at that path."""
    parent = anchor.directory(split(step.path)[0])
    above = os.fstat(parent)
    filler = _Filler(contents, above, _inherited(step), progress)
    entries: dict[str, Fingerprint] = {}
    first, *others = step.items
    if first.type is not EntryType.DIRECTORY:
        return {"": filler.make(first, staging, slot)}
    cut = len(step.path) + 1
    opened: list[tuple[str, int, Item]] = []  # the open directories, from the top
    try:
        opened.append((step.path + "/", filler.enter(staging, slot), first))
        for item in others:
            while not item.path.startswith(opened[-1][0]):
                path, fd, directory = opened.pop()
                entries[path[cut:-1]] = filler.finish(fd, directory)
            _, fd, _ = opened[-1]
            name = split(item.path)[1]
            if opened[-1][0] + name != item.path:
                raise Surprise(item.path, "the directory it is to be in is not part of what is promoted")
            if item.type is EntryType.DIRECTORY:
                opened.append((item.path + "/", filler.enter(fd, name), item))
            else:
                entries[item.path[cut:]] = filler.make(item, fd, name)
        while opened:
            path, fd, directory = opened.pop()
            entries[path[cut:-1]] = filler.finish(fd, directory)
    finally:
        for _, fd, _ in opened:
            os.close(fd)
    return entries


def _inherited(step: Put) -> dict[str, bytes]:
    """Return the access control list of a replaced file as an extended attribute. The new file keeps it.

    The owner of the file set this list, and the guest may not have seen it.
    """
    expected, first = step.expected, step.items[0]
    if expected is None or first.type is not EntryType.FILE or _ACCESS_LIST not in expected.node.xattrs:
        return {}
    return {_ACCESS_LIST: expected.node.xattrs[_ACCESS_LIST]} if expected.node.type is EntryType.FILE else {}


class _Filler:
    """Makes the new entries of one step. `above` is the status of the directory in the tree that the entries will be in."""

    def __init__(self, contents: Contents, above: os.stat_result, inherited: dict[str, bytes], progress: Progress) -> None:
        self.progress = progress
        self.contents = contents
        self.above = above
        self.inherited = inherited
        self.ids = os.geteuid(), os.getegid()
        self.group_goes_down = above.st_mode & stat.S_ISGID

    def make(self, item: Item, directory: int, name: str) -> Fingerprint:
        """Make an entry that is not a directory. Return its fingerprint."""
        self.progress.advance(files=1)
        if item.type is EntryType.FILE:
            return self._file(item, directory, name)
        if item.type is EntryType.SYMLINK:
            os.symlink(item.target, name, dir_fd=directory)
        else:  # only in an undo, for entries that were the tree's own
            os.mknod(name, _FORMATS[item.type] | item.look.mode, item.device, dir_fd=directory)
        return self._set_owner_and_time(item, directory, name)

    def enter(self, directory: int, name: str) -> int:
        """Make a directory and return its descriptor. `finish` sets the metadata later."""
        os.mkdir(name, 0o700, dir_fd=directory)
        return open_directory(directory, name)

    def finish(self, fd: int, item: Item) -> Fingerprint:
        """Set the final metadata of a directory that is complete, and close it. Return its fingerprint."""
        try:
            return self._set_metadata(fd, item, item.look.mode | self.group_goes_down, item.look.mtime_ns)
        finally:
            os.close(fd)

    def _file(self, item: Item, directory: int, name: str) -> Fingerprint:
        assert item.content is not None
        if (read := self.contents.recall(item.content.path) if isinstance(self.contents, Mixed) else None) is not None:
            return self._read_file(item, read, directory, name)
        try:
            source = self.contents.open_file(item.content)
        except FileNotFoundError as error:
            raise Surprise(item.path, "the file in the sandbox is not there any more") from error
        try:
            status = os.fstat(source)
            if not stat.S_ISREG(status.st_mode) or status.st_size != item.size:
                raise Surprise(item.path, _CHANGED)
            target = os.open(name, _NEW_FILE, self._first_mode(item), dir_fd=directory)
            try:
                digest = copy(source, target, item.size, path=item.path, progress=self.progress)
                if item.digest and item.digest != digest:
                    raise Surprise(item.path, _NOT_APPROVED)
                mtime = status.st_mtime_ns if item.look.mtime_ns is None else item.look.mtime_ns
                return self._set_metadata(target, item, item.look.mode, mtime, digest)
            finally:
                os.close(target)
        finally:
            os.close(source)

    def _read_file(self, item: Item, read: ReadFile, directory: int, name: str) -> Fingerprint:
        """Make a file from content in memory: the bytes that were hashed and shown."""
        if len(read.content) != item.size:
            raise Surprise(item.path, _CHANGED)
        if item.digest and item.digest != read.digest:
            raise Surprise(item.path, _NOT_APPROVED)
        target = os.open(name, _NEW_FILE, self._first_mode(item), dir_fd=directory)
        try:
            write_all(target, read.content, 0)
            self.progress.advance(size=item.size)
            mtime = read.mtime_ns if item.look.mtime_ns is None else item.look.mtime_ns
            return self._set_metadata(target, item, item.look.mode, mtime, read.digest)
        finally:
            os.close(target)

    def _first_mode(self, item: Item) -> int:
        """Return the mode to make a file with: its own, or a writable one if attributes must be set. Nobody else reaches it here."""
        return 0o600 if item.look.xattrs or self.inherited else item.look.mode & 0o777

    def _set_owner_and_time(self, item: Item, directory: int, name: str) -> Fingerprint:
        """Set the owner and the time of an entry by name, without opening the entry. Return its fingerprint."""
        owner = self._owner(item.look)
        if owner != self.ids:
            with suppress(PermissionError):
                os.chown(name, *owner, dir_fd=directory, follow_symlinks=False)
        if item.look.mtime_ns is not None:
            os.utime(name, ns=(item.look.mtime_ns, item.look.mtime_ns), dir_fd=directory, follow_symlinks=False)
        status = os.stat(name, dir_fd=directory, follow_symlinks=False)
        mode = stat.S_IMODE(status.st_mode)
        node = Node(item.type, mode, status.st_uid, status.st_gid, target=item.target, device=item.device)
        return seen_from(status, node, now_ns=time.time_ns())

    def _set_metadata(self, fd: int, item: Item, mode: int, mtime_ns: int | None, digest: str = "") -> Fingerprint:
        owner = self._owner(item.look)
        if owner != self.ids:
            self._chown(fd, owner, item)
        for attribute, value in self.inherited.items():
            with suppress(OSError):
                os.setxattr(fd, attribute, value)
        for attribute, value in item.look.xattrs.items():
            os.setxattr(fd, attribute, value)
        if mtime_ns is not None:
            os.utime(fd, ns=(mtime_ns, mtime_ns))
        status = os.fstat(fd)
        if stat.S_IMODE(status.st_mode) != mode:  # after the owner: chown clears the set-id bits
            os.fchmod(fd, mode)
            status = os.fstat(fd)
        size = status.st_size if item.type is EntryType.FILE else 0
        node = Node(item.type, stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid, size, xattrs=item.look.xattrs)
        return seen_from(status, node, now_ns=time.time_ns(), digest=digest)

    def _owner(self, wanted: Look) -> tuple[int, int]:
        uid = self.above.st_uid if wanted.uid is None else wanted.uid
        return uid, self.above.st_gid if wanted.gid is None else wanted.gid

    def _chown(self, fd: int, owner: tuple[int, int], item: Item) -> None:
        try:
            os.fchown(fd, *owner)
        except OSError as error:
            if error.errno != errno.EPERM:
                raise
            if item.look.uid is None:  # a new file in another user's directory is ours, like every file that we make there
                with suppress(PermissionError):
                    os.fchown(fd, -1, owner[1])
                return
            raise PermissionError(errno.EPERM, f"only its owner, user {owner[0]}, or root can replace it", item.path) from error
