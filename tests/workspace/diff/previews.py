"""Diffs of layers that tests have written, and of two contents that need no layer."""

from __future__ import annotations

import os

from agent_sandbox.workspace.changes import Change, Kind
from agent_sandbox.workspace.diff.compare import DEFAULT, DiffLimits, Effort, MachineFiles, Preview, compare
from agent_sandbox.workspace.diff.formats import unified
from agent_sandbox.workspace.layers.stack import Stack
from agent_sandbox.workspace.nodes import EntryType, Node


def lines_of_diff(change: Change, layers: int, *, machine_root: str = "/", limits: DiffLimits = DEFAULT) -> list[str]:
    """The lines that are printed of one change."""
    with Stack.of([layers], userxattr=os.geteuid() != 0) as stack:
        preview = compare(change, stack, MachineFiles(machine_root), limits=limits)
    return [row.plain for row in unified(preview, limits=limits)]


class InMemory:
    """Both sides of a change, in files without a name."""

    def __init__(self, old: bytes, new: bytes) -> None:
        self._old, self._new = old, new

    def open_old(self, change: Change) -> int:
        return _file(self._old)

    def open_file(self, change: Change) -> int:
        return _file(self._new)


def _file(content: bytes) -> int:
    fd = os.memfd_create("side", os.MFD_CLOEXEC)
    with open(os.dup(fd), "wb") as file:
        file.write(content)
    return fd


def preview_of(
    old: bytes | None, new: bytes | None, limits: DiffLimits = DEFAULT, effort: Effort | None = None, path: str = "/f"
) -> Preview:
    """The preview of a file with this content, None where there is none."""
    before, after = (None if content is None else Node(EntryType.FILE, 0o644, 0, 0, len(content)) for content in (old, new))
    kind = Kind.ADDED if old is None else Kind.DELETED if new is None else Kind.MODIFIED
    sides = InMemory(old or b"", new or b"")
    return compare(Change(path, kind, before, after), sides, sides, limits=limits, effort=effort)
