"""Check that an entry that came out of the tree is the expected one: the same inode, unchanged, and not open for writing.

The check runs after the exchange, on the entry in the staging directory. Only a program that already had the file open could still change
it, and the lease reveals such a program.
"""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import stat
from collections.abc import Mapping

from agent_sandbox.workspace import beneath
from agent_sandbox.workspace.fingerprint import SETTLED_NS, Seen, digest_of, digest_of_open
from agent_sandbox.workspace.nodes import EntryType

_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


def is_inode(status: os.stat_result | None, seen: Seen | None) -> bool:
    """Return whether this is the very inode that was seen, changed or not."""
    return status is not None and seen is not None and (status.st_dev, status.st_ino) == (seen.device, seen.inode)


def status_of(directory: int, name: str) -> os.stat_result | None:
    """Return the status of an entry, of a link itself; None if there is none."""
    try:
        return os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return None


def glance(status: os.stat_result | None, seen: Seen | None) -> str:
    """Return in words what a status alone shows to be unexpected; empty if it shows nothing."""
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


def touched(directory: int, name: str, status: os.stat_result | None, seen: Seen | None) -> str:
    """Return a complaint if a file, not moved yet, was written although its size and time do not show it; else empty.

    Raises OSError.
    """
    if status is None or seen is None or seen.node.type is not EntryType.FILE or status.st_ctime_ns == seen.ctime_ns:
        return ""
    if seen.digest and digest_of(directory, name) == seen.digest:
        return ""
    return "it has been touched, and what was in it is not known"


def surprise(directory: int, name: str, seen: Seen, inside: Mapping[str, Seen]) -> str:
    """Return in words what is unexpected about an entry or anything in it; empty if all is as expected. Raises OSError."""
    if words := glance(status_of(directory, name), seen):
        return words
    node = seen.node
    if node.type is EntryType.FILE:
        return _file(directory, name, seen)
    if node.type is EntryType.SYMLINK:
        return "" if os.readlink(name, dir_fd=directory) == node.target else "it leads elsewhere now"
    return _tree(directory, name, inside) if node.type is EntryType.DIRECTORY else ""


def _file(directory: int, name: str, seen: Seen) -> str:
    fd = _opened(directory, name, seen)
    if fd is None:
        return "" if _settled(seen) else "it cannot be read, so whether it has changed cannot be told"
    try:
        if words := glance(os.fstat(fd), seen):
            return words
        if _written_to(fd):
            return "a program has it open for writing"
        if not _settled(seen) and seen.digest and digest_of_open(fd) != seen.digest:
            return "its content has changed"
        return ""
    finally:
        os.close(fd)


def _opened(directory: int, name: str, seen: Seen) -> int | None:
    try:
        return os.open(name, _OPEN, dir_fd=directory)
    except PermissionError:
        return None


def _settled(seen: Seen) -> bool:
    """Return whether a later write would have shown in the times."""
    return seen.ctime_ns + SETTLED_NS < seen.looked_ns


def _written_to(fd: int) -> bool:
    """Return whether a program has the file open for writing: then the kernel grants no read lease.

    Return False if we may not ask for a lease.
    """
    # The kernel announces a broken lease by a signal. SIGURG is ignored by default; SIGIO would kill us.
    fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError as error:
        return error.errno == errno.EAGAIN
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return False


def _tree(directory: int, name: str, inside: Mapping[str, Seen]) -> str:
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
    except beneath.Moved:
        return "it is being rearranged"
    finally:
        os.close(top)
    return "" if count == len(inside) else "some of what was in it is gone"
