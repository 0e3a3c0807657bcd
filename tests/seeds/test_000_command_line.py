"""The command lines of the first seed document, typed as they are written there."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.e2e.program import Shell
from tests.e2e.sitting import sitting


@pytest.fixture
def shell(project: Path, tmp_path: Path) -> Shell:
    return Shell(project, {"AGENT_SANDBOX_STATE": str(tmp_path / "state")})


def test_run_with_permission_checking(shell: Shell) -> None:
    done = shell("--allow", "git,curl", "run", "npm install")
    assert done.returncode == 126 and done.stdout == b""
    assert b"does not allow the program 'npm'" in done.stderr and b"--allow git,curl,npm" in done.stderr


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed: run `make setup` as root")
def test_what_is_allowed_runs(shell: Shell) -> None:
    assert shell("--allow", "git,curl", "run", "git --version").stdout.startswith(b"git version")


def test_show_diff_before_execution(shell: Shell, project: Path) -> None:
    done = shell("--diff", "run", "echo 'new content' > file.txt")
    assert done.returncode == 0
    assert b"+new content\n" in done.stdout
    assert not (project / "file.txt").exists() and shell("diff").stdout == b""


def test_execute_a_command_in_the_sandbox(shell: Shell, project: Path) -> None:
    done = shell("run", "echo changed > greeting.txt; cat greeting.txt")
    assert (done.returncode, done.stdout) == (0, b"changed\n")
    assert (project / "greeting.txt").read_text() == "hello\n"


def test_show_diff_without_executing(shell: Shell, project: Path) -> None:
    done = shell("diff", "rm greeting.txt")
    assert b"-hello\n" in done.stdout and (project / "greeting.txt").exists()


def test_show_the_status_and_reset_the_virtual_filesystem(shell: Shell) -> None:
    shell("run", "echo changed > greeting.txt")
    assert b"changes   1 " in shell("status").stdout
    with sitting(shell, "reset") as person:
        person.expect(b"[y/N] ")
        person.type(b"y\r")
        assert person.end() == 0
    assert b"changes   1 " not in shell("status").stdout and shell("run", "cat greeting.txt").stdout == b"hello\n"
