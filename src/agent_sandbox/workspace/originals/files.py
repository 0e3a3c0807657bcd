"""The files that hold bases: for each generation `<generation>.jsonl`, and `<generation>.content` with file contents back to back.

Contents share one file because a file each would cost many times as much to write. The first file has a line for each fact, as captured:

    {"run":N}                                 a run began at time N; the lines after this one are of that run
    {"path":P,"known":…,"kept":…,"seen":…}    the entry at a path, and the location of its content
    {"within":P,"nothing":NAMES}              a directory of the layer, and names in it that did not exist
    {"below":P}                               every real entry below this directory has its line
    {"done":N}                                the run that began at this time has all its lines

Paths and names are bytes in hexadecimal, because JSON cannot hold bytes that are not UTF-8. Only whole lines count. A missing `done` tells
the next run that this one did not finish.

Only the begin record of a run is synced. After a crash, lines may be missing and content may be torn. A missing line makes its base
unknown, and content is trusted only if it has the recorded digest. The begin record is synced, because the run may have changed paths whose
lines were lost. It prevents that a later run takes the present real entry for the original one there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache

from agent_sandbox._fast.encoding import as_json, sha256
from agent_sandbox._fast.values import TYPE_CHECKING
from agent_sandbox.errors import WorkspaceError
from agent_sandbox.workspace.durable import explained, write_atomically
from agent_sandbox.workspace.nodes import EntryType, Node
from agent_sandbox.workspace.originals.runs import file_of, read_lines, spell_done, spell_run, unfinished
from agent_sandbox.workspace.reality import Base, Fingerprint

if TYPE_CHECKING:
    import re  # slow to load, and a run reads no changes

_TYPES = {kind.value.encode(): kind for kind in EntryType}
PATH, WITHIN, BELOW = b'{"path":"', b'{"within":"', b'{"below":"'
_SUFFIX = ".content"
_BUFFERED = 1 << 20  # bytes of contents that wait to be written together


def spell_base(base: Base) -> str:
    """Return the JSON line that records one base."""
    # Numbers, booleans and hexadecimal need no escapes. Formatting by hand takes a tenth of the time.
    known = "true" if base.known else "false"
    return f'{{"path":"{_hex(base.path)}","known":{known},"kept":"{base.kept}","seen":{_spell_seen(base.seen)}}}\n'


def spell_nothing(directory: str, names: Iterable[str]) -> str:
    """Return the JSON line that records names which did not exist in a directory."""
    return as_json({"within": _hex(directory), "nothing": _hex("\0".join(names))}) + "\n"


def spell_below(path: str) -> str:
    """Return the JSON line which says that every real entry below a directory has its own line."""
    return as_json({"below": _hex(path)}) + "\n"


def _hex(path: str) -> str:
    return os.fsencode(path).hex()


def _spell_seen(seen: Fingerprint | None) -> str:
    if seen is None:
        return "null"
    node = seen.node
    xattrs = as_json({_hex(name): value.hex() for name, value in node.xattrs.items()}) if node.xattrs else "{}"
    target = _hex(node.target) if node.target else ""
    return (
        f'{{"type":"{node.type.value}","mode":{node.mode},"uid":{node.uid},"gid":{node.gid},"size":{node.size},"target":"{target}"'
        f',"rdev":{node.device},"xattrs":{xattrs},"device":{seen.device},"inode":{seen.inode}'
        f',"mtime":{seen.mtime_ns},"ctime":{seen.ctime_ns},"looked":{seen.looked_ns},"digest":"{seen.digest}"}}'
    )


def path_of(line: bytes, kind: bytes) -> str | None:
    """Return the path in a line of this kind; None if malformed. The rest is not parsed, because a search reads thousands of lines."""
    return _unhexed(line[len(kind) : line.find(b'"', len(kind))])


def _unhexed(text: bytes) -> str | None:
    try:
        return os.fsdecode(bytes.fromhex(text.decode("ascii"))) or None
    except ValueError:
        return None


def nothing_in(line: bytes) -> Iterator[str]:
    """Yield the paths of the missing entries that a `within` line records."""
    directory = path_of(line, WITHIN)
    names = _unhexed(_field(line, b'"nothing":"'))
    if directory is not None and names is not None:
        yield from (f"{directory.rstrip('/')}/{name}" for name in names.split("\0") if name)


def place_of(kept: str) -> tuple[int, int] | None:
    """Parse a content location into the generation that holds it and its byte offset. Return None if malformed."""
    generation, _, at = kept.partition(":")
    return (int(generation), int(at)) if generation.isdecimal() and at.isdecimal() and len(kept) < 40 else None


def kept_in(line: bytes) -> str:
    """Return the content location in a `path` line, without parsing the rest of the line."""
    return _field(line, b'"kept":"').decode("ascii", errors="replace")


def _field(line: bytes, name: bytes) -> bytes:
    start = line.find(name)
    return line[start + len(name) : line.find(b'"', start + len(name))] if start >= 0 else b""


@cache
def _base_pattern() -> re.Pattern[bytes]:
    """Return a regular expression for a `path` line. It parses a line four times as fast as JSON, and there is a line per change."""
    import re  # slow to load, and a run reads no changes

    number, types = rb"(-?[0-9]{1,20})", b"|".join(_TYPES)
    node = rb'"type":"(%b)","mode":#,"uid":#,"gid":#,"size":#,"target":"([0-9a-f]*)","rdev":#,"xattrs":(\{[0-9a-f":,]*\})' % types
    seen = rb'\{%b,"device":#,"inode":#,"mtime":#,"ctime":#,"looked":#,"digest":"([0-9a-f]{64}|)"\}' % node
    line = rb'\{"path":"[0-9a-f]+","known":(true|false),"kept":"([0-9]{1,19}:[0-9]{1,19}|)","seen":(?:null|%b)\}' % seen
    return re.compile(line.replace(b"#", number))


def read_base(path: str, line: bytes, *, listed: bool) -> Base:
    """Parse the base in a `path` line. A malformed line gives a base that is not known. `listed` is the base's field of that name."""
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
    seen = Fingerprint(node, int(device), int(inode), int(mtime), int(ctime), int(looked), digest.decode())
    return Base(path, seen, known == b"true", kept.decode(), listed)


