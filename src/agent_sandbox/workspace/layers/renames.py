"""Find renames: added entries with the content of deleted entries.

An overlay records no renames: a moved file is a deleted file and an added file. Both stay in the change set, because promotion needs both;
`renamed_from` is for the reader. A file counts as moved when its content is equal to that of a deleted file. A text also counts when at
least half of its content is equal, as in git. A directory counts as moved when all its entries moved.

Reading and comparing are bounded: beyond the bounds a rename is not found, and nothing else is lost. Empty files are all alike and are
ignored.
"""

from __future__ import annotations

import hashlib  # OpenSSL's is several times faster than the interpreter's own
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from functools import partial

from agent_sandbox._fast.values import dataclass, field, replace
from agent_sandbox.workspace import beneath
from agent_sandbox.workspace.beneath import TooMany
from agent_sandbox.workspace.changes import Change, ChangeSet, Contents, Kind
from agent_sandbox.workspace.nodes import EntryType, Node, describe

_ENTRIES = 50_000  # examined in deleted directories
_DEPTH = 200  # depth of deleted directories
_BYTES = 256 << 20  # read
_TEXT = 64 << 10  # largest text compared by lines
_PAIRS = 500  # pairs of texts compared by lines
_ALIKE = 0.5
_CHUNK = 1 << 20


