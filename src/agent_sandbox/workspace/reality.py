"""The real entries at the paths that a layer covers, and fingerprints that show later whether an entry has changed.

No link is followed on the way down, because the overlay's lower layer does not follow links either. If the guest replaced a link with a
directory, the link's target has nothing to do with that directory. Unlike in a layer, mounts are crossed: a path means the same as on the
machine.

Size and modification time can mislead: a coarse clock hides a second write, and a tool that restores times hides even the first write. The
inode's change time cannot be set, so it is trusted when it is old enough; otherwise content decides.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from contextlib import suppress

from agent_sandbox._fast.encoding import sha256
from agent_sandbox._fast.values import dataclass
from agent_sandbox.workspace import beneath
from agent_sandbox.workspace.nodes import EntryType, Node, describe
from agent_sandbox.workspace.originals.runs import TICK_NS

_MOST_OPEN = 16  # directories
_CHUNK = 1 << 20
_COARSE_NS = 2_000_000_000  # the coarsest times of any filesystem


class Reality:
    """The real directory at `root`, which need not exist. Paths are relative to it, "" for itself. A context manager."""

    def __init__(self, root: str) -> None:
        self._root = -1
        with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            self._root = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._way: list[tuple[str, int]] = []  # open directories, each below the previous one; entries are looked up directory by directory

    def __enter__(self) -> Reality:
        return self

    def __exit__(self, *ended: object) -> None:
        for fd in (*(fd for _, fd in self._way), self._root):
            if fd >= 0:
                os.close(fd)
        self._way, self._root = [], -1

    def directory(self, path: str) -> int | None:
        """Return a descriptor of a real directory, valid until the next call; None if none exists or it cannot be entered."""
        if not path:
            return self._root if self._root >= 0 else None
        way = self._way
        while way and way[-1][0] != path and not path.startswith(way[-1][0] + "/"):
            os.close(way.pop()[1])
        if not way or way[-1][0] != path:
            above, start = way[-1] if way else ("", self._root)
            if start < 0:
                return None
            below = path[len(above) + 1 :] if above else path
            try:
                if "/" in below or below in ("", ".", ".."):
                    opened = beneath.open_beneath(start, below, os.O_PATH | os.O_DIRECTORY, one_filesystem=False)
                else:  # for a single name the plain call is equivalent and faster
                    opened = os.open(below, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=start)
            except OSError:
                return None
            way.append((path, opened))
            if len(way) > _MOST_OPEN:
                os.close(way.pop(0)[1])
        return way[-1][1]

    def names(self, path: str) -> list[str]:
        """Return the sorted names in a real directory; an empty list if it cannot be listed."""
        directory = self.directory(path)
        if directory is None:
            return []
        try:
            listing = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=directory)
        except OSError:
            return []
        try:
            return sorted(os.listdir(listing))
        finally:
            os.close(listing)

    def status(self, path: str, name: str) -> os.stat_result | None:
        """Return the status of `name` in the directory at `path`, without following a link; None if it does not exist."""
        directory = self.directory(path)
        if directory is None:
            return None
        try:
            return os.stat(name, dir_fd=directory, follow_symlinks=False)
        except OSError:
            return None


@dataclass(frozen=True)
class Fingerprint:
    """The metadata, inode and times of an entry at the time when it was seen.

    `digest` is the hexadecimal digest of a regular file's content; empty if the content was not read.
    """

    node: Node
    device: int
    inode: int
    mtime_ns: int
    ctime_ns: int
    looked_ns: int  # machine clock
    digest: str = ""

    # Written out, like `Node.__init__`, because there is one for each change.
    def __init__(self, node: Node, device: int, inode: int, mtime_ns: int, ctime_ns: int, looked_ns: int, digest: str = "") -> None:
        values = self.__dict__
        values["node"], values["device"], values["inode"], values["mtime_ns"] = node, device, inode, mtime_ns
        values["ctime_ns"], values["looked_ns"], values["digest"] = ctime_ns, looked_ns, digest

    def untouched(self, status: os.stat_result) -> bool:
        """Return whether the times alone prove that `status` is of the same, unchanged inode. A False result proves nothing."""
        same = (self.device, self.inode, self.ctime_ns) == (status.st_dev, status.st_ino, status.st_ctime_ns)
        return same and is_settled(self.ctime_ns, self.looked_ns)


@dataclass(frozen=True)
class Base:
    """The real entry at a path when a layer first covered the path. `seen` is None when nothing was there.

    `known` is False when reality had changed before it could be captured: a merge then has no base, and says so. `kept` is the place of the
    content in the store, empty if it was not stored. `listed` says of a directory that everything real below it has a base, too.
    """

    path: str
    seen: Fingerprint | None
    known: bool = True
    kept: str = ""
    listed: bool = False

    def __init__(self, path: str, seen: Fingerprint | None, known: bool = True, kept: str = "", listed: bool = False) -> None:
        values = self.__dict__
        values["path"], values["seen"], values["known"], values["kept"], values["listed"] = path, seen, known, kept, listed


Bases = Mapping[str, Base]


def is_settled(ctime_ns: int, looked_ns: int) -> bool:
    """Return whether every change after `looked_ns`, by `file_clock_ns`, gives the file another ctime than `ctime_ns`.

    A change within the same tick of the kernel's clock may leave the ctime as it was. Some filesystems keep whole seconds, or two of them.
    A ctime of a whole second may be of such a filesystem.
    """
    return ctime_ns + granule_ns(ctime_ns) < looked_ns


def granule_ns(ctime_ns: int) -> int:
    """Return how far apart two changes must be, at most, to have different ctimes on the filesystem that gave this ctime."""
    return TICK_NS if ctime_ns % 1_000_000_000 else _COARSE_NS


def look(directory: int, name: str, *, now_ns: int, content: bool = False) -> Fingerprint | None:
    """Take the fingerprint of `name` in a real directory; None when nothing is there. With `content`, add a regular file's digest.

    Raises OSError for an entry that cannot be examined.
    """
    try:
        status = os.stat(name, dir_fd=directory, follow_symlinks=False)
        attributes = beneath.xattrs(directory, name)
        node = describe(directory, name, status, attributes, own_prefix="trusted.overlay.")
    except FileNotFoundError:
        return None
    digest = digest_of(directory, name) if content and stat.S_ISREG(status.st_mode) else ""
    return Fingerprint(node, status.st_dev, status.st_ino, status.st_mtime_ns, status.st_ctime_ns, now_ns, digest)


def digest_of(directory: int, name: str) -> str:
    """Return the digest of a regular file's content. Raises OSError."""
    fd = beneath.open_file(directory, name, one_filesystem=False)
    try:
        return digest_of_open(fd)
    finally:
        os.close(fd)


def digest_of_open(fd: int) -> str:
    """Return the digest of an open file's content, from its current position."""
    digest = sha256()
    while piece := os.read(fd, _CHUNK):
        digest.update(piece)
    return digest.hexdigest()


def alike(one: Fingerprint | None, other: Fingerprint | None) -> bool:
    """Return whether two fingerprints show the same type, content, mode, owner and attributes. The inodes may differ.

    Files whose content was not read count as different, unless both are the same inode with the same, old enough change time.
    """
    if one is None or other is None:
        return one is other
    if one.node != other.node:
        return False
    if one.node.type is not EntryType.FILE or (one.digest and one.digest == other.digest):
        return True
    known = one.digest and other.digest
    settled = is_settled(max(one.ctime_ns, other.ctime_ns), min(one.looked_ns, other.looked_ns))
    return not known and settled and (one.device, one.inode, one.ctime_ns) == (other.device, other.inode, other.ctime_ns)
