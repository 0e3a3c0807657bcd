"""Inspect the tree before a promotion: its real state now, and the tree as it would be afterwards.

`look_at` reads the real state, including everything in directories that would be removed. `NewTree` answers the questions of `protected`
about the new tree: where links lead, which names exist, and the text of files.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable

from agent_sandbox._fast.values import replace
from agent_sandbox.workspace import beneath
from agent_sandbox.workspace.beneath import walk
from agent_sandbox.workspace.changes import Change, ChangeSet, Contents
from agent_sandbox.workspace.nodes import EntryType, Node
from agent_sandbox.workspace.promotion.plan import Expected, relative, seen_from, split
from agent_sandbox.workspace.promotion.target import Surprise, TargetTree
from agent_sandbox.workspace.protected import classes_of_all
from agent_sandbox.workspace.reality import SETTLED_NS, Fingerprint, digest_of, look

_LARGEST_TEXT = 1 << 20  # bytes, where the text of a file decides; a larger file counts as protected whatever its text


def look_at(root: str, changes: ChangeSet) -> dict[str, Fingerprint | None]:
    """Return the present real state of the changed paths, and of everything below directories that would be removed.

    A file that changed a moment ago also gets a digest, because a further change may leave its times as they are. Paths that are not plain
    paths below the root are left out. Raises OSError, and `WorkspaceError` if the root cannot be opened.
    """
    states: dict[str, Fingerprint | None] = {}
    with TargetTree(root) as anchor:
        missing = "\0"  # the last missing path, with a slash: below it nothing exists either
        for change in changes:
            try:
                path = relative(change.path, root)
            except ValueError:
                continue
            if path.startswith(missing):
                states[change.path] = None
                continue
            seen = _seen(anchor, path)
            states[change.path] = seen
            if seen is None:
                missing = path + "/"
            elif seen.node.type is EntryType.DIRECTORY and (change.after is None or change.after.type is not EntryType.DIRECTORY):
                _below(anchor.directory(path), change.path, states)
    return states


def _seen(anchor: TargetTree, path: str) -> Fingerprint | None:
    if path == "":
        return _root(anchor)
    parent, name = split(path)
    try:
        return seen_at(anchor.directory(parent), name)
    except Surprise:
        return None


def _root(anchor: TargetTree) -> Fingerprint:
    status = os.fstat(anchor.root)
    attributes = {name: os.getxattr(anchor.root, name) for name in os.listxattr(anchor.root) if name.startswith("user.")}
    node = Node(EntryType.DIRECTORY, stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid, xattrs=attributes)
    return seen_from(status, node, now_ns=time.time_ns())


def seen_at(directory: int, name: str, *, content: bool = False) -> Fingerprint | None:
    """Return the fingerprint of an entry as it is now; None if the entry is missing. Raises OSError.

    The fingerprint has a digest if the file changed a moment ago, or if `content` is set.
    """
    now = time.time_ns()
    seen = look(directory, name, now_ns=now)
    if seen is None or seen.node.type is not EntryType.FILE or (seen.ctime_ns + SETTLED_NS < now and not content):
        return seen
    return replace(seen, digest=digest_of(directory, name))


def _below(directory: int, path: str, states: dict[str, Fingerprint | None]) -> None:
    for entry in walk(directory, unlock=False):
        states[f"{path}/{entry.path}"] = seen_at(entry.directory, entry.name)


def protected_classes(changes: ChangeSet, expected: Expected, contents: Contents, *, root: str) -> dict[str, frozenset[str]]:
    """Return the protected classes of each change that has any, by path. Raises OSError.

    The real tree and the new contents decide; see `protected`.
    """
    with NewTree(root, changes, contents) as tree:
        return classes_of_all(changes, root, gone=expected, links=tree.link, names=tree.names, texts=tree.texts)


class NewTree:
    """The real tree as it would be after the changes. A context manager. Its methods answer the questions of `protected.classes_of_all`."""

    def __init__(self, root: str, changes: ChangeSet, contents: Contents) -> None:
        self._root = root
        self._contents = contents
        self._anchor = TargetTree(root)
        self._after = {change.path: change.after for change in changes}

    def __enter__(self) -> NewTree:
        return self

    def __exit__(self, *ended: object) -> None:
        self._anchor.__exit__(None, None, None)

    def link(self, path: str) -> str | None:
        """Return the target of the link that would be at a path; None if there would be no link."""
        if path in self._after:
            node = self._after[path]
            return node.target if node is not None and node.type is EntryType.SYMLINK else None
        above = os.path.dirname(path)
        while len(above) > len(self._root):
            if above in self._after and ((node := self._after[above]) is None or node.type is not EntryType.DIRECTORY):
                return None  # it goes with its directory
            above = os.path.dirname(above)
        try:
            directory, name = self._place(path)
            return os.readlink(name, dir_fd=directory)
        except (OSError, Surprise):
            return None

    def names(self, directory: str) -> list[str]:
        """Return the names in a real directory; none if it cannot be listed."""
        try:
            return os.listdir(self._anchor.directory(relative(directory, self._root)))
        except (OSError, Surprise, ValueError):
            return []

    def texts(self, change: Change) -> tuple[bytes | None, bytes | None]:
        """Return the text of a file before and after the change; None for a side that has no file.

        Raises ValueError if a text cannot be read in full.
        """
        before = after = None
        if change.before is not None and change.before.type is EntryType.FILE:
            before = self._text(lambda: beneath.open_file(*self._place(change.path), one_filesystem=False))
        if change.after is not None and change.after.type is EntryType.FILE:
            after = self._text(lambda: self._contents.open_file(change))
        return before, after

    def _place(self, path: str) -> tuple[int, str]:
        parent, name = split(relative(path, self._root))
        return self._anchor.directory(parent), name

    def _text(self, opened: Callable[[], int]) -> bytes:
        try:
            with open(opened(), "rb") as file:
                text = file.read(_LARGEST_TEXT + 1)
        except (OSError, Surprise) as error:
            raise ValueError("it cannot be read") from error
        if len(text) > _LARGEST_TEXT:
            raise ValueError("it is too large to be read")
        return text
