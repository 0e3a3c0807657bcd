"""Drift: changes to the real project since a sandbox was cloned from it.

`look_for_drift` scans the whole project for `status`; `judge` checks exactly the paths that a promotion is about to touch. A *base* is the
real state of a path when the sandbox first changed it.
"""

from __future__ import annotations

import os
import stat
import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from enum import Enum

from agent_sandbox._fast.values import dataclass, field, replace
from agent_sandbox.workspace.changes import Change, ChangeSet
from agent_sandbox.workspace.clone_inventory import Inventory, NoInventory, open_inside
from agent_sandbox.workspace.nodes import EntryType
from agent_sandbox.workspace.originals.runs import TICK_NS
from agent_sandbox.workspace.read_tracking import Reads
from agent_sandbox.workspace.reality import Base, Bases, Fingerprint, Reality, alike, digest_of, look

OWN = ".agent-sandbox-"  # name prefix of our own directories in a project, where promotions are staged
_MOST_TOLD = 20
_LETTERS = {EntryType.DIRECTORY: "d", EntryType.FILE: "f", EntryType.SYMLINK: "l"}  # as in `clone_inventory`
_UNITS = ((86_400, "day"), (3_600, "hour"), (60, "minute"), (1, "second"))


class DriftKind(Enum):
    """Kinds of change to a real path since the clone."""

    CHANGED = "changed"
    APPEARED = "appeared"
    GONE = "gone"
    GIT = "git"  # a change inside a .git directory, whose entries are not listed one by one


@dataclass(frozen=True)
class Drifted:
    """A real path that has changed since the clone.

    `yours` says that the sandbox changed it too. `read` says that a run opened it; None if no run was watched. `files` is the number of
    drifted files that this path stands for: more than one for a new directory and for a `.git` directory.
    """

    path: str
    kind: DriftKind
    yours: bool = False
    read: bool | None = None
    files: int = 1


@dataclass(frozen=True)
class DriftReport:
    """All drift of a project. `untold` lists, in sentences, the facts that could not be determined, with the reasons."""

    cloned_ns: int
    looked_ns: int
    entries: tuple[Drifted, ...] = ()
    untold: tuple[str, ...] = ()

    @property
    def age_seconds(self) -> float:
        """The age of the clone, in seconds."""
        return max(0, self.looked_ns - self.cloned_ns) / 1e9

    @property
    def files(self) -> int:
        """The number of drifted files."""
        return sum(entry.files for entry in self.entries)

    @property
    def yours(self) -> tuple[Drifted, ...]:
        """The drifted entries that the sandbox changed as well. To promote them takes a merge or a decision."""
        return tuple(entry for entry in self.entries if entry.yours)

    def sentence(self) -> str:
        """Return a one-line summary, such as "15 minutes behind; 3 files moved on, 1 of them you changed"."""
        if not self.entries:
            return f"{age(self.age_seconds)} old; nothing has moved on" + (" as far as can be told" if self.untold else "")
        read = sum(entry.files for entry in self.entries if entry.read)
        parts = [_of_them(sum(entry.files for entry in self.yours), self.files, "changed")]
        if any(entry.read is not None for entry in self.entries):
            parts.append(_of_them(read, self.files, "read"))
        return f"{age(self.age_seconds)} behind; {_counted(self.files, 'file')} moved on, {' and '.join(parts)}"


