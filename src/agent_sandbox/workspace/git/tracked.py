"""The files that the commit HEAD of a real repository tracks. Read from the objects themselves: no git is run, and no index is trusted.

Only the repository on the machine is read, never one in a sandbox's layers. Loose objects, packs (index version 2, deltas), alternates,
linked worktrees, detached heads and packed refs are understood. For anything else (SHA-256 objects, reftables, damage) `UnknownHead` is
raised: the caller then knows nothing about the files, and hides them.
"""

from __future__ import annotations

import errno
import os
import stat
import zlib
from collections.abc import Callable, Collection
from contextlib import ExitStack
from mmap import ACCESS_READ, mmap

LARGEST = 32 << 20  # bytes of one commit or tree
_LONGEST_REF = 4096
_MOST_HOPS = 5  # symbolic refs in a row, as in git
_DEEPEST = 4096  # deltas in a row
_MOST_ALTERNATES = 32
_TYPES = {1: b"commit", 2: b"tree", 3: b"blob", 4: b"tag"}
_OFFSET_DELTA, _REFERENCE_DELTA = 6, 7
_HEX = frozenset("0123456789abcdef")


class UnknownHead(Exception):
    """It cannot be said which files are tracked."""


def tracked_blobs(project: str, among: Collection[str]) -> dict[str, str]:
    """Return the object id of each of these paths, relative to `project`, that is a regular file in HEAD. Raises `UnknownHead`."""
    found = _repository(project)
    if found is None or not among:
        return {}
    repository, inside = found
    with repository:
        return {name: blob for name in among if (blob := repository.blob((*inside, *name.split("/")))) is not None}


def head_of(project: str) -> str:
    """Return the commit id of HEAD; empty without a repository or before the first commit. Raises `UnknownHead`."""
    found = _repository(project)
    return "" if found is None else found[0].head()


def blob_id(content: bytes) -> str:
    """Return the object id that git gives this content."""
    from hashlib import sha1  # slow to load: only for a suspected file that is tracked

    return sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _repository(project: str) -> tuple[_Repository, tuple[str, ...]] | None:
    """Return the repository that a directory belongs to, and the way from its top to the directory."""
    top, inside = os.path.realpath(project), []
    while not os.path.lexists(os.path.join(top, ".git")):
        top, name = os.path.split(top)
        if not name:
            return None
        inside.append(name)
    place = os.path.join(top, ".git")
    if not os.path.isdir(place):  # a linked worktree or a submodule
        place = os.path.join(top, _line(place).removeprefix("gitdir:").strip())
    common = os.path.join(place, "commondir")
    shared = os.path.join(place, _line(common)) if os.path.exists(common) else place
    return _Repository(place, shared), tuple(reversed(inside))


