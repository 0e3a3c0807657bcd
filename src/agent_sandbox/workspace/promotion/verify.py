"""Whether what came out of the tree is what was expected: the same inode, unchanged, and nobody writing to it.

It is asked after the exchange, of what lies in the staging directory: nothing can come between the answer and what depends on it but a
program that had the file open already, and the lease shows that one.
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
    """Whether this is the very thing that was seen, changed or not."""
    return status is not None and seen is not None and (status.st_dev, status.st_ino) == (seen.device, seen.inode)


def status_of(directory: int, name: str) -> os.stat_result | None:
    """Of an entry, of a link itself; None if there is none."""
    try:
        return os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return None


def glance(status: os.stat_result | None, seen: Seen | None) -> str:
    """What a status alone tells is not as expected, in words; nothing if it tells nothing."""
    if status is None or seen is None:
        return "" if status is None and seen is None else "it is gone" if status is None else "something is there now"
    node = seen.node
    if not is_inode(status, seen) or EntryType.of(status.st_mode) is not node.type:
        return "something else is there now"
    if node.type is EntryType.FILE and (status.st_size, status.st_mtime_ns) != (node.size, seen.mtime_ns):
        return "its content has changed"
    mode = stat.S_IMODE(status.st_mode)
    if node.type is EntryType.DIRECTORY and mode == node.mode | 0o200:
        mode = node.mode  # opened up by us to be moved: see `performing`
    if (mode, status.st_uid, status.st_gid) != (node.mode, node.uid, node.gid):
        return "its mode or owner has changed"
    return ""


def touched(directory: int, name: str, status: os.stat_result | None, seen: Seen | None) -> str:
    """Of a file that has not been moved yet: whether it was written although its size and time do not tell, in words. Raises OSError."""
    if status is None or seen is None or seen.node.type is not EntryType.FILE or status.st_ctime_ns == seen.ctime_ns:
        return ""
    if seen.digest and digest_of(directory, name) == seen.digest:
        return ""
    return "it has been touched, and what was in it is not known"


def surprise(directory: int, name: str, seen: Seen, inside: Mapping[str, Seen]) -> str:
    """What is not as expected of an entry and of all that is in it, in words; nothing if all is. Raises OSError."""
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
    """Whether a later write would have shown in the times."""
    return seen.ctime_ns + SETTLED_NS < seen.looked_ns


def _written_to(fd: int) -> bool:
    """Whether anybody has the file open for writing: then the kernel grants no read lease. Who may not ask is told no."""
    # A lease that is broken is told by a signal: by one that is ignored unless somebody listens, not by SIGIO, which kills.
    fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError as error:
        return error.errno == errno.EAGAIN
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return False


def _tree(directory: int, name: str, inside: Mapping[str, Seen]) -> str:
    top = beneath.open_directory(directory, name)
    found = 0
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
            found += 1
    except beneath.TooMany:
        return "there is more in it than there was"
    except beneath.Moved:
        return "it is being rearranged"
    finally:
        os.close(top)
    return "" if found == len(inside) else "some of what was in it is gone"
