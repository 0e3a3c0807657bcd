"""`try` as its users meet it: three approaches to a failing test, tried at once, and the winner made real.

The story is told on `referencing`, a real project whose package holds its own test-suite, and which our own tests need anyway; and on the
source distribution of `toolz`, which has a bug.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.e2e.program import Shell, processes_with, tree, words
from tests.e2e.sitting import sitting
from tests.leftovers import LOOK_AGAIN_SECONDS, adopting, left_since, traces
from tests.patience import Patience
from tests.sdists import TOOLZ

pytestmark = pytest.mark.once

FAULT = ('return self._resources[uri.rstrip("#")]', "return self._resources[uri]")
PYTEST = f"{sys.executable} -m pytest -q -p no:cacheprovider"


def experiments(shell: Shell) -> list[str]:
    place = Path(shell.env["AGENT_SANDBOX_STATE"], "experiments")
    return [name for name in os.listdir(place) if not name.startswith(".")] if place.exists() else []


def is_over(what: str) -> bool:
    """Whether no process has this word on its command line, now or in a moment."""
    patience = Patience(30.0)
    while (found := processes_with(what)) and not patience.over:
        time.sleep(LOOK_AGAIN_SECONDS)
    return not found


@pytest.fixture
def referencing(tmp_path: Path) -> Path:
    """The sources of a real project with its tests, of which two fail: the fault was once a real one."""
    found = find_spec("referencing")
    assert found is not None and found.origin is not None
    root = tmp_path / "referencing-src"
    shutil.copytree(
        Path(found.origin).parent, root / "referencing", ignore=shutil.ignore_patterns("__pycache__", "test_referencing_suite.py")
    )
    (root / ".git").mkdir()
    core = root / "referencing" / "_core.py"
    assert core.read_text().count(FAULT[0]) == 1
    core.write_text(core.read_text().replace(*FAULT))
    return root


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_three_approaches_to_a_failing_test_of_a_real_project_are_tried_at_once_and_the_winner_is_promoted(
    referencing: Path, tmp_path: Path
) -> None:
    shell = Shell(referencing, {"AGENT_SANDBOX_STATE": str(tmp_path / "state")})
    before = tree(referencing)
    tests = "referencing/tests/test_core.py referencing/tests/test_exceptions.py"
    done = shell(
        "--json",
        "try",
        "lower=sed -i 's/self._resources.uri.$/self._resources[uri.lower()]/' referencing/_core.py",
        "hide=sed -i s/test_getitem_strips/getitem_strips/\\;s/test_contents_strips/contents_strips/ referencing/tests/test_core.py",
        "strip=sed -i 's/self._resources.uri.$/self._resources[uri.rstrip(\"#\")]/' referencing/_core.py",
        "--check",
        f"{PYTEST} {tests}",
        "--promote",
        "--yes",
    )
    document = json.loads(done.stdout)
    assert done.returncode == 0, (document, words(done))
    attempts = {each["name"]: each for each in document["attempts"]}
    assert document["winner"] == "strip" and [each["name"] for each in document["attempts"]] == ["strip", "hide", "lower"]
    assert attempts["lower"]["state"] == "failed" and attempts["lower"]["claimed_tests"]["failed"] >= 1
    assert attempts["hide"]["state"] == "passed", "it passes by hiding the tests, and loses because fewer pass"
    assert attempts["hide"]["claimed_tests"]["passed"] < attempts["strip"]["claimed_tests"]["passed"]
    assert document["promotion"]["outcome"] == "promoted" and document["experiment"] is None and document["frozen"]
    after = tree(referencing)
    assert {name for name in after.keys() | before.keys() if after.get(name) != before.get(name)} == {"referencing/_core.py"}
    assert FAULT[0] in (referencing / "referencing" / "_core.py").read_text()
    assert experiments(shell) == []


# What a maintainer would write first, for a bug of this version: `interpose` of an empty sequence raises StopIteration.
REPRODUCED = "\n\ndef test_interpose_of_nothing():\n    assert list(interpose('a', [])) == []\n"
APPROACHES = {
    "eager": r"sed -i 's/^    inposed = concat.*/    seq = list(seq)\n    if not seq:\n        return iter(())\n&/' toolz/itertoolz.py",
    "hide": "sed -i '/^def test_interpose_of_nothing/,$d' toolz/tests/test_itertoolz.py",
    "default": "sed -i 's/^    next(inposed)$/    next(inposed, None)/' toolz/itertoolz.py",
}


@pytest.fixture
def toolz(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The source distribution as a project under git, with a test that fails."""
    cache = getattr(request.config, "cache", None)
    root = TOOLZ.unpack(tmp_path if cache is None else cache.mkdir("sdists"), tmp_path)
    with (root / "toolz/tests/test_itertoolz.py").open("a") as tests:
        tests.write(REPRODUCED)
    who = ("-c", "user.name=ada", "-c", "user.email=ada@example.org")
    for words_of_git in (("init", "-q"), ("add", "-A"), (*who, "commit", "-qm", "interpose of nothing")):
        subprocess.run(["git", *words_of_git], cwd=root, check=True)
    return root


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_bug_of_a_source_distribution_is_fixed_by_the_best_of_three_approaches_and_nothing_else_is_touched(
    toolz: Path, tmp_path: Path
) -> None:
    shell = Shell(toolz, {"AGENT_SANDBOX_STATE": str(tmp_path / "state")})

    def suite() -> str:
        return subprocess.run([*PYTEST.split(), "toolz"], cwd=toolz, capture_output=True, text=True, check=False).stdout

    assert "1 failed, 180 passed" in suite(), "the control: the bug is there, and all other tests pass"
    shutil.rmtree(toolz / "toolz/__pycache__", ignore_errors=True)
    before = tree(toolz)
    line = [*(f"{name}={command}" for name, command in APPROACHES.items()), "--check", f"{PYTEST} toolz", "--memory", "256M"]
    document = shell.json("try", *line)
    found = {each["name"]: each for each in document["attempts"]}
    assert document["winner"] == "default" and [each["name"] for each in document["attempts"]] == ["default", "hide", "eager"], document
    assert found["default"]["claimed_tests"] == {**found["default"]["claimed_tests"], "passed": 181, "failed": 0}
    assert found["hide"]["state"] == "passed" and found["hide"]["claimed_tests"]["passed"] == 180, "it hides the test, and so loses"
    assert found["eager"]["state"] == "failed", "another test asks for a thousand million elements: its memory is limited"
    assert tree(toolz) == before, "nothing is real yet"

    name = document["experiment"]
    shown = shell("try", name, "--side-by-side").stdout.decode()
    assert "next(inposed, None)" in shown and "seq = list(seq)" in shown
    assert shell("try", name, "--promote", "--yes").returncode == 0
    after = tree(toolz)
    assert {path for path in after.keys() | before.keys() if after.get(path) != before.get(path)} == {"toolz/itertoolz.py"}
    changed = subprocess.run(["git", "diff", "--numstat"], cwd=toolz, capture_output=True, text=True, check=True).stdout
    assert changed.split() == ["1", "1", "toolz/itertoolz.py"]
    assert "181 passed" in suite(), "and it holds outside the sandbox"
    assert experiments(shell) == []


