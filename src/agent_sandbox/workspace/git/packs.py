"""Read git objects, from single files and from packs.

This module needs only the standard library, because its text is also a program: `engine.git_objects` runs it in a sandbox on the objects of
a guest. There it reads files from standard input, and writes the requested objects, with all that they refer to, to standard output. The
sandbox contains any attack on this code. The host trusts nothing of the output: it computes the name of each object itself.
"""

from __future__ import annotations

import bisect
import json
import struct
import sys
import zlib

KINDS = {1: "commit", 2: "tree", 3: "blob", 4: "tag"}
_OFFSET_DELTA, _NAMED_DELTA = 6, 7
_PIECE = 64 << 10
_LARGEST = 1 << 30  # bytes of one object
_LONGEST_CHAIN = 10_000  # deltas on deltas; git itself makes at most 4,095
_INDEX_START = b"\xfftOc\0\0\0\2"


class Damaged(Exception):
    """A file of a repository is not what git would write, or is of a format that is not supported."""


def inflate(data: memoryview, start: int, size: int) -> bytes:
    """Decompress the data at `start`. Raises `Damaged` if the result does not have `size` bytes."""
    if size > _LARGEST:
        raise Damaged("an object is too large")
    engine, parts, length = zlib.decompressobj(), [], 0
    try:
        while not engine.eof:
            piece = data[start : start + _PIECE]
            if not len(piece):
                break
            start += len(piece)
            text = engine.decompress(piece, size - length + 1)
            parts.append(text)
            length += len(text)
            if length > size or engine.unconsumed_tail:
                break
    except zlib.error as error:
        raise Damaged(f"an object cannot be decompressed: {error}") from None
    if length != size or not engine.eof:
        raise Damaged("an object has another size than it says")
    return b"".join(parts)


def read_loose(data: bytes) -> tuple[str, bytes]:
    """Return the kind and the content of a loose object. `data` is the content of its file."""
    try:
        start = zlib.decompressobj().decompress(data, 64)
    except zlib.error as error:
        raise Damaged(f"an object cannot be decompressed: {error}") from None
    header, found, _ = start.partition(b"\0")
    kind, _, size = header.decode("ascii", "replace").partition(" ")
    if not found or kind not in KINDS.values() or not size.isdecimal() or len(size) > 12:
        raise Damaged("an object has no valid header")
    return kind, inflate(memoryview(data), 0, len(header) + 1 + int(size))[len(header) + 1 :]


class PackIndex:
    """The index of a pack: the names of its objects, and where each begins in the pack. `width` is the length of a name in bytes."""

    def __init__(self, data: memoryview, width: int) -> None:
        self._data, self._width = data, width
        if len(data) < 1032 or bytes(data[:8]) != _INDEX_START:
            raise Damaged("the index of a pack is of another format than version 2")
        self._ends = struct.unpack(">256I", data[8:1032])
        self.count = self._ends[-1]
        self._offsets = 1032 + self.count * (width + 4)
        if list(self._ends) != sorted(self._ends) or len(data) < self._offsets + 4 * self.count:
            raise Damaged("the index of a pack is too short")

    def names(self) -> memoryview:
        """Return the names of all objects, one after the other."""
        return self._data[1032 : 1032 + self.count * self._width]

    def find(self, name: bytes) -> int | None:
        """Return where an object begins in the pack; None if the pack does not have it."""
        first, end = self._ends[name[0] - 1] if name[0] else 0, self._ends[name[0]]
        at = bisect.bisect_left(range(first, end), name, key=self._name) + first
        if at >= end or self._name(at) != name:
            return None
        (offset,) = struct.unpack_from(">I", self._data, self._offsets + 4 * at)
        if not offset & 0x80000000:
            return int(offset)
        place = self._offsets + 4 * self.count + 8 * (offset & 0x7FFFFFFF)
        if place + 8 > len(self._data):
            raise Damaged("the index of a pack is too short")
        return int(struct.unpack_from(">Q", self._data, place)[0])

    def _name(self, at: int) -> bytes:
        start = 1032 + at * self._width
        return bytes(self._data[start : start + self._width])


class Pack:
    """A pack and its index."""

    def __init__(self, data: memoryview, index: PackIndex, width: int) -> None:
        self._data, self.index, self._width = data, index, width

    def read(self, name: bytes) -> tuple[str, bytes] | None:
        """Return the kind and the content of an object; None if the pack does not have it."""
        start = self.index.find(name)
        if start is None:
            return None
        deltas: list[bytes] = []
        while True:
            kind, size, at = self._header(start)
            if kind in KINDS:
                content = inflate(self._data, at, size)
                for delta in reversed(deltas):
                    content = apply_delta(content, delta)
                return KINDS[kind], content
            if len(deltas) >= _LONGEST_CHAIN:
                raise Damaged("a pack has too long a chain of deltas")
            if kind == _OFFSET_DELTA:
                back, at = self._back(at)
                base: int | None = start - back
            elif kind == _NAMED_DELTA:
                base = self.index.find(bytes(self._data[at : at + self._width]))
                at += self._width
            else:
                raise Damaged("a pack has an object of an unknown kind")
            if base is None or not 0 < base < len(self._data) or base == start:
                raise Damaged("a delta in a pack has no base")
            deltas.append(inflate(self._data, at, size))
            start = base

    def _header(self, at: int) -> tuple[int, int, int]:
        """Return the kind of the object at a place, its size, and the place after its header."""
        byte = self._byte(at)
        kind, size, shift = byte >> 4 & 7, byte & 15, 4
        while byte & 0x80:
            at += 1
            byte = self._byte(at)
            size |= (byte & 0x7F) << shift
            shift += 7
            if shift > 64:
                raise Damaged("a pack has an object with an impossible size")
        return kind, size, at + 1

    def _back(self, at: int) -> tuple[int, int]:
        """Decode the distance from a delta back to its base, in bytes. Return it, and the place after it."""
        byte = self._byte(at)
        back = byte & 0x7F
        while byte & 0x80:
            at += 1
            byte = self._byte(at)
            back = (back + 1) << 7 | byte & 0x7F
            if back >> 64:
                raise Damaged("a delta in a pack has no base")
        return back, at + 1

    def _byte(self, at: int) -> int:
        if at >= len(self._data):
            raise Damaged("a pack is too short")
        return self._data[at]