def _of_them(count: int, whole: int, verb: str) -> str:
    if whole == 1:
        return f"{'which you' if count else 'which you have not'} {verb}"
    return f"{count if count else 'none'} of them you {verb}"


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def age(seconds: float) -> str:
    """Format a duration in its largest unit.

    >>> age(0.2), age(61), age(7200)
    ('0 seconds', '1 minute', '2 hours')
    """
    size, unit = next((each for each in _UNITS if seconds >= each[0]), _UNITS[-1])
    return _counted(int(seconds // size), unit)


@dataclass(frozen=True)
class NotMoved:
    """The verdict on a real entry that has not changed since the sandbox first changed its path. `seen` is the present real entry."""

    seen: Fingerprint | None


@dataclass(frozen=True)
class MovedOn:
    """The verdict on a real entry that has changed since the sandbox first changed its path, or may have.

    `base` is the entry at that time and `seen` the present one. `below` lists the changed paths in a directory that the sandbox removed.
    `reason` is how the entry has changed, if its content alone does not tell.
    """

    base: Base
    seen: Fingerprint | None
    below: tuple[str, ...] = ()
    reason: str = ""

    def why(self) -> str:
        """Return, in a few words, how the real entry has changed."""
        if self.reason:
            return self.reason
        if self.below:
            return f"{'an entry' if len(self.below) == 1 else f'{len(self.below):,} entries'} below it moved on, first {self.below[0]!r}"
        if not self.base.known:
            return "what it was when the sandbox first changed it is not known"
        if self.base.seen is None:
            return "it has appeared in reality"
        return "it has gone in reality" if self.seen is None else "it has changed in reality"


Verdict = NotMoved | MovedOn


def judge(changes: ChangeSet, bases: Bases, expected: Mapping[str, Fingerprint | None], *, machine_root: str = "/") -> dict[str, Verdict]:
    """Return, by path, whether the real entry of each change still equals its base.

    `expected` holds the present real entries, including everything below directories that would be removed. A file is read only where times
    do not decide. A path without a base and without a real entry counts as not moved, because nothing can be lost there.
    """
    with Reality(machine_root) as reality:
        comparison = _Judge(bases, expected, reality)
        return {change.path: comparison.of(change) for change in changes}


def with_judged(drift: DriftReport, verdicts: Mapping[str, Verdict]) -> DriftReport:
    """Return the report with further entries: the paths for which `judge` found drift and a scan did not."""
    known = {entry.path for entry in drift.entries}
    moved = [path for path, verdict in verdicts.items() if isinstance(verdict, MovedOn) and path not in known]
    return replace(drift, entries=(*drift.entries, *(Drifted(path, DriftKind.CHANGED, yours=True) for path in moved)))


class _Judge:
    def __init__(self, bases: Bases, expected: Mapping[str, Fingerprint | None], reality: Reality) -> None:
        self._bases, self._expected, self._reality = bases, expected, reality
        self._seen_paths: Sequence[str] = ()
        self._based_paths: Sequence[str] = ()

    def of(self, change: Change) -> Verdict:
        base, seen = self._base(change.path), self._expected.get(change.path)
        if seen is None and not base.known:
            return NotMoved(None)
        same, seen = self._compare(base, seen)
        if not same:
            return MovedOn(base, seen)
        goes = seen is not None and seen.node.type is EntryType.DIRECTORY and _ends(change)
        below = tuple(self._moved_below(change.path)) if goes else ()
        if not goes:
            return NotMoved(seen)
        listed = self._is_listed(change.path)
        if below or (not listed and any(self._below(self._seen_below, change.path))):
            return MovedOn(base if listed else replace(base, known=False), seen, below)
        return NotMoved(seen)

    def _base(self, path: str) -> Base:
        return self._bases.get(path) or Base(path, None, known=False)

    def _is_listed(self, path: str) -> bool:
        """Return whether every real entry below a directory has a base. That was recorded for the directory, or for one above it."""
        while path:
            if self._base(path).listed:
                return True
            path = path.rpartition("/")[0]
        return False

    def _compare(self, base: Base, seen: Fingerprint | None) -> tuple[bool, Fingerprint | None]:
        """Return whether the real entry equals its base, and the entry's fingerprint, which has a digest if the file had to be read."""
        if not base.known:
            return False, seen
        if alike(base.seen, seen):
            return True, seen
        before = base.seen
        if before is None or seen is None or before.node != seen.node or not before.digest or seen.digest:
            return False, seen
        parent, _, name = base.path.rpartition("/")
        directory = self._reality.directory(parent.lstrip("/"))
        if directory is None:
            return False, seen
        try:
            seen = replace(seen, digest=digest_of(directory, name))
        except OSError:
            return False, seen  # an unreadable file cannot be shown to be unchanged
        return alike(before, seen), seen

    def _moved_below(self, path: str) -> Iterator[str]:
        """Yield the paths below a directory whose real entry has changed, appeared or gone. The sandbox would remove the directory."""
        for inner in self._below(self._seen_below, path):
            if inner not in self._bases or not self._compare(self._bases[inner], self._expected[inner])[0]:
                yield inner
        for inner in self._below(self._based_below, path):
            base = self._bases[inner]
            if base.known and base.seen is not None and self._expected.get(inner) is None:
                yield inner

    @property
    def _seen_below(self) -> Sequence[str]:
        if not self._seen_paths:
            self._seen_paths = sorted(self._expected)
        return self._seen_paths

    @property
    def _based_below(self) -> Sequence[str]:
        if not self._based_paths:
            self._based_paths = sorted(self._bases)
        return self._based_paths

    @staticmethod
    def _below(paths: Sequence[str], directory: str) -> Iterator[str]:
        prefix = directory.rstrip("/") + "/"
        for at in range(bisect_left(paths, prefix), len(paths)):
            if not paths[at].startswith(prefix):
                return
            yield paths[at]


def _ends(change: Change) -> bool:
    """Return whether no directory is left at the path after this change. A real directory there would go, with everything in it."""
    return change.after is None or change.after.type is not EntryType.DIRECTORY


@dataclass
class LookBudget:
    """Limits of a scan: entries examined, and bytes of files that must be read to be compared."""

    entries: int = 2_000_000
    bytes: int = 2 << 30


def look_for_drift(
    project: str,
    cloned_ns: int,
    names: Inventory | NoInventory,
    changes: ChangeSet,
    bases: Bases,
    *,
    masks: Collection[str] = (),
    reads: Reads | None = None,
    budget: LookBudget | None = None,
    now_ns: Callable[[], int] = time.time_ns,
) -> DriftReport:
    """Return the drift of `project`, an absolute path, since `cloned_ns`. `changes` and `bases` are those of the sandbox.

    `names` is the inventory at the clone. Paths in `masks` are skipped. `reads` are the files that runs opened. Raises OSError if there is
    no such directory.
    """
    scan = _Scan(project.rstrip("/"), cloned_ns - TICK_NS, names, bases, reads, budget or LookBudget(), now_ns)
    scan.know(changes, masks)
    if isinstance(names, NoInventory):
        scan.untold.append(f"what has gone cannot be told: {names.why}")
    root = os.open(project, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        scan.all(root)
    finally:
        os.close(root)
    entries = sorted(scan.found, key=lambda entry: entry.path.replace("/", "\0"))
    return DriftReport(cloned_ns, now_ns(), tuple(entries), tuple(scan.untold))


@dataclass
class _Fold:
    """A directory that is reported as one entry with a count of its drifted files. Files that the sandbox changed too are not folded."""

    path: str
    kind: DriftKind
    files: int = 0


@dataclass
class _Scan:
    project: str
    before: int  # an entry with an older change time has not changed since the clone
    names: Inventory | NoInventory
    bases: Bases
    reads: Reads | None
    budget: LookBudget
    now_ns: Callable[[], int]
    found: list[Drifted] = field(default_factory=list)
    untold: list[str] = field(default_factory=list)
    _hidden: dict[str, set[str]] = field(default_factory=dict)  # names by directory
    _changed: set[str] = field(default_factory=set)
    _ended: set[str] = field(default_factory=set)
    _above: set[str] = field(default_factory=set)

    def know(self, changes: ChangeSet, masks: Collection[str]) -> None:
        """Record the masked paths, the changed paths with the directories above them, and the directories that the sandbox removed."""
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
        """Examine the entries of one directory. Return its subdirectories, for the scan to examine next."""
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
        """Return whether every entry of a directory is new since the clone, and the names that the directory had at the clone.

        The names are None if every entry is new, if no name has changed, or if the inventory does not list the directory.
        """
        if isinstance(self.names, NoInventory):
            return False, None
        if path not in self.names.records:  # the directory is new, or could not be listed when the clone was made
            return not any(path == unlisted or path.startswith(unlisted + "/") for unlisted in self.names.unlisted), None
        if os.fstat(directory).st_ctime_ns < self.before:  # adding or removing a name changes the directory's change time
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
        """Return whether a file, although touched after the clone, equals its base."""
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
    return change.before is not None and change.before.type is EntryType.DIRECTORY and _ends(change)


__all__ = ["DriftKind", "DriftReport", "Drifted", "LookBudget", "MovedOn", "NotMoved", "Verdict", "judge", "look_for_drift", "with_judged"]