def test_the_comparison_is_kept_shown_again_and_promoted_later(shell: Shell, project: Path) -> None:
    done = shell("try", "a=echo two > greeting.txt", "b=echo three > greeting.txt; echo x > extra", "--check", "grep two greeting.txt")
    lines = done.stdout.decode().splitlines()
    assert done.returncode == 0 and lines[1].split()[:3] == ["*", "a", "passed"] and "its check exited with 1" in lines[2]
    assert b"\r" not in done.stderr and b"\x1b" not in done.stderr, "progress is for terminals"
    assert (project / "greeting.txt").read_text() == "hello\n"
    kept = shell.json("try")["experiments"]
    assert [(each["winner"], each["attempts"]) for each in kept] == [("a", ["a", "b"])]
    name = kept[0]["id"]
    shown = shell("try", name, "--side-by-side").stdout.decode()
    assert "+two" in shown and "+three" in shown and "── extra" in shown
    refused = shell("try", f"{name}/b", "--promote")
    assert refused.returncode == 3 and "needs --yes" in words(refused) and not (project / "extra").exists()
    done = shell("try", f"{name[:5]}/b", "--promote", "--yes", "--keep", "none")
    assert done.returncode == 0 and (project / "greeting.txt").read_text() == "three\n" and (project / "extra").exists()
    assert shell("undo", "--yes").returncode == 0 and (project / "greeting.txt").read_text() == "hello\n"
    assert shell.json("try")["experiments"] == [] and experiments(shell) == []


