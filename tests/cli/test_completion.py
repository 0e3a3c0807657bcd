"""The words that shells offer, as a person types a line."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from agent_sandbox.assembly import here
from agent_sandbox.cli.completion import candidates
from agent_sandbox.cli.grammar import VERBS
from agent_sandbox.cli.main import main
from agent_sandbox.policy.files.presets import PRESETS
from agent_sandbox.workspace.protected import CLASSES
from tests.e2e.program import SCRIPT

HOSTILE = ("$(touch canary)", "a b", "`id`", "a;b", "--x=$(id)", "a\nb")


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AGENT_SANDBOX_STATE", str(tmp_path / "state"))
    return Path(here().host.state)


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        (["sta"], ("status",)),
        (["--js"], ("--json",)),
        (["--json", "rollb"], ("rollback",)),
        (["run", "--env-"], ("--env-file",)),
        (["log", "--env-"], ()),
        (["run", "--color", "al"], ("always",)),
        (["run", "--color", "=", "al"], ("always",)),
        (["run", "--color", "="], ("auto", "always", "never")),
        (["run", "--color=n"], ("--color=never",)),
        (["promote", "--approve", "c"], ("ci", *(kind for kind in CLASSES if kind.startswith("c") and kind != "ci"))),
        (["promote", "--approve", "ci,edi"], ("ci,editor",)),
        (["run", "--policy", "h"], tuple(name for name in PRESETS if name.startswith("h"))),
        (["log", "--category", "pro"], ("process", "promotion")),
        (["log", "--level", "w"], ("warning",)),
        (["log", "v"], ("verify",)),
        (["try", "--keep", "w"], ("winner",)),
        (["try", "--live", ""], ("stores", "all", "none")),
        (["try", "a=ls", "--tot"], ("--total-timeout",)),
        (["log", "verify", "v"], ()),
        (["completion", ""], ("bash", "zsh", "fish")),
        (["help", "undo"], ("undo",)),
        (["run", "ls", "--js"], ()),  # of the command
        (["code", "x.py", "--", "--js"], ()),
        (["frobnicate", ""], ()),
    ],
)
def test_words_are_offered_where_they_may_stand(state: Path, line: list[str], offered: tuple[str, ...]) -> None:
    assert candidates(line) == offered


def test_every_verb_is_offered_and_nothing_that_is_to_come() -> None:
    assert set(candidates([""])) == set(candidates([])) == set(VERBS)


def test_names_of_the_state_are_offered_if_a_shell_sees_nothing_in_them(state: Path) -> None:
    for name in ("mine-0123456789abcdef", *(each.replace("/", "") for each in HOSTILE)):
        (state / "sandboxes" / name).mkdir(parents=True)
    assert candidates(["log", "--sandbox", ""]) == ("mine-0123456789abcdef",)


def test_nothing_is_said_and_made_where_there_is_nothing(state: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for line in (["rollback", ""], ["log", "--sandbox", ""], ["revoke", ""], ["rollback", "--project", "/no/such", ""]):
        assert main(["completion", "words", "--", *line]) == 0
    assert capfd.readouterr() == ("", "") and not state.exists()


def test_snapshots_are_offered_by_label_and_number(state: Path, tmp_path: Path) -> None:
    from agent_sandbox.workspace.layers.history import History, Snapshot, save
    from agent_sandbox.workspace.store import sandbox_id

    project = tmp_path / "project"
    project.mkdir()
    place = state / "sandboxes" / sandbox_id(str(project))
    place.mkdir(parents=True)
    save(str(place), History(snapshots=(Snapshot(1, "before", None, (), 1.0, False), Snapshot(2, "", 1, (), 2.0, True))))
    assert candidates(["rollback", "--project", str(project), ""]) == ("before", "1", "2")
    assert candidates(["snapshots", "--project", str(project), "--forget", "b"]) == ("before",)


def test_there_is_no_script_for_another_shell(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "tcsh"]) == main(["completion", "bash", "zsh"]) == 2


@pytest.mark.skipif(not SCRIPT.exists(), reason="the program is not installed")
def test_bash_completes_a_line(state: Path, tmp_path: Path) -> None:
    script = subprocess.run([SCRIPT, "completion", "bash"], capture_output=True, check=True, text=True).stdout
    for name in HOSTILE:
        (state / "sandboxes" / name.replace("/", "")).mkdir(parents=True)
    lines = ("run --thr", "log --category=net", "log --sandbox ''", "nonsense ''")
    asked = "".join(
        f"COMP_WORDS=(agent-sandbox {line.replace('=', ' = ')}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); COMPREPLY=(old); "
        'COMP_WORDS=("${COMP_WORDS[@]}"); _agent_sandbox; echo "${COMPREPLY[*]}"; '
        for line in lines
    )
    path = f"{SCRIPT.parent}:/usr/bin:/bin"
    environment = {"PATH": path, "HOME": str(tmp_path), "AGENT_SANDBOX_STATE": str(state)}
    command = ["bash", "--norc", "-c", f"cd {tmp_path}; {script}\n{asked}"]
    done = subprocess.run(command, capture_output=True, check=False, text=True, env=environment)
    assert (done.stdout.split("\n"), done.stderr) == (["--throw-away", "network", "", "", ""], "")
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_is_one_that_its_shell_can_read(shell: str, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    assert main(["completion", shell]) == 0
    (tmp_path / "script").write_text(capfd.readouterr().out)
    done = subprocess.run([shell, "-n", str(tmp_path / "script")], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_kept_experiments_are_offered(state: Path) -> None:
    for name in ("0123456789ab", ".lock", "$(id)"):
        (state / "experiments" / name).mkdir(parents=True)
    assert candidates(["try", ""]) == ("0123456789ab",)


def test_held_sessions_are_offered(state: Path) -> None:
    for name in ("t01abcd", ".lock", "$(id)"):
        (state / "timelines" / name).mkdir(parents=True)
    assert candidates(["inspect", ""]) == candidates(["timeline", "t"]) == ("t01abcd",)
    assert candidates(["run", "--in", ""]) == ("t01abcd", "last")
