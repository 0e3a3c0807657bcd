"""The line format of bases: one line each, in the order in which they were captured.

    {"run":N}                                 a run began at this time; paths first covered from here on are judged by it
    {"path":P,"known":…,"kept":…,"seen":…}    the entry at a path, and the location of its content
    {"within":P,"nothing":NAMES}              a directory of the layer, and names in it that did not exist
    {"below":P}                               every real entry below this directory has its line
    {"done":N}                                the run that began at this time has all its lines

Paths and names are bytes in hexadecimal, because JSON cannot hold bytes that are not UTF-8. Only whole lines count. A lost line makes its
base unknown. A missing `done` tells the next run that this one did not finish.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from functools import cache

from agent_sandbox._fast.encoding import as_json
from agent_sandbox._fast.values import TYPE_CHECKING
from agent_sandbox.workspace.fingerprint import Base, Seen
from agent_sandbox.workspace.nodes import EntryType, Node

if TYPE_CHECKING:
    import re

_TYPES = {kind.value.encode(): kind for kind in EntryType}
PATH, WITHIN, BELOW = b'{"path":"', b'{"within":"', b'{"below":"'


def spell_base(base: Base) -> str:
    """Return the line for one base."""
    # Numbers, booleans and hexadecimal need no escapes. Formatting by hand takes a tenth of the time.
    known = "true" if base.known else "false"
    return f'{{"path":"{_hex(base.path)}","known":{known},"kept":"{base.kept}","seen":{_spell_seen(base.seen)}}}\n'


def spell_nothing(directory: str, names: Iterable[str]) -> str:
    """Return the line for names of a directory that did not exist."""
    return as_json({"within": _hex(directory), "nothing": _hex("\0".join(names))}) + "\n"


def spell_below(path: str) -> str:
    """Return the line that says that all real entries below a directory have their lines."""
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
    """Return the path of a line of this kind, None if malformed. Skips the rest: thousands of lines are searched for one."""
    return _unhexed(line[len(kind) : line.find(b'"', len(kind))])


def _unhexed(text: bytes) -> str | None:
    try:
        return os.fsdecode(bytes.fromhex(text.decode("ascii"))) or None
    except ValueError:
        return None


def nothing_in(line: bytes) -> Iterator[str]:
    """Yield the paths of a `within` line."""
    directory = path_of(line, WITHIN)
    names = _unhexed(_field(line, b'"nothing":"'))
    if directory is not None and names is not None:
        yield from (f"{directory.rstrip('/')}/{name}" for name in names.split("\0") if name)


def place_of(kept: str) -> tuple[int, int] | None:
    """Parse a content location into the generation that holds it and its byte offset. Return None if malformed."""
    generation, _, at = kept.partition(":")
    return (int(generation), int(at)) if generation.isdecimal() and at.isdecimal() and len(kept) < 40 else None


def kept_in(line: bytes) -> str:
    """Return the content location of a `path` line without parsing the rest."""
    return _field(line, b'"kept":"').decode("ascii", errors="replace")


def _field(line: bytes, name: bytes) -> bytes:
    start = line.find(name)
    return line[start + len(name) : line.find(b'"', start + len(name))] if start >= 0 else b""


@cache
def _base_pattern() -> re.Pattern[bytes]:
    """Return the pattern of a `path` line.

    A pattern, because a list of changes reads one line per change, and JSON takes four times as long.
    """
    import re

    number, types = rb"(-?[0-9]{1,20})", b"|".join(_TYPES)
    node = rb'"type":"(%b)","mode":#,"uid":#,"gid":#,"size":#,"target":"([0-9a-f]*)","rdev":#,"xattrs":(\{[0-9a-f":,]*\})' % types
    seen = rb'\{%b,"device":#,"inode":#,"mtime":#,"ctime":#,"looked":#,"digest":"([0-9a-f]{64}|)"\}' % node
    line = rb'\{"path":"[0-9a-f]+","known":(true|false),"kept":"([0-9]{1,19}:[0-9]{1,19}|)","seen":(?:null|%b)\}' % seen
    return re.compile(line.replace(b"#", number))


def read_base(path: str, line: bytes, *, listed: bool) -> Base:
    """Parse the base in a `path` line. A malformed line gives a base that is not known."""
    match = _base_pattern().fullmatch(line)
    if match is None:
        return Base(path, None, known=False)
    known, kept, kind, mode, uid, gid, size, target, rdev, xattrs, device, inode, mtime, ctime, looked, digest = match.groups()
    if kind is None:
        return Base(path, None, known == b"true", kept.decode(), listed)
    try:
        node = Node(
            _TYPES[kind],
            int(mode),
            int(uid),
            int(gid),
            int(size),
            os.fsdecode(bytes.fromhex(target.decode())) if target else "",
            int(rdev),
            _read_xattrs(xattrs) if xattrs != b"{}" else {},
        )
    except (ValueError, AttributeError):  # an odd number of hexadecimal digits, or malformed attributes
        return Base(path, None, known=False)
    seen = Seen(node, int(device), int(inode), int(mtime), int(ctime), int(looked), digest.decode())
    return Base(path, seen, known == b"true", kept.decode(), listed)


def _read_xattrs(text: bytes) -> dict[str, bytes]:
    from json import loads

    return {os.fsdecode(bytes.fromhex(name)): bytes.fromhex(value) for name, value in loads(text).items()}
