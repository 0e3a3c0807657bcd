"""Answer conflicts: by one side, by markers in the text, or by asking a function about each.

Only what is in conflict is answered. What merged cleanly stays merged, also when a side is preferred.
"""

from __future__ import annotations

from collections.abc import Callable

from agent_sandbox.values import TYPE_CHECKING, replace
from agent_sandbox.workspace.merging.entries import Conflict, ConflictKind, MergedEntry, Version
from agent_sandbox.workspace.merging.text import Labels
from agent_sandbox.workspace.nodes import EntryType, Node

if TYPE_CHECKING:
    from typing import Literal

    Word = Literal["ours", "theirs", "markers"]
    Answer = Word | bytes | None
    Choice = Callable[[Conflict], Answer]

WORDS = ("ours", "theirs", "markers")
_OF_ONE_PROPERTY = (ConflictKind.MODE, ConflictKind.OWNER, ConflictKind.TARGET, ConflictKind.XATTRS)


def resolve(entry: MergedEntry, how: Word | Choice, labels: Labels | None = None) -> MergedEntry:
    """The entry with its conflicts answered. Those that cannot be answered in this way stay.

    "ours" is the sandbox's side, "theirs" is reality's. "markers" answers conflicts within a text. A function is given each conflict, and
    returns one of these words, the content that the file shall have, or None to leave it. Raises ValueError for any other word.
    """
    result = entry.result
    left: list[Conflict] = []
    for conflict in entry.conflicts:
        answer = how(conflict) if callable(how) else how
        if isinstance(answer, str) and answer not in WORDS:
            raise ValueError(f"a conflict is resolved by {', '.join(WORDS)} or by a function, not by {answer!r}")
        content = _with_markers(conflict, labels) if answer == "markers" else answer
        if content == "ours" or content == "theirs":
            result = _by_side(result, conflict, ours=content == "ours")
        elif isinstance(content, bytes) and conflict.kind not in _OF_ONE_PROPERTY:
            result = _file(result or conflict.ours or conflict.theirs, content)
        else:
            left.append(conflict)
    return MergedEntry(entry.path, result, tuple(left))


def _with_markers(conflict: Conflict, labels: Labels | None) -> bytes | None:
    merged = conflict.merged
    return None if merged is None or merged.why else merged.with_markers(labels)


def _file(like: Version | None, content: bytes) -> Version:
    """A file with this content, otherwise like what is there; of a thing that is no file only the owner is taken."""
    assert like is not None, "a conflict has a side"
    node = like.node if like.node.type is EntryType.FILE else Node(EntryType.FILE, 0o644, like.node.uid, like.node.gid)
    return Version(replace(node, size=len(content)), content)


def _by_side(result: Version | None, conflict: Conflict, *, ours: bool) -> Version | None:
    side = conflict.ours if ours else conflict.theirs
    if side is None or result is None:
        return side
    match conflict.kind:
        case ConflictKind.CONTENT:
            assert conflict.merged is not None
            return _file(result, conflict.merged.ours() if ours else conflict.merged.theirs())
        case ConflictKind.WHOLE:
            return Version(replace(result.node, size=side.node.size), side.content, side.digest)
        case ConflictKind.MODE:
            return replace(result, node=replace(result.node, mode=side.node.mode))
        case ConflictKind.OWNER:
            return replace(result, node=replace(result.node, uid=side.node.uid, gid=side.node.gid))
        case ConflictKind.TARGET:
            return replace(result, node=replace(result.node, target=side.node.target))
        case ConflictKind.XATTRS:
            return replace(result, node=replace(result.node, xattrs=side.node.xattrs))
        case _:
            return side