def find_renames(
    changes: ChangeSet, contents: Contents, *, machine_root: str = "/", open_old: Callable[[str], int] | None = None
) -> ChangeSet:
    """Return the same changes, with `renamed_from` set where an added entry was moved.

    `contents` holds the added files. `open_old` opens a deleted file by its absolute path, for callers that kept the originals; without it
    the file is read at its place on the machine at `machine_root`.
    """
    added = [change for change in changes if change.kind is Kind.ADDED and change.after]
    deleted = [change for change in changes if change.kind is Kind.DELETED and change.before]
    if not added or not deleted:
        return changes
    root = os.open(machine_root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        old = _Old(root, open_old or (lambda path: beneath.open_file(root, path.lstrip("/"), one_filesystem=False)))
        for change in deleted:
            old.add(change)
        renames = _Search(old, contents).search(added)
    finally:
        os.close(root)
    if not renames:
        return changes
    return ChangeSet(tuple(replace(change, renamed_from=renames[change.path]) if change.path in renames else change for change in changes))


@dataclass(slots=True)
class _Old:
    """The deleted entries, including those below deleted directories."""

    root: int
    open: Callable[[str], int]
    nodes: dict[str, Node] = field(default_factory=dict)
    inside: dict[str, set[str]] = field(default_factory=dict)  # names in each directory that was walked
    left: int = _ENTRIES

    def add(self, change: Change) -> None:
        assert change.before is not None
        self.nodes[change.path] = change.before
        if change.before.type is EntryType.DIRECTORY:
            try:
                self._look_through(change.path)
            except (OSError, TooMany):
                self.inside.clear()  # a partly known directory must not pass for a complete one

    def _look_through(self, path: str) -> None:
        directory = beneath.open_directory(self.root, path.lstrip("/"), one_filesystem=False)
        try:
            self.inside[path] = set()
            ways = [path]  # paths of the directories that the walk is in
            with closing(beneath.walk(directory, limit=self.left, unlock=False)) as entries:
                for entry in entries:
                    self.left -= 1
                    if entry.depth > _DEPTH:
                        raise TooMany("deeper than will be looked at")
                    del ways[entry.depth + 1 :]
                    here = f"{ways[-1]}/{entry.name}"
                    node = describe(entry.directory, entry.name, entry.status, {}, own_prefix="")
                    self.nodes[here] = node
                    self.inside[ways[-1]].add(entry.name)
                    if entry.own is not None:
                        ways.append(here)
                        self.inside[here] = set()
        finally:
            os.close(directory)

    def files(self) -> Iterable[tuple[str, int]]:
        return ((path, node.size) for path, node in self.nodes.items() if node.type is EntryType.FILE and node.size)


@dataclass(slots=True)
class _Search:
    old: _Old
    contents: Contents
    found: dict[str, str] = field(default_factory=dict)  # new path to old path
    used: set[str] = field(default_factory=set)
    children: dict[str, list[Change]] = field(default_factory=lambda: defaultdict(list))  # added entries by directory
    left: int = _BYTES

    def search(self, added: Sequence[Change]) -> dict[str, str]:
        files = [change for change in added if change.after and change.after.type is EntryType.FILE and change.after.size]
        self._by_content(files)
        self._by_lines([change for change in files if change.path not in self.found])
        self._directories(added)
        return self.found

    def _by_content(self, files: Sequence[Change]) -> None:
        sizes = {change.after.size for change in files if change.after}
        olds: dict[int, list[str]] = defaultdict(list)
        for path, size in self.old.files():
            if size in sizes:
                olds[size].append(path)
        digests: dict[str, list[str]] = defaultdict(list)
        for size, paths in olds.items():
            for path in paths:
                if digest := self._digest(partial(self.old.open, path), size):
                    digests[digest].append(path)
        wanted: list[tuple[Change, list[str]]] = []
        for change in files:
            if change.after and change.after.size in olds:
                digest = self._digest(partial(self.contents.open_file, change), change.after.size)
                if digest in digests:
                    wanted.append((change, digests[digest]))
        # The longer the common end of two paths, the likelier the rename: try three names, then two, one and none.
        for length in (3, 2, 1, 0):
            ends: dict[tuple[int, tuple[str, ...]], list[str]] = defaultdict(list)
            for same in {id(paths): paths for _, paths in wanted}.values():
                for path in reversed(same):
                    ends[id(same), _end(path, length)].append(path)
            for change, same in wanted:
                if change.path not in self.found:
                    self._take(change.path, ends[id(same), _end(change.path, length)])

    def _take(self, path: str, candidates: list[str]) -> None:
        while candidates:
            old = candidates.pop()
            if old not in self.used:
                self.found[path] = old
                self.used.add(old)
                return

    def _digest(self, open_it: Callable[[], int], size: int) -> str:
        self.left -= size
        if self.left < 0:
            return ""
        try:
            fd = open_it()
        except OSError:
            return ""
        try:
            digest = hashlib.sha256()
            while piece := os.read(fd, _CHUNK):
                digest.update(piece)
            return digest.hexdigest()
        except OSError:
            return ""
        finally:
            os.close(fd)

    def _by_lines(self, files: Sequence[Change]) -> None:
        """Match added texts with deleted texts that are at least half the same, best matches first."""
        olds = [(path, size) for path, size in self.old.files() if path not in self.used and size <= _TEXT]
        news = [(change, change.after.size) for change in files if change.after and change.after.size <= _TEXT]
        if len(olds) * len(news) > _PAIRS:
            return
        old_lines = {path: _lines(partial(self.old.open, path)) for path, _ in olds}
        scores: list[tuple[float, bool, str, str]] = []
        for change, size in news:
            new = _lines(partial(self.contents.open_file, change))
            for path, old_size in olds:
                old = old_lines[path]
                if new and old and min(size, old_size) >= _ALIKE * max(size, old_size):
                    same = sum(len(line) * count for line, count in (new & old).items()) / max(size, old_size)
                    if same >= _ALIKE:
                        scores.append((-same, _end(path, 1) != _end(change.path, 1), change.path, path))
        for _, _, new_path, old_path in sorted(scores):
            if new_path not in self.found and old_path not in self.used:
                self.found[new_path] = old_path
                self.used.add(old_path)

    def _directories(self, added: Sequence[Change]) -> None:
        """Match added directories whose entire content moved, inner directories first."""
        for change in added:
            self.children[change.path.rpartition("/")[0]].append(change)
        for change in reversed(added):
            within = self.children.get(change.path)
            if change.after and change.after.type is EntryType.DIRECTORY and within:
                old = self._where_from(within)
                if old and old not in self.used:
                    self.found[change.path] = old
                    self.used.add(old)

    def _where_from(self, within: Sequence[Change]) -> str:
        """Return the old directory from which exactly these entries moved; "" if there is none."""
        first = next((self.found[change.path] for change in within if change.path in self.found), "")
        old = first.rpartition("/")[0]
        if self.old.inside.get(old) != {change.path.rpartition("/")[2] for change in within}:
            return ""
        return old if all(self._came_from(change, old) for change in within) else ""

    def _came_from(self, change: Change, directory: str) -> bool:
        path = f"{directory}/{change.path.rpartition('/')[2]}"
        if change.path in self.found:
            return self.found[change.path] == path
        before, after = self.old.nodes[path], change.after
        if after is None or after.type is not before.type:
            return False
        if after.type is EntryType.DIRECTORY:
            return self.old.inside.get(path) == set() and change.path not in self.children
        return after.size == before.size == 0 and after.target == before.target


def _end(path: str, names: int) -> tuple[str, ...]:
    return tuple(path.split("/")[-names:]) if names else ()


def _lines(open_it: Callable[[], int]) -> Counter[bytes]:
    """Return the lines of a text with their counts; none for binary or unreadable files."""
    try:
        with open(open_it(), "rb") as file:
            content = file.read(_TEXT + 1)
    except OSError:
        return Counter()
    return Counter() if b"\0" in content else Counter(content.splitlines(keepends=True))
