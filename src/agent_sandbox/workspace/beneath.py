"""Open, walk and remove files and directories that a guest made. No other module opens or removes them.

A hostile program chooses the names, types, modes and links in a layer, and it may still be running. So every step starts from a descriptor,
follows no link of any kind, stays on one filesystem, and opens only directories and regular files.

`os.fwalk` and `shutil.rmtree` are not used. They keep one descriptor per level or recurse, so a tree 10,000 levels deep breaks them; they
cross into other mounts; and they give up on directories of mode 000. Here a single descriptor goes down and, through "..", up again. Each
step up is accepted only if it arrives at the directory that the step down left (same device and inode), so a moved directory cannot lead
elsewhere.

Removal unlinks nothing by path. A tree that is rearranged meanwhile can make it fail, but cannot lead it outside. Directories of mode 000
(overlayfs makes one, `work/work`) are made accessible first, which their owner may do.
"""

from __future__ import annotations

import errno
import math
import os
import stat
import time
from collections.abc import Generator
from functools import cache

from agent_sandbox._fast.values import dataclass, field
from agent_sandbox.errors import WorkspaceError
from agent_sandbox.kernel import syscalls

ENTRY_LIMIT = 1_000_000
_NO_LINKS = syscalls.RESOLVE_NO_SYMLINKS | syscalls.RESOLVE_NO_MAGICLINKS
_ONE_FILESYSTEM = syscalls.RESOLVE_NO_XDEV
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NONBLOCK
_FILE = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_NO_NAMES = ("", ".", "..")
_LONGEST_PATH = 4000  # bytes for one call; PATH_MAX is 4096
SWAPPED = (errno.ELOOP, errno.ENOTDIR, errno.ENOENT)  # errors of opening a directory that the guest has just replaced
_BATCH = 4096  # names in memory per level
_PATIENCE = 10_000  # concurrent changes tolerated before an error


class TooMany(WorkspaceError):
    """Raised if a tree has more entries than the caller's limit."""


class MovedAway(WorkspaceError):
    """Raised if a directory is moved while it is walked or removed."""


def open_beneath(directory: int, path: str, flags: int, *, one_filesystem: bool = True) -> int:
    """Open `path` below `directory` without following links; `path` may be longer than PATH_MAX.

    Raises OSError, with EINVAL for a path with `..`, `.`, NUL or empty components. The caller chooses the flags; for files that a guest
    made, use `open_file` or `open_directory`.
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
    """Split a path into pieces short enough for one system call. No piece has "..", so each stays beneath the directory."""
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
    """Open a regular file for reading and return its descriptor.

    Raises OSError for any other type, without having opened it: no FIFO is joined, no device started. With `unlock`, a file that the caller
    owns but may not read is made readable for a moment; leave it off for files that no guest made.
    """
    handle = open_beneath(directory, path, os.O_PATH, one_filesystem=one_filesystem)
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
        # Reopen the handle, not the name: the handle is the object whose type was checked.
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
    """Open an entry that was a regular file a moment ago; return its descriptor and status.

    Cheaper than `open_file`, because the type is checked after opening. If the name has become a FIFO meanwhile, it is opened without
    blocking and closed again. Links are not followed even then, and a guest cannot make devices. Raises OSError for anything but a regular
    file.
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
    """Open a directory and return its descriptor. The descriptor can list the directory, and open entries below it."""
    return open_beneath(directory, path, _DIRECTORY, one_filesystem=one_filesystem)


def xattrs(directory: int, name: str) -> dict[str, bytes]:
    """Return the extended attributes of one entry; for a link, those of the link itself. The value of an unreadable attribute is b""."""
    if "/" in name or name in _NO_NAMES:
        raise OSError(errno.EINVAL, "not the name of an entry", name)
    try:
        if _can_list_attributes():
            attributes = syscalls.listxattrat(directory, name, syscalls.AT_SYMLINK_NOFOLLOW)
        else:
            attributes = os.listxattr(_entry(directory, name), follow_symlinks=False)
    except OSError as error:
        if error.errno == errno.ENOTSUP:
            return {}
        raise
    return {attribute: _attribute(_entry(directory, name), attribute, follow=False) for attribute in attributes} if attributes else {}


def _entry(directory: int, name: str) -> str:
    """Return a path through /proc to an entry, for system calls that take no directory descriptor.

    The path is safe as long as the call does not follow a link at `name`.
    """
    return f"/proc/self/fd/{directory}/{name}"