def test_a_promotion_needs_what_promote_needs_and_drift_refuses_it(shell: Shell, project: Path) -> None:
    hook = "mkdir -p .github/workflows; echo on: push > .github/workflows/ci.yml; echo two > greeting.txt"
    done = shell("try", f"a={hook}", "--promote", "--yes")
    assert done.returncode == 3 and "--approve ci" in words(done), words(done)
    assert not (project / ".github").exists() and (project / "greeting.txt").read_text() == "hello\n"
    name = shell.json("try")["experiments"][0]["id"]
    (project / "greeting.txt").write_text("an edit of somebody\n")
    done = shell("try", name, "--promote", "--yes", "--approve", "ci")
    assert done.returncode == 1 and "changed in reality" in words(done)
    assert not (project / ".github").exists() and (project / "greeting.txt").read_text() == "an edit of somebody\n"
    with shell.start("run", "echo ready; sleep 3600") as running:
        assert running.stdout is not None and running.stdout.readline() == b"ready\n"
        done = shell("try", name, "--promote", "--force", "--yes", "--approve", "ci")
        assert done.returncode == 125 and "in use by process" in words(done)
        running.send_signal(signal.SIGTERM)
    assert shell("try", name, "--promote", "--force", "--yes", "--approve", "ci").returncode == 0
    assert (project / "greeting.txt").read_text() == "two\n"


def test_a_person_sees_the_progress_and_the_winner_and_is_asked(shell: Shell, project: Path) -> None:
    terminal = Shell(shell.cwd, {**shell.env, "TERM": "xterm"})
    line = ("try", "a=echo two > greeting.txt", "b=false", "--check", "grep two greeting.txt", "--promote")
    with sitting(terminal, *line) as person:
        person.expect(b"waiting")
        person.expect(b"a: passed after")
        person.expect(b"*  a")
        person.expect(b"Promote 1 change to ")
        person.type(b"n\n")
        assert person.end() == 3 and (project / "greeting.txt").read_text() == "hello\n"
    with sitting(terminal, *line, "--keep", "winner") as person:
        person.expect(b"Promote 1 change to ")
        person.type(b"y\n")
        assert person.end() == 0 and (project / "greeting.txt").read_text() == "two\n"
    newest = shell.json("try")["experiments"][0]
    assert newest["attempts"] == ["a"]


def test_no_attempt_that_passes_is_not_a_mistake_in_the_line(shell: Shell, project: Path) -> None:
    before = tree(project)
    done = shell("try", "a=echo two > greeting.txt; echo why >&2", "b=exit 7", "--check", "echo not so >&2; false", "--promote", "--yes")
    assert done.returncode == 1 and "no attempt passed" in words(done) and "| not so" in words(done), words(done)
    assert tree(project) == before
    missing = shell("try", "a=true", "b=true", "--check", "no-such-check --fast")
    assert missing.returncode == 127 and "could not be started" in missing.stdout.decode()
    for line in (
        ["a=true", "a=false"],
        ["../a=true"],
        ["=true"],
        ["a="],
        ["a", "b=true"],
        ["x", "y"],
        ["--check", "true"],
        ["a=true", "--keep", "some"],
    ):
        done = shell("try", *line)
        assert done.returncode == 2 and words(done).startswith("agent-sandbox: error: "), (line, words(done))
    assert shell("try", "0123456789ab", "--promote").returncode == 2


def test_what_never_ends_is_ended_and_the_first_to_pass_ends_the_rest(shell: Shell) -> None:
    marker = f"3600.{os.getpid()}1"
    document = shell.json("try", f"a=sleep {marker}", "--timeout", "0.5", "--keep", "none")
    assert document["attempts"][0]["state"] == "timed-out" and document["winner"] is None
    done = shell("--json", "try", f"a=sleep {marker}", "b=true", "--total-timeout", "1", "--jobs", "1", "--keep", "none")
    assert done.returncode == 124 and json.loads(done.stdout)["ended"] == "the time limit of the experiment was reached"
    document = shell.json("try", "quick=true", f"slow=sleep {marker}", "--first", "--keep", "none")
    assert document["winner"] == "quick" and document["attempts"][1]["why"] == "another attempt passed first"
    assert is_over(marker) and experiments(shell) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_the_middle_leaves_nothing(shell: Shell, number: signal.Signals, project: Path) -> None:
    before, marker = tree(project), f"3600.{os.getpid()}{number}"
    with shell.start("try", f"a=sleep {marker}", f"b=sleep {marker}", "--check", "true") as running:
        patience = Patience(60.0)
        while not processes_with(marker) and not patience.over:
            time.sleep(LOOK_AGAIN_SECONDS)
        running.send_signal(number)
        running.communicate()
    assert running.returncode == 128 + number
    assert is_over(marker) and experiments(shell) == [] and tree(project) == before


