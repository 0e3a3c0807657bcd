"""Policy files as their users write them, and the verb that explains them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.program import Shell, words

pytestmark = pytest.mark.once

POLICY = """
name = "careful"
[files]
write = false
denied = ["/etc/hostname"]
[limits]
timeout_seconds = 50
"""


def test_a_projects_file_takes_away_and_is_explained(shell: Shell, project: Path) -> None:
    (project / "agent-sandbox.toml").write_text(POLICY)
    done = shell("run", "touch made; cat /etc/hostname")
    assert done.returncode != 0 and not (project / "made").exists()
    assert "made" in words(done) and "/etc/hostname" in words(done)
    assert shell("diff").stdout == b""
    told = shell("policy", "explain").stdout.decode()
    assert f"from {project / 'agent-sandbox.toml'}\npolicy cloned+careful (" in told
    assert "files: / can be read\nfiles: not there: /etc/hostname\n" in told
    assert "limits: 50 s," in told
    assert shell.json("policy", "explain")["name"] == "cloned+careful"


def test_a_command_is_tested_without_being_run(shell: Shell, project: Path) -> None:
    tested = shell("policy", "test", "touch made && git push --force")
    assert tested.returncode == 0
    assert "git push --force: network git push, destroys git push" in tested.stdout.decode()
    assert not (project / "made").exists()
    (project / "agent-sandbox.toml").write_text('[processes]\ncommands = ["git", "curl"]\n')
    denied = shell("policy", "test", "npm install $X | $(cat y)")
    assert denied.returncode == 126
    assert "does not allow the program 'npm'" in denied.stdout.decode()
    assert "to allow it: --allow git,curl,npm" in denied.stdout.decode()
    assert "not known: it starts a program whose name it computes" in denied.stdout.decode()
    document = shell.json("policy", "test", "npm install")
    assert (document["allowed"], document["rule"], document["tools"]) == (False, "programs", ["npm"])


def test_a_policy_that_names_programs_is_kept_to(shell: Shell, project: Path) -> None:
    (project / "agent-sandbox.toml").write_text('[processes]\ncommands = ["ls"]\n')
    assert shell("run", "ls").stdout.split()
    seen = shell("run", "cat greeting.txt")
    assert seen.returncode == 126 and "does not allow the program 'cat'" in words(seen)
    assert shell("run", "source /dev/stdin", stdin=b"cat greeting.txt").returncode == 127, "nor is it there when nobody has seen it coming"


def test_a_mistake_in_a_file_stops_every_run_and_says_what_to_do(shell: Shell, project: Path) -> None:
    (project / "agent-sandbox.toml").write_text("[files]\nreed = true\n")
    done = shell("run", "true")
    assert done.returncode == 2
    assert "there is no setting 'files.reed'" in words(done) and "did you mean files.read?" in words(done)


def test_a_network_that_a_project_asks_for_is_said_to_be_missing(shell: Shell, project: Path) -> None:
    (project / "agent-sandbox.toml").write_text("[network]\noutbound = true\n")
    done = shell("run", "true")
    assert done.returncode == 0
    assert "narrows one, and opens none; --network HOST does" in words(done)
    assert shell("--quiet", "run", "true").stderr == b""


def test_lint_and_schema(shell: Shell, project: Path) -> None:
    assert shell("policy", "lint").returncode == 0
    (project / "agent-sandbox.toml").write_text('[processes]\ncommands = ["bash", "gti"]\n')
    done = shell("policy", "lint")
    assert done.returncode == 1
    assert "'bash' runs what it is given" in done.stdout.decode() and "'gti' is no tool" in done.stdout.decode()
    assert [each["key"] for each in shell.json("policy", "lint")["remarks"]] == ["processes.commands"] * 2
    assert b"json-schema.org" in shell("policy", "schema").stdout
    assert "policy takes explain, lint, schema" in words(shell("policy", "enforce"))
