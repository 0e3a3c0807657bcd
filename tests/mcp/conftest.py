"""What the tests of the MCP server share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mcp.client import Place


@pytest.fixture
def place(project: Path, tmp_path: Path) -> Place:
    return Place(project, tmp_path / "state")
