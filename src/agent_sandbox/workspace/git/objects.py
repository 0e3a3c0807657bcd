"""Git objects: their names, their syntax, and the files that hold them. Pure, except for `ObjectFiles`, which reads a real repository."""

from __future__ import annotations

import hashlib
import mmap
import os
import struct
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress

from agent_sandbox._fast.values import dataclass
from agent_sandbox.workspace.escape import folded
from agent_sandbox.workspace.git.packs import KINDS, Damaged, Pack, PackIndex, entries_of, read_loose

WIDTHS = {"sha1": 20, "sha256": 32}
LINK, DIRECTORY, REPOSITORY = "120000", "40000", "160000"
_MODES = frozenset({"100644", "100755", "100664", LINK, DIRECTORY, REPOSITORY})
_NUMBERS = {kind: number for number, kind in KINDS.items()}
_MOST_ALTERNATES = 20


@dataclass(frozen=True)
class Commit:
    """A commit. `title` is the first line of its message, `time` the seconds since 1970 that its committer gave."""

    tree: str
    parents: tuple[str, ...]
    title: str
    time: int


def hash_name(kind: str, content: bytes, algorithm: str) -> str:
    """Return the name that git gives an object: the hash of its kind, size and content."""
    return hashlib.new(algorithm, b"%s %d\0%s" % (kind.encode(), len(content), content), usedforsecurity=False).hexdigest()


def check(kind: str, content: bytes, width: int) -> list[str]:
    """Check the syntax of an object, and return the names of the objects that it needs. Raises `Damaged` with the reason."""
    if kind == "tree":
        return [name for mode, _, name in tree_entries(content, width) if mode != REPOSITORY]
    if kind == "commit":
        commit = read_commit(content, width)
        return [commit.tree, *commit.parents]
    if kind == "tag":
        lines = _header(content)
        target, what = _value(lines, "object"), _value(lines[1:], "type")
        if what not in _NUMBERS or not _is_name(target, width) or not _value(lines[2:], "tag"):
            raise Damaged("a tag has no valid header")
        return [target]
    return []


def tree_entries(content: bytes, width: int) -> Iterator[tuple[str, str, str]]:
    """Yield the entries of a tree: mode, file name, object name. Raises `Damaged` for a tree that git would not write."""
    last = b""
    for mode, name, target in entries_of(content, width):
        text, order = os.fsdecode(name), name + (b"/" if mode == b"40000" else b"")
        if mode.decode("ascii", "replace") not in _MODES:
            raise Damaged(f"a tree has an entry of mode {mode!r}")
        if not name or b"/" in name or text in (".", "..") or folded(text) == ".git":
            raise Damaged(f"a tree has an entry called {text!r}")
        if order <= last or name == last.rstrip(b"/"):
            raise Damaged("the entries of a tree are not in order")
        last = order
        yield mode.decode(), text, target.hex()


def read_commit(content: bytes, width: int) -> Commit:
    """Parse a commit object. Raises `Damaged` for one that git would not write."""
    lines = _header(content)
    tree, at, parents = _value(lines, "tree"), 1, []
    while at < len(lines) and lines[at].startswith("parent "):
        parents.append(_value(lines[at:], "parent"))
        at += 1
    people = _value(lines[at:], "author"), _value(lines[at + 1 :], "committer")
    if not all(_is_name(name, width) for name in (tree, *parents)) or not all(people):
        raise Damaged("a commit has no valid header")
    message = content.partition(b"\n\n")[2].lstrip(b"\n")
    seconds = people[1].rpartition(" ")[0].rpartition(" ")[2]
    time = int(seconds) if seconds.isdecimal() and len(seconds) < 15 else 0
    return Commit(tree, tuple(parents), os.fsdecode(message.partition(b"\n")[0][:200]), time)


def _header(content: bytes) -> list[str]:
    header = content.partition(b"\n\n")[0]
    if b"\0" in header:
        raise Damaged("an object has a NUL in its header")
    return header.decode("utf-8", "surrogateescape").split("\n")


def _value(lines: list[str], word: str) -> str:
    start = f"{word} "
    return lines[0].removeprefix(start) if lines and lines[0].startswith(start) else ""


def _is_name(text: str, width: int) -> bool:
    return len(text) == 2 * width and not text.strip("0123456789abcdef")


def as_loose(kind: str, content: bytes) -> bytes:
    """Return the content of a file that holds this one object (a loose object)."""
    return zlib.compress(b"%s %d\0%s" % (kind.encode(), len(content), content), 1)