class _Repository(ExitStack):
    """The objects and refs of a repository. A context manager: open packs are closed with it."""

    def __init__(self, own: str, shared: str) -> None:
        super().__init__()
        self._own, self._shared = own, shared
        self._stores: list[str] = []
        self._packs: list[_Pack] | None = None
        self._trees: dict[str, dict[str, tuple[bytes, str]]] = {}

    def head(self) -> str:
        """Return the commit id of HEAD; empty before the first commit."""
        name, text = "HEAD", ""
        for _ in range(_MOST_HOPS):
            text = self._ref(name)
            if not text.startswith("ref:"):
                break
            name = text[4:].strip()
            if not name.startswith("refs/") or ".." in name.split("/"):
                raise UnknownHead(f"HEAD names {name!r}")
            if name == "refs/heads/.invalid":
                raise UnknownHead("its refs are stored as a reftable")
        if text and (len(text) != 40 or not _HEX.issuperset(text)):
            raise UnknownHead("HEAD is no SHA-1 commit id")
        return text

    def blob(self, names: tuple[str, ...]) -> str | None:
        """Return the object id of a regular file in HEAD; None if there is none at this path."""
        directory = self._directory(names[:-1])
        mode, object_id = self._tree(directory).get(names[-1], (b"", "")) if directory is not None else (b"", "")
        return object_id if mode.startswith(b"100") else None

    def _directory(self, names: tuple[str, ...]) -> str | None:
        commit = self.head()
        if not commit:
            return None
        first = self._object(commit, b"commit").partition(b"\n")[0]
        if not first.startswith(b"tree ") or len(first) != 45:
            raise UnknownHead("its commit cannot be read")
        tree = first[5:].decode("ascii", "replace")
        for name in names:
            mode, tree = self._tree(tree).get(name, (b"", ""))
            if mode != b"40000":
                return None
        return tree

    def _tree(self, object_id: str) -> dict[str, tuple[bytes, str]]:
        if object_id not in self._trees:
            content, entries, at = self._object(object_id, b"tree"), {}, 0
            while at < len(content):
                end = content.find(b"\0", at)
                mode, _, name = content[at:end].partition(b" ")
                if end < 0 or not name or len(content) < end + 21:
                    raise UnknownHead("one of its trees is damaged")
                entries[os.fsdecode(name)] = (mode, content[end + 1 : end + 21].hex())
                at = end + 21
            self._trees[object_id] = entries
        return self._trees[object_id]

    def _ref(self, name: str) -> str:
        for directory in dict.fromkeys((self._own, self._shared)):
            place = os.path.join(directory, name)
            if os.path.isfile(place):
                return _line(place)
        packed = os.path.join(self._shared, "packed-refs")
        for line in _content(packed).splitlines() if os.path.isfile(packed) else ():
            object_id, _, rest = line.partition(b" ")
            if rest == os.fsencode(name):
                return object_id.decode("ascii", "replace")
        return ""

    def _object(self, object_id: str, kind: bytes) -> bytes:
        try:
            found, content = self._loose(object_id) or self._packed(object_id) or (b"", b"")
        except (OSError, ValueError, IndexError, KeyError, zlib.error, RecursionError) as error:
            raise UnknownHead(f"an object cannot be read: {error}") from error
        if found != kind:
            raise UnknownHead(f"there is no {kind.decode()} {object_id}")
        return content

    def _loose(self, object_id: str) -> tuple[bytes, bytes] | None:
        for store in self._object_stores():
            try:
                content = _inflated(_content(os.path.join(store, object_id[:2], object_id[2:])), LARGEST)
            except FileNotFoundError:
                continue
            header, _, body = content.partition(b"\0")
            return header.partition(b" ")[0], body
        return None

    def _packed(self, object_id: str) -> tuple[bytes, bytes] | None:
        if self._packs is None:
            self._packs = [self.enter_context(_Pack(path)) for store in self._object_stores() for path in _indexes(f"{store}/pack")]
        for pack in self._packs:
            if (offset := pack.find(bytes.fromhex(object_id))) is not None:
                return pack.read(offset, self._any_object)
        return None

    def _any_object(self, object_id: str) -> tuple[bytes, bytes]:
        found = self._loose(object_id) or self._packed(object_id)
        if found is None:
            raise ValueError(f"there is no {object_id}")
        return found

    def _object_stores(self) -> list[str]:
        if not self._stores:
            self._stores = [os.path.join(self._shared, "objects")]
            for store in self._stores:
                listed = os.path.join(store, "info", "alternates")
                if os.path.isfile(listed) and len(self._stores) < _MOST_ALTERNATES:
                    lines = [os.fsdecode(line) for line in _content(listed).splitlines() if not line.startswith(b"#")]
                    self._stores += [path for line in lines if line and (path := os.path.join(store, line)) not in self._stores]
        return self._stores


