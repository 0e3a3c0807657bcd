"""`policy learn`: a policy on standard output, words on standard error, nothing changed; and the policy does what it says."""

from __future__ import annotations

import os
import signal
import tomllib
from pathlib import Path

import pytest

from tests.e2e.program import Shell, processes_with, words
from tests.patience import until

pytestmark = pytest.mark.once


@pytest.fixture
def shell(project: Path, tmp_path: Path) -> Shell:
    """Somebody with a home of their own."""
    home = tmp_path / "home"
    (home / ".ssh").mkdir(parents=True)
    (home / ".ssh" / "id").write_text("secret")
    (home / "notes").write_text("a note\n")
    return Shell(project, {"AGENT_SANDBOX_STATE": str(tmp_path / "state"), "HOME": str(home), "PATH": "/usr/bin:/bin"})


@pytest.mark.both
def test_a_command_is_learnt_and_then_runs_under_what_was_learnt_and_no_other_does(shell: Shell, project: Path) -> None:
    line = "cat ~/notes greeting.txt | sort > sorted.txt; cat ~/.ssh/id"
    learnt = shell("policy", "learn", line)
    policy = tomllib.loads(learnt.stdout.decode())
    assert policy["files"] == {"allowed": [str(project), "~/notes"]}
    assert policy["processes"]["commands"] == ["cat", "sort"]
    assert learnt.returncode == 1, "as the command: a secret cannot be read"
    assert "not proposed: " in words(learnt) and ".ssh/id, which cat tried, stays hidden (private keys)" in words(learnt)
    assert "tried again under this policy: it ends the same way, with the same changes" in words(learnt)
    assert not (project / "sorted.txt").exists()
    assert shell("diff").stdout == b"", "nor is it in the sandbox"
    (project / "agent-sandbox.toml").write_bytes(learnt.stdout)
    assert shell("policy", "lint").stdout == b""
    assert shell("run", line).returncode == 1
    assert shell("run", "cat sorted.txt").stdout == b"a note\nhello\n"
    assert shell("run", "ls").returncode == 126


def test_what_waits_in_the_sandbox_is_there_and_the_policy_that_is_there_is_widened(shell: Shell, project: Path) -> None:
    (project / "agent-sandbox.toml").write_text('[processes]\ncommands = ["ls"]\nmax = 40\n')
    assert shell("run", "echo waiting > made.txt").returncode == 0
    document = shell.json("policy", "learn", "--add", "sort made.txt", "head greeting.txt")
    assert document["exit"] == 0, document
    assert tomllib.loads(document["toml"])["processes"] == {"commands": ["ls", "head", "sort"], "max": 40}
    assert {(each["key"], each["value"], each["because"]) for each in document["settings"]} >= {
        ("processes.commands", "ls", "as it was"),
        ("processes.commands", "sort", "started by bash"),
    }
    assert "changes in the sandbox" in document["tried"][0]


def test_what_differs_under_the_policy_is_said(shell: Shell, project: Path) -> None:
    other = project.parent / "only looked at"
    other.write_text("x")
    learnt = shell("policy", "learn", "--", "test", "-f", str(other))
    assert learnt.returncode == 0
    assert tomllib.loads(learnt.stdout.decode())["files"]["allowed"] == [str(project), str(other)], "named, and needed"
    hidden = shell("policy", "learn", f"x='{project.parent}'; test -f \"$x/only looked at\"")
    assert hidden.returncode == 1
    assert "does not end the same way: it ended with 1 instead of 0" in words(hidden)


def test_options_go_with_learning_alone(shell: Shell) -> None:
    assert "--add goes with policy learn" in words(shell("policy", "explain", "--add"))
    assert "learn COMMAND…" in words(shell("policy", "learn"))
    assert "policy cloned+low" in shell("policy", "explain", "--policy", "low").stdout.decode()
    held = shell("policy", "learn", "--policy", "reviewer", "touch x")
    assert held.returncode == 126 and "does not allow the program 'touch'" in words(held), "what holds a run holds learning"
    assert set(os.listdir(shell.cwd)) == {".git", "src", "greeting.txt"}


def test_what_is_interrupted_is_learnt_from_and_not_tried(shell: Shell, project: Path) -> None:
    seconds = f"600.{os.getpid()}"  # by which it is found
    with shell.start("policy", "learn", f"cat greeting.txt; exec sleep {seconds}") as learning:
        # Not while the first of them runs: a shell whose command takes no notice of an interrupt goes on.
        assert until(lambda: processes_with(seconds))
        learning.send_signal(signal.SIGINT)
        policy, said = learning.communicate()
    assert tomllib.loads(policy.decode())["processes"]["commands"] == ["cat", "sleep"]
    assert said.startswith(b"hello\n") and b"not tried again: it was interrupted" in said
    assert learning.returncode == 130
