"""Bad input and bad surroundings: a clear error, the right exit code, and nothing lost or left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.e2e.program import PROGRAM, Shell, processes_in, words

pytestmark = pytest.mark.once


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (["run", "--env", "=x", "true"], "no name before the '='"),
        (["run", "--env", "NOT_SET_ANYWHERE", "true"], "the variable is not set"),
        (["run", "--timeout", "-5", "true"], "--timeout must be above 0"),
        (["run", "--timeout", "nan", "true"], "--timeout takes a time"),
        (["run", "--timeout", "1e400", "true"], "--timeout takes a time"),
        (["run", "--memory", "0", "true"], "--memory must be above 0"),
        (["run", "--memory", "lots", "true"], "--memory takes a size"),
        (["run", "--memory", "99999999999T", "true"], "within reason"),
        (["run", "--disk", "-1G", "true"], "--disk must be above 0"),
        (["run", "--processes", "1.5", "true"], "--processes takes a whole number"),
        (["run", "--processes", "0", "true"], "--processes takes a whole number"),
        (["run", "--project", "/no/such/project", "true"], "there is no directory"),
        (["run", "--reveal", "/etc/hostname", "true"], "nothing is masked"),
        (["run", "--runtime", "minivm", "true"], "there is no runtime 'minivm'"),
        (["run"], "an argument is missing"),
        (["run", "--cwd", "", "true"], "--cwd is empty"),
        (["run", "--runtime", "", "true"], "--runtime is empty"),
        (["run", "--image=", "true"], "--image is empty"),
        (["run", "--cwd", "/proc/1", "true"], "not in the sandbox"),
        (["run", "--", ""], "whose first is a program"),
    ],
)
def test_an_option_that_makes_no_sense_is_refused_before_anything_runs(shell: Shell, line: list[str], why: str) -> None:
    done = shell(*line)
    assert done.returncode == 2, words(done)
    assert why in words(done)
    assert words(done).startswith("agent-sandbox: error: ")
    assert "Traceback" not in words(done)


def test_with_json_an_error_is_a_document_too(shell: Shell) -> None:
    document = shell.json("run", "--timeout", "-5", "true")
    assert document["schema"] == "agent-sandbox/error/1"
    assert document["exit"] == 2
    assert "--timeout" in document["error"]["message"]


def test_a_directory_that_is_not_there_inside_is_named(shell: Shell) -> None:
    done = shell("run", "--cwd", "no/such/directory", "true")
    assert done.returncode == 125
    assert "cannot start in" in words(done) and "no/such/directory" in words(done)


def test_a_current_directory_that_has_vanished_is_an_error(shell: Shell, project: Path) -> None:
    command = f"mkdir gone && cd gone && rmdir ../gone && exec {' '.join(PROGRAM)} run true"
    done = subprocess.run(["/bin/sh", "-c", command], cwd=project, env=shell.environment, capture_output=True, check=False)
    assert done.returncode == 2
    assert "current directory cannot be found" in words(done)


@pytest.mark.both
def test_a_masked_directory_is_no_place_to_start(shell: Shell, tmp_path: Path) -> None:
    home = tmp_path / "home"
    (home / ".ssh").mkdir(parents=True)
    done = Shell(home / ".ssh", {**shell.env, "HOME": str(home)})("run", "--project", str(shell.cwd), "true")
    assert done.returncode == 126
    assert "does not show the working directory" in words(done)


@pytest.mark.parametrize("place", ["home", "/"])
def test_the_home_directory_and_the_root_are_projects_only_when_they_are_named(shell: Shell, tmp_path: Path, place: str) -> None:
    home = tmp_path / "home"
    home.mkdir()
    there = Shell(home if place == "home" else Path("/"), {**shell.env, "HOME": str(home)})
    done = there("run", "true")
    assert done.returncode == 2
    assert "the project would be" in words(done)
    assert "--project" in words(done) and "--throw-away" in words(done), "it says what to do instead"
    assert not list((tmp_path / "state").glob("sandboxes/*")), "nothing was made for it"
    named = there("run", "--project", ".", "echo works")
    assert named.stdout == b"works\n", words(named)
    for pid in processes_in(there):  # the inventory of a whole machine, at low priority: on a busy machine that takes very long
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_a_store_of_another_version_is_left_alone(shell: Shell, tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    (state / "format").write_text("agent-sandbox store 99\n")
    (state / "precious").write_text("x")
    done = shell("run", "true")
    assert done.returncode == 125
    assert "store 99" in words(done)
    assert sorted(os.listdir(state)) == ["format", "precious"]


def test_a_throw_away_run_first_does_not_make_the_store_look_foreign(shell: Shell) -> None:
    assert shell("run", "--throw-away", "true").returncode == 0
    assert shell("run", "true").returncode == 0


def in_namespace(shell: Shell, preparation: str, *line: str) -> subprocess.CompletedProcess[bytes]:
    """The program with other mounts or settings than the machine's, made in namespaces of its own by the same user."""
    code = f"""
import os, sys
from agent_sandbox.kernel import namespaces, syscalls as sc
namespaces.enter_own_user_namespace()
{preparation}
os.execv(sys.argv[1], sys.argv[1:])
"""
    return subprocess.run(
        [sys.executable, "-c", code, *PROGRAM, *line], cwd=shell.cwd, env=shell.environment, capture_output=True, check=False
    )


