"""A writer of cpio archives in the format `newc`, which the kernel unpacks as its first file system."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator

from agent_sandbox._fast.values import dataclass

_LARGEST = 1 << 31  # bytes of one file: the format has eight hexadecimal digits


@dataclass(frozen=True)
class ArchiveEntry:
    """A file, directory or link of an archive. `name` has no leading slash; all entries belong to root."""

    name: str
    mode: int
    content: bytes = b""
    mtime: int = 0


def tree_entries(paths: Iterator[str] | list[str]) -> Iterator[ArchiveEntry]:
    """Yield entries for files of this machine, under their own names, and for the directories and links that lead to them.

    Every component that is a link stays a link, and its target is added, so that a name resolves inside as it does here.
    """
    seen: set[str] = set()
    for path in paths:
        yield from _resolved(path, seen)


def _resolved(path: str, seen: set[str], depth: int = 0) -> Iterator[ArchiveEntry]:
    if depth > 40:
        raise OSError(f"too many links on the way to {path}")
    way = "/"
    parts = [part for part in path.split("/") if part]
    for index, part in enumerate(parts):
        way = os.path.join(way, part)
        facts = os.lstat(way)
        if stat.S_ISLNK(facts.st_mode):
            target = os.readlink(way)
            if way not in seen:
                seen.add(way)
                yield ArchiveEntry(way[1:], stat.S_IFLNK | 0o777, os.fsencode(target), int(facts.st_mtime))
            rest = os.path.join(os.path.dirname(way), target, *parts[index + 1 :])
            yield from _resolved(os.path.normpath(rest), seen, depth + 1)
            return
        if way in seen:
            continue
        seen.add(way)
        if stat.S_ISDIR(facts.st_mode):
            yield ArchiveEntry(way[1:], stat.S_IFDIR | 0o755, b"", int(facts.st_mtime))
        elif stat.S_ISREG(facts.st_mode):
            with open(way, "rb") as file:
                yield ArchiveEntry(way[1:], stat.S_IFREG | 0o755, file.read(), int(facts.st_mtime))


def pack(entries: list[ArchiveEntry]) -> bytes:
    """Return the archive. Raises ValueError for a file that the format cannot hold."""
    out = bytearray()
    for number, entry in enumerate([*entries, ArchiveEntry("TRAILER!!!", 0)], 1):
        if len(entry.content) >= _LARGEST:
            raise ValueError(f"{entry.name} is too large")
        name = os.fsencode(entry.name) + b"\0"
        words = (number, entry.mode, 0, 0, 1, entry.mtime & 0xFFFFFFFF, len(entry.content), 0, 0, 0, 0, len(name), 0)
        out += b"070701" + b"".join(b"%08X" % word for word in words) + name
        out += bytes(-len(out) % 4)
        out += entry.content
        out += bytes(-len(out) % 4)
    return bytes(out)
