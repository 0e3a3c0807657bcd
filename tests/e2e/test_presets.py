"""The tiers of trust and the presets for agents, as they hold in real runs: each lets its work be done, and nothing that it leaves out."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests.e2e.program import Shell, words

Run = Callable[..., "CompletedProcess[bytes]"]
MAKEFILE = "test: app\n\t./app\napp: app.sh\n\tcp app.sh app && chmod +x app\n"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A user's, with a project and a note in it."""
    project = tmp_path / "home" / "project"
    (project / ".git").mkdir(parents=True)
    (project / "greeting.txt").write_text("hello\n")
    (project / "app.sh").write_text("#!/bin/sh\necho built and run\n")
    (project / "Makefile").write_text(MAKEFILE)
    (project / "test_it.py").write_text("import unittest\nclass It(unittest.TestCase):\n    def test(self): self.assertEqual(6 * 7, 42)\n")
    (tmp_path / "home" / "note.txt").write_text("canary-in-the-home\n")
    (tmp_path / "elsewhere.txt").write_text("canary-elsewhere\n")
    return tmp_path / "home"


@pytest.fixture
def run(home: Path, tmp_path: Path) -> Run:
    """Type a line under a preset, in the project."""
    shell = Shell(home / "project", {"AGENT_SANDBOX_STATE": str(tmp_path / "state"), "HOME": str(home)})
    return lambda preset, line, *more: shell("--policy", preset, "--throw-away", *more, "run", line)


@pytest.mark.once
def test_high_is_full(run: Run, home: Path) -> None:
    done = run("high", f"cat {home}/note.txt {home.parent}/elsewhere.txt; make test; echo x > greeting.txt && cat greeting.txt")
    assert done.stdout.decode().splitlines()[:2] == ["canary-in-the-home", "canary-elsewhere"]
    assert done.stdout.endswith(b"built and run\nx\n")


def test_medium_is_the_home_and_approved_programs(run: Run, home: Path) -> None:
    seen = run("medium", f"cat {home}/note.txt; cat {home.parent}/elsewhere.txt; echo x > greeting.txt; cat greeting.txt")
    assert seen.stdout == b"canary-in-the-home\nx\n" and "elsewhere.txt: No such file" in words(seen)
    assert (home / "project/greeting.txt").read_text() == "hello\n"
    made = run("medium", "python3 -m unittest 2>&1 | tail -n 1; make test")
    assert made.stdout.startswith(b"OK\n")
    assert made.returncode != 0 and "Permission denied" in words(made), "what it has made itself is on no list"
    asked = run("medium", "sudo ls")
    assert asked.returncode == 126 and "does not allow the program 'sudo'" in words(asked)


@pytest.mark.once
def test_medium_outside_of_the_home_says_what_is_missing(home: Path, tmp_path: Path) -> None:
    (tmp_path / "other/.git").mkdir(parents=True)
    done = Shell(tmp_path / "other", {"AGENT_SANDBOX_STATE": str(tmp_path / "state"), "HOME": str(home)})("--policy", "medium", "run", "ls")
    assert done.returncode == 126 and "does not show the working directory" in words(done)


def test_low_is_scratch_space_and_programs_for_looking(run: Run, home: Path) -> None:
    looked = run("low", "pwd; ls -d /usr; printf 'b\\na\\n' > notes; sort notes | grep a; cat notes | wc -l")
    assert looked.stdout == b"/tmp\n/usr\na\n2\n"
    seen = run("low", f"cat {home}/note.txt {home}/project/greeting.txt /etc/hostname; ls {home}; echo x > /etc/made; echo x > /usr/made")
    assert b"canary" not in seen.stdout and seen.stdout == b"", "nothing of the machine is there, and nothing can be made outside of /tmp"
    assert all(f"/{name}/made" in words(seen) for name in ("etc", "usr"))
    refused = run("low", "touch x")
    assert refused.returncode == 126 and "does not allow the program 'touch'" in words(refused)
    unforeseen = run("low", "printf 'touch made' > script; source ./script; echo $?; echo *")
    assert unforeseen.stdout == b"127\nscript\n", "nor is it there when nobody has seen it coming"


