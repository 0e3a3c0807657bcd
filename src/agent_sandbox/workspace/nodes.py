"""Nodes: the type, size, mode, owner, link target and attributes of an entry, on the machine or in a layer.

This module reads metadata and compares content. FIFOs, sockets and devices are described, never opened.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
from collections.abc import Mapping, Sequence
from enum import Enum

from agent_sandbox._fast.values import TYPE_CHECKING, dataclass, field

if TYPE_CHECKING:
    from typing import Any

_CHUNK = 1 << 20
# Labels that the kernel or a security module sets by itself: they differ between filesystems without any change.
_LABELS = frozenset({"security.selinux", "security.ima", "security.evm"})
_ACCESS_LISTS = frozenset({"system.posix_acl_access", "system.posix_acl_default"})
_LIST_HEAD, _LIST_ENTRY = 4, struct.Struct("<HHI")  # a version; then a tag, rights and an id for each entry
_NAMED = (0x02, 0x08)  # tags of the entries of named users and groups; all others have no id


class EntryType(Enum):
    """Types of directory entry."""

    FILE = "file"
    DIRECTORY = "dir"
    SYMLINK = "symlink"
    FIFO = "fifo"
    SOCKET = "socket"
    DEVICE = "device"

    @classmethod
    def of(cls, mode: int) -> EntryType:
        """Return the type in an `st_mode`."""
        return _TYPES.get(stat.S_IFMT(mode), cls.DEVICE)


_TYPES = {
    stat.S_IFREG: EntryType.FILE,
    stat.S_IFDIR: EntryType.DIRECTORY,
    stat.S_IFLNK: EntryType.SYMLINK,
    stat.S_IFIFO: EntryType.FIFO,
    stat.S_IFSOCK: EntryType.SOCKET,
}
_BY_VALUE = {kind.value: kind for kind in EntryType}


@dataclass(frozen=True)
class Node:
    """The metadata of one entry. `size` is set only for files; `xattrs` exclude kernel labels and the overlay's own attributes."""

    type: EntryType
    mode: int  # permission bits, with set-user-id, set-group-id and sticky
    uid: int
    gid: int
    size: int = 0
    target: str = ""  # for a symlink
    device: int = 0  # for a device
    xattrs: Mapping[str, bytes] = field(default_factory=dict, hash=False)

    # Written out because each change has two nodes, and the shared dataclass `__init__` takes three times as long.
    def __init__(
        self,
        type: EntryType,
        mode: int,
        uid: int,
        gid: int,
        size: int = 0,
        target: str = "",
        device: int = 0,
        xattrs: Mapping[str, bytes] | None = None,
    ) -> None:
        values = self.__dict__
        values["type"], values["mode"], values["uid"], values["gid"] = type, mode, uid, gid
        values["size"], values["target"], values["device"] = size, target, device
        values["xattrs"] = {} if xattrs is None else xattrs


def as_row(node: Node | None) -> list[Any] | None:
    """Return a node as JSON values. Invalid UTF-8 in a link target becomes Python's surrogate escapes, so no byte is lost."""
    if node is None:
        return None
    attributes = {name: value.hex() for name, value in node.xattrs.items()} if node.xattrs else {}
    return [node.type.value, node.mode, node.uid, node.gid, node.size, node.target, node.device, attributes]


def from_row(row: Sequence[Any] | None) -> Node | None:
    """Return the node that `as_row` turned into a row. Raises KeyError, ValueError or TypeError for a malformed row."""
    if row is None:
        return None
    kind, mode, uid, gid, size, target, device, attributes = row
    xattrs = {name: bytes.fromhex(value) for name, value in attributes.items()} if attributes else None
    return Node(_BY_VALUE[kind], mode, uid, gid, size, target, device, xattrs)


def describe(
    directory: int, name: str, status: os.stat_result, attributes: Mapping[str, bytes], *, own_prefix: str, owner_shift: int = 0
) -> Node:
    """Return the node at `name` from its status and attributes.

    Attributes under `own_prefix` are left out; owner ids, and those in access control lists, are reduced by `owner_shift`.
    """
    mode, uid, gid = status.st_mode, status.st_uid, status.st_gid
    kind = _TYPES.get(stat.S_IFMT(mode), EntryType.DEVICE)
    if owner_shift:
        uid, gid = (identity - owner_shift if identity >= owner_shift else identity for identity in (uid, gid))
    if attributes:
        attributes = {key: value for key, value in attributes.items() if key not in _LABELS and not key.startswith(own_prefix)}
        if owner_shift:
            attributes = {key: _unshifted(value, owner_shift) if key in _ACCESS_LISTS else value for key, value in attributes.items()}
    if kind is EntryType.FILE:
        return Node(kind, stat.S_IMODE(mode), uid, gid, status.st_size, "", 0, attributes)
    target = os.readlink(name, dir_fd=directory) if kind is EntryType.SYMLINK else ""
    device = status.st_rdev if kind is EntryType.DEVICE else 0
    return Node(kind, stat.S_IMODE(mode), uid, gid, 0, target, device, attributes)


def _unshifted(value: bytes, shift: int) -> bytes:
    """Return a POSIX access control list with the ids of its users and groups reduced by `shift`; another text as it is."""
    if len(value) % _LIST_ENTRY.size != _LIST_HEAD:
        return value
    entries = bytearray(value[:_LIST_HEAD])
    for tag, rights, identity in _LIST_ENTRY.iter_unpack(value[_LIST_HEAD:]):
        entries += _LIST_ENTRY.pack(tag, rights, identity - shift if tag in _NAMED and identity >= shift else identity)
    return bytes(entries)


def same_content(one: int, other: int, size: int, *, most: int) -> tuple[bool | None, int]:
    """Return whether two open files share their first `size` bytes, and the number of bytes read.

    The answer is None when the comparison would read more than `most` bytes. Holes that both files have are not read: a file of a terabyte
    that occupies a megabyte costs a megabyte.
    """
    if size <= min(_CHUNK, most):  # the usual case
        piece = os.pread(one, size, 0)
        return (len(piece) == size and piece == os.pread(other, size, 0)), size
    position = read = 0
    while position < size:
        position, length = _next_data(one, other, position, size)
        if read + length > most:
            return None, read
        piece = _read(one, position, length)
        read += length
        if len(piece) < length or piece != _read(other, position, length):
            return False, read
        position += length
    return True, read


def _next_data(one: int, other: int, position: int, size: int) -> tuple[int, int]:
    """Return the start and length of the next piece in which at least one of two files has data. The length is 0 at the end.

    A piece is at most one chunk long.
    """
    extents = [next_extent(fd, position, size) for fd in (one, other)]
    start = min(extent[0] for extent in extents)
    end = max(end for begin, end in extents if begin == start)
    return start, min(_CHUNK, end - start)


def next_extent(fd: int, position: int, size: int) -> tuple[int, int]:
    """Return where the file's next data begins and ends, from `position` on; both are `size` when only a hole is left."""
    try:
        start = os.lseek(fd, position, os.SEEK_DATA)
        return min(start, size), min(os.lseek(fd, start, os.SEEK_HOLE), size)
    except OSError as error:
        if error.errno == errno.ENXIO:
            return size, size
        if error.errno == errno.EINVAL:  # a filesystem without hole support
            return position, size
        raise


def _read(fd: int, position: int, length: int) -> bytes:
    """Read `length` bytes at `position`, or up to the end of the file. A short read is continued, so that it cannot pass for the end."""
    piece = os.pread(fd, length, position)
    while len(piece) < length and (more := os.pread(fd, length - len(piece), position + len(piece))):
        piece += more
    return piece