@cache
def _can_list_attributes() -> bool:
    """Return whether the kernel has listxattrat. The fallback through /proc costs twice as much."""
    try:
        syscalls.listxattrat(syscalls.AT_FDCWD, "/", 0)
    except OSError as error:
        return error.errno == errno.ENOTSUP
    return True


def xattrs_of(fd: int) -> dict[str, bytes]:
    """Return the extended attributes of an open file or directory."""
    try:
        attributes = os.listxattr(fd)
    except OSError as error:
        if error.errno == errno.ENOTSUP:
            return {}
        raise
    return {attribute: _attribute(fd, attribute, follow=True) for attribute in attributes} if attributes else {}


def _attribute(place: int | str, name: str, *, follow: bool) -> bytes:
    try:
        return os.getxattr(place, name, follow_symlinks=follow)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM, errno.ENODATA):
            return b""
        raise


@dataclass(frozen=True, slots=True)
class TreeEntry:
    """One entry that `walk` yielded. Its descriptors are valid until `walk` yields the next entry.

    `directory` is a descriptor of the directory that holds the entry. `own` is a descriptor of the entry itself if that is a directory that
    can be entered, else None.
    """

    parent: TreeEntry | None
    name: str
    depth: int
    status: os.stat_result
    directory: int
    own: int | None = None

    @property
    def path(self) -> str:
        """The path relative to the start of the walk. Computed on demand: the paths of 10,000 nested directories need much memory."""
        names: list[str] = []
        entry: TreeEntry | None = self
        while entry is not None:
            names.append(entry.name)
            entry = entry.parent
        return "/".join(reversed(names))


@dataclass(slots=True)
class _Level:
    identity: tuple[int, int]
    entry: TreeEntry | None = None
    names: list[str] = field(default_factory=list)
    mode: int | None = None  # restored on leaving


def walk(
    directory: int, *, limit: int = ENTRY_LIMIT, unlock: bool = True, directories_only: bool = False
) -> Generator[TreeEntry, None, None]:
    """Yield every entry below `directory`, or only directories, each before its contents, sorted by name.

    With `unlock`, a directory that the caller owns but may not read is made readable while the walk is in it; leave it off for directories
    that no guest made. Raises `TooMany` after `limit` entries, and `MovedAway` when a directory is moved away during the walk.
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
                yield TreeEntry(level.entry, name, len(levels) - 1, status, current)
                continue
            try:
                own, status, mode = enter(current, name, 0o500 if unlock else 0)
            except OSError as error:
                if error.errno in SWAPPED and left > 0:
                    level.names.append(name)
                    left -= 1
                    continue
                yield TreeEntry(level.entry, name, len(levels) - 1, status, current)
                continue
            entry = TreeEntry(level.entry, name, len(levels) - 1, status, current, own)
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
    """Return the names in a directory, unordered, with their type from the listing: S_IFDIR, S_IFREG, or 0 for any other.

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


def status_of(directory: int, name: str) -> os.stat_result | None:
    """Return the status of an entry without following a link; None if there is no such entry."""
    try:
        return os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return None


def identity(fd: int) -> tuple[int, int]:
    """Return the device and inode of an open entry. They stay the same when the entry is renamed or moved."""
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def enter(directory: int, name: str, wanted: int) -> tuple[int, os.stat_result, int | None]:
    """Open a directory. If we own it and lack the mode bits `wanted`, because the guest removed them, add them.

    Returns a descriptor, the original status, and the mode to restore, which is None if the mode was not changed.
    """
    resolve = syscalls.RESOLVE_BENEATH | _NO_LINKS | _ONE_FILESYSTEM
    try:
        own = syscalls.openat2(directory, name, _DIRECTORY, resolve=resolve)
    except PermissionError:
        return _unlock(directory, name, wanted)
    status = os.fstat(own)
    mode = stat.S_IMODE(status.st_mode)
    if mode & wanted == wanted or not os.geteuid() == status.st_uid != 0:  # root needs no permission bits
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
        os.chmod(here, mode | wanted)  # the handle: its name may lead elsewhere by now
        return os.open(here, _DIRECTORY | os.O_CLOEXEC), status, mode
    finally:
        os.close(handle)


def _leave(current: int, levels: list[_Level]) -> int:
    """Close the innermost directory and restore its mode. Return a descriptor of its parent; -1 if it was the outermost directory."""
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
    """Open the parent directory. Raises `MovedAway` unless its device and inode are `expected`."""
    above = syscalls.openat2(current, "..", _DIRECTORY, resolve=_NO_LINKS | _ONE_FILESYSTEM)
    if identity(above) != expected:
        os.close(above)
        raise MovedAway("a directory was moved while it was being looked at", hint="wait until nothing runs in this sandbox")
    return above


