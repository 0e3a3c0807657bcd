"""Look through a project for what has moved on since its clone was made.

The time of the last change of an inode cannot be set, so what is older than the clone has not changed. What is younger is compared with its
base where there is one: touched or checked out again it has not moved. Without a base younger counts as changed. Names tell what has
appeared or gone; a directory that has appeared is one entry, and so is all that moves inside a repository's own `.git`. What is masked the
sandbox never saw, and it is not looked at. Modes and owners of directories are not compared.

No link is followed and no other filesystem entered; what was not looked at is said.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Collection

from agent_sandbox.values import dataclass, field
from agent_sandbox.workspace.bases.keeping import TICK_NS
from agent_sandbox.workspace.changes import Change, ChangeSet
from agent_sandbox.workspace.drift.values import Drift, Drifted, DriftKind
from agent_sandbox.workspace.names import Names, Unfinished, open_inside
from agent_sandbox.workspace.nodes import EntryType
from agent_sandbox.workspace.reads import Reads
from agent_sandbox.workspace.seen import Base, Bases, alike, look

OWN = ".agent-sandbox-"  # how the names of our own directories in a project begin: promotions are staged in them
_MOST_TOLD = 20
_LETTERS = {EntryType.DIRECTORY: "d", EntryType.FILE: "f", EntryType.SYMLINK: "l"}


@dataclass
class LookBudget:
    """How much is looked at: entries, and bytes of files that only their content can tell about."""

    entries: int = 2_000_000
    bytes: int = 2 << 30


def look_for_drift(
    project: str,
    cloned_ns: int,
    names: Names | Unfinished,
    changes: ChangeSet,
    bases: Bases,
    *,
    masks: Collection[str] = (),
    reads: Reads | None = None,
    budget: LookBudget | None = None,
    now_ns: Callable[[], int] = time.time_ns,
) -> Drift:
    """What changed, appeared or went in `project`, an absolute path, since `cloned_ns`. Raises OSError when there is no such directory."""
    looking = _Looking(project.rstrip("/"), cloned_ns - TICK_NS, names, bases, reads, budget or LookBudget(), now_ns)
    looking.know(changes, masks)
    if isinstance(names, Unfinished):
        looking.untold.append(f"what has gone cannot be told: {names.why}")
    root = os.open(project, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        looking.all(root)
    finally:
        os.close(root)
    found = sorted(looking.found, key=lambda entry: entry.path.replace("/", "\0"))
    return Drift(cloned_ns, now_ns(), tuple(found), tuple(looking.untold))


@dataclass
class _Fold:
    """A directory whose files are counted instead of listed, but for those that the sandbox changed too."""

    path: str
    kind: DriftKind
    files: int = 0


@dataclass
class _Looking:
    project: str
    before: int  # what changed before this has not changed since the clone
    names: Names | Unfinished
    bases: Bases
    reads: Reads | None
    budget: LookBudget
    now_ns: Callable[[], int]
    found: list[Drifted] = field(default_factory=list)
    untold: list[str] = field(default_factory=list)
    _hidden: dict[str, set[str]] = field(default_factory=dict)  # names by their directory
    _changed: set[str] = field(default_factory=set)
    _ended: set[str] = field(default_factory=set)
    _above: set[str] = field(default_factory=set)

    def know(self, changes: ChangeSet, masks: Collection[str]) -> None:
        """Remember what the sandbox never saw, what it changed, and which directories it removed with all that is in them."""
        for mask in masks:
            if mask.startswith(f"{self.project}/"):
                parent, _, name = mask[len(self.project) + 1 :].rpartition("/")
                self._hidden.setdefault(parent, set()).add(name)
        for change in changes:
            self._changed.add(change.path)
            if _ended(change):
                self._ended.add(change.path)
            parent = change.path.rpartition("/")[0]
            while parent and parent not in self._above:
                self._above.add(parent)
                parent = parent.rpartition("/")[0]

    def all(self, root: int) -> None:
        pending: list[tuple[str, _Fold | None]] = [("", None)]
        folds: list[_Fold] = []
        while pending:
            path, fold = pending.pop()
            try:
                directory = open_inside(root, path)
            except OSError as error:
                self._unseen(path, error)
                continue
            try:
                for inner, inner_fold in self._directory(directory, path, fold):
                    pending.append((inner, inner_fold))
                    if inner_fold is not None and inner_fold is not fold:
                        folds.append(inner_fold)
            except OSError as error:
                self._unseen(path, error)
            finally:
                os.close(directory)
            if self.budget.entries < 0:
                self.untold.append("the project has more entries than are looked at, so not all of it was")
                break
        for fold in folds:
            if fold.files:
                read = self.reads.opened_below(fold.path) if self.reads is not None else None
                self.found.append(Drifted(fold.path, fold.kind, self._is_yours(fold.path), read, fold.files))

    def _directory(self, directory: int, path: str, fold: _Fold | None) -> list[tuple[str, _Fold | None]]:
        """Look at what is in one directory; returns the directories in it, which come next."""
        deeper: list[tuple[str, _Fold | None]] = []
        prefix = f"{path}/" if path else ""
        absolute = f"{self.project}/{prefix}"
        hidden = self._hidden.get(path, set())
        is_new, remembered = self._remembered(directory, path)
        there: set[str] = set()
        with os.scandir(directory) as entries:
            for entry in entries:
                self.budget.entries -= 1
                name = entry.name
                if remembered is not None:
                    there.add(name)
                    is_new = name not in remembered
                if name in hidden or name.startswith(OWN):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    deeper.append((prefix + name, fold or self._fold(absolute + name, name, is_new)))
                    continue
                try:
                    status = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                if is_new or status.st_ctime_ns >= self.before:
                    self._candidate(directory, name, absolute + name, status, is_new, (remembered or {}).get(name), fold)
        for name in (remembered or {}).keys() - there - hidden:
            if not name.startswith(OWN):
                self._add(absolute + name, DriftKind.GONE, fold)
        return deeper

    def _remembered(self, directory: int, path: str) -> tuple[bool, dict[str, str] | None]:
        """Whether all in a directory is new, or the names that were in it; neither where no name has changed or nobody knows."""
        if isinstance(self.names, Unfinished):
            return False, None
        if path not in self.names.records:  # it is new itself, or it could not be listed when the clone was made
            return not any(path == unlisted or path.startswith(unlisted + "/") for unlisted in self.names.unlisted), None
        if os.fstat(directory).st_ctime_ns < self.before:  # a name that comes or goes changes the directory
            return False, None
        return False, self.names.in_directory(path)

    def _fold(self, path: str, name: str, is_new: bool) -> _Fold | None:
        if name == ".git":
            return _Fold(path, DriftKind.GIT)
        return _Fold(path, DriftKind.APPEARED) if is_new else None

    def _candidate(
        self, directory: int, name: str, path: str, status: os.stat_result, is_new: bool, letter: str | None, fold: _Fold | None
    ) -> None:
        base = self.bases.get(path)
        if base is not None and base.known:
            if self._is_base(directory, name, status, base):
                return
            is_new = base.seen is None
        retyped = letter is not None and letter != _LETTERS.get(EntryType.of(status.st_mode), "o")
        self._add(path, DriftKind.APPEARED if is_new and not retyped else DriftKind.CHANGED, fold)

    def _is_base(self, directory: int, name: str, status: os.stat_result, base: Base) -> bool:
        """Whether a file that was changed after the clone is again, or still, what it was."""
        if base.seen is None or EntryType.of(status.st_mode) is not base.seen.node.type:
            return False
        size = status.st_size if stat.S_ISREG(status.st_mode) else 0
        if base.seen.untouched(status):
            return True
        if size != base.seen.node.size:
            return False
        self.budget.bytes -= size
        if self.budget.bytes < 0:
            self._tell(f"{base.path!r} was not read: there is too much to read, so it counts as changed")
            return False
        try:
            return alike(base.seen, look(directory, name, now_ns=self.now_ns(), content=bool(base.seen.digest)))
        except OSError:
            return False

    def _add(self, path: str, kind: DriftKind, fold: _Fold | None) -> None:
        yours = self._is_yours(path) or (kind is DriftKind.GONE and path in self._above)
        if fold is not None and not yours:
            fold.files += 1
            return
        read = self.reads.opened(path) if self.reads is not None else None
        self.found.append(Drifted(path, kind, yours, read))

    def _is_yours(self, path: str) -> bool:
        if path in self._changed:
            return True
        while self._ended and path:
            if path in self._ended:
                return True
            path = path.rpartition("/")[0]
        return False

    def _unseen(self, path: str, error: OSError) -> None:
        if isinstance(error, FileNotFoundError):
            return  # it has just gone
        self._tell(f"{f'{self.project}/{path}'!r} was not looked into: {error.strerror}")

    def _tell(self, sentence: str) -> None:
        if len(self.untold) < _MOST_TOLD:
            self.untold.append(sentence)


def _ended(change: Change) -> bool:
    before, after = change.before, change.after
    was_directory = before is not None and before.type is EntryType.DIRECTORY
    return was_directory and (after is None or after.type is not EntryType.DIRECTORY)
