"""Freeze a project: copy its tree once, so that several sandboxes see the same files whatever happens to the real ones.

The copy is a lower layer, as the real tree is one for other sandboxes: nobody writes to it, and changes are still changes of the real
project. Content is cloned where the filesystem shares blocks, else copied. Secrets that the view hides are not copied. A file that is
written while the tree is being copied may be copied as it was before, after, or in between; every sandbox sees the same copy of it.

Not frozen are filesystems mounted inside the project, the rest of the machine, and, unless the caller wants them copied, *stores*: large
trees that change by installing, not by editing. These are virtual environments, `node_modules`, and the objects of a git repository, which
never change. They are shown live, and `changed_since` tells whether a file there changed meanwhile.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Collection
from contextlib import suppress

from agent_sandbox._fast.values import dataclass
from agent_sandbox.errors import WorkspaceError
from agent_sandbox.workspace import beneath
from agent_sandbox.workspace.copy import copy_file, copy_special, dress
from agent_sandbox.workspace.durable import explained
from agent_sandbox.workspace.originals.runs import TICK_NS, await_file_clock, file_clock_ns

MOST_ENTRIES = 500_000
SPARED_BYTES = 256 << 20  # of the disk, which a copy never takes
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
LARGE_ENTRIES, LARGE_BYTES = 10_000, 256 << 20  # a store with more of either is shown live
_MOST_LIVE = 32  # stores that are shown live, each by an overlay of its own; further ones are copied
_CACHE = "__pycache__"
_MARKS = ("user.overlay.", "trusted.overlay.", "security.")  # attributes that a lower layer must not bring, or that only the kernel sets


@dataclass(frozen=True)
class FrozenTree:
    """A frozen project. `since_ns` is when the copying began: a real file with a later ctime may differ from its copy."""

    project: str
    path: str
    since_ns: int
    entries: int = 0
    size: int = 0  # bytes of all files
    live: tuple[str, ...] = ()  # absolute paths of trees that are shown live
    left_out: tuple[str, ...] = ()  # what could not be copied, in words


class _Copier:
    """Copies the entries of one tree. Directories stay open from the top to the current one, and are finished when they are left."""

    def __init__(self, project: str, into: str, skip: Collection[str], room: int, *, stores: bool) -> None:
        self._project, self._skip, self._room, self._stores = project, skip, room, stores
        self._open: list[tuple[int, os.stat_result, dict[str, bytes]]] = []
        self._links: dict[tuple[int, int], tuple[str, int]] = {}
        self._into = into
        self.entries = self.size = 0
        self.unread: list[str] = []
        self.live: list[str] = []

    def copy(self) -> None:
        source = os.open(self._project, _DIRECTORY)
        try:
            self._enter(os.open(self._into, _DIRECTORY), os.fstat(source), _attributes(source))
            hidden = -1  # the depth of a directory whose entries are passed over, because it is masked or shown live
            for entry in beneath.walk(source, limit=MOST_ENTRIES, unlock=False):
                if 0 <= hidden < entry.depth:
                    continue
                hidden = -1
                self._leave(entry.depth + 1)
                if f"{self._project}/{entry.path}" in self._skip:
                    hidden = entry.depth
                    continue
                if self._one(entry):
                    hidden = entry.depth
            self._leave(0)
        finally:
            for fd, _, _ in self._open:
                os.close(fd)
            os.close(source)

    def _enter(self, fd: int, status: os.stat_result, attributes: dict[str, bytes]) -> None:
        self._open.append((fd, status, attributes))

    def _leave(self, depth: int) -> None:
        """Finish the directories below this depth: mode and times are set last, because entries are made in them meanwhile."""
        while len(self._open) > depth:
            fd, status, attributes = self._open.pop()
            try:
                _finish(fd, status, attributes)
            finally:
                os.close(fd)

    def _one(self, entry: beneath.TreeEntry) -> bool:
        """Copy one entry. Return whether it is a directory that is shown live: then it is copied without its entries."""
        into, status = self._open[-1][0], entry.status
        self.entries += 1
        if stat.S_ISDIR(status.st_mode):
            os.mkdir(entry.name, 0o700, dir_fd=into)
            if entry.own is None:  # another filesystem, or closed to us: an empty directory stands there
                self.unread.append(entry.path)
            own = os.open(entry.name, _DIRECTORY, dir_fd=into)
            self._enter(own, status, _attributes(entry.own) if entry.own is not None else {})
            if not self._stores and entry.own is not None and len(self.live) < _MOST_LIVE and _is_store(entry, entry.own):
                self.live.append(f"{self._project}/{entry.path}")
                return True
        elif stat.S_ISREG(status.st_mode):
            self._file(entry, into)
        elif stat.S_ISLNK(status.st_mode) or stat.S_ISFIFO(status.st_mode):
            with suppress(FileNotFoundError):  # gone since it was listed
                copy_special(entry.directory, entry.name, into, _owned(status), {})
        else:
            self.unread.append(entry.path)
        return False

    def _file(self, entry: beneath.TreeEntry, into: int) -> None:
        status = entry.status
        known = self._links.get((status.st_dev, status.st_ino)) if status.st_nlink > 1 else None
        if known is not None and known[1] == status.st_ctime_ns:
            os.link(known[0], entry.name, src_dir_fd=self._open[0][0], dst_dir_fd=into, follow_symlinks=False)
            return
        try:
            old, status = beneath.open_seen_file(entry.directory, entry.name)
        except FileNotFoundError:
            return
        except OSError:
            self.unread.append(entry.path)
            return
        try:
            self.size += status.st_size
            self._room -= status.st_blocks * 512
            if self._room < 0:
                raise OSError(errno.ENOSPC, "the disk has too little room for a copy of the project")
            _copy(old, entry.name, into, status)
        finally:
            os.close(old)
        if status.st_nlink > 1:
            self._links[status.st_dev, status.st_ino] = entry.path, status.st_ctime_ns


def freeze(project: str, into: str, *, skip: Collection[str] = (), stores: bool = False) -> FrozenTree:
    """Copy the project into the new directory `into`, without the paths `skip`. Raises `WorkspaceError`; the caller removes the rest.

    Everything that was written before this call is in the copy. With `stores`, large stores are copied, too.
    """
    since = await_file_clock(file_clock_ns() + TICK_NS)  # everything written before this call is older than the copy, by a tick
    with explained(f"copy the project {project!r}"):
        os.mkdir(into, 0o700)
        disk = os.statvfs(into)
        copier = _Copier(project, into, frozenset(skip), disk.f_bavail * disk.f_frsize - SPARED_BYTES, stores=stores)
        try:
            copier.copy()
        except (beneath.TooMany, beneath.MovedAway) as error:
            hint = "name a smaller directory (--project), or use the live files: --live all"
            raise WorkspaceError(f"the project cannot be frozen: {error.message}", hint=hint) from error
    left_out = tuple(f"{path!r} is not in the frozen copy of the project" for path in copier.unread[:5])
    return FrozenTree(project, into, since, copier.entries, copier.size, tuple(copier.live), left_out)


def _is_store(entry: beneath.TreeEntry, own: int) -> bool:
    """Return whether a directory is a large store of installed packages or of git's objects."""
    objects = entry.name == "objects" and entry.parent is not None and entry.parent.name == ".git"
    if not (objects or entry.name == "node_modules" or beneath.status_of(own, "pyvenv.cfg") is not None):
        return False
    size = 0
    try:
        for number, inner in enumerate(beneath.walk(own, unlock=False)):
            size += inner.status.st_blocks * 512
            if number >= LARGE_ENTRIES or size > LARGE_BYTES:
                return True
    except (beneath.TooMany, beneath.MovedAway, OSError):
        return True
    return False


