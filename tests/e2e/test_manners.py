"""The manners of the command line: what a new user stumbles over."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest

from tests.e2e.program import PROGRAM, Shell, words
from tests.patience import until


@pytest.mark.parametrize("line", [("log",), ("log", "--format", "jsonl"), ("help",), ("capabilities", "--json")])
def test_a_reader_that_goes_away_is_no_complaint(shell: Shell, line: tuple[str, ...]) -> None:
    shell("run", "true")
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run([*PROGRAM, *line], cwd=shell.cwd, env=shell.environment, stdout=writer, stderr=subprocess.PIPE, check=False)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


def test_a_run_that_was_killed_has_no_end_in_the_log(shell: Shell) -> None:
    with shell.start("run", "sleep 1000") as process:
        assert until(lambda: shell.json("log")["entries"])
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert [entry["ended"] for entry in shell.json("log")["entries"]] == [False]
    assert b"NO END" in shell("log").stdout
    shell("run", "true")
    assert [entry["ended"] for entry in shell.json("log")["entries"]] == [False, True, None]


def test_the_log_counts_changes_only_where_they_are_known(shell: Shell) -> None:
    shell("run", "echo x > kept")
    shell("run", "--throw-away", "echo x > thrown-away")
    facts = [entry["event"]["facts"] for entry in shell.json("log")["entries"] if entry["kind"] == "outcome"]
    assert ["changes" in each for each in facts] == [False, True] and facts[1]["changes"] == 1


def test_the_log_of_a_project_has_its_throw_away_runs_and_not_those_of_another(shell: Shell) -> None:
    other = Shell(shell.cwd.parent / "other", shell.env)
    other.cwd.mkdir()
    shell("run", "--throw-away", "echo ours")
    other("run", "--throw-away", "echo theirs")
    ours, theirs = shell("log"), other("log")
    assert b"echo ours" in ours.stdout and b"echo theirs" not in ours.stdout
    assert b"echo theirs" in theirs.stdout and b"echo ours" not in theirs.stdout
    assert "2 entries of other projects" in words(ours)
    assert shell("log", "--all").stdout.count(b"echo ") == 2
