"""How bases are written: one line each, in the order in which they were found.

    {"run":N}                                 a run began at this time; what is covered first from here on is judged by it
    {"path":P,"known":…,"seen":…}             what was at a path
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

PATH, WITHIN, BELOW, RUN, DONE = b'{"path":"', b'{"within":"', b'{"below":"', b'{"run":', b'{"done":'


def spell_base(base: Base) -> str:
    """What was at a path."""
    line = {"path": _hex(base.path), "known": base.known, "kept": base.kept, "seen": _spell_seen(base.seen) if base.seen else None}
    return as_json(line) + "\n"


def spell_nothing(directory: str, names: Iterable[str]) -> str:
    """Names of a directory where nothing was."""
    return as_json({"within": _hex(directory), "nothing": _hex("\0".join(names))}) + "\n"


def spell_below(path: str) -> str:
    """That all real entries below a directory have their lines."""
    return as_json({"below": _hex(path)}) + "\n"


def spell_run(since_ns: int) -> str:
    """That a run began."""
    return as_json({"run": since_ns}) + "\n"


def spell_done(since_ns: int) -> str:
    """That it has all its lines."""
    return as_json({"done": since_ns}) + "\n"


def _hex(path: str) -> str:
    return os.fsencode(path).hex()


def _spell_seen(seen: Seen) -> dict[str, Any]:
    node = seen.node
    return {
        "type": node.type.value,
        "mode": node.mode,
        "uid": node.uid,
        "gid": node.gid,
        "size": node.size,
        "target": _hex(node.target),
        "rdev": node.device,
        "xattrs": {_hex(name): value.hex() for name, value in node.xattrs.items()},
        "device": seen.device,
        "inode": seen.inode,
        "mtime": seen.mtime_ns,
        "ctime": seen.ctime_ns,
        "looked": seen.looked_ns,
        "digest": seen.digest,
    }


def whole_lines(content: bytes) -> list[bytes]:
    """The lines that are there from their beginning to their end. What a crash tore is left out, wherever it is."""
    return [line for line in content.split(b"\n")[:-1] if line.startswith(b"{") and line.endswith(b"}")]


def path_of(line: bytes, kind: bytes) -> str | None:
    """The path of a line of this kind, without reading the rest of it: thousands of them are looked through for one."""
    end = line.find(b'"', len(kind))
    try:
        return os.fsdecode(bytes.fromhex(line[len(kind) : end].decode("ascii"))) or None
    except ValueError:
        return None


def nothing_in(line: bytes) -> Iterator[str]:
    """The paths of a `within` line."""
    directory = path_of(line, WITHIN)
    start = line.find(b'"nothing":"')
    names = path_of(line[start:], b'"nothing":"') if start >= 0 else None
    if directory is not None and names is not None:
        yield from (f"{directory.rstrip('/')}/{name}" for name in names.split("\0") if name)


def number_of(line: bytes, kind: bytes) -> int | None:
    """The time in a `run` or `done` line."""
    digits = line[len(kind) : -1]
    return int(digits) if digits.isdigit() and len(digits) < 20 else None


def read_base(path: str, line: bytes, *, listed: bool) -> Base:
    """The base in a `path` line; one that is not known, if the line makes no sense."""
    from json import loads

    try:
        found = loads(line)
        seen = _read_seen(found["seen"]) if found["seen"] is not None else None
        known, kept = found["known"], found["kept"]
        if not isinstance(known, bool) or not isinstance(kept, bool):
            raise TypeError("neither true nor false")
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