def _read_xattrs(text: bytes) -> dict[str, bytes]:
    from json import loads  # few files have extended attributes

    return {os.fsdecode(bytes.fromhex(name)): bytes.fromhex(value) for name, value in loads(text).items()}


def contents_of(directory: str, generation: int) -> str:
    """Return the path of the file that holds the original contents of one generation."""
    return os.path.join(directory, f"{generation}{_SUFFIX}")


class ContentWriter:
    """Writes the original contents of one generation. `most` limits the bytes of all generations, because a guest can cause many."""

    def __init__(self, directory: str, generation: int, most: int) -> None:
        self._directory, self._generation, self._most = directory, generation, most
        self._fd = -1
        self._left = 0
        self._end = 0  # where the next content goes
        self._waiting: list[bytes] = []
        self._unwritten = 0

    def add(self, content: bytes) -> str:
        """Store content and return its location; an empty string if there is no room. It is written by `flush`. Raises WorkspaceError."""
        # Callers take an OSError for an error of the real file. An error of our own disk is a WorkspaceError: then no base is written.
        if self._fd < 0:
            self._open()
        if len(content) > self._left:
            return ""
        place = f"{self._generation}:{self._end}"
        self._left -= len(content)
        self._end += len(content)
        self._unwritten += len(content)
        self._waiting.append(content)
        if self._unwritten >= _BUFFERED:
            self.flush()
        return place

    def _open(self) -> None:
        with explained(f"keep content in {self._directory!r}"):
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
            self._fd = os.open(contents_of(self._directory, self._generation), flags, 0o600)
            with os.scandir(self._directory) as entries:
                self._left = self._most - sum(entry.stat().st_size for entry in entries if entry.name.endswith(_SUFFIX))
            self._end = os.fstat(self._fd).st_size  # nobody else appends: the sandbox is locked

    def flush(self) -> None:
        """Write what was added. Raises WorkspaceError."""
        with explained(f"keep content in {self._directory!r}"):
            data = b"".join(self._waiting)
            self._waiting.clear()
            self._unwritten = 0
            while data:
                data = data[os.write(self._fd, data) :]

    def close(self) -> None:
        """Close the file. What was not flushed is lost."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def read_content(directory: str, base: Base) -> bytes:
    """Return a file's original content.

    Raises WorkspaceError if the content was not kept or is damaged: then there is no base to merge with.
    """
    place = place_of(base.kept)
    if base.seen is None or place is None:
        raise WorkspaceError(f"what {base.path!r} held before was not kept", hint="choose one side")
    with explained(f"open what {base.path!r} held before"):
        fd = os.open(contents_of(directory, place[0]), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            content = os.pread(fd, base.seen.node.size, place[1])
        finally:
            os.close(fd)
    if sha256(content).hexdigest() != base.seen.digest:
        raise WorkspaceError(f"what {base.path!r} held before is damaged in the store", hint="choose one side")
    return content


def open_content(directory: str, base: Base) -> int:
    """Return a descriptor of a file's original content. Raises as `read_content` does."""
    content = read_content(directory, base)
    with explained(f"open what {base.path!r} held before"):
        return in_memory(content)


