"""Whether what a promotion is about to touch is what the sandbox started from: exactly, path by path.

Times are believed where they prove something, and otherwise content decides: a file that was touched, or checked out again with the same
content, has not moved.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence

from agent_sandbox.values import replace
from agent_sandbox.workspace.changes import Change, ChangeSet
from agent_sandbox.workspace.drift.values import Drift, Drifted, DriftKind, Moved, Unmoved, Verdict
from agent_sandbox.workspace.nodes import EntryType
from agent_sandbox.workspace.reality import Reality
from agent_sandbox.workspace.seen import Base, Bases, Seen, alike, digest_of


def judge(changes: ChangeSet, bases: Bases, expected: Mapping[str, Seen | None], *, machine_root: str = "/") -> dict[str, Verdict]:
    """Compare what is real now with the base of each change.

    `expected` is what was just seen there, with all that is below directories that would go. A file is read only where times do not tell.
    Where there is no base and nothing real either, nothing can be lost: that counts as unmoved.
    """
    with Reality(machine_root) as reality:
        judging = _Judging(bases, expected, reality)
        return {change.path: judging.of(change) for change in changes}


def with_judged(drift: Drift, verdicts: Mapping[str, Verdict]) -> Drift:
    """Drift with what a judgement has found beyond it: paths that the sandbox changed, and that moved on before this clone was made."""
    known = {entry.path for entry in drift.entries}
    moved = [path for path, verdict in verdicts.items() if isinstance(verdict, Moved) and path not in known]
    return replace(drift, entries=(*drift.entries, *(Drifted(path, DriftKind.CHANGED, yours=True) for path in moved)))


class _Judging:
    def __init__(self, bases: Bases, expected: Mapping[str, Seen | None], reality: Reality) -> None:
        self._bases, self._expected, self._reality = bases, expected, reality
        self._seen_paths: Sequence[str] = ()
        self._based_paths: Sequence[str] = ()

    def of(self, change: Change) -> Verdict:
        base, seen = self._base(change.path), self._expected.get(change.path)
        if seen is None and not base.known:
            return Unmoved(None)
        same, seen = self._compare(base, seen)
        if not same:
            return Moved(base, seen)
        goes = seen is not None and seen.node.type is EntryType.DIRECTORY and _ends(change)
        below = tuple(self._moved_below(change.path)) if goes else ()
        if not goes:
            return Unmoved(seen)
        listed = self._is_listed(change.path)
        if below or (not listed and any(self._below(self._seen_below, change.path))):
            return Moved(base if listed else replace(base, known=False), seen, below)
        return Unmoved(seen)

    def _base(self, path: str) -> Base:
        return self._bases.get(path) or Base(path, None, known=False)

    def _is_listed(self, path: str) -> bool:
        """Whether all that was below a real directory has been noted, with it or with one that it is in."""
        while path:
            if self._base(path).listed:
                return True
            path = path.rpartition("/")[0]
        return False

    def _compare(self, base: Base, seen: Seen | None) -> tuple[bool, Seen | None]:
        """Whether it is the base, and what was seen, with its digest if it had to be read."""
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
            return False, seen  # what cannot be read cannot be shown to be the same
        return alike(before, seen), seen

    def _moved_below(self, path: str) -> Iterator[str]:
        """Entries of a directory that would go that are not as they were, have come, or have gone."""
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
    """Whether a real directory would end with this change, and with it all that is in it."""
    return change.after is None or change.after.type is not EntryType.DIRECTORY
