"""The index of a git repository: read, merged by content, and written. Pure.

`git status` writes the index anew whenever the times of files have changed, although nothing is staged. So two indexes are compared by
their entries: path, mode and object. The times and sizes in an entry only save git from reading a file; an entry without them is valid.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Mapping

from agent_sandbox._fast.values import dataclass
from agent_sandbox.workspace.escape import folded
from agent_sandbox.workspace.git.objects import WIDTHS
from agent_sandbox.workspace.git.packs import Damaged

_ASSUME_UNCHANGED, _EXTENDED = 0x8000, 0x4000
_SKIP_WORKTREE, _INTENT_TO_ADD = 0x4000, 0x2000
_STATUS = 24  # bytes before the mode: times, device and inode
_MODES = frozenset({0o100644, 0o100755, 0o120000, 0o160000})


@dataclass(frozen=True)
class IndexEntry:
    """An entry. `name` is the name of its object. `stage` is 0, or 1 to 3 for the sides of a conflict.

    `status` and `sizes` are the times, device, inode, owner and size by which git notices that a file has changed. `assumed` is git's flag
    assume-unchanged; `flags` are its flags skip-worktree and intent-to-add.
    """

    mode: int
    name: str
    stage: int
    status: bytes = bytes(_STATUS)
    sizes: bytes = bytes(12)
    assumed: bool = False
    flags: int = 0

    @property
    def meaning(self) -> tuple[int, int, str]:
        """The stage, the mode and the object name, by which entries are compared."""
        return self.stage, self.mode, self.name


Entries = Mapping[str, tuple[IndexEntry, ...]]  # by path, in the order of stages


def read_index(data: bytes, algorithm: str = "sha1") -> dict[str, tuple[IndexEntry, ...]]:
    """Return the entries of an index by path. Raises `Damaged` if the index cannot be read, or is split or sparse."""
    width = WIDTHS[algorithm]
    if len(data) < 12 + width or data[:4] != b"DIRC":
        raise Damaged("it is no index")
    version, count = struct.unpack(">II", data[4:12])
    if version not in (2, 3, 4):
        raise Damaged(f"the index has version {version}")
    entries: dict[str, tuple[IndexEntry, ...]] = {}
    at, last = 12, b""
    end = len(data) - width
    try:
        for _ in range(count):
            start = at
            (mode,) = struct.unpack_from(">I", data, at + _STATUS)
            name = data[at + 40 : at + 40 + width].hex()
            (flags,) = struct.unpack_from(">H", data, at + 40 + width)
            at += 42 + width
            more = 0
            if flags & _EXTENDED:
                (more,) = struct.unpack_from(">H", data, at)
                at += 2
            if version == 4:
                cut, at = _strip(data, at)
                stop = data.index(b"\0", at)
                path = last[: len(last) - cut] + data[at:stop]
                at = stop + 1
            else:
                stop = data.index(b"\0", at)
                path = data[at:stop]
                at = start + (stop - start + 8) // 8 * 8
            if at > end:
                raise Damaged("the index is cut off")
            last = path
            text = os.fsdecode(path)
            _check(text, mode)
            status, sizes = data[start : start + _STATUS], data[start + _STATUS + 4 : start + 40]
            entry = IndexEntry(mode, name, flags >> 12 & 3, status, sizes, bool(flags & _ASSUME_UNCHANGED), more)
            entries[text] = (*entries.get(text, ()), entry)
    except (struct.error, ValueError) as error:
        raise Damaged(f"the index is damaged: {error}") from None
    while at + 8 <= end:
        if data[at] >= 0x61:  # a small letter: git must not ignore it
            raise Damaged("the index is split or sparse")
        at += 8 + int(struct.unpack_from(">I", data, at + 4)[0])
    return entries


def _strip(data: bytes, at: int) -> tuple[int, int]:
    """Decode the number at `at`, which says how many bytes of the previous path to drop. Return it, and the place after it."""
    byte = data[at]
    value = byte & 0x7F
    while byte & 0x80:
        at += 1
        byte = data[at]
        value = (value + 1) << 7 | byte & 0x7F
        if value > 1 << 20:
            raise ValueError("a path is too long")
    return value, at + 1


def _check(path: str, mode: int) -> None:
    names = path.split("/")
    if mode not in _MODES or any(name in ("", ".", "..") or folded(name) == ".git" for name in names):
        raise Damaged(f"the index has an entry {path!r} of mode {mode:o}")


def write_index(entries: Entries, algorithm: str = "sha1") -> bytes:
    """Return the content of an index file with these entries."""
    version = 3 if any(entry.flags for each in entries.values() for entry in each) else 2
    ordered = sorted((os.fsencode(path), entry.stage, entry) for path, each in entries.items() for entry in each)
    parts = [struct.pack(">4sII", b"DIRC", version, len(ordered))]
    for path, stage, entry in ordered:
        flags = (_ASSUME_UNCHANGED if entry.assumed else 0) | (_EXTENDED if entry.flags else 0) | stage << 12 | min(len(path), 0xFFF)
        part = entry.status + struct.pack(">I", entry.mode) + entry.sizes + bytes.fromhex(entry.name) + struct.pack(">H", flags)
        part += struct.pack(">H", entry.flags) if entry.flags else b""
        part += path
        parts.append(part + bytes(8 - len(part) % 8))
    body = b"".join(parts)
    return body + hashlib.new(algorithm, body, usedforsecurity=False).digest()


def merge_indexes(
    base: Entries, ours: Entries, theirs: Entries, keep: frozenset[str]
) -> tuple[dict[str, tuple[IndexEntry, ...]], list[str]]:
    """Merge two indexes path by path: `ours` is the guest's, `theirs` the real one. Return the entries, and the paths that both changed.

    A path that both changed gets the guest's entry. Paths in `keep`, and paths below them, get the real entry. The guest cannot set flags
    that hide a file from git. Its file times and sizes are dropped, because they are those of the clone.
    """
    result: dict[str, tuple[IndexEntry, ...]] = {}
    both: list[str] = []
    for path in {**theirs, **ours}:
        was, mine, real = base.get(path, ()), ours.get(path, ()), theirs.get(path, ())
        if _same(mine, real) or _same(mine, was) or _lies_in(path, keep):
            chosen = real
        else:
            if not _same(real, was):
                both.append(path)
            chosen = tuple(IndexEntry(each.mode, each.name, each.stage, flags=each.flags & _INTENT_TO_ADD) for each in mine)
        if chosen:
            result[path] = chosen
    return result, both


def same_entries(one: Entries, other: Entries) -> bool:
    """Return whether two indexes have the same entries. Times and sizes of files are not compared."""
    return one.keys() == other.keys() and all(_same(one[path], other[path]) for path in one)


def _same(one: tuple[IndexEntry, ...], other: tuple[IndexEntry, ...]) -> bool:
    return [each.meaning for each in one] == [each.meaning for each in other]


def _lies_in(path: str, places: frozenset[str]) -> bool:
    while path and path not in places:
        path = path.rpartition("/")[0]
    return bool(path)
