"""`carry-out`: exactly what a plan says, once, and not at all when anything of it has changed."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.e2e.cutting import cut_off
from tests.e2e.program import Shell, tree, words
from tests.e2e.sitting import sitting
from tests.e2e.test_sim import repository

pytestmark = pytest.mark.once

__all__ = ["repository"]

EVERYTHING = (
    "echo two >> greeting.txt; printf 'a\\0b\\377' > bytes; mkdir -p deep/er; echo x > deep/er/x; chmod 0640 deep/er/x; chmod 0750 deep; "
    "ln -s greeting.txt link; ln -s nowhere dangling; mkdir shut; touch shut/in; chmod 0500 shut; "
    "rm src/app.py; mv notes.txt renamed.txt; touch $'odd\\n\\x1bname'"
)


def plan_of(shell: Shell, *line: str) -> str:
    document = json.loads(shell("--json", "sim", *line).stdout)
    assert document["kept"], document
    digest: str = document["digest"]
    return digest


def plans(shell: Shell) -> list[Path]:
    return [each for each in Path(shell.env["AGENT_SANDBOX_STATE"], "plans").iterdir() if not each.name.startswith(".")]


@pytest.mark.both
def test_what_is_carried_out_is_what_the_command_would_have_done(shell: Shell, tmp_path: Path) -> None:
    (shell.cwd / "notes.txt").write_text("notes\n")
    really = tmp_path / "really"
    shutil.copytree(shell.cwd, really, symlinks=True)
    before = tree(shell.cwd)
    digest = plan_of(shell, EVERYTHING)
    assert tree(shell.cwd) == before
    done = shell("carry-out", digest[:12], "--yes")
    assert done.returncode == 0, words(done)
    subprocess.run(["bash", "-c", EVERYTHING], cwd=really, check=True)
    assert tree(shell.cwd) == tree(really) != before
    assert plans(shell) == []
    assert shell("undo", "--yes").returncode == 0 and tree(shell.cwd) == before
    again = shell("carry-out", digest, "--yes")
    assert again.returncode == 2 and "there is no plan" in words(again)


def test_a_commit_is_carried_out_when_git_history_is_agreed_to(repository: Shell) -> None:
    digest = plan_of(repository, "git commit -m 'fix: bug'")
    assert digest[:12].encode() in repository("carry-out").stdout
    asked = repository("carry-out", digest, "--approve", "git-history")
    assert asked.returncode == 3 and "needs --yes" in words(asked) and b"would make a commit" in asked.stdout
    refused = repository("carry-out", digest, "--yes")
    assert refused.returncode == 3 and "git-history" in words(refused)
    assert repository("carry-out", digest, "--yes", "--approve", "git-history").returncode == 0
    log = subprocess.run(["git", "log", "--format=%s"], cwd=repository.cwd, capture_output=True, check=True).stdout
    assert log == b"fix: bug\nfirst\n"
    subprocess.run(["git", "fsck", "--strict"], cwd=repository.cwd, capture_output=True, check=True)
    entries = [json.loads(line) for line in repository("log", "--format", "jsonl").stdout.splitlines()]
    assert any(digest in json.dumps(entry) for entry in entries)


def test_a_person_is_asked_after_the_plan(shell: Shell) -> None:
    with sitting(shell, "sim", "--no-pager", "echo x > made.txt") as person:
        person.expect(b"Carry out the plan")
        person.type(b"n\r")
        assert person.end() == 0
    assert not (shell.cwd / "made.txt").exists()
    with sitting(shell, "sim", "--no-pager", "echo x > made.txt") as person:
        person.expect(b"Carry out the plan")
        person.type(b"y\r")
        assert person.end() == 0
    assert (shell.cwd / "made.txt").read_text() == "x\n"


@pytest.mark.slow
def test_a_plan_that_was_changed_by_a_byte_is_refused(shell: Shell) -> None:
    digest = plan_of(shell, "echo x > made.txt")
    (text,) = plans(shell)[0].glob("plan-*")
    shown = text.read_bytes()
    text.write_bytes(shown.replace(b"made.txt", b"nade.txt"))
    done = shell("carry-out", digest, "--yes")
    assert done.returncode == 2 and "the plan has been changed" in words(done)
    text.write_bytes(shown)
    (file,) = plans(shell)[0].rglob("made.txt")
    file.write_text("y\n")
    done = shell("carry-out", digest, "--yes")
    assert done.returncode == 2 and "changed since it was shown" in words(done) and not (shell.cwd / "made.txt").exists()
    file.write_text("x\n")
    assert shell("carry-out", digest, "--yes").returncode == 0, "the control arm: as it was, it is carried out"


@pytest.mark.slow
def test_a_plan_is_refused_when_reality_has_moved_on(shell: Shell) -> None:
    digest = plan_of(shell, "echo two >> greeting.txt; echo x > made.txt")
    (shell.cwd / "greeting.txt").write_text("somebody else\n")
    done = shell("carry-out", digest, "--yes")
    assert done.returncode == 1 and "changed in reality since" in words(done) and not (shell.cwd / "made.txt").exists()
    (shell.cwd / "greeting.txt").write_text("hello\n")
    assert shell("carry-out", digest, "--yes").returncode == 0, "the control arm: nothing came of the first try"


@pytest.mark.slow
def test_a_plan_is_refused_when_the_policy_has_changed(shell: Shell) -> None:
    digest = plan_of(shell, "echo x > made.txt")
    (shell.cwd / "agent-sandbox.toml").write_text('[files]\ndenied = ["/nowhere"]\n')
    done = shell("carry-out", digest, "--yes")
    assert done.returncode == 2 and "the policy has changed" in words(done) and not (shell.cwd / "made.txt").exists()


def test_what_reaches_beyond_files_is_refused_unless_only_the_files_are_wanted(shell: Shell) -> None:
    digest = plan_of(shell, "echo x > made.txt; curl --max-time 2 -s http://nowhere.invalid/; true")
    refused = shell("carry-out", digest, "--yes")
    assert refused.returncode == 2 and "nowhere.invalid" in words(refused) and not (shell.cwd / "made.txt").exists()
    done = shell("carry-out", digest, "--yes", "--files-only")
    assert done.returncode == 0 and "NOT carried out" in words(done) and (shell.cwd / "made.txt").exists()


@pytest.mark.needs_root
def test_what_lies_outside_the_project_needs_its_own_word(shell: Shell, tmp_path: Path) -> None:
    place = Path("/opt", f"agent-sandbox-{os.getpid()}-{tmp_path.name}")
    digest = plan_of(shell, f"echo x > made.txt; touch {place}")
    done = shell("carry-out", digest, "--yes")
    assert done.returncode == 2 and "outside the project" in words(done)
    assert not (shell.cwd / "made.txt").exists() and not place.exists()


@pytest.mark.slow
def test_scratch_files_elsewhere_are_left_out_unless_asked_for(shell: Shell, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    done = shell("carry-out", plan_of(shell, f"echo x > made.txt; touch {outside}/made"), "--yes")
    assert (
        "left out: 1 change in caches and scratch directories" in words(done)
        and (shell.cwd / "made.txt").exists()
        and not (outside / "made").exists()
    )
    done = shell("carry-out", plan_of(shell, f"touch {outside}/made"), "--yes", "--system", "--caches")
    assert done.returncode == 0 and (outside / "made").exists()


IN_THE_MAKING = (
    "agent_sandbox.workspace.saved_plans:write_atomically",
    "agent_sandbox.workspace.saved_plans:Plans.keep",
    "agent_sandbox.workspace.stored_sandbox:Stored.after_run",
)


@pytest.mark.slow
@pytest.mark.parametrize("at", [IN_THE_MAKING[0], *(pytest.param(at, marks=pytest.mark.torture) for at in IN_THE_MAKING[1:])])
def test_killed_while_a_plan_is_kept_there_is_none(shell: Shell, at: str) -> None:
    before = tree(shell.cwd)
    cut_off(shell, at, "sim", "echo x > made.txt")
    assert tree(shell.cwd) == before and len(plans(shell)) == 1
    digest = plan_of(shell, "echo y > made.txt")  # which sweeps what was left
    assert len(plans(shell)) == 1
    assert shell("carry-out", digest, "--yes").returncode == 0 and plans(shell) == []


CUT = {"agent_sandbox.workspace.promotion.exchange:make": False, "agent_sandbox.workspace.saved_plans:Plans.drop": True}


@pytest.mark.slow
@pytest.mark.parametrize("at", CUT)
def test_killed_while_it_is_carried_out_it_is_all_there_or_nothing_and_never_twice(shell: Shell, at: str) -> None:
    before = tree(shell.cwd)
    digest = plan_of(shell, "echo x > made.txt; rm greeting.txt")
    cut_off(shell, at, "carry-out", digest, "--yes")
    shell("status")
    after = tree(shell.cwd)
    assert after == before if not CUT[at] else "made.txt" in after and "greeting.txt" not in after
    assert "there is no plan" in words(shell("carry-out", digest, "--yes")) and tree(shell.cwd) == after


@pytest.mark.torture
def test_killed_at_any_moment_there_is_a_whole_plan_or_none(shell: Shell) -> None:
    chance, line = random.Random(7), "for i in 1 2 3 4 5; do echo $i > made-$i.txt; done"
    before, whole = tree(shell.cwd), 0
    for _ in range(100):
        with shell.start("sim", line) as process:
            try:
                process.wait(chance.uniform(0.05, 0.6))
            except subprocess.TimeoutExpired:
                process.kill()
        for listed in shell.json("carry-out")["plans"]:
            whole += 1
            assert shell("carry-out", listed["digest"], "--yes", "--quiet").returncode == 0
            assert [(shell.cwd / f"made-{number}.txt").read_text() for number in range(1, 6)] == [f"{number}\n" for number in range(1, 6)]
            assert shell("undo", "--yes", "--quiet").returncode == 0
        assert tree(shell.cwd) == before
    assert plans(shell) == [] and 0 < whole < 100