def apply_delta(base: bytes, delta: bytes) -> bytes:
    """Return the content that results from applying a delta to its base."""
    try:
        before, at = _number(delta, 0)
        after, at = _number(delta, at)
        if before != len(base) or after > _LARGEST:
            raise Damaged("a delta is for another base")
        parts: list[bytes] = []
        length = 0
        while at < len(delta):
            code = delta[at]
            at += 1
            if code & 0x80:
                start = size = 0
                for bit in range(4):
                    if code & 1 << bit:
                        start |= delta[at] << 8 * bit
                        at += 1
                for bit in range(3):
                    if code & 0x10 << bit:
                        size |= delta[at] << 8 * bit
                        at += 1
                part = base[start : start + (size or 0x10000)]
                size = size or 0x10000
            elif code:
                part, size = delta[at : at + code], code
                at += code
            else:
                raise Damaged("a delta has an unknown instruction")
            length += len(part)
            if len(part) != size or length > after:
                raise Damaged("a delta does not fit its base")
            parts.append(part)
    except IndexError:
        raise Damaged("a delta is too short") from None
    if length != after:
        raise Damaged("a delta does not fit its base")
    return b"".join(parts)


def _number(delta: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = delta[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if not byte & 0x80:
            return value, at
        if shift > 64:
            raise Damaged("a delta has an impossible size")


def named_in(kind: str, content: bytes, width: int) -> list[bytes]:
    """Return the names of the objects that an object needs. Malformed parts are left out."""
    if kind == "tree":
        return [name for mode, _, name in entries_of(content, width) if mode != b"160000"]
    names = []
    if kind in ("commit", "tag"):
        for line in content.partition(b"\n\n")[0].split(b"\n"):
            word, _, value = line.partition(b" ")
            if word in (b"tree", b"parent", b"object") and len(value) == 2 * width:
                names.append(bytes.fromhex(value.decode("ascii", "replace")))
    return names


def entries_of(content: bytes, width: int) -> list[tuple[bytes, bytes, bytes]]:
    """Return the entries of a tree: mode, file name and object name. Raises `Damaged`."""
    entries, at = [], 0
    while at < len(content):
        blank = content.find(b" ", at, at + 8)
        end = content.find(b"\0", blank)
        if blank < 0 or end < 0 or end + 1 + width > len(content):
            raise Damaged("a tree is cut off")
        entries.append((content[at:blank], content[blank + 1 : end], content[end + 1 : end + 1 + width]))
        at = end + 1 + width
    return entries


def main() -> None:
    """Read files of objects from standard input, and write the wanted objects, with all that they need, to standard output.

    Objects that the host has already, and objects that are missing or damaged, are left out.
    """
    stdin, stdout = sys.stdin.buffer, sys.stdout.buffer
    order = json.loads(stdin.readline())
    width = int(order["width"])
    table = stdin.read(order["held"])
    held = {table[at : at + width] for at in range(0, len(table), width)}
    loose: dict[bytes, bytes] = {}
    halves: dict[str, dict[str, bytes]] = {}
    for name, size in order["files"]:
        data = stdin.read(size)
        if name.endswith((".pack", ".idx")):
            stem, _, half = name.rpartition(".")
            halves.setdefault(stem, {})[half] = data
        else:
            loose[bytes.fromhex(name)] = data
    packs = []
    for both in halves.values():
        try:
            packs.append(Pack(memoryview(both["pack"]), PackIndex(memoryview(both["idx"]), width), width))
        except (KeyError, Damaged):
            continue  # what only this pack has is missing, and the host says so
    todo = [bytes.fromhex(name) for name in order["wanted"]]
    seen = set(todo)
    while todo:
        name = todo.pop()
        if name in held:
            continue
        try:
            found = read_loose(loose[name]) if name in loose else next(filter(None, (pack.read(name) for pack in packs)), None)
            if found is None:
                continue
            needed = named_in(*found, width)
        except (Damaged, ValueError):
            continue
        kind, content = found
        stdout.write(b"%s %s %d\n" % (name.hex().encode(), kind.encode(), len(content)))
        stdout.write(content)
        new = [each for each in needed if each not in seen]
        seen.update(new)
        todo += new
    stdout.write(b"end\n")
    stdout.flush()


if __name__ == "__main__":
    main()
