"""The files in which bases are kept: of each generation `<generation>.jsonl` and, one after the other, what files held in `.content`.

Nothing is synced but the beginning of a run.
After a crash lines may be missing, and content may be torn: a missing line is a base that is not known, and content is believed only if it
has the digest that is noted. The beginning is synced because the run it stands for may have covered paths without any line: those must not
later be given a base that is younger than the run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress

from agent_sandbox.workspace.bases import lines
from agent_sandbox.workspace.bases.contents import contents_of
from agent_sandbox.workspace.bases.runs import file_of, read_lines, spell_done, spell_run, unfinished
from agent_sandbox.workspace.durable import explained, sync_directory
from agent_sandbox.workspace.seen import Base


class Recalled(Mapping[str, Base]):
    """Bases as they were written. They are read when the first is asked for, and only what is asked for is parsed."""

    def __init__(self, read: Callable[[], Iterator[bytes]]) -> None:
        self._read: Callable[[], Iterator[bytes]] | None = read
        self._found: dict[str, bytes] = {}  # empty where nothing was
        self._listed: set[str] = set()

    @property
    def _lines(self) -> dict[str, bytes]:
        if self._read is not None:
            self._take(self._read())
            self._read = None
        return self._found

    @property
    def listed(self) -> set[str]:
        """The directories of which everything below has a base."""
        return self._listed if self._lines is self._found else set()

    def __getitem__(self, path: str) -> Base:
        line = self._lines[path]
        return lines.read_base(path, line, listed=path in self.listed) if line else Base(path, None)

    def __iter__(self) -> Iterator[str]:
        return iter(self._lines)

    def __len__(self) -> int:
        return len(self._lines)

    def __contains__(self, path: object) -> bool:
        return path in self._lines

    def _take(self, found: Iterator[bytes]) -> None:
        """The first line about a path is the one that counts."""
        for line in found:
            if line.startswith(lines.PATH):
                path = lines.path_of(line, lines.PATH)
                if path is not None:
                    self._found.setdefault(path, line)
            elif line.startswith(lines.WITHIN):
                for path in lines.nothing_in(line):
                    self._found.setdefault(path, b"")
            elif line.startswith(lines.BELOW) and (path := lines.path_of(line, lines.BELOW)) is not None:
                self._listed.add(path)

    def line_of(self, path: str) -> bytes:
        """As it was written; empty where nothing was."""
        return self._lines[path]


def recall(directory: str, generations: Sequence[int]) -> Recalled:
    """The bases of a chain of generations, oldest first: what was real when the first of them covered a path.

    A path that is not in it has no base: it is as if `known` were False.
    """

    def read() -> Iterator[bytes]:
        with explained(f"read what is kept in {directory!r}"):
            for generation in generations:
                yield from read_lines(directory, generation)

    return Recalled(read)


def forget(directory: str, generations_in_use: Collection[int]) -> None:
    """Remove the bases of all other generations, and contents that none of these needs. May be repeated.

    A squashed generation goes on using the contents of those that it stands for.
    """
    with explained(f"tidy {directory!r}"), suppress(FileNotFoundError):
        kept = {file_of(directory, generation) for generation in generations_in_use}
        for generation in generations_in_use:
            places = {lines.kept_in(line).partition(":")[0] for line in read_lines(directory, generation) if line.startswith(lines.PATH)}
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
    """Write the bases of a generation that stands for several, oldest first. Afterwards all of it is there, or nothing.

    `without` are paths that have left the layers. `removed` are real directories that are gone for good: all below them leaves as well.
    `anew` are bases that take the place of what was known of their paths.
    """
    with explained(f"carry bases over in {directory!r}"):
        found = recall(directory, generations)
        gone, trees = frozenset(without).union(base.path for base in anew), frozenset(removed)
        text = bytearray()
        nothing: dict[str, list[str]] = {}
        for path in found:
            if path in gone or _is_below(path, trees):
                continue
            if line := found.line_of(path):
                text += line + b"\n"
            else:
                parent, _, name = path.rpartition("/")
                nothing.setdefault(parent or "/", []).append(name)
        spelt = [lines.spell_base(base) for base in anew]
        spelt += [lines.spell_nothing(parent, names) for parent, names in nothing.items()]
        spelt += [lines.spell_below(path) for path in sorted(found.listed) if path not in gone and not _is_below(path, trees)]
        open_runs = [left for generation in generations if (left := unfinished(file_of(directory, generation))) is not None]
        spelt.append(spell_run(min(open_runs)) if open_runs else spell_done(0))
        new = file_of(directory, into) + ".new"
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(bytes(text) + "".join(spelt).encode())
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
