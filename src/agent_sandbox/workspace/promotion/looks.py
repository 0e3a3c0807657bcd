"""How a promoted entry looks: the mode and the attributes that it gets, decided without looking at anything.

The guest says what may be executed and read. It does not say who owns a file, and it does not give away the right to write: others may
never write a new file, and an old one if they could before. Bits and attributes that lend power need the approval of their class.
"""

from __future__ import annotations

import stat

from agent_sandbox.workspace.changes import Change, Kind
from agent_sandbox.workspace.nodes import EntryType, Node
from agent_sandbox.workspace.promotion.steps import Look

POWER_BITS = stat.S_ISUID | stat.S_ISGID | stat.S_ISVTX
CAPABILITY = "security.capability"
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def carried(attribute: str, *, powers: bool) -> bool:
    """Whether an extended attribute comes along. Those of overlays never do: they would be believed when the tree is overlaid again."""
    return (attribute.startswith("user.") and not attribute.startswith("user.overlay.")) or (powers and attribute == CAPABILITY)


def look_for(change: Change, old: Node | None, *, powers: bool) -> tuple[Look, list[str]]:
    """How the entry of a change is to look where `old` is now, and in words what does not come along."""
    node = change.after
    assert node is not None
    same_type = old if old is not None and old.type is node.type else None
    kept = same_type.mode if same_type else 0
    mode = (node.mode & 0o777 & ~_OTHERS_WRITE) | (node.mode & kept & _OTHERS_WRITE)
    bits = node.mode & POWER_BITS
    mode |= bits if powers else bits & kept if node.type is EntryType.DIRECTORY else 0
    xattrs = {name: value for name, value in node.xattrs.items() if carried(name, powers=powers)}
    left = [f"the attribute {name}" for name in change.xattrs if name in node.xattrs and name not in xattrs]
    if node.type is not EntryType.SYMLINK and node.mode & 0o777 & ~mode:
        left.append("the right of others to write")
    before = change.before
    if before is not None and change.kind is not Kind.RETYPED and (before.uid, before.gid) != (node.uid, node.gid):
        left.append("the owner")
    owner = (same_type.uid, same_type.gid) if same_type else (None, None)
    return Look(mode, xattrs, *owner), left
