"""Diffs of layers that tests have written."""

from __future__ import annotations

from agent_sandbox.workspace.changes import Change
from agent_sandbox.workspace.preview.compare import DEFAULT, Limits, compare
from agent_sandbox.workspace.preview.sources import Machine, OneLayer
from agent_sandbox.workspace.preview.unified import unified


def lines_of_diff(change: Change, layers: int, *, machine_root: str = "/", limits: Limits = DEFAULT) -> list[str]:
    """The lines that are printed of one change."""
    preview = compare(change, OneLayer(layers), Machine(machine_root), limits=limits)
    return [row.plain for row in unified(preview, limits=limits)]
