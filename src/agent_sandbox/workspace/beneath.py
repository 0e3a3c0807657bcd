"""The one module that opens what a guest made; `removal` removes it with the same steps.

Names, types, modes and links in a layer are chosen by a hostile program that may still be running, so every step starts from a
descriptor, follows no link of any kind, stays on one filesystem, and never opens anything but a directory or a regular file.

`os.fwalk` and `shutil.rmtree` are not used: they keep one descriptor for each level or recurse, so a tree 10,000 levels deep ends them;
they cross into other mounts; and they give up on directories of mode 000. Here one descriptor goes down and, through "..", up again.
Going up is believed only if it arrives at the very directory it came from (device and inode), so that moving a directory cannot lead
anyone elsewhere.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Generator
from dataclasses import dataclass, field
from functools import cache

from agent_sandbox.errors import WorkspaceError
from agent_sandbox.kernel import syscalls

ENTRY_LIMIT = 1_000_000
_NO_LINKS = syscalls.RESOLVE_NO_SYMLINKS | syscalls.RESOLVE_NO_MAGICLINKS
_ONE_FILESYSTEM = syscalls.RESOLVE_NO_XDEV
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NONBLOCK
_FILE = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_NO_NAMES = ("", ".", "..")
_LONGEST_PATH = 4000  # bytes for one call; PATH_MAX is 4096
SWAPPED = (errno.ELOOP, errno.ENOTDIR, errno.ENOENT)  # it was a directory a moment ago


class TooMany(WorkspaceError):
    """There is more than the caller was willing to look at."""


class Moved(WorkspaceError):
    """The tree is being rearranged while we are in it."""


def open_beneath(directory: int, path: str, flags: int, *, one_filesystem: bool = True) -> int:
    """Open `path` below `directory` without following links. Raises OSError; EINVAL for a path with `..`, `.`, NUL or empty components.

    Works for paths longer than PATH_MAX. The caller names the flags; for what a guest made use `open_file` or `open_directory`.
    """
    resolve = syscalls.RESOLVE_BENEATH | _NO_LINKS | (_ONE_FILESYSTEM if one_filesystem else 0)
    *leading, last = _pieces(path)
    current = directory
    try:
        for piece in leading:
            deeper = syscalls.openat2(current, piece, os.O_PATH | os.O_DIRECTORY, resolve=resolve)
            if current != directory:
                os.close(current)
            current = deeper
        return syscalls.openat2(current, last, flags, resolve=resolve)
    finally:
        if current != directory:
            os.close(current)


def _pieces(path: str) -> list[str]:
    """The path in pieces that one system call takes. Without ".." in them, beneath each is beneath the whole."""
    pieces: list[str] = []
    length = 0
    for part in path.split("/"):
        if part in ("", ".", "..") or "\0" in part:
            raise OSError(errno.EINVAL, "not a plain relative path", path)
        size = len(os.fsencode(part)) + 1
        if pieces and length + size <= _LONGEST_PATH:
            pieces[-1] += "/" + part
            length += size
        else:
            pieces.append(part)
            length = size
    return pieces


def open_file(directory: int, path: str, *, one_filesystem: bool = True, unlock: bool = False) -> int:
    """A descriptor to read a regular file. Anything else is an OSError, and has not been opened: no FIFO is joined, no device started.

    With `unlock`, a file that the caller owns but may not read is made readable for the moment; leave it off for what is no guest's.
    """
    handle = open_beneath(directory, path, os.O_PATH, one_filesystem=one_filesystem)
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
        # The handle is opened again, not the name: it is the object that was just judged.
        here = f"/proc/self/fd/{handle}"
        try:
            return os.open(here, _FILE)
        except PermissionError:
            if not unlock or status.st_uid != os.geteuid():
                raise
            os.chmod(here, stat.S_IMODE(status.st_mode) | stat.S_IRUSR)
            try:
                return os.open(here, _FILE)
            finally:
                os.chmod(here, stat.S_IMODE(status.st_mode))
    finally:
        os.close(handle)


def open_seen_file(directory: int, name: str) -> tuple[int, os.stat_result]:
    """A descriptor to read a single name that was a regular file a moment ago, and its status: one call instead of three.

    Should it have become a FIFO in that moment, it is opened without waiting and closed again. Links are not followed even then, and
    devices are nothing that a guest can make. Raises OSError for anything but a regular file.
    """
    if "/" in name or name in _NO_NAMES:
        raise OSError(errno.EINVAL, "not the name of an entry", name)
    fd = os.open(name, _FILE | os.O_NOFOLLOW, dir_fd=directory)
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", name)
    return fd, status


def open_directory(directory: int, path: str, *, one_filesystem: bool = True) -> int:
    """A descriptor to list a directory and to start from."""
    return open_beneath(directory, path, _DIRECTORY, one_filesystem=one_filesystem)


def xattrs(directory: int, name: str) -> dict[str, bytes]:
    """The extended attributes of one entry, a link's own rather than its target's. Those that may not be read have no value: b""."""
    if "/" in name or name in _NO_NAMES:
        raise OSError(errno.EINVAL, "not the name of an entry", name)
    try:
        if _can_list_attributes():
            found = syscalls.listxattrat(directory, name, syscalls.AT_SYMLINK_NOFOLLOW)
        else:
            found = os.listxattr(_entry(directory, name), follow_symlinks=False)
    except OSError as error:
        if error.errno == errno.ENOTSUP:
            return {}
        raise
    return {attribute: _attribute(_entry(directory, name), attribute, follow=False) for attribute in found} if found else {}


def _entry(directory: int, name: str) -> str:
    """A path for calls that take no descriptor: a single name after one, itself not followed, leads nowhere else."""
    return f"/proc/self/fd/{directory}/{name}"


@cache
def _can_list_attributes() -> bool:
    """Whether the kernel takes a descriptor for it. The way through /proc costs twice as much."""
    try:
        syscalls.listxattrat(syscalls.AT_FDCWD, "/", 0)
    except OSError as error:
        return error.errno == errno.ENOTSUP
    return True


def xattrs_of(fd: int) -> dict[str, bytes]:
    """The same of an open file or directory."""
    try:
        found = os.listxattr(fd)
    except OSError as error:
        if error.errno == errno.ENOTSUP:
            return {}
        raise
    return {attribute: _attribute(fd, attribute, follow=True) for attribute in found} if found else {}


def _attribute(place: int | str, name: str, *, follow: bool) -> bytes:
    try:
        return os.getxattr(place, name, follow_symlinks=follow)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM, errno.ENODATA):
            return b""
        raise


@dataclass(frozen=True, slots=True)
class Entry:
    """One thing found by `walk`. `directory` holds it; `own` is the directory itself, or None if it is none or cannot be entered.

    Both descriptors are good until the next entry is taken.
    """

    parent: Entry | None
    name: str
    depth: int
    status: os.stat_result
    directory: int
    own: int | None = None

    @property
    def path(self) -> str:
        """Relative to where the walk began. Made on demand: kept for each of 10,000 nested directories it would be quadratic."""
        names: list[str] = []
        entry: Entry | None = self
        while entry is not None:
            names.append(entry.name)
            entry = entry.parent
        return "/".join(reversed(names))


@dataclass(slots=True)
class _Level:
    identity: tuple[int, int]
    entry: Entry | None = None
    names: list[str] = field(default_factory=list)
    mode: int | None = None  # to be put back


def walk(directory: int, *, limit: int = ENTRY_LIMIT, unlock: bool = True, directories_only: bool = False) -> Generator[Entry, None, None]:
    """Everything below `directory`, or all directories, each before what is in it, in the order of names.

    With `unlock`, a directory that the caller owns but may not read is made readable while the walk is in it; leave it off for what is no
    guest's. Raises `TooMany` after `limit` entries, and `Moved` when a directory is moved away under us.
    """
    current = os.open(".", _DIRECTORY | os.O_CLOEXEC, dir_fd=directory)
    levels = [_Level(identity(current))]
    levels[0].names = _listed(current, limit, directories_only)
    left = limit - len(levels[0].names)
    try:
        while levels:
            level = levels[-1]
            if not level.names:
                current = _leave(current, levels)
                continue
            name = level.names.pop()
            try:
                status = os.stat(name, dir_fd=current, follow_symlinks=False)
            except FileNotFoundError:
                continue
            if not stat.S_ISDIR(status.st_mode):
                yield Entry(level.entry, name, len(levels) - 1, status, current)
                continue
            try:
                own, status, mode = enter(current, name, 0o500 if unlock else 0)
            except OSError as error:
                if error.errno in SWAPPED and left > 0:
                    level.names.append(name)
                    left -= 1
                    continue
                yield Entry(level.entry, name, len(levels) - 1, status, current)
                continue
            entry = Entry(level.entry, name, len(levels) - 1, status, current, own)
            below = _Level(identity(own), entry, mode=mode)
            outer, current = current, own
            levels.append(below)
            try:
                below.names = _listed(own, left, directories_only)
                left -= len(below.names)
                yield entry
            finally:
                os.close(outer)
    finally:
        try:
            while levels:
                current = _leave(current, levels)
        finally:
            if current >= 0:
                os.close(current)


def _listed(directory: int, limit: int, directories_only: bool) -> list[str]:
    found = names(directory, limit=limit)
    return sorted([name for name in found if found[name] == stat.S_IFDIR] if directories_only else found, reverse=True)


def names(directory: int, *, limit: int) -> dict[str, int]:
    """What is in a directory, in no order, with the type of each as the listing tells it: S_IFDIR, S_IFREG, or 0 for anything else.

    Raises `TooMany` beyond `limit`.
    """
    found: dict[str, int] = {}
    with os.scandir(directory) as listing:
        for item in listing:
            if len(found) >= limit:
                raise TooMany("there are more files and directories here than will be looked at", hint="agent-sandbox reset drops them")
            if item.is_file(follow_symlinks=False):
                found[item.name] = stat.S_IFREG
            else:
                found[item.name] = stat.S_IFDIR if item.is_dir(follow_symlinks=False) else 0
    return found


def identity(fd: int) -> tuple[int, int]:
    """What a descriptor leads to, however it is called and wherever it has been moved."""
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def enter(directory: int, name: str, wanted: int) -> tuple[int, os.stat_result, int | None]:
    """Open a directory, giving its owner (us) the rights in `wanted` that the guest took away.

    Returns a descriptor, the status as found, and a mode to put back if it was changed.
    """
    resolve = syscalls.RESOLVE_BENEATH | _NO_LINKS | _ONE_FILESYSTEM
    try:
        own = syscalls.openat2(directory, name, _DIRECTORY, resolve=resolve)
    except PermissionError:
        return _unlock(directory, name, wanted)
    status = os.fstat(own)
    mode = stat.S_IMODE(status.st_mode)
    if mode & wanted == wanted or not os.geteuid() == status.st_uid != 0:  # root passes modes as it is
        return own, status, None
    os.fchmod(own, mode | wanted)
    return own, status, mode


def _unlock(directory: int, name: str, wanted: int) -> tuple[int, os.stat_result, int | None]:
    resolve = syscalls.RESOLVE_BENEATH | _NO_LINKS | _ONE_FILESYSTEM
    handle = syscalls.openat2(directory, name, os.O_PATH | os.O_DIRECTORY, resolve=resolve)
    try:
        here = f"/proc/self/fd/{handle}"
        status = os.fstat(handle)
        mode = stat.S_IMODE(status.st_mode)
        if mode & wanted == wanted or os.geteuid() != status.st_uid:
            raise PermissionError(errno.EACCES, "not ours to open", name)
        os.chmod(here, mode | wanted)  # the handle, whatever its name now leads to
        return os.open(here, _DIRECTORY | os.O_CLOEXEC), status, mode
    finally:
        os.close(handle)


def _leave(current: int, levels: list[_Level]) -> int:
    """Close the innermost directory and return its parent, or -1 above the first."""
    level = levels.pop()
    try:
        above = parent(current, levels[-1].identity) if levels else -1
    except BaseException:
        levels.clear()
        raise
    if level.mode is not None:
        os.fchmod(current, level.mode)
    os.close(current)
    return above


def parent(current: int, expected: tuple[int, int]) -> int:
    """Go up, and raise `Moved` unless that leads to `expected`."""
    above = syscalls.openat2(current, "..", _DIRECTORY, resolve=_NO_LINKS | _ONE_FILESYSTEM)
    if identity(above) != expected:
        os.close(above)
        raise Moved("a directory was moved while it was being looked at", hint="wait until nothing runs in this sandbox")
    return above