@pytest.mark.once
def test_low_looks_at_code_before_it_runs(home: Path, tmp_path: Path) -> None:
    shell = Shell(home / "project", {"AGENT_SANDBOX_STATE": str(tmp_path / "state"), "HOME": str(home)})
    code = ("--policy", "low", "--throw-away", "code", "-", "--language", "python")
    refused = shell(*code, stdin=b"import socket\n")
    assert refused.returncode == 126 and "line 1: socket opens network connections" in words(refused)
    assert shell(*code, stdin=b"print(6 * 7)\n").stdout == b"42\n"


@pytest.mark.once
@pytest.mark.parametrize("preset", ["coding-agent", "test-runner"])
def test_who_writes_programs_builds_and_runs_them(run: Run, preset: str) -> None:
    assert run(preset, "make test && python3 -m unittest 2>&1 | tail -n 1").stdout.endswith(b"built and run\nOK\n")
    assert run(preset, "ssh -V").returncode == 126


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed: run `make setup` as root")
def test_a_reviewer_reads_everything_and_changes_nothing(run: Run, home: Path) -> None:
    done = run("reviewer", f"cat {home}/note.txt; git --version; echo x > greeting.txt; cat greeting.txt; sed -i s/hello/x/ greeting.txt")
    assert done.stdout.startswith(b"canary-in-the-home\ngit version") and done.stdout.endswith(b"\nhello\n")
    assert "Read-only file system" in words(done)


@pytest.mark.once
def test_a_data_analyst_computes_and_starts_nothing(home: Path, tmp_path: Path) -> None:
    shell = Shell(home / "project", {"AGENT_SANDBOX_STATE": str(tmp_path / "state"), "HOME": str(home)})
    code = ("--policy", "data-analyst", "--throw-away", "code", "-", "--language", "python")
    assert shell(*code, stdin=b"print(open('greeting.txt').read().upper())").stdout == b"HELLO\n\n"
    assert "line 1: subprocess starts other programs" in words(shell(*code, stdin=b"import subprocess"))
    refused = shell("--policy", "data-analyst", "--throw-away", "run", "ls")
    assert refused.returncode == 126 and "allows no processes" in words(refused)


@pytest.mark.once
def test_a_policy_of_ones_own_is_a_file_and_takes_away_too(run: Run, home: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('extends = "reviewer"\n[processes]\ndenied_commands = ["cat"]\n[code]\nblocked = ["grep"]\n')
    mine = str(tmp_path / "mine.toml")
    assert run(mine, "head -n 1 greeting.txt").stdout == b"hello\n"
    assert "does not allow the program 'cat'" in words(run(mine, "cat greeting.txt"))
    assert "line 1: grep is on the list" in words(run(mine, "grep h greeting.txt"))
    shell = Shell(home / "project", {"HOME": str(home)})
    tested = shell("--policy", mine, "policy", "test", "grep h greeting.txt")
    assert tested.returncode == 126 and b"line 1: grep is on the list" in tested.stdout, "as it is when it is run"
    assert b"files: / can be read\n" in shell("policy", "explain", "--policy", mine).stdout
    assert run("high", "cat greeting.txt", "--policy", mine).returncode == 126, "the last of several takes away, too"
    done = run("lowest", "true")
    assert done.returncode == 2 and "there is no preset and no file 'lowest'" in words(done)


@pytest.mark.once
def test_a_run_under_rules_of_other_trees_says_that_it_has_not_seen_what_was_changed(home: Path, tmp_path: Path) -> None:
    shell = Shell(home / "project", {"AGENT_SANDBOX_STATE": str(tmp_path / "state"), "HOME": str(home)})
    assert shell("--policy", "medium", "run", "echo medium > greeting.txt; cat greeting.txt").stdout == b"medium\n"
    other = shell("run", "cat greeting.txt; echo high > app.sh")
    assert other.stdout == b"hello\n" and f"earlier changes in {home} were not visible" in words(other)
    again = shell("--policy", "medium", "run", "cat greeting.txt")
    assert again.stdout == b"medium\n" and "were not visible" in words(again), "of the whole machine's layers it has none"
