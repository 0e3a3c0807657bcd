"""What is different about a path besides its content, in sentences of ours. Names in them are escaped."""

from __future__ import annotations

from agent_sandbox.workspace.changes import Change
from agent_sandbox.workspace.nodes import EntryType, Node
from agent_sandbox.workspace.visible import lookalike, named

_BITS = {EntryType.FILE: 0o100000, EntryType.SYMLINK: 0o120000, EntryType.DIRECTORY: 0o040000}


def facts(change: Change) -> tuple[str, ...]:
    """The sentences, in the order in which they are shown."""
    before, after = change.before, change.after
    lines: list[str] = []
    if before is None and after is not None:
        lines.append(f"new {after.type.value} mode {_mode(after)}")
    elif after is None and before is not None:
        lines.append(f"deleted {before.type.value} mode {_mode(before)}")
    elif before and after:
        if before.type is not after.type:
            lines.append(f"was a {before.type.value}, is a {after.type.value}")
        if before.mode != after.mode:
            lines += [f"old mode {_mode(before)}", f"new mode {_mode(after)}"]
        if (before.uid, before.gid) != (after.uid, after.gid):
            lines.append(f"owner {before.uid}:{before.gid} is now {after.uid}:{after.gid}")
    if change.renamed_from:
        lines.append(f"renamed from {named(change.renamed_from)}")
    if change.link_of:
        lines.append(f"the same file as {named(change.link_of)}")
    lines += [f"extended attribute {named(name)} differs" for name in change.xattrs]
    if change.inside:
        lines.append(f"and {change.inside:,} {'entry' if change.inside == 1 else 'entries'} below it")
    return tuple(lines)


def warnings(change: Change) -> tuple[str, ...]:
    """What somebody who looks at the change should not miss."""
    lines: list[str] = []
    if change.masks_real:
        lines.append("a real file that was hidden from the sandbox is here")
    if change.unread:
        lines.append("not everything here could be read, so it is taken as changed")
    if change.after is not None and (remark := lookalike(change.path)):
        lines.append(remark)
    return tuple(lines)


def _mode(node: Node) -> str:
    return f"{_BITS.get(node.type, 0) | node.mode:06o}"
