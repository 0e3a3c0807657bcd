"""Look at what a change set would change: what is really there now, down to everything in directories that would go."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable

from agent_sandbox._fast.values import replace
from agent_sandbox.workspace import beneath
from agent_sandbox.workspace.beneath import walk
from agent_sandbox.workspace.changes import Change, ChangeSet, Contents
from agent_sandbox.workspace.fingerprint import SETTLED_NS, Seen, digest_of, look
from agent_sandbox.workspace.nodes import EntryType, Node
from agent_sandbox.workspace.promotion.plan import Expected, relative
from agent_sandbox.workspace.promotion.steps import seen_from, split
from agent_sandbox.workspace.promotion.target import Anchor, Surprise
from agent_sandbox.workspace.protected import classes_of_all


def look_at(root: str, changes: ChangeSet) -> dict[str, Seen | None]:
    """What is really at the paths of these changes now, and below directories that would go.

    Files that were changed a moment ago are read for their digest: their times do not tell yet whether they change again. Raises OSError,
    and `WorkspaceError` when there is no such root. A path that is no plain path below the root is not looked at, and not in the result.
    """
    found: dict[str, Seen | None] = {}
    with Anchor(root) as anchor:
        missing = "\0"  # below it there is nothing either
        for change in changes:
            try:
                path = relative(change.path, root)
            except ValueError:
                continue
            if path.startswith(missing):
                found[change.path] = None
                continue
            seen = _seen(anchor, path)
            found[change.path] = seen
            if seen is None:
                missing = path + "/"
            elif seen.node.type is EntryType.DIRECTORY and (change.after is None or change.after.type is not EntryType.DIRECTORY):
                _below(anchor.directory(path), change.path, found)
    return found


def _seen(anchor: Anchor, path: str) -> Seen | None:
    if path == "":
        return _root(anchor)
    parent, name = split(path)
    try:
        return seen_at(anchor.directory(parent), name)
    except Surprise:
        return None


def _root(anchor: Anchor) -> Seen:
    status = os.fstat(anchor.root)
    attributes = {name: os.getxattr(anchor.root, name) for name in os.listxattr(anchor.root) if name.startswith("user.")}
    node = Node(EntryType.DIRECTORY, stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid, xattrs=attributes)
    return seen_from(status, node, now_ns=time.time_ns())


def seen_at(directory: int, name: str, *, content: bool = False) -> Seen | None:
    """One entry as it is now, with a digest if its times do not tell enough, or if `content` is wanted anyway. Raises OSError."""
    now = time.time_ns()
    found = look(directory, name, now_ns=now)
    if found is None or found.node.type is not EntryType.FILE or (found.ctime_ns + SETTLED_NS < now and not content):
        return found
    return replace(found, digest=digest_of(directory, name))


def _below(directory: int, path: str, found: dict[str, Seen | None]) -> None:
    for entry in walk(directory, unlock=False):
        found[f"{path}/{entry.path}"] = seen_at(entry.directory, entry.name)


_LARGEST_TEXT = 1 << 20  # of a file whose text decides; a larger one counts whatever it says


def protected_classes(changes: ChangeSet, expected: Expected, contents: Contents, *, root: str) -> dict[str, frozenset[str]]:
    """The protected classes of each change that has any, by path, judged by the real tree and by the new content. Raises OSError."""
    with NewTree(root, changes, contents) as tree:
        return classes_of_all(changes, root, gone=expected, links=tree.link, names=tree.names, texts=tree.texts)


class NewTree:
    """A context manager. Every function is one that `protected` takes."""

    def __init__(self, root: str, changes: ChangeSet, contents: Contents) -> None:
        self._root = root
        self._contents = contents
        self._anchor = Anchor(root)
        self._after = {change.path: change.after for change in changes}

    def __enter__(self) -> NewTree:
        return self

    def __exit__(self, *ended: object) -> None:
        self._anchor.__exit__(None, None, None)

    def link(self, path: str) -> str | None:
        """The target of the link that would be at a path; None if there would be none."""
        if path in self._after:
            node = self._after[path]
            return node.target if node is not None and node.type is EntryType.SYMLINK else None
        above = os.path.dirname(path)
        while len(above) > len(self._root):
            if above in self._after and ((node := self._after[above]) is None or node.type is not EntryType.DIRECTORY):
                return None  # it goes with the directory it is in
            above = os.path.dirname(above)
        try:
            directory, name = self._place(path)
            return os.readlink(name, dir_fd=directory)
        except (OSError, Surprise):
            return None

    def names(self, directory: str) -> list[str]:
        """The names in a real directory."""
        try:
            return os.listdir(self._anchor.directory(relative(directory, self._root)))
        except (OSError, Surprise, ValueError):
            return []

    def texts(self, change: Change) -> tuple[bytes | None, bytes | None]:
        """What a file says now and what it would say; None where there is none. Raises ValueError for what cannot be read in full."""
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
