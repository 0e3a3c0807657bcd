"""What the tests of the daemon share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.program import Shell


@pytest.fixture
def shell(project: Path, tmp_path: Path) -> Shell:
    """Somebody standing in a project, with a state directory of their own."""
    return Shell(project, {"AGENT_SANDBOX_STATE": str(tmp_path / "state")})