class _Pack(ExitStack):
    """A pack with its index. Opened when an object is looked up."""

    def __init__(self, index: str) -> None:
        super().__init__()
        self._path = index
        self._index: mmap | None = None
        self._data: mmap | None = None

    def find(self, object_id: bytes) -> int | None:
        """Return the offset of an object in the pack."""
        index = self._index = self._index or self._mapped(self._path)
        if index[:8] != b"\xfftOc\0\0\0\2":
            raise ValueError("a pack index of another version")
        first = int.from_bytes(index[4 + 4 * object_id[0] : 8 + 4 * object_id[0]]) if object_id[0] else 0
        last, total = int.from_bytes(index[8 + 4 * object_id[0] : 12 + 4 * object_id[0]]), int.from_bytes(index[1028:1032])
        while first < last:
            middle = (first + last) // 2
            here = index[1032 + 20 * middle : 1052 + 20 * middle]
            if here == object_id:
                start = 1032 + 24 * total + 4 * middle
                offset = int.from_bytes(index[start : start + 4])
                if offset < 1 << 31:
                    return offset
                start = 1032 + 28 * total + 8 * (offset - (1 << 31))
                return int.from_bytes(index[start : start + 8])
            first, last = (middle + 1, last) if here < object_id else (first, middle)
        return None

    def read(self, offset: int, other: Callable[[str], tuple[bytes, bytes]]) -> tuple[bytes, bytes]:
        """Return type and content of the object at an offset. `other` finds the base of a delta by its id."""
        data = self._data = self._data or self._mapped(self._path.removesuffix(".idx") + ".pack")
        deltas: list[bytes] = []
        while len(deltas) < _DEEPEST:
            at, byte = offset + 1, data[offset]
            kind, size, shift = byte >> 4 & 7, byte & 15, 4
            while byte & 128:
                byte = data[at]
                size, shift, at = size | (byte & 127) << shift, shift + 7, at + 1
            if size > LARGEST:
                raise ValueError("too large")
            if kind == _OFFSET_DELTA:
                byte, at = data[at], at + 1
                back = byte & 127
                while byte & 128:
                    byte, at = data[at], at + 1
                    back = (back + 1) << 7 | byte & 127
                deltas.append(_inflated(data[at : at + size + (size >> 8) + 1024], size))
                offset -= back
                if back <= 0 or offset < 12:
                    raise ValueError("a delta without a base")
                continue
            if kind == _REFERENCE_DELTA:
                deltas.append(_inflated(data[at + 20 : at + 20 + size + (size >> 8) + 1024], size))
                name, content = other(data[at : at + 20].hex())
            else:
                name, content = _TYPES[kind], _inflated(data[at : at + size + (size >> 8) + 1024], size)
            for delta in reversed(deltas):
                content = _applied(delta, content)
            return name, content
        raise ValueError("too many deltas in a row")

    def _mapped(self, path: str) -> mmap:
        with open(path, "rb") as file:
            return self.enter_context(mmap(file.fileno(), 0, access=ACCESS_READ))


def _applied(delta: bytes, base: bytes) -> bytes:
    expected, at = _varint(delta, 0)
    size, at = _varint(delta, at)
    if expected != len(base) or size > LARGEST:
        raise ValueError("a delta of another base")
    parts: list[bytes] = []
    while at < len(delta):
        code, at = delta[at], at + 1
        if not code & 128:
            if not code:
                raise ValueError("an unknown instruction in a delta")
            parts.append(delta[at : at + code])
            at += code
            continue
        values = [0] * 7
        for bit in range(7):
            if code >> bit & 1:
                values[bit], at = delta[at], at + 1
        start = int.from_bytes(values[:4], "little")
        parts.append(base[start : start + (int.from_bytes(values[4:], "little") or 0x10000)])
    result = b"".join(parts)
    if len(result) != size:
        raise ValueError("a delta that does not fit")
    return result


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value, shift = 0, 0
    while True:
        byte, at = data[at], at + 1
        value, shift = value | (byte & 127) << shift, shift + 7
        if not byte & 128:
            return value, at


def _inflated(data: bytes, most: int) -> bytes:
    unpacker = zlib.decompressobj()
    content = unpacker.decompress(data, most + 1)
    if len(content) > most:
        raise ValueError("too large")
    if not unpacker.eof and unpacker.decompress(unpacker.unconsumed_tail, 1):
        raise ValueError("too large")
    return content


def _indexes(directory: str) -> list[str]:
    try:
        return sorted(os.path.join(directory, name) for name in os.listdir(directory) if name.endswith(".idx"))
    except FileNotFoundError:
        return []


def _line(path: str) -> str:
    try:
        return os.fsdecode(_content(path, _LONGEST_REF).partition(b"\n")[0]).strip()
    except OSError as error:
        raise UnknownHead(f"{path!r} cannot be read: {error.strerror}") from error


def _content(path: str, most: int = LARGEST) -> bytes:
    """Return the beginning of a regular file. Raises OSError for anything else, and never waits for a pipe."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
        return file.read(most)