def as_pack(objects: Iterable[tuple[str, str, bytes]], algorithm: str) -> tuple[str, bytes, bytes]:
    """Make a pack of objects, each given as a name, a kind and a content.

    Returns the name of the pack, the content of the pack file, and the content of its index file.
    """
    everything = sorted(objects)
    parts, places, at = [struct.pack(">4sII", b"PACK", 2, len(everything))], [], 12
    for name, kind, content in everything:
        size, byte = len(content) >> 4, _NUMBERS[kind] << 4 | len(content) & 15
        header = bytearray()
        while size:
            header.append(byte | 0x80)
            byte, size = size & 0x7F, size >> 7
        header.append(byte)
        part = bytes(header) + zlib.compress(content, 1)
        places.append((bytes.fromhex(name), zlib.crc32(part), at))
        parts.append(part)
        at += len(part)
    body = b"".join(parts)
    body += hashlib.new(algorithm, body, usedforsecurity=False).digest()
    ends = [0] * 256
    for name_bytes, _, _ in places:
        ends[name_bytes[0]] += 1
    for number in range(1, 256):
        ends[number] += ends[number - 1]
    far = [offset for _, _, offset in places if offset >= 0x80000000]
    offsets = [offset if offset < 0x80000000 else 0x80000000 | far.index(offset) for _, _, offset in places]
    names = b"".join(name_bytes for name_bytes, _, _ in places)
    width = WIDTHS[algorithm]
    index = b"\xfftOc\0\0\0\2" + struct.pack(">256I", *ends) + names
    index += b"".join(struct.pack(">I", check) for _, check, _ in places) + b"".join(struct.pack(">I", offset) for offset in offsets)
    index += b"".join(struct.pack(">Q", offset) for offset in far) + body[-width:]
    index += hashlib.new(algorithm, index, usedforsecurity=False).digest()
    return hashlib.new(algorithm, names, usedforsecurity=False).hexdigest(), body, index


class ObjectFiles:
    """The objects of a real repository: those in its `objects` directory and in its alternates. A context manager."""

    def __init__(self, directory: str, algorithm: str = "sha1") -> None:
        self.width = WIDTHS[algorithm]
        self._directories = list(_directories(directory))
        self._packs: list[Pack] | None = None
        self._maps: list[mmap.mmap] = []
        self._views: list[memoryview] = []

    def __enter__(self) -> ObjectFiles:
        return self

    def __exit__(self, *ended: object) -> None:
        self._packs = None
        for view in self._views:
            view.release()
        for each in self._maps:
            with suppress(BufferError):  # a part of it is still in use; it ends with the process
                each.close()
        self._views, self._maps = [], []

    def has(self, name: str) -> bool:
        """Return whether the repository has an object."""
        if any(os.path.isfile(self._loose(directory, name)) for directory in self._directories):
            return True
        return any(pack.index.find(bytes.fromhex(name)) is not None for pack in self._all_packs())

    def read(self, name: str) -> tuple[str, bytes] | None:
        """Return the kind and the content of an object; None if the repository does not have it. Raises `Damaged`."""
        for directory in self._directories:
            with suppress(FileNotFoundError, NotADirectoryError), open(self._loose(directory, name), "rb") as file:
                return read_loose(file.read())
        return next(filter(None, (pack.read(bytes.fromhex(name)) for pack in self._all_packs())), None)

    def packed_names(self) -> bytes:
        """Return the names of all objects in packs, one after the other."""
        return b"".join(bytes(pack.index.names()) for pack in self._all_packs())

    @staticmethod
    def _loose(directory: str, name: str) -> str:
        return os.path.join(directory, name[:2], name[2:])

    def _all_packs(self) -> list[Pack]:
        if self._packs is None:
            self._packs = []
            for directory in self._directories:
                with suppress(FileNotFoundError, NotADirectoryError):
                    for name in sorted(os.listdir(os.path.join(directory, "pack"))):
                        if name.endswith(".idx"):
                            self._open(os.path.join(directory, "pack", name))
        return self._packs

    def _open(self, index: str) -> None:
        assert self._packs is not None
        with suppress(FileNotFoundError):  # removed meanwhile: git has repacked
            places = self._map(index), self._map(index.removesuffix(".idx") + ".pack")
            self._packs.append(Pack(places[1], PackIndex(places[0], self.width), self.width))

    def _map(self, path: str) -> memoryview:
        with open(path, "rb") as file:
            if not os.fstat(file.fileno()).st_size:
                raise Damaged(f"{path!r} is empty")
            self._maps.append(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        self._views.append(memoryview(self._maps[-1]))
        return self._views[-1]


def _directories(first: str) -> Iterator[str]:
    """Yield an `objects` directory, and all directories that `info/alternates` files name."""
    todo, seen = [first], {first}
    while todo and len(seen) < _MOST_ALTERNATES:
        directory = todo.pop(0)
        yield directory
        with suppress(OSError), open(os.path.join(directory, "info/alternates"), "rb") as file:
            for line in file.read(1 << 16).splitlines():
                other = os.path.normpath(os.path.join(directory, os.fsdecode(line)))
                if line and not line.startswith(b"#") and other not in seen:
                    seen.add(other)
                    todo.append(other)
