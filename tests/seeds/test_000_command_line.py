"""The examples of the first seed document that show what would change, typed as they are written there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.program import Shell


@pytest.fixture
def shell(project: Path, tmp_path: Path) -> Shell:
    return Shell(project, {"AGENT_SANDBOX_STATE": str(tmp_path / "state")})


def test_show_diff_before_execution(shell: Shell, project: Path) -> None:
    done = shell("--diff", "run", "echo 'new content' > file.txt")
    assert done.returncode == 0
    assert b"+new content\n" in done.stdout
    assert not (project / "file.txt").exists() and shell("diff").stdout == b""


def test_show_diff_without_executing(shell: Shell, project: Path) -> None:
    done = shell("diff", "rm greeting.txt")
    assert b"-hello\n" in done.stdout and (project / "greeting.txt").exists()