def in_memory(content: bytes) -> int:
    """Return a descriptor from which this content can be read. Raises OSError."""
    with open(os.memfd_create("base", os.MFD_CLOEXEC), "wb") as memory:
        memory.write(content)
        memory.flush()
        return os.open(f"/proc/self/fd/{memory.fileno()}", os.O_RDONLY | os.O_CLOEXEC)


class Recalled(Mapping[str, Base]):
    """Bases by path. The files are read on first use, and only the lines looked up are parsed."""

    def __init__(self, read: Callable[[], Iterator[bytes]]) -> None:
        self._read: Callable[[], Iterator[bytes]] | None = read
        self._by_path: dict[str, bytes] = {}  # a line each; empty where nothing existed
        self._listed: set[str] = set()

    @property
    def _lines(self) -> dict[str, bytes]:
        if self._read is not None:
            self._index(self._read())
            self._read = None
        return self._by_path

    @property
    def listed(self) -> set[str]:
        """The directories below which every real entry has a base."""
        return self._listed if self._lines is self._by_path else set()

    def __getitem__(self, path: str) -> Base:
        line = self._lines[path]
        return read_base(path, line, listed=path in self._listed) if line else Base(path, None)

    def __iter__(self) -> Iterator[str]:
        return iter(self._lines)

    def __len__(self) -> int:
        return len(self._lines)

    def __contains__(self, path: object) -> bool:
        return path in self._lines

    def _index(self, lines: Iterator[bytes]) -> None:
        """Index lines by path. If several lines are about one path, the first counts."""
        for line in lines:
            if line.startswith(PATH):
                path = path_of(line, PATH)
                if path is not None:
                    self._by_path.setdefault(path, line)
            elif line.startswith(WITHIN):
                for path in nothing_in(line):
                    self._by_path.setdefault(path, b"")
            elif line.startswith(BELOW) and (path := path_of(line, BELOW)) is not None:
                self._listed.add(path)

    def line_of(self, path: str) -> bytes:
        """Return the stored line of a path; empty if nothing existed there."""
        return self._lines[path]


def recall(directory: str, generations: Sequence[int]) -> Recalled:
    """Return the bases of a chain of generations, given oldest first. For each path, the oldest base counts.

    A path that is missing has no base, as if `known` were False.
    """

    def read() -> Iterator[bytes]:
        with explained(f"read what is kept in {directory!r}"):
            for generation in generations:
                yield from read_lines(directory, generation)

    return Recalled(read)


def forget(directory: str, generations_in_use: Collection[int]) -> None:
    """Remove the bases of generations that are not in use, and contents that no generation in use needs. Safe to repeat.

    A squashed generation still uses the contents of the generations that it replaces.
    """
    with explained(f"tidy {directory!r}"), suppress(FileNotFoundError):
        kept = {file_of(directory, generation) for generation in generations_in_use}
        for generation in generations_in_use:
            places = {kept_in(line).partition(":")[0] for line in read_lines(directory, generation) if line.startswith(PATH)}
            kept |= {contents_of(directory, int(number)) for number in places if number.isdecimal()}
        for name in os.listdir(directory):
            if os.path.join(directory, name) not in kept:
                os.unlink(os.path.join(directory, name))


def carry(
    directory: str,
    generations: Sequence[int],
    into: int,
    *,
    without: Collection[str] = (),
    removed: Collection[str] = (),
    anew: Collection[Base] = (),
) -> None:
    """Write the bases of the generation `into`, which replaces these generations, given oldest first. Writes all bases or none.

    `without` are paths that have left the layers; they get no base. `removed` are real directories that are gone for good; paths below them
    get no base either. `anew` are bases that replace the older bases of their paths.
    """
    with explained(f"carry bases over in {directory!r}"):
        bases = recall(directory, generations)
        gone, trees = frozenset(without).union(base.path for base in anew), frozenset(removed)
        text = bytearray()
        nothing: dict[str, list[str]] = {}
        for path in bases:
            if path in gone or _is_below(path, trees):
                continue
            if line := bases.line_of(path):
                text += line + b"\n"
            else:
                parent, _, name = path.rpartition("/")
                nothing.setdefault(parent or "/", []).append(name)
        lines = [spell_base(base) for base in anew]
        lines += [spell_nothing(parent, names) for parent, names in nothing.items()]
        lines += [spell_below(path) for path in sorted(bases.listed) if path not in gone and not _is_below(path, trees)]
        open_runs = [left for generation in generations if (left := unfinished(file_of(directory, generation))) is not None]
        lines.append(spell_run(min(open_runs)) if open_runs else spell_done(0))
        write_atomically(file_of(directory, into), bytes(text) + "".join(lines).encode())


def _is_below(path: str, trees: frozenset[str]) -> bool:
    while trees and path:
        if path in trees:
            return True
        path = path.rpartition("/")[0]
    return False
