"""Bring together what a sandbox changed and what has changed in reality since, before a promotion.

Each path that both changed is merged against its base (`workspace.merge`); the result takes the place of the sandbox's change, against
reality as it is now. What cannot be merged stays in question as a conflict.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping

from agent_sandbox.errors import WorkspaceError
from agent_sandbox.values import TYPE_CHECKING, replace
from agent_sandbox.workspace.changes import Change, ChangeSet, Contents, Kind
from agent_sandbox.workspace.diff.sources import Machine
from agent_sandbox.workspace.drift import Moved
from agent_sandbox.workspace.fingerprint import Base, digest_of_open
from agent_sandbox.workspace.merge import Conflict, ConflictKind, MergedEntry, Version, merge_entry, resolve
from agent_sandbox.workspace.nodes import EntryType, Node

if TYPE_CHECKING:
    from agent_sandbox.workspace.merge.tree import Answer, Choice, Word

LARGEST_MERGED = 8 << 20  # bytes of one file; beyond it a side is chosen or it stays a conflict

OpenBase = Callable[[Base], int]


class Mixed:
    """The contents of changed files: the sandbox's, and those that a merge has made. It is `changes.Contents`."""

    def __init__(self, sandbox: Contents) -> None:
        self._sandbox = sandbox
        self._made: dict[str, bytes] = {}

    def put(self, path: str, content: bytes) -> None:
        """From now on this is the content of the file at `path`."""
        self._made[path] = content

    def open_file(self, change: Change) -> int:
        """See `Contents`."""
        if change.path not in self._made:
            return self._sandbox.open_file(change)
        made = os.memfd_create("merged", os.MFD_CLOEXEC)
        with open(os.dup(made), "wb") as file:
            file.write(self._made[change.path])
        os.lseek(made, 0, os.SEEK_SET)
        return made


def _read(node: Node | None, open_it: Callable[[], int], most: int) -> bytes | None:
    if node is None or node.type is not EntryType.FILE or node.size > most:
        return None
    try:
        with open(open_it(), "rb") as file:
            content = file.read(most + 1)
    except (OSError, WorkspaceError):
        return None
    return content if len(content) <= most else None


def brought_together(
    changes: ChangeSet, moved: Mapping[str, Moved], contents: Mixed, open_base: OpenBase, how: Word | Choice | None
) -> tuple[ChangeSet, tuple[str, ...], tuple[Conflict, ...]]:
    """The changes with those merged that reality has a part in; the paths that were merged; and what is still in question.

    Merged contents are put into `contents`. `how` answers conflicts, as `merging.resolve` takes it; with None they stay.
    """
    result: list[Change] = []
    questions: list[Conflict] = []
    for change in changes:
        each = moved.get(change.path)
        if each is None:
            result.append(change)
        elif each.below:
            asked = [conflict for path in each.below for conflict in _lively(path, each, how)]
            questions += [conflict for conflict, answer in asked if answer not in ("ours", "theirs")]
            if not any(answer == "theirs" for _, answer in asked):  # otherwise the directory stays, with all that is in it
                result.append(change)
        else:
            entry = _merge(change, each, contents, open_base)
            entry = resolve(entry, how) if how is not None else entry
            questions += entry.conflicts
            result += _changes(change, each, entry, contents)
    open_paths = {conflict.path for conflict in questions}
    merged = tuple(change.path for change in result if change.path in moved and change.path not in open_paths)
    return ChangeSet(tuple(result)), merged, tuple(questions)


def is_so_already(change: Change, moved: Moved, contents: Mixed) -> bool:
    """Whether reality has come to be what the change would make of it. Owners do not count: a promotion never changes them."""
    if moved.below or (change.after is None) != (moved.seen is None):
        return False
    if change.after is None or moved.seen is None:
        return True
    real = moved.seen.node
    if _owned(change.after, real) != real:
        return False
    ours = _version(change.after, lambda: contents.open_file(change))
    return real.type is not EntryType.FILE or (ours is not None and ours.holds_the_same(_theirs(change, moved)))


def _lively(path: str, moved: Moved, how: Word | Choice | None) -> Iterator[tuple[Conflict, Answer]]:
    """Something in a directory that the sandbox removed has changed in reality."""
    conflict = Conflict(path, ConflictKind.DELETED_OURS, None, None, None, moved.base.known)
    yield conflict, how(conflict) if callable(how) else how


def _merge(change: Change, moved: Moved, contents: Mixed, open_base: OpenBase) -> MergedEntry:
    theirs = _theirs(change, moved)
    real = theirs.node if theirs else None
    ours = _version(_owned(change.after, real), lambda: contents.open_file(change))
    base, was = moved.base, moved.base.seen
    before = _version(_owned(was.node, real), lambda: open_base(base), was.digest) if was is not None else None
    return merge_entry(change.path, before, ours, theirs, known=base.known)


def _theirs(change: Change, moved: Moved) -> Version | None:
    if moved.seen is None:
        return None
    real = moved.seen.node
    return _version(real, lambda: Machine().open_old(replace(change, before=real)), moved.seen.digest)


def _version(node: Node | None, open_it: Callable[[], int], digest: str = "") -> Version | None:
    if node is None:
        return None
    content = _read(node, open_it, LARGEST_MERGED)
    if content is None and not digest and node.type is EntryType.FILE:
        try:
            fd = open_it()
        except (OSError, WorkspaceError):
            return Version(node)
        try:
            digest = digest_of_open(fd)
        finally:
            os.close(fd)
    return Version(node, content, digest)


def _owned(node: Node | None, real: Node | None) -> Node | None:
    """As if it had the owner of what is real: a promotion never changes owners, so they are nothing to quarrel about."""
    return node if node is None or real is None else replace(node, uid=real.uid, gid=real.gid)


def _changes(change: Change, moved: Moved, entry: MergedEntry, contents: Mixed) -> Iterator[Change]:
    """The change from what is real now to what was merged; none when that is the same."""
    real, result = moved.seen.node if moved.seen else None, entry.result
    if result is None:
        if real is not None:
            yield replace(change, kind=Kind.DELETED, before=real, after=None)
        return
    if result.content is not None:
        contents.put(change.path, result.content)
    if real is None or result.node.type is not real.type:
        yield replace(change, kind=Kind.ADDED if real is None else Kind.RETYPED, before=real, after=result.node)
    elif entry.conflicts or result.node != real or not result.holds_the_same(_theirs(change, moved)):
        yield replace(change, kind=Kind.MODIFIED, before=real, after=result.node)
