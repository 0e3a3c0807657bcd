"""`verify` as its users start it: it passes here, says so to people and programs, and leaves nothing, however it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from agent_sandbox.errors import SandboxError
from agent_sandbox.kernel import namespaces
from agent_sandbox.kernel import syscalls as sc
from agent_sandbox.runtime import network_packages
from agent_sandbox.selftest.bench import DecoyBench
from agent_sandbox.selftest.boxes import Found
from agent_sandbox.selftest.probe import judge, look
from agent_sandbox.selftest.probes import PROBES, egress
from agent_sandbox.selftest.walls import NOT_ATTACKED
from tests.e2e.program import PROGRAM, Shell, words
from tests.e2e.test_bad_input import NO_USER_NAMESPACES, in_namespace
from tests.e2e.test_schemas import checked
from tests.patience import until
from tests.security.harness import snapshot

pytestmark = pytest.mark.slow


@pytest.fixture
def bench(tmp_path: Path) -> Path:
    """Where the self-test plants things."""
    directory = tmp_path / "bench"
    directory.mkdir()
    return directory


@pytest.fixture
def user(shell: Shell, bench: Path, tmp_path: Path) -> Shell:
    """Somebody with a home of their own, in which there is a key."""
    home = tmp_path / "home"
    (home / ".ssh").mkdir(parents=True)
    (home / ".ssh" / "id_rsa").write_text("a real key\n")
    return Shell(shell.cwd, {**shell.env, "HOME": str(home), "TMPDIR": str(bench)})


def left(tmp_path: Path) -> list[str]:
    """List the files that a self-test left: in its bench, its sandbox, and the scratch directories of the machine.

    Another self-test may be under way: what it has in the scratch directories does not stay there, and what is older is not ours.
    """
    state, began = tmp_path / "state", tmp_path.stat().st_ctime
    places = [tmp_path / "bench", *(state / name for name in ("sandboxes", "locks", "trash"))]
    seen = [path for top in ("/tmp", "/dev/shm") for path in Path(top).glob("vfy*")]

    def scratch() -> list[Path]:
        found = {path: path.lstat() for path in seen if os.path.lexists(path)}
        return [path for path, status in found.items() if status.st_uid == os.geteuid() and status.st_ctime >= began]

    until(lambda: not scratch())
    return [str(path) for place in places if place.exists() for path in place.iterdir()] + [str(path) for path in scratch()]


def test_every_promise_holds_here_and_nothing_is_left_or_changed(user: Shell, tmp_path: Path) -> None:
    before = snapshot(user.cwd), snapshot(tmp_path / "home")
    done = user("--json", "verify")
    document = checked(done)
    assert [row for row in document["results"] if row["status"] != "pass" and not row["excused"]] == []
    assert done.returncode == 0 and document["held"] is True
    assert document["schema"] == "agent-sandbox/verify/1"
    assert document["counts"]["fail"] == 0 and document["counts"]["pass"] > 60
    fields = {"probe", "box", "status", "claim", "tried", "why", "reached", "shown", "unshown", "excused", "remedies"}
    assert {frozenset(row) for row in document["results"]} == {frozenset(fields)}
    assert all(row["shown"] for row in document["results"] if row["status"] == "pass"), "nothing passes that cannot succeed"
    assert {row["box"] for row in document["results"]} == {"run", "sdk", "wasm", "product"}
    walls = {row["wall"]: row["status"] for row in document["walls"]}
    assert [wall for wall, status in walls.items() if status in ("broken", "not shown")] == []
    assert [wall.name for wall in NOT_ATTACKED if walls[wall.name] != "not attacked"] == []
    hidden = next(row for row in document["results"] if row["probe"] == "hidden-places")
    assert str(tmp_path / "home" / ".ssh") in hidden["shown"], "the user's own secrets are among what is tried"
    assert (snapshot(user.cwd), snapshot(tmp_path / "home")) == before
    assert left(tmp_path) == []


# The program with some probes only.
SOME = """
import sys
from agent_sandbox.cli.commands import verify
from agent_sandbox.cli.main import main
verify.PROBES = tuple(probe for probe in verify.PROBES if probe.name in sys.argv[1].split())
sys.exit(main(sys.argv[2:]))
"""


WITH_SOME = [sys.executable, "-c", SOME, "background read-by-path"]


@pytest.mark.parametrize("program", [WITH_SOME, pytest.param(PROGRAM, marks=pytest.mark.torture)], ids=["some", "all"])
def test_what_could_not_be_tried_is_said_and_is_no_success(user: Shell, tmp_path: Path, program: list[str]) -> None:
    line = [*program, "verify", "--processes", "2"]
    done = subprocess.run(line, cwd=user.cwd, env=user.environment, capture_output=True, check=False)
    said = done.stdout.decode()
    assert done.returncode == 1, said
    assert "inconclusive background (run): it could not be tried" in said
    assert "tried    leaves a process in a session of its own" in said
    assert "Not everything that is promised" in said
    assert left(tmp_path) == []


@pytest.mark.torture  # the whole of it once more
def test_it_runs_also_where_there_is_no_project(user: Shell, tmp_path: Path) -> None:
    there = Shell(tmp_path / "home", user.env)
    assert there("run", "true").returncode == 2, "the home directory is no project unless it is named"
    done = there("verify")
    assert done.returncode == 0, done.stdout.decode()
    said = done.stdout.decode()
    last = said.rstrip().splitlines()[-1]
    assert re.match(r"The \d+ walls that were attacked held", last) and last.endswith(f"{len(NOT_ATTACKED)} are not attacked.")
    assert [wall.name for wall in NOT_ATTACKED if f"{wall.says} ({wall.why})" not in said] == [], "each is listed, with the reason"


def test_where_no_sandbox_can_be_made_the_verdict_says_so_and_gives_the_remedy(user: Shell, tmp_path: Path) -> None:
    done = in_namespace(user, NO_USER_NAMESPACES, "--json", "verify")
    assert done.returncode == 1, words(done)
    document = json.loads(done.stdout)
    tried = [row for row in document["results"] if row["box"] in ("run", "sdk")]
    assert {(row["status"], row["excused"]) for row in tried} == {("inconclusive", False)}, "nothing passes, and nothing is excused"
    assert all("no sandbox of this kind can be used here" in row["why"] for row in tried)
    assert any("user.max_user_namespaces" in remedy for row in tried for remedy in row["remedies"])
    assert document["held"] is False and left(tmp_path) == []


@pytest.mark.parametrize(
    "line", [["verify", "word"], ["verify", "--timeout", "-1"], ["verify", "--cwd", "/"], ["verify", "--runtime", "wasm"]]
)
def test_a_line_that_makes_no_sense_is_refused_before_anything_runs(user: Shell, tmp_path: Path, line: list[str]) -> None:
    done = user(*line)
    assert done.returncode == 2, words(done)
    assert left(tmp_path) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_it_can_be_interrupted_and_leaves_nothing(user: Shell, bench: Path, tmp_path: Path, number: signal.Signals) -> None:
    """A terminal interrupts every process in the foreground, so the whole group gets the signal."""
    with subprocess.Popen(
        [*PROGRAM, "verify"],
        cwd=user.cwd,
        env=user.environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
        # What starts tests may have set these aside (nohup does).
        preexec_fn=lambda: signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL) and None,
    ) as process:
        assert until(lambda: list(bench.glob("*/tree-*")) != []), "attacks are under way"
        os.killpg(process.pid, number)
        assert process.wait() == 128 + number
        assert process.stderr is not None and b"Traceback" not in process.stderr.read()
    assert left(tmp_path) == []
    assert until(lambda: processes_of(bench) == [])


def test_what_a_killed_self_test_left_is_swept_by_the_next(user: Shell, bench: Path, tmp_path: Path) -> None:
    with user.start("verify") as process:
        assert until(lambda: list(bench.glob("*/tree-*")) != [])
        process.kill()
    (old,) = bench.iterdir()
    assert until(lambda: processes_of(bench) == []), "what it had started ends by itself"
    with user.start("verify") as process:
        assert until(lambda: not old.exists() and list(bench.glob("*/tree-*")) != [])
        process.send_signal(signal.SIGINT)
    assert left(tmp_path) == []


def processes_of(bench: Path) -> list[str]:
    """Processes that were started with this bench in their environment."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            variables = Path("/proc", pid, "environ").read_bytes()
        except OSError:
            continue
        if b"TMPDIR=" + os.fsencode(bench) in variables.split(b"\0"):
            found.append(pid)
    return found


def test_without_the_extra_for_networks_the_door_is_not_covered_and_the_remedy_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network_packages, "NEEDED", {"no-such-package": "no_such_package"})
    doors = [probe for probe in PROBES if probe.name.startswith("door")]
    seen = look(doors, DecoyBench("/nowhere", ""), None)
    assert len(doors) == 2
    for probe in doors:
        result = judge(probe, "run", Found(), seen[probe.name])
        assert (result.status, result.bad) == ("inconclusive", False)
        assert "not covered" in result.why and "pip install no-such-package" in result.why


def test_the_addresses_of_an_attack_are_never_given_to_the_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    attacked = tmp_path / "attacked"

    def attack() -> Found:
        attacked.touch()
        return Found()

    egress.in_world(attack)
    assert attacked.exists(), "the control: in a world of its own it goes on"
    attacked.unlink()
    monkeypatch.setattr(sc, "unshare", lambda flags: None)
    monkeypatch.setattr(namespaces, "enter_own_user_namespace", lambda: None)
    monkeypatch.setattr(namespaces, "raise_loopback", lambda: None)
    with pytest.raises(SandboxError, match="no world of its own"):
        egress.in_world(attack)
    assert not attacked.exists()