def mounted(target: Path, options: str, flags: str = "0") -> str:
    return (
        "sc.unshare(sc.CLONE_NEWNS); sc.mount('', '/', None, sc.MS_REC | sc.MS_PRIVATE)\n"
        f"sc.mount('tmpfs', {str(target)!r}, 'tmpfs', {flags}, {options!r})"
    )


@pytest.mark.both
def test_a_full_disk_under_the_state_directory_is_named_and_nothing_runs(shell: Shell, tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    fill = mounted(state, "size=4k,mode=700") + f"\nopen({str(state / 'format')!r}, 'w').write('agent-sandbox store 2\\n')"
    done = in_namespace(shell, fill, "run", "echo ran")
    assert done.returncode == 125, words(done)
    assert "No space left" in words(done)
    assert done.stdout == b""


@pytest.mark.both
def test_a_state_directory_that_cannot_be_written_is_named(shell: Shell, tmp_path: Path) -> None:
    home = tmp_path / "state"
    home.mkdir(mode=0o700)
    done = in_namespace(shell, mounted(home, "size=64k,mode=700", "sc.MS_RDONLY"), "run", "echo ran")
    assert done.returncode == 125, words(done)
    assert "Read-only file system" in words(done)
    assert "XDG_STATE_HOME" in words(done)
    assert done.stdout == b""


NO_USER_NAMESPACES = "open('/proc/sys/user/max_user_namespaces', 'w').write('0')"


@pytest.mark.both
def test_without_user_namespaces_nothing_runs_and_the_remedy_is_named(shell: Shell, project: Path) -> None:
    control = in_namespace(shell, "pass", "doctor")
    assert b"user namespaces" in control.stdout
    done = in_namespace(shell, NO_USER_NAMESPACES, "run", "echo ran > ran.txt")
    assert done.returncode == 125, words(done)
    assert "user.max_user_namespaces" in words(done)
    assert not (project / "ran.txt").exists()
    assert shell("diff").stdout == b""


@pytest.mark.both
def test_the_doctor_tells_the_truth_about_user_namespaces(shell: Shell) -> None:
    done = in_namespace(shell, NO_USER_NAMESPACES, "doctor")
    assert done.returncode == 1
    row = next(line for line in done.stdout.decode().splitlines() if " user namespaces " in line)
    assert row.startswith("missing")
    assert "sysctl -w user.max_user_namespaces" in done.stdout.decode()
    assert "Nothing can run here" in done.stdout.decode()