@dataclass(slots=True)
class _RemovedLevel:
    name: str
    identity: tuple[int, int]
    names: list[str] = field(default_factory=list)
    stuck: set[str] = field(default_factory=set)


@dataclass(slots=True)
class _Removal:
    until: float
    failures: list[OSError] = field(default_factory=list)
    patience: int = _PATIENCE

    @property
    def late(self) -> bool:
        """Whether the time limit of the removal has passed."""
        return time.monotonic() > self.until

    def surprised(self) -> None:
        self.patience -= 1
        if self.patience <= 0:
            raise WorkspaceError("a directory keeps changing while it is removed", hint="end what still writes there, then try again")


def remove_tree(directory: int, name: str, *, until: float = math.inf) -> bool:
    """Remove `name` in `directory` and everything below it. Returns False if the time `until` passed before the end.

    `until` is a time of the monotonic clock. If something cannot be removed, everything else is removed, and `WorkspaceError` names the
    first failure. A missing name is no error.
    """
    if name in ("", ".", "..") or "/" in name:
        raise WorkspaceError(f"not the name of an entry: {name!r}")
    removal = _Removal(until)
    while not removal.failures and status_of(directory, name) is not None:
        if removal.late:
            return False
        try:
            _remove(directory, name, removal)
        except MovedAway:
            removal.surprised()
    if removal.failures:
        first = removal.failures[0]
        raise WorkspaceError(
            f"could not remove {len(removal.failures)} of the files of a sandbox; the first: {first.filename!r}: {first.strerror}",
            hint="they may be immutable (lsattr, chattr -i), in use as a mount, or owned by another user",
        ) from first
    return True


def _remove(directory: int, name: str, removal: _Removal) -> None:
    top = _unlink_or_enter(directory, name, removal)
    if top is None:
        return
    current, levels = top, [_RemovedLevel(name, identity(top))]
    try:
        while levels and not removal.late:
            level = levels[-1]
            if not level.names and not _refill(current, level):
                levels.pop()
                above = parent(current, levels[-1].identity) if levels else os.dup(directory)
                os.close(current)
                current = above
                if not _rmdir(current, level, removal) and levels:
                    levels[-1].stuck.add(level.name)
                continue
            child = level.names.pop()
            failed = len(removal.failures)
            inner = _unlink_or_enter(current, child, removal)
            if inner is not None:
                os.close(current)
                current = inner
                levels.append(_RemovedLevel(child, identity(inner)))
            elif len(removal.failures) > failed:
                level.stuck.add(child)
    finally:
        os.close(current)


def _refill(directory: int, level: _RemovedLevel) -> bool:
    """Read the next batch of names; return False if none is left. One long listing would miss entries while others are being removed."""
    with os.scandir(directory) as listing:
        for item in listing:
            if item.name not in level.stuck:
                level.names.append(item.name)
                if len(level.names) >= _BATCH:
                    break
    return bool(level.names)


def _unlink_or_enter(directory: int, name: str, removal: _Removal) -> int | None:
    """Unlink an entry. If the entry is a directory, which unlink refuses, open it and return its descriptor.

    The type is not checked first, because a guest could swap the entry. Failures are noted in `removal`.
    """
    try:
        os.unlink(name, dir_fd=directory)
    except FileNotFoundError:
        return None
    except IsADirectoryError:
        try:
            return enter(directory, name, 0o700)[0]
        except OSError as error:
            if error.errno in SWAPPED:
                removal.surprised()
                return None
            removal.failures.append(OSError(error.errno, error.strerror, name))
    except OSError as error:
        removal.failures.append(OSError(error.errno, error.strerror, name))
    return None


def _rmdir(directory: int, level: _RemovedLevel, removal: _Removal) -> bool:
    """Remove an emptied directory. Returns False if that failed for good, True if the directory is gone or will be listed again."""
    try:
        os.rmdir(level.name, dir_fd=directory)
    except FileNotFoundError:
        return True
    except OSError as error:
        if level.stuck:
            return False  # not empty, and the reason is already recorded
        if error.errno in (*SWAPPED, errno.ENOTEMPTY):
            removal.surprised()
            return True
        removal.failures.append(OSError(error.errno, error.strerror, level.name))
        return False
    return True
