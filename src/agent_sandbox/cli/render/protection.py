"""Render the remarks on protected changes, as text for people and as values for JSON."""

from __future__ import annotations

from collections.abc import Mapping

from agent_sandbox.cli.results import PathName, PathRemarks

_REMARKS = 8  # on one path


def remarked(path: str, remarks: tuple[str, ...]) -> str:
    """Return a path followed by its first remarks, as text."""
    more = f"; and {len(remarks) - _REMARKS:,} more (--json has all)" if len(remarks) > _REMARKS else ""
    return f"{path}: {'; '.join(remarks[:_REMARKS])}{more}" if remarks else path


def path_remarks(remarks: Mapping[str, tuple[str, ...]]) -> tuple[PathRemarks, ...]:
    """Return the remarks on each path as values for JSON."""
    return tuple(PathRemarks(PathName(path), every) for path, every in remarks.items())
