"""Merge the changes of a sandbox with changes made in reality meanwhile. Pure: bytes and values in, values out.

*Ours* is the sandbox, *theirs* is reality, the *base* is the real state when the sandbox first covered a path.

text.py    three texts into one, or into conflicts; the edits between two lists of lines
tree.py    one path, and answers to conflicts
"""

from __future__ import annotations

from agent_sandbox.workspace.merge.text import Labels, Merged, TextConflict, merge_text
from agent_sandbox.workspace.merge.tree import Conflict, ConflictKind, MergedEntry, Version, merge_entry, resolve

__all__ = [
    "Conflict",
    "ConflictKind",
    "Labels",
    "Merged",
    "MergedEntry",
    "TextConflict",
    "Version",
    "merge_entry",
    "merge_text",
    "resolve",
]