def changed_since(frozen: FrozenTree) -> tuple[str, ...]:
    """Return the trees shown live in which a file has appeared or changed since the project was frozen. Caches of Python do not count."""
    return tuple(tree for tree in frozen.live if _has_changed(tree, frozen.since_ns))


def _has_changed(tree: str, since_ns: int) -> bool:
    try:
        top = os.open(tree, _DIRECTORY)
    except OSError:
        return True
    try:
        cache = -1  # the depth of a cache whose entries do not count
        for entry in beneath.walk(top, limit=MOST_ENTRIES, unlock=False):
            if 0 <= cache < entry.depth:
                continue
            cache = entry.depth if entry.name == _CACHE else -1
            if not stat.S_ISDIR(entry.status.st_mode) and entry.status.st_ctime_ns >= since_ns:
                return True
    except (beneath.TooMany, beneath.MovedAway, OSError):
        return True
    finally:
        os.close(top)
    return False


def _copy(old: int, name: str, into: int, status: os.stat_result) -> None:
    try:
        copy_file(old, name, into, _owned(status), _attributes(old))
    except OSError as error:
        if error.errno != errno.EIO:  # it became shorter meanwhile: take what is there now
            raise
        os.unlink(name, dir_fd=into)
        copy_file(old, name, into, _owned(os.fstat(old)), {})


def _attributes(fd: int) -> dict[str, bytes]:
    try:
        return {name: value for name, value in beneath.xattrs_of(fd).items() if not name.startswith(_MARKS)}
    except OSError:
        return {}


def _owned(status: os.stat_result) -> os.stat_result:
    """Return the status that a copy gets. Without root the copy is ours, and has the permissions that we had."""
    if os.geteuid() == 0:
        return status
    values = list(status)
    mode = status.st_mode
    if status.st_uid != os.geteuid():
        mode = stat.S_IFMT(mode) | (mode & 0o1077) | (mode & 0o7) << 6
    values[stat.ST_MODE], values[stat.ST_UID], values[stat.ST_GID] = mode & ~0o6000, os.geteuid(), os.getegid()
    more = ("st_atime_ns", "st_mtime_ns", "st_ctime_ns", "st_rdev", "st_blocks", "st_blksize")
    return os.stat_result(values, {name: getattr(status, name) for name in more})


def _finish(fd: int, status: os.stat_result, attributes: dict[str, bytes]) -> None:
    dress(fd, _owned(status), attributes)
