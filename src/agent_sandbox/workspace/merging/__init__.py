"""Merge what a sandbox changed with what has changed in reality meanwhile. Pure: bytes and values in, values out.

*Ours* is the sandbox, *theirs* is reality, the *base* is what was real when the sandbox first covered a path.

edits.py       how one list of lines became another, in bounded time
text.py        three texts into one, or into conflicts
entries.py     one path: content, type, mode, owner, link target, attributes
resolving.py   conflicts answered by a side, by markers, or by a function
tree.py        whole trees, and whether the merged paths fit together
"""

from __future__ import annotations

from agent_sandbox.workspace.merging.entries import Conflict, ConflictKind, MergedEntry, Version, merge_entry
from agent_sandbox.workspace.merging.resolving import resolve
from agent_sandbox.workspace.merging.text import Labels, Merged, TextConflict, merge_text
from agent_sandbox.workspace.merging.tree import MergedTree, merge_tree

__all__ = [
    "Conflict",
    "ConflictKind",
    "Labels",
    "Merged",
    "MergedEntry",
    "MergedTree",
    "TextConflict",
    "Version",
    "merge_entry",
    "merge_text",
    "merge_tree",
    "resolve",
]