@pytest.mark.both
def test_a_killed_supervisor_takes_its_attempts_along_and_the_next_verb_clears_away(shell: Shell) -> None:
    marker = f"3600.{os.getpid()}9"
    with shell.start("try", f"a=sleep {marker}") as running:
        patience = Patience(60.0)
        while not processes_with(marker) and not patience.over:
            time.sleep(LOOK_AGAIN_SECONDS)
        assert len(experiments(shell)) == 1
        running.kill()
        running.communicate()
    assert is_over(marker)
    assert shell("status").returncode == 0 and experiments(shell) == []


def test_secrets_are_hidden_options_hold_and_the_log_tells(shell: Shell, project: Path) -> None:
    (project / ".env").write_text("TOKEN=canary\n")
    (project / "sub").mkdir()
    line = "cat .env ../.env; echo $WORD; pwd; ls -A .."
    document = shell.json("try", f"a={line}; true", "--env", "WORD=given", "--cwd", "sub", "--memory", "256M", "--disk", "64M")
    attempt = document["attempts"][0]
    assert "canary" not in json.dumps(document) and "given" in attempt["run"]["output"] and "/sub" in attempt["run"]["output"]
    shown = shell.json("try", f"a=cat {project}/.env", "--reveal", str(project / ".env"))["attempts"][0]["run"]["output"]
    assert shown == "TOKEN=canary\n", "the control"
    (project / ".venv").mkdir()
    (project / ".venv" / "pyvenv.cfg").write_text("canary")
    for options in ((), ("--deny", ".venv"), ("--deny", "src")):
        shown = shell.json("try", "a=cat .venv/pyvenv.cfg src/app.py", *options, "--keep", "none")["attempts"][0]["run"]["output"]
        assert ("canary" in shown, "hello" in shown) == (".venv" not in options, "src" not in options), options
    denied = shell.json("try", "a=ls; git --version", "--deny-command", "git")["attempts"][0]
    assert denied["state"] in ("failed", "refused")
    log = shell("log", "--category", "experiment").stdout.decode()
    assert "begun" in log and "ended" in log
    assert "/try-a" in json.dumps(shell.json("log", "--all", "--limit", "none"))


@pytest.mark.both
@pytest.mark.needs_user
def test_what_the_user_may_not_read_is_not_copied_and_named(shell: Shell, project: Path) -> None:
    (project / "closed").write_text("x")
    (project / "closed").chmod(0)
    done = shell("try", "a=true", "--keep", "none", "--reveal", "closed")  # what cannot be examined is hidden otherwise
    assert done.returncode == 0 and "'closed' is not in the frozen copy" in words(done)


def some_experiments(shell: Shell, count: int) -> list[str]:
    """What so many experiments leave. The ledger and the searches grow, and are not looked at."""
    watched = Path(shell.env["AGENT_SANDBOX_STATE"])
    assert shell("try", "warm=true", "--keep", "none").returncode == 0
    with adopting():
        before = traces(watched / "experiments", watched / "trash", adopted=True)
        for number in range(count):
            done = shell("try", f"a=echo {number} > greeting.txt", "b=false", "--check", "true", "--keep", "none")
            assert done.returncode == 0, words(done)
        return left_since(before, watched / "experiments", watched / "trash", adopted=True)


@pytest.mark.both
def test_experiments_leave_no_process_mount_or_file(shell: Shell) -> None:
    assert some_experiments(shell, 2) == []


@pytest.mark.torture
@pytest.mark.timeout(3600)
def test_a_hundred_experiments_leave_no_process_mount_or_file(shell: Shell) -> None:
    assert some_experiments(shell, 100) == []


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("count", [3, pytest.param(100, marks=pytest.mark.torture)])
def test_experiments_in_one_process_leave_no_descriptor(shell: Shell, project: Path, count: int) -> None:
    code = (
        "import os, sys\n"
        "from agent_sandbox import Experiment, shell\n"
        "def once():\n"
        "    with Experiment(sys.argv[1]) as experiment:\n"
        "        experiment.attempt('a', shell('echo x > new'))\n"
        "        assert experiment.run().winner == 'a'\n"
        "once()\n"
        "before = len(os.listdir('/proc/self/fd'))\n"
        "for _ in range(int(sys.argv[2])): once()\n"
        "print(len(os.listdir('/proc/self/fd')) - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(project), str(count)], env=shell.environment, capture_output=True, check=False)
    assert done.stdout == b"0\n", done
