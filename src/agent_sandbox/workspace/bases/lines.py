"""How bases are written: one line each, in the order in which they were found.

    {"run":N}                                 a run began at this time; what is covered first from here on is judged by it
    {"path":P,"known":…,"kept":…,"seen":…}    what was at a path, and where its content is
    {"within":P,"nothing":NAMES}              a directory of the layer, and names in it where nothing was
    {"below":P}                               everything that was real below this directory has its line
    {"done":N}                                the run that began at this time has all its lines

Paths and names are bytes in hexadecimal, because JSON has no place for what is not UTF-8. Only whole lines count. A line that is lost is a
base that is not known, and that a run has no `done` tells the next one.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

from agent_sandbox.spelling import as_json
from agent_sandbox.values import TYPE_CHECKING
from agent_sandbox.workspace.nodes import EntryType, Node
from agent_sandbox.workspace.seen import Base, Seen

if TYPE_CHECKING:
    from typing import Any

PATH, WITHIN, BELOW = b'{"path":"', b'{"within":"', b'{"below":"'


def spell_base(base: Base) -> str:
    """What was at a path."""
    # Numbers, truth values and hexadecimal need no escapes; spelt like this it takes a tenth of the time.
    known = "true" if base.known else "false"
    return f'{{"path":"{_hex(base.path)}","known":{known},"kept":"{base.kept}","seen":{_spell_seen(base.seen)}}}\n'


def spell_nothing(directory: str, names: Iterable[str]) -> str:
    """Names of a directory where nothing was."""
    return as_json({"within": _hex(directory), "nothing": _hex("\0".join(names))}) + "\n"


def spell_below(path: str) -> str:
    """That all real entries below a directory have their lines."""
    return as_json({"below": _hex(path)}) + "\n"


def _hex(path: str) -> str:
    return os.fsencode(path).hex()


def _spell_seen(seen: Seen | None) -> str:
    if seen is None:
        return "null"
    node = seen.node
    xattrs = as_json({_hex(name): value.hex() for name, value in node.xattrs.items()})
    return (
        f'{{"type":"{node.type.value}","mode":{node.mode},"uid":{node.uid},"gid":{node.gid},"size":{node.size},"target":"{_hex(node.target)}"'
        f',"rdev":{node.device},"xattrs":{xattrs},"device":{seen.device},"inode":{seen.inode}'
        f',"mtime":{seen.mtime_ns},"ctime":{seen.ctime_ns},"looked":{seen.looked_ns},"digest":"{seen.digest}"}}'
    )


def path_of(line: bytes, kind: bytes) -> str | None:
    """The path of a line of this kind, without reading the rest of it: thousands of them are looked through for one."""
    return _unhexed(line[len(kind) : line.find(b'"', len(kind))])


def _unhexed(text: bytes) -> str | None:
    try:
        return os.fsdecode(bytes.fromhex(text.decode("ascii"))) or None
    except ValueError:
        return None


def nothing_in(line: bytes) -> Iterator[str]:
    """The paths of a `within` line."""
    directory = path_of(line, WITHIN)
    names = _unhexed(_field(line, b'"nothing":"'))
    if directory is not None and names is not None:
        yield from (f"{directory.rstrip('/')}/{name}" for name in names.split("\0") if name)


def place_of(kept: str) -> tuple[int, int] | None:
    """The generation whose file of contents holds it, and from which byte on."""
    generation, _, at = kept.partition(":")
    return (int(generation), int(at)) if generation.isdecimal() and at.isdecimal() and len(kept) < 40 else None


def kept_in(line: bytes) -> str:
    """Where the content of a `path` line is, without reading the rest of it."""
    return _field(line, b'"kept":"').decode("ascii", errors="replace")


def _field(line: bytes, name: bytes) -> bytes:
    start = line.find(name)
    return line[start + len(name) : line.find(b'"', start + len(name))] if start >= 0 else b""


def read_base(path: str, line: bytes, *, listed: bool) -> Base:
    """The base in a `path` line; one that is not known, if the line makes no sense."""
    from json import loads

    try:
        found = loads(line)
        seen = _read_seen(found["seen"]) if found["seen"] is not None else None
        known, kept = found["known"], found["kept"]
        if not isinstance(known, bool) or (kept and place_of(kept) is None):
            raise TypeError("neither true nor false, or no place")
    except (ValueError, KeyError, TypeError, AttributeError):
        return Base(path, None, known=False)
    return Base(path, seen, known, kept, listed)


def _read_seen(found: dict[str, Any]) -> Seen:
    numbers = [found[name] for name in ("mode", "uid", "gid", "size", "rdev", "device", "inode", "mtime", "ctime", "looked")]
    if any(type(number) is not int for number in numbers):
        raise TypeError("not a number")
    mode, uid, gid, size, rdev, device, inode, mtime, ctime, looked = numbers
    digest = found["digest"]
    if digest and (len(digest) != 64 or len(bytes.fromhex(digest)) != 32 or digest != digest.lower()):
        raise ValueError("not a digest")
    xattrs = {os.fsdecode(bytes.fromhex(name)): bytes.fromhex(value) for name, value in found["xattrs"].items()}
    node = Node(EntryType(found["type"]), mode, uid, gid, size, os.fsdecode(bytes.fromhex(found["target"])), rdev, xattrs)
    return Seen(node, device, inode, mtime, ctime, looked, digest)
