"""The files that hold bases: for each generation `<generation>.jsonl`, and `<generation>.content` with file contents back to back.

Contents share one file because a file each would cost many times as much to write.

Only the begin record of a run is synced. After a crash, lines may be missing and content may be torn. A missing line makes its base
unknown, and content is trusted only if it has the recorded digest. The begin record is synced because its run may have covered paths that
have no line: those must not later get a base that is younger than the run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress

from agent_sandbox._fast.encoding import sha256
from agent_sandbox.errors import WorkspaceError
from agent_sandbox.workspace.durable import explained, sync_directory
from agent_sandbox.workspace.fingerprint import Base
from agent_sandbox.workspace.originals import records
from agent_sandbox.workspace.originals.runs import file_of, read_lines, spell_done, spell_run, unfinished

_SUFFIX = ".content"


def contents_of(directory: str, generation: int) -> str:
    """Return the path of the file with the original contents that this generation first covered."""
    return os.path.join(directory, f"{generation}{_SUFFIX}")


class ContentWriter:
    """The writer of a generation's contents. `most` limits the bytes of all generations: a guest chooses what it covers."""

    def __init__(self, directory: str, generation: int, most: int) -> None:
        self._directory, self._generation, self._most = directory, generation, most
        self._fd = -1
        self._left = 0

    def add(self, content: bytes) -> str:
        """Store content and return its location; empty if there is no room. Raises WorkspaceError."""
        # Callers blame an OSError on the real file. This one is our own disk's, and then no base is written at all.
        with explained(f"keep content in {self._directory!r}"):
            if self._fd < 0:
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
                self._fd = os.open(contents_of(self._directory, self._generation), flags, 0o600)
                with os.scandir(self._directory) as entries:
                    self._left = self._most - sum(entry.stat().st_size for entry in entries if entry.name.endswith(_SUFFIX))
            if len(content) > self._left:
                return ""
            self._left -= len(content)
            place = f"{self._generation}:{os.fstat(self._fd).st_size}"
            while content:
                content = content[os.write(self._fd, content) :]
            return place

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def open_content(directory: str, base: Base) -> int:
    """Return a descriptor of a file's original content.

    Raises WorkspaceError if it was not kept or is damaged: then there is no base to merge with.
    """
    place = records.place_of(base.kept)
    if base.seen is None or place is None:
        raise WorkspaceError(f"what {base.path!r} held before was not kept", hint="choose one side")
    with explained(f"open what {base.path!r} held before"):
        with open(os.open(contents_of(directory, place[0]), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
            content = os.pread(file.fileno(), base.seen.node.size, place[1])
        if sha256(content).hexdigest() != base.seen.digest:
            raise WorkspaceError(f"what {base.path!r} held before is damaged in the store", hint="choose one side")
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
        """The directories below which everything has a base."""
        return self._listed if self._lines is self._by_path else set()

    def __getitem__(self, path: str) -> Base:
        line = self._lines[path]
        return records.read_base(path, line, listed=path in self.listed) if line else Base(path, None)

    def __iter__(self) -> Iterator[str]:
        return iter(self._lines)

    def __len__(self) -> int:
        return len(self._lines)

    def __contains__(self, path: object) -> bool:
        return path in self._lines

    def _index(self, lines: Iterator[bytes]) -> None:
        """Index lines by path. The first line about a path counts."""
        for line in lines:
            if line.startswith(records.PATH):
                path = records.path_of(line, records.PATH)
                if path is not None:
                    self._by_path.setdefault(path, line)
            elif line.startswith(records.WITHIN):
                for path in records.nothing_in(line):
                    self._by_path.setdefault(path, b"")
            elif line.startswith(records.BELOW) and (path := records.path_of(line, records.BELOW)) is not None:
                self._listed.add(path)

    def line_of(self, path: str) -> bytes:
        """Return the line of a path as written; empty where nothing existed."""
        return self._lines[path]


def recall(directory: str, generations: Sequence[int]) -> Recalled:
    """Return the bases of a chain of generations, oldest first: the real state when the first of them covered a path.

    A path that is missing has no base, as if `known` were False.
    """

    def read() -> Iterator[bytes]:
        with explained(f"read what is kept in {directory!r}"):
            for generation in generations:
                yield from read_lines(directory, generation)

    return Recalled(read)


def forget(directory: str, generations_in_use: Collection[int]) -> None:
    """Remove the bases of all other generations, and contents that the generations in use do not need. Safe to repeat.

    A squashed generation still uses the contents of the generations that it replaces.
    """
    with explained(f"tidy {directory!r}"), suppress(FileNotFoundError):
        kept = {file_of(directory, generation) for generation in generations_in_use}
        for generation in generations_in_use:
            places = {
                records.kept_in(line).partition(":")[0] for line in read_lines(directory, generation) if line.startswith(records.PATH)
            }
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
    """Write the bases of a generation that replaces several, given oldest first. Atomic: afterwards all of them are there, or none.

    `without` are paths that have left the layers. `removed` are real directories that are gone for good: everything below them leaves too.
    `anew` are bases that replace the known ones of their paths.
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
        lines = [records.spell_base(base) for base in anew]
        lines += [records.spell_nothing(parent, names) for parent, names in nothing.items()]
        lines += [records.spell_below(path) for path in sorted(bases.listed) if path not in gone and not _is_below(path, trees)]
        open_runs = [left for generation in generations if (left := unfinished(file_of(directory, generation))) is not None]
        lines.append(spell_run(min(open_runs)) if open_runs else spell_done(0))
        new = file_of(directory, into) + ".new"
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(bytes(text) + "".join(lines).encode())
            file.flush()
            os.fsync(file.fileno())
        os.rename(new, file_of(directory, into))
        sync_directory(directory)


def _is_below(path: str, trees: frozenset[str]) -> bool:
    while trees and path:
        if path in trees:
            return True
        path = path.rpartition("/")[0]
    return False
