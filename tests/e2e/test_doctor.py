"""`doctor` and `setup` on a machine that can run sandboxes, as every machine that runs these tests can."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from agent_sandbox.cli.commands import doctor
from agent_sandbox.runtime import network_packages
from tests import compiled
from tests.e2e.program import Shell
from tests.e2e.sabotage import NOTHING

REQUIRED = {"user namespaces", "namespaces", "mount copies", "overlay", "own /proc", "seccomp", "pidfd", "openat2", "a run", "a kept run"}


def test_every_required_capability_has_a_row_and_is_there(shell: Shell) -> None:
    document = shell.json("doctor")
    rows = {row["name"]: row for row in document["rows"]}
    assert rows.keys() >= REQUIRED | {
        "Landlock",
        "control groups",
        "setup helper",
        "network",
        "state directory",
        "python",
        "bash",
        "javascript",
        "ruby",
        "wasm",
    }
    assert {name for name in REQUIRED if rows[name]["status"] != "ok"} == set()
    assert document["usable"] is True


def test_whatever_is_not_ok_says_what_to_do(shell: Shell) -> None:
    rows = shell.json("doctor")["rows"]
    assert [row["name"] for row in rows if row["status"] != "ok" and not row["remedy"]] == []
    assert [row["name"] for row in rows if row["status"] == "ok" and row["remedy"]] == []


def test_the_doctor_agrees_with_what_then_happens(shell: Shell) -> None:
    assert shell("doctor").returncode == 0
    assert shell("run", "true").returncode == 0


@pytest.mark.needs_root
def test_a_file_of_another_user_does_not_make_the_doctor_fail(reachable_checkout: Path) -> None:
    """As with a fixed name for the file that the doctor writes in a shared directory of its clone."""
    stranger = 60_702
    with tempfile.TemporaryDirectory(dir="/var/tmp") as home:
        os.chown(home, stranger, stranger)
        taken = Path("/var/tmp/agent-sandbox-probe")
        made = not taken.exists()
        taken.touch()
        try:
            command = [str(reachable_checkout / ".venv/bin/agent-sandbox"), "--json", "doctor"]
            environment = {"HOME": home, "PATH": "/usr/bin:/bin", "AGENT_SANDBOX_SHARED_CACHE": f"{home}/shared"}
            ran = subprocess.run(
                command, user=stranger, group=stranger, extra_groups=(), env=environment, cwd=home, capture_output=True, check=False
            )
        finally:
            if made:
                taken.unlink()
    rows = {row["name"]: row for row in json.loads(ran.stdout)["rows"]}
    assert (rows["a run"]["status"], rows["a kept run"]["status"]) == ("ok", "ok"), rows


@pytest.mark.once
def test_the_doctor_knows_every_package_that_a_network_needs() -> None:
    """What is left of `pyproject.toml`'s list is only what makes it faster."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    extra = {re.split("[<>=]", line)[0] for line in project["project"]["optional-dependencies"]["network"]}
    assert extra == network_packages.NEEDED.keys() | network_packages.FASTER.keys()


@pytest.mark.once
@pytest.mark.parametrize("package", sorted(network_packages.NEEDED))
def test_the_doctor_names_a_package_without_which_no_run_has_a_network(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.network() == "", "the control: with all of them there is one"
    monkeypatch.setitem(network_packages.NEEDED, package, "no_such_module")
    row = doctor._network()
    assert (row.status, row.remedy) == ("missing", f"install them: {sys.executable} -m pip install {package}")
    assert package in row.found


@pytest.mark.once
def test_without_the_faster_search_a_network_is_only_weaker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(network_packages.FASTER, "hyperscan", "no_such_module")
    row = doctor._network()
    assert (row.status, "slower" in row.found, "pip install hyperscan" in row.remedy) == ("weaker", True, True)


@pytest.mark.parametrize(("wall", "works"), [(NOTHING, True), ("captured-writes", False)])
def test_a_run_whose_writes_reach_the_machine_does_not_work_and_leaves_nothing(tmp_path: Path, wall: str, works: bool) -> None:
    written = f"/var/tmp/{tmp_path.name}-{os.getpid()}."
    code = (
        f"import tests.e2e.sabotage as s; s.tear_down({wall!r}); from agent_sandbox.cli.commands import doctor; "
        f"doctor._WRITTEN = {written!r}; trial = doctor.throw_away(); print(trial.worked, trial.said)"
    )
    environment = {**os.environ, "AGENT_SANDBOX_STATE": str(tmp_path / "state"), "PYTHONPATH": str(Path(__file__).parents[2])}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert ran.stdout.startswith(f"{works} a {'shell ran in it' if works else 'file that a shell wrote in it'}"), ran
    assert list(Path("/var/tmp").glob(f"{Path(written).name}*")) == []


def test_the_doctor_leaves_nothing_in_the_state_directory(shell: Shell, tmp_path: Path) -> None:
    shell("doctor")
    left = [path for name in ("sandboxes", "trash") for path in (tmp_path / "state" / name).iterdir()]
    assert left == []


@pytest.mark.once
def test_setup_makes_the_state_directory_and_says_what_to_do_next(shell: Shell, tmp_path: Path) -> None:
    compiled.offer_to_all(tmp_path / "shared")
    done = replace(shell, env={**shell.env, "AGENT_SANDBOX_SHARED_CACHE": str(tmp_path / "shared")})("setup")
    assert done.returncode == 0
    assert b"inside WebAssembly" in done.stdout
    assert (tmp_path / "state" / "format").exists()
    assert b'agent-sandbox run "' in done.stdout


@pytest.mark.once
def test_the_completion_script_is_one_that_bash_accepts_and_knows_the_verbs(shell: Shell) -> None:
    script = shell("completion", "bash").stdout
    done = shell("run", "bash -n /dev/stdin && echo fine", stdin=script)
    assert done.stdout == b"fine\n"
    verbs = shell("completion", "words", "--", "").stdout.split()
    assert b"doctor" in verbs and b"promote" in verbs and b"image" in verbs and b"exec" in verbs
    assert b"--throw-away" in shell("completion", "words", "--", "run", "--").stdout.split()
