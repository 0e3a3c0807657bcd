"""`list` and `prune`: all sandboxes of a user, and the removal of those that nobody needs."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.e2e.program import Shell, words
from tests.e2e.sitting import sitting
from tests.patience import until


@pytest.fixture
def gone(shell: Shell, tmp_path: Path) -> Shell:
    """A shell in a project that is removed, with a change in its sandbox."""
    place = tmp_path / "gone project"
    place.mkdir()
    there = Shell(place, shell.env)
    assert there("run", "echo precious > canary").returncode == 0
    shutil.rmtree(place)
    return there


def named(shell: Shell) -> dict[str, dict[str, object]]:
    """All sandboxes, by the last part of their projects."""
    return {os.path.basename(each["project"]): each for each in shell.json("list")["sandboxes"]}


@pytest.mark.once
def test_list_shows_each_sandbox_with_its_size_changes_and_whether_its_project_is_gone(shell: Shell, project: Path, gone: Shell) -> None:
    assert shell("run", "echo x > new; echo y > other; mkdir -p __pycache__; echo z > __pycache__/m.pyc").returncode == 0
    shell("snapshot")
    found = named(shell)
    here, away = found[project.name], found["gone project"]
    assert (here["project_state"], here["changes"], here["caches"], here["snapshots"]) == ("there", 2, 2, 1)
    assert (away["project_state"], away["changes"], away["in_use_by"]) == ("gone", 1, None)
    assert isinstance(here["bytes"], int) and here["bytes"] > 0
    text = shell("list").stdout.decode()
    assert f"{project}\n" in text and "gone project (gone)\n" in text and "2 + 1 snapshot" in text


def test_list_names_who_uses_a_sandbox_and_prune_leaves_it_alone(shell: Shell, project: Path) -> None:
    with shell.start("run", "--", "sh", "-c", "echo up; read x", stdin=subprocess.PIPE) as running:
        assert running.stdout is not None and running.stdout.readline() == b"up\n"
        away = project.with_name("away")
        project.rename(away)
        other = Shell(away, shell.env)
        used = named(other)[project.name]
        assert used["project_state"] == "gone" and f"process {running.pid}" in str(used["in_use_by"])
        assert "nothing to remove" in words(other("prune", "--yes"))
        refused = other("prune", "--yes", str(used["sandbox"]))
        assert refused.returncode == 1 and "in use" in words(refused)
        away.rename(project)
        running.communicate(b"\n")
    assert project.name in named(shell)


@pytest.mark.once
def test_prune_without_a_terminal_shows_what_would_be_lost_and_removes_nothing(shell: Shell, gone: Shell) -> None:
    for line in (("prune",), ("prune", "--dry-run")):
        done = shell(*line)
        assert done.returncode == (0 if "--dry-run" in line else 3), done
        assert b"1 change never promoted would be LOST" in done.stdout and b"to free" in done.stdout
    assert "needs --yes" in words(shell("prune"))
    document = shell.json("prune")
    assert document["outcome"] == "not-approved" and document["removed"][0]["sandbox"]["changes"] == 1
    assert "gone project" in named(shell)


def test_prune_removes_what_belongs_to_a_project_that_is_gone_and_nothing_else(shell: Shell, project: Path, gone: Shell) -> None:
    shell("run", "echo mine > kept")
    state = Path(shell.environment["AGENT_SANDBOX_STATE"])
    done = shell("prune", "--yes")
    assert done.returncode == 0 and b"1 change never promoted would be LOST" in done.stdout and "removed 1 sandbox" in words(done)
    assert list(named(shell)) == [project.name] and shell("run", "--", "cat", "kept").stdout == b"mine\n"
    assert not [path for path in state.rglob("*") if "gone-project" in path.name]
    assert "nothing to remove" in words(shell("prune", "--yes"))


@pytest.mark.once
def test_prune_asks_at_a_terminal_and_no_is_no(shell: Shell, gone: Shell) -> None:
    with sitting(shell, "prune") as person:
        person.expect(b"LOST")
        person.expect(b"[y/N] ")
        person.type(b"n\r")
        person.expect(b"nothing was changed")
        assert person.end() == 3
    assert "gone project" in named(shell)
    with sitting(shell, "prune") as person:
        person.expect(b"[y/N] ")
        person.type(b"y\r")
        person.expect(b"removed 1 sandbox")
        assert person.end() == 0
    assert "gone project" not in named(shell)


def test_prune_can_remove_sandboxes_without_changes_and_long_unused_ones(shell: Shell, project: Path, tmp_path: Path) -> None:
    shells = {}
    for name in ("changed", "unchanged", "saved", "old"):
        (tmp_path / name).mkdir()
        shells[name] = Shell(tmp_path / name, shell.env)
        assert shells[name]("run", "true" if name == "unchanged" else "echo x > new").returncode == 0
    shells["saved"]("snapshot")
    shells["saved"]("run", "rm new")
    state = Path(str(named(shell)["old"]["sandbox"]))
    place = Path(shell.environment["AGENT_SANDBOX_STATE"], "sandboxes", state)
    for path in (place / "history.json", *(place / "bases").iterdir()):
        os.utime(path, (0, path.stat().st_mtime - 40 * 86400))
    assert shell("prune", "--yes").returncode == 0 and len(named(shell)) == 4, "the control arm: by itself it removes none of them"
    assert shell("prune", "--yes", "--unchanged").returncode == 0
    assert sorted(named(shell)) == ["changed", "old", "saved"], "a snapshot counts as a change"
    assert shell("prune", "--yes", "--unused", "41").returncode == 0 and "old" in named(shell)
    done = shell("prune", "--yes", "--unused", "30")
    assert b"would be LOST" in done.stdout and sorted(named(shell)) == ["changed", "saved"]


@pytest.mark.once
def test_prune_removes_a_sandbox_by_name_and_refuses_names_that_are_none(shell: Shell, project: Path) -> None:
    shell("run", "echo x > new")
    name = str(named(shell)[project.name]["sandbox"])
    for wrong in ("no-such", "..", "../locks", ""):
        assert shell("prune", "--yes", wrong).returncode == 2, wrong
    assert shell("prune", "--yes", "--unchanged", name).returncode == 2
    assert shell("prune", "--yes", name).returncode == 0 and not named(shell)
    assert project.is_dir()


def test_a_sandbox_whose_layers_are_lost_does_not_count_as_one_without_changes(shell: Shell, project: Path) -> None:
    assert shell("run", "echo precious > canary").returncode == 0
    name = str(named(shell)[project.name]["sandbox"])
    place = Path(shell.environment["AGENT_SANDBOX_STATE"], "sandboxes", name)
    kept = place / ("image" if (place / "image").exists() else "layers")
    kept.rename(place / "elsewhere")
    assert named(shell)[project.name]["changes"] is None and "are gone" in str(named(shell)[project.name]["problem"])
    assert "nothing to remove" in words(shell("prune", "--yes", "--unchanged"))
    assert b"would be LOST" in shell("prune", "--dry-run", name).stdout
    for line in (("diff",), ("promote", "--yes"), ("snapshots",), ("run", "true")):
        refused = shell(*line)
        assert refused.returncode == 125 and "are gone" in words(refused), words(refused)
    told = shell("status").stdout
    assert b"are gone" in told and b"nothing has run" not in told
    (place / "elsewhere").rename(kept)
    assert named(shell)[project.name]["changes"] == 1, "the control arm"


@pytest.mark.skipif(os.geteuid() == 0, reason="root can look into every directory")
def test_a_sandbox_that_cannot_be_looked_into_is_not_taken_for_one_that_a_crash_left_behind(shell: Shell, project: Path) -> None:
    assert shell("run", "echo precious > canary").returncode == 0
    place = Path(shell.environment["AGENT_SANDBOX_STATE"], "sandboxes", str(named(shell)[project.name]["sandbox"]))
    place.chmod(0)
    try:
        (found,) = shell.json("list")["sandboxes"]
        assert found["changes"] is None and "Permission denied" in found["problem"]
        assert "nothing to remove" in words(shell("prune", "--yes", "--unchanged"))
        assert b"would be LOST" in shell("prune", "--dry-run", place.name).stdout
    finally:
        place.chmod(0o700)
    assert named(shell)[project.name]["changes"] == 1, "the control arm"


def test_a_run_that_starts_while_prune_removes_gets_a_whole_sandbox(shell: Shell, project: Path) -> None:
    """Whoever of the two has the lock first, the other finds the sandbox as it was or a new one."""
    for _ in range(3):
        assert shell("run", "echo x > old").returncode == 0
        name = str(named(shell)[project.name]["sandbox"])
        with shell.start("prune", "--yes", name) as pruning, shell.start("run", "--", "sh", "-c", "echo x > new; ls") as running:
            out, said = running.communicate()
            pruning.communicate()
        assert running.returncode == 0 and b"new" in out.split(), said
        assert pruning.returncode in (0, 1, 2)
        kept = shell("run", "--", "ls").stdout.split()
        assert b"new" in kept or b"old" not in kept, "all of it is there, or all of it was removed"


@pytest.mark.once
def test_a_file_that_a_guest_named_cannot_act_on_the_terminal(shell: Shell, tmp_path: Path) -> None:
    place = tmp_path / "\x1b[31mred\nname"
    place.mkdir()
    Shell(place, shell.env)("run", "echo x > new")
    shutil.rmtree(place)
    for line in (("list",), ("prune", "--dry-run")):
        done = shell(*line)
        assert b"\x1b" not in done.stdout + done.stderr and b"red" in done.stdout


@pytest.mark.needs_root
def test_a_sandbox_takes_little_of_the_disk(shell: Shell, project: Path) -> None:
    assert shell("run", "echo x > new").returncode == 0
    assert until(lambda: int(str(named(shell)[project.name]["bytes"])) <= 16 << 20)
