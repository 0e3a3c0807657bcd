"""What was really at a path at one moment: enough to tell later whether it is still that, and to say what was there.

Size and times can lie: a clock that ticks slowly hides a second write, a tool that restores times hides a first one. The time of the last
change of the inode cannot be set, so it is believed when it is old enough; otherwise content decides.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping

from agent_sandbox._fast.encoding import sha256
from agent_sandbox._fast.values import dataclass
from agent_sandbox.workspace import beneath
from agent_sandbox.workspace.nodes import EntryType, Node, describe

_CHUNK = 1 << 20
SETTLED_NS = 2_000_000_000  # a file that changed less than this before we looked may change again without its times telling


@dataclass(frozen=True)
class Seen:
    """One entry as it was when we looked. `digest` is that of a regular file's content, in hexadecimal; empty when it was not read."""

    node: Node
    device: int
    inode: int
    mtime_ns: int
    ctime_ns: int
    looked_ns: int  # by the clock of the machine
    digest: str = ""

    # Written out, as that of `Node`, because there is one for each change.
    def __init__(self, node: Node, device: int, inode: int, mtime_ns: int, ctime_ns: int, looked_ns: int, digest: str = "") -> None:
        values = self.__dict__
        values["node"], values["device"], values["inode"], values["mtime_ns"] = node, device, inode, mtime_ns
        values["ctime_ns"], values["looked_ns"], values["digest"] = ctime_ns, looked_ns, digest

    def untouched(self, status: os.stat_result) -> bool:
        """Whether times alone prove that this is still the same, unchanged inode. False proves nothing."""
        same = (self.device, self.inode, self.ctime_ns) == (status.st_dev, status.st_ino, status.st_ctime_ns)
        return same and self.ctime_ns + SETTLED_NS < self.looked_ns


@dataclass(frozen=True)
class Base:
    """What was real at a path when a layer first covered it. `seen` is None when nothing was there.

    With `known` False reality had moved before it could be kept: whoever merges has no base, and says so. `kept` says where the content is
    in the store, and is empty when it is not. `listed` says of a directory that everything real below it has a base, too.
    """

    path: str
    seen: Seen | None
    known: bool = True
    kept: str = ""
    listed: bool = False

    def __init__(self, path: str, seen: Seen | None, known: bool = True, kept: str = "", listed: bool = False) -> None:
        values = self.__dict__
        values["path"], values["seen"], values["known"], values["kept"], values["listed"] = path, seen, known, kept, listed


Bases = Mapping[str, Base]


def look(directory: int, name: str, *, now_ns: int, content: bool = False) -> Seen | None:
    """What is at `name` in a real directory; None when nothing is. With `content` a regular file is read for its digest.

    Raises OSError for what cannot be looked at.
    """
    try:
        status = os.stat(name, dir_fd=directory, follow_symlinks=False)
        attributes = beneath.xattrs(directory, name)
        node = describe(directory, name, status, attributes, own_prefix="trusted.overlay.")
    except FileNotFoundError:
        return None
    digest = digest_of(directory, name) if content and stat.S_ISREG(status.st_mode) else ""
    return Seen(node, status.st_dev, status.st_ino, status.st_mtime_ns, status.st_ctime_ns, now_ns, digest)


def digest_of(directory: int, name: str) -> str:
    """The digest of a regular file's content. Raises OSError."""
    fd = beneath.open_file(directory, name, one_filesystem=False)
    try:
        return digest_of_open(fd)
    finally:
        os.close(fd)


def digest_of_open(fd: int) -> str:
    """The same of an open file, from where it stands."""
    made = sha256()
    while piece := os.read(fd, _CHUNK):
        made.update(piece)
    return made.hexdigest()


def alike(one: Seen | None, other: Seen | None) -> bool:
    """Whether both were the same thing with the same content, mode, owner and attributes, whichever inode it was.

    Files whose content was not read count as different unless it is the same, settled inode.
    """
    if one is None or other is None:
        return one is other
    if one.node != other.node:
        return False
    if one.node.type is not EntryType.FILE or (one.digest and one.digest == other.digest):
        return True
    known = one.digest and other.digest
    settled = max(one.ctime_ns, other.ctime_ns) + SETTLED_NS < min(one.looked_ns, other.looked_ns)
    return not known and settled and (one.device, one.inode, one.ctime_ns) == (other.device, other.inode, other.ctime_ns)
