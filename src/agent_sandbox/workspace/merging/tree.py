"""Merge whole trees, given as what is at each path: each path for itself, and then that the paths fit together.

A path can only be where its parent is a directory. Two sides that each are a tree may merge into none: one puts a file into a directory
that the other removed or made a link of. That is a conflict of the parent.
"""

from __future__ import annotations

from collections.abc import Container, Mapping

from agent_sandbox.values import dataclass
from agent_sandbox.workspace.merging.entries import Conflict, ConflictKind, MergedEntry, Version, merge_entry
from agent_sandbox.workspace.nodes import EntryType

Tree = Mapping[str, Version]


@dataclass(frozen=True)
class MergedTree:
    """What shall be at each path; a path without anything is not in it. Paths with conflicts hold the sandbox's side meanwhile."""

    tree: Tree
    conflicts: tuple[Conflict, ...] = ()


def merge_tree(base: Tree, ours: Tree, theirs: Tree, *, unknown: Container[str] = ()) -> MergedTree:
    """Merge every path of the three. `unknown` are paths that have no base."""
    entries = {
        path: merge_entry(path, base.get(path), ours.get(path), theirs.get(path), known=path not in unknown)
        for path in sorted({*base, *ours, *theirs})
    }
    homeless = _without_a_directory(entries)
    conflicts = [conflict for entry in entries.values() for conflict in entry.conflicts]
    conflicts += [
        Conflict(path, ConflictKind.TREE, base.get(path), ours.get(path), theirs.get(path), path not in unknown)
        for path in sorted(homeless)
    ]
    tree = {path: entry.result for path, entry in entries.items() if entry.result is not None}
    return MergedTree(tree, tuple(sorted(conflicts, key=lambda conflict: conflict.path)))


def _without_a_directory(entries: Mapping[str, MergedEntry]) -> set[str]:
    """Parents that have something below them in the result, or may have, and are no directory there. Others' parents are not judged."""
    found: set[str] = set()
    for path, entry in entries.items():
        parent = path.rpartition("/")[0]
        nothing = entry.result is None and not entry.conflicts  # a conflict may be answered by the side that has something
        if nothing or parent not in entries or entries[parent].conflicts:
            continue
        above = entries[parent].result
        if above is None or above.node.type is not EntryType.DIRECTORY:
            found.add(parent)
    return found
