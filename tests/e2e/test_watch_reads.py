"""`run --watch-reads`: what a run read, and whether that has moved on since."""

from __future__ import annotations

import pytest

from tests.e2e.program import Shell, words


@pytest.mark.needs_root
def test_status_tells_which_of_the_files_that_moved_on_a_run_had_read(shell: Shell) -> None:
    (shell.cwd / "other").write_text("other\n")
    assert shell("run", "--watch-reads", "cat greeting.txt").stdout == b"hello\n"
    for name in ("greeting.txt", "other"):
        (shell.cwd / name).write_text("moved on\n")
    moved = {entry["path"]: entry["read"] for entry in shell.json("status")["drift"]["moved"]}
    assert moved == {str(shell.cwd / "greeting.txt"): True, str(shell.cwd / "other"): False}
    assert b"greeting.txt, and a run read it" in shell("status").stdout


@pytest.mark.needs_user
def test_without_root_a_run_that_is_to_be_watched_does_not_start(shell: Shell) -> None:
    done = shell("run", "--watch-reads", "echo ran")
    assert done.returncode == 125 and done.stdout == b"" and "cannot watch what the run reads" in words(done)


def test_what_a_throw_away_run_reads_is_not_kept_and_that_is_said(shell: Shell) -> None:
    done = shell("run", "--throw-away", "--watch-reads", "true")
    assert done.returncode == 2 and "is not kept" in words(done)
