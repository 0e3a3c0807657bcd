"""Look at what a change set would change: what is really there now, down to everything in directories that would go."""

from __future__ import annotations

import os
import stat
import time

from agent_sandbox.values import replace
from agent_sandbox.workspace.beneath import walk
from agent_sandbox.workspace.changes import ChangeSet
from agent_sandbox.workspace.nodes import EntryType, Node
from agent_sandbox.workspace.promotion.anchor import Anchor, Surprise
from agent_sandbox.workspace.promotion.planning import relative
from agent_sandbox.workspace.promotion.steps import seen_from, split
from agent_sandbox.workspace.seen import SETTLED_NS, Seen, digest_of, look


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
