"""A policy that asks, on the command line: somebody answers, or a token does, or it is not done."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.program import SCRIPT, Shell, words
from tests.e2e.sitting import sitting
from tests.e2e.test_daemon import serving
from tests.patience import given_time, until

pytestmark = pytest.mark.once

POLICY = '[approvals]\ncommands = ["touch marked-*"]\npromotions = true\n'
DONE = "touch marked-file && ls"


@pytest.fixture
def asking(shell: Shell, project: Path) -> Shell:
    (project / "agent-sandbox.toml").write_text(POLICY)
    return shell


def question(shell: Shell) -> dict[str, Any]:
    """The one that waits, once it does."""
    while not (waiting := shell.json("approve")["waiting"]):
        continue
    (found,) = waiting
    assert isinstance(found, dict)
    return found


def answered(shell: Shell, *line: str, answer: Callable[[dict[str, Any]], None]) -> tuple[int, str, str]:
    """Type it, have somebody answer the question that it leads to, and wait for its end."""
    with shell.start(*line) as running:
        answer(question(shell))
        out, err = running.communicate()
    return running.returncode, out.decode(), err.decode()


def says(shell: Shell, *how: str) -> Callable[[dict[str, Any]], None]:
    def say(asked: dict[str, Any]) -> None:
        assert shell("approve", asked["digest"], *how).returncode == 0

    return say


@pytest.mark.parametrize("by_daemon", [False, True], ids=["alone", "by the daemon"])
def test_the_question_of_a_killed_caller_waits_no_more(asking: Shell, *, by_daemon: bool) -> None:
    with serving(asking) if by_daemon else nullcontext():
        with asking.start("run", DONE) as caller:
            asked = question(asking)
            caller.kill()
        assert until(lambda: asking.json("approve")["waiting"] == [])
        late = asking("approve", asked["digest"], "--yes")
        assert late.returncode == 2 and b"no waiting question" in late.stderr, late
        code, out, _ = answered(asking, "run", DONE, answer=says(asking, "--yes"))
        assert code == 0 and "marked-file" in out, "the control arm"


def test_what_somebody_agrees_to_is_done_and_what_they_refuse_is_not(asking: Shell) -> None:
    code, out, err = answered(asking, "run", DONE, answer=says(asking, "--yes"))
    assert code == 0 and "marked-file" in out
    assert "touch marked-*" in err and "agent-sandbox approve" in err, "who waits is told why, and how to answer"
    code, out, err = answered(asking, "run", "touch marked-other; ls", answer=says(asking, "--refuse"))
    assert code == 3 and out == "" and "said no" in err and "agent-sandbox grant" in err
    assert "marked-other" not in asking("run", "ls").stdout.decode(), "nothing of it ran"


@pytest.mark.slow
def test_who_sits_at_the_terminal_of_a_promotion_is_asked_there(asking: Shell, project: Path) -> None:
    (project / "agent-sandbox.toml").write_text("[approvals]\npromotions = true\n")
    assert asking("run", "echo new > marked-file").returncode == 0
    with sitting(asking, "promote", "--yes") as person:
        person.type(b"y\n")  # before there is a question: no answer to it
        person.expect(b"| +new")
        person.expect(b"Allow exactly this?")
        person.type(b"n\n")
        assert person.end() == 3 and not (project / "marked-file").exists()
    with sitting(asking, "promote", "--yes") as person:
        person.expect(b"Allow exactly this?")
        person.type(b"what\ny\n")
        assert person.end() == 0 and (project / "marked-file").read_text() == "new\n"
    with sitting(asking, "undo", "--yes") as person:  # and whoever answers elsewhere has answered
        person.expect(b"Allow exactly this?")
        says(asking, "--yes")(question(asking))
        assert person.end() == 0 and not (project / "marked-file").exists()


def test_a_question_of_a_run_is_not_put_to_the_terminal_that_is_the_programs(asking: Shell) -> None:
    with sitting(asking, "run", "touch marked-it; read line; echo got $line") as person:
        person.expect(b"agent-sandbox approve ")
        person.type(b"y\n")
        says(asking, "--yes")(question(asking))
        person.expect(b"got y")
        assert b"Allow exactly" not in person.seen
        assert person.end() == 0


@pytest.mark.slow
def test_who_is_refused_is_told_in_json_what_is_missing_and_how_to_ask_for_it(asking: Shell) -> None:
    code, out, _ = answered(asking, "--json", "run", "--", "touch", "marked-it", answer=says(asking, "--refuse"))
    document = json.loads(out)
    refusal = document["error"]["refusal"]
    assert code == document["exit"] == 3 and refusal["rule"] == "approval" and "approvals.commands" in refusal["why"]
    assert refusal["missing_capability"] == "run touch marked-it"
    assert refusal["grant"] == "agent-sandbox grant 'run touch marked-it' --for 10m" and refusal["elevate"] is None


def test_a_capability_is_used_instead_of_asking_and_is_seen_neither_inside_nor_in_the_ledger(asking: Shell, tmp_path: Path) -> None:
    granted = asking("grant", "run touch marked-a *", "run bash -c **", "--for", "10m", "--times", "2")
    token = granted.stdout.decode().strip()
    assert granted.returncode == 0 and token.startswith("cap1.")
    look = "touch marked-a; cat /proc/*/environ /proc/*/cmdline 2>/dev/null | tr '\\0' '\\n'; env; echo seen"
    holder = Shell(asking.cwd, {**asking.env, "AGENT_SANDBOX_CAPABILITY": token})
    for done in (asking("run", "--capability", token, look), holder("run", look)):
        assert done.returncode == 0 and b"seen" in done.stdout and b"HOME=" in done.stdout
        assert token.encode() not in done.stdout and b"cap1." not in done.stdout
    passed = holder("run", "--env", "AGENT_SANDBOX_CAPABILITY", "true")
    assert passed.returncode == 2 and "never passed into the sandbox" in words(passed)
    code, _, err = answered(asking, "run", "--capability", token, look, answer=says(asking, "--refuse"))
    assert code == 3 and "said no" in err, "it is used up"
    answered(asking, "run", "--", "touch", "marked-x", token, answer=says(asking, "--refuse"))
    written = (tmp_path / "state" / "ledger.jsonl").read_text()
    assert token not in written and "secret removed" in written


@pytest.mark.slow
def test_without_its_token_a_grant_is_nothing_and_revoked_it_is_nothing_either(asking: Shell) -> None:
    token = asking("grant", "run touch **", "--for", "10m", "-q").stdout.decode().strip()
    assert asking("run", "--capability", token, "touch marked-a").returncode == 0, "with it, it is"
    assert answered(asking, "run", "touch marked-a", answer=says(asking, "--refuse"))[0] == 3
    (standing,) = asking.json("capabilities")["capabilities"]
    assert asking("revoke", standing["name"]).returncode == 0
    assert answered(asking, "run", "--capability", token, "touch marked-a", answer=says(asking, "--refuse"))[0] == 3
    assert asking("revoke", "0" * 32).returncode == 2
    wrong = asking("run", "--capability", "cap1.nothing", "touch marked-a")
    assert wrong.returncode == 2 and "cap1.nothing" not in words(wrong)


def test_who_revokes_is_told_which_runs_go_on(asking: Shell) -> None:
    token = asking("grant", "run bash -c **", "--for", "10m", "-q").stdout.decode().strip()
    with asking.start("run", "--capability", token, "touch marked-a; echo on; exec sleep 60") as running:
        assert running.stdout is not None and running.stdout.readline() == b"on\n"
        revoked = asking.json("revoke", "--all")
        assert revoked["going_on"] == [running.pid]
        running.terminate()
        running.wait()
    assert asking.json("capabilities")["capabilities"][0]["revoked"] is True


@pytest.mark.both
def test_a_guest_cannot_see_the_questions_nor_answer_them(asking: Shell, tmp_path: Path) -> None:
    state = tmp_path / "state"
    token = asking("grant", "run bash -c **", "--for", "1m", "-q").stdout.decode().strip()
    tries = f"ls -laR {state} 2>&1; agent-sandbox approve 2>&1; echo y > {state}/approvals/x 2>&1; echo tried"

    def try_from_inside(asked: dict[str, Any]) -> None:
        done = asking("run", "--throw-away", "--capability", token, tries)
        assert b"tried" in done.stdout and asked["digest"].encode() not in done.stdout and b"ledger.jsonl" not in done.stdout
        assert question(asking)["digest"] == asked["digest"], "it still waits"
        assert (state / "approvals" / "waiting" / asked["digest"] / "question").exists(), "where the guest was told to look"
        says(asking, "--refuse")(asked)

    assert answered(asking, "run", DONE, answer=try_from_inside)[0] == 3


def test_two_who_answer_at_once_give_one_answer(asking: Shell) -> None:
    def both(asked: dict[str, Any]) -> None:
        with asking.start("approve", asked["digest"], "--yes") as yes, asking.start("approve", asked["digest"], "--refuse") as no:
            codes.append((yes.wait(), no.wait()))

    codes: list[tuple[int, int]] = []
    code, _, _ = answered(asking, "run", DONE, answer=both)
    yes, no = codes[0]
    assert (yes == 0) != (no == 0) and code == (0 if yes == 0 else 3)


def test_what_cannot_be_understood_is_asked_about_and_a_policy_without_questions_asks_nobody(asking: Shell, project: Path) -> None:
    assert asking("policy", "test", "$(echo touch) marked-x").returncode == 3
    (project / "agent-sandbox.toml").write_text("")
    assert asking("run", "$(echo touch) marked-x").returncode == 0


ELEVATING = '[processes]\ncommands = ["ls", "cat"]\n[approvals]\nelevate = ["programs"]\n'


@pytest.mark.slow
def test_a_refused_program_can_be_permitted_for_a_time_and_the_return_is_recorded(shell: Shell, project: Path) -> None:
    (project / "agent-sandbox.toml").write_text(ELEVATING)
    code, out, err = answered(shell, "run", "--", "seq", "3", answer=says(shell, "--refuse"))
    assert code == 126 and out == "" and "not elevated" in err
    code, out, err = answered(shell, "run", "--", "seq", "3", answer=says(shell, "--yes"))
    assert code == 0 and out.split() == ["1", "2", "3"] and "the run ends when that expires" in err
    assert shell("run", "--", "seq", "1").returncode == 0, "the next one has it too"
    (standing,) = shell.json("capabilities")["elevations"]
    assert standing["programs"] == ["seq"] and 0 < standing["left"] <= 600
    assert shell("revoke", "--all").returncode == 0
    assert answered(shell, "run", "--", "seq", "3", answer=says(shell, "--refuse"))[0] == 126
    assert shell("grant", "--elevate", "--memory", "16G", "--for", "1m").returncode == 2, "the policy lets nobody lift limits"
    said = shell("log", "--category", "elevation", "--no-pager").stdout.decode()
    assert said.count("began") == said.count("ended") == 1


@pytest.mark.slow
def test_a_run_ends_with_its_elevation(shell: Shell, project: Path) -> None:
    (project / "agent-sandbox.toml").write_text('[processes]\ncommands = ["ls"]\n')
    assert shell("run", "--", "sleep", "0").returncode == 126

    def attempt(seconds: float) -> int:
        assert shell("grant", "--elevate", "--allow", "sleep", "--for", str(seconds)).returncode == 0
        return shell("run", "--", "sleep", "600").returncode

    # On a busy machine the grant may be over before the run begins: it is then denied, or not started.
    assert given_time(attempt, lambda code: code == 124, seconds=1.5) == 124
    assert shell("run", "--", "sleep", "0").returncode == 126
    said = shell("log", "--category", "elevation", "--no-pager").stdout.decode()
    assert said.count("ended") == said.count("began") > 0


@pytest.mark.both
def test_nothing_is_lifted_that_holds_our_own_keys(shell: Shell, tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "state" / "ledger.jsonl.keys"):
        refused = shell("grant", "--elevate", "--reveal", str(path), "--for", "1m")
        assert refused.returncode == 2 and "never shown" in words(refused)


@pytest.mark.slow
def test_a_second_factor_is_needed_where_the_policy_says_so(shell: Shell, project: Path, tmp_path: Path) -> None:
    from agent_sandbox.engine.approvals.second_factor import STEP, digits

    (project / "agent-sandbox.toml").write_text(POLICY + 'high_risk = "second-factor"\n')
    uri = shell("approve", "--enroll").stdout.decode()
    assert uri.startswith("otpauth://totp/") and shell("approve", "--enroll").returncode == 2

    def answer(asked: dict[str, Any]) -> None:
        import time

        without = shell("approve", asked["digest"], "--yes")
        wrong = shell("approve", asked["digest"], "--yes", "--code", "00000")
        assert "second factor" in words(without) and "second factor" in words(wrong) and 0 not in (without.returncode, wrong.returncode)
        secret = (tmp_path / "state" / "ledger.jsonl.keys" / "second-factor").read_bytes()
        says(shell, "--yes", "--code", digits(secret, int(time.time() // STEP)))(asked)

    token = shell("grant", "run bash -c **", "--for", "1m", "-q").stdout.decode().strip()
    lifting = shell("grant", "--elevate", "--memory", "16G", "--for", "1m")
    assert lifting.returncode == 2 and "may not relax a rule" in words(lifting)
    code, out, _ = answered(shell, "run", "--capability", token, DONE, answer=answer)
    assert code == 0 and "marked-file" in out, "and a grant without it is no way around it"


@pytest.fixture
def open_place() -> Iterator[Path]:
    """A directory that other users can reach; pytest's own are closed to them."""
    place = Path(tempfile.mkdtemp(dir="/var/tmp", prefix="asking-"))
    place.chmod(0o755)
    yield place
    shutil.rmtree(place)


@dataclass(frozen=True)
class As(Shell):
    """Another user at the same machine."""

    uid: int = 54_321
    program: Path = SCRIPT

    def __call__(self, *line: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            [self.program, *line],
            cwd=self.cwd,
            env=self.environment,
            input=stdin,
            capture_output=True,
            check=False,
            user=self.uid,
            group=self.uid,
            extra_groups=[],
        )


@pytest.mark.needs_root
def test_another_user_is_needed_where_the_policy_says_so(open_place: Path, tmp_path: Path, reachable_checkout: Path) -> None:
    """Two real users: one who asks and cannot agree with themselves, not even by hand, and root, who can."""
    project, theirs = open_place / "project", open_place / "theirs"
    (project / ".git").mkdir(parents=True)
    theirs.mkdir()
    (project / "agent-sandbox.toml").write_text(POLICY + 'high_risk = "another-user"\n')
    env = {"AGENT_SANDBOX_STATE": str(theirs / "state"), "HOME": str(theirs)}
    env |= {f"XDG_{kind}_HOME": str(theirs / kind) for kind in ("CONFIG", "CACHE", "STATE", "DATA")}
    env |= {"XDG_RUNTIME_DIR": str(theirs / "RUN"), "AGENT_SANDBOX_SHARED_CACHE": str(theirs / "shared")}  # root's they cannot enter
    asker = As(project, env, program=reachable_checkout / ".venv/bin/agent-sandbox")
    root = Shell(project, {**env, "XDG_STATE_HOME": str(tmp_path / "a"), "XDG_DATA_HOME": str(tmp_path / "b")})
    for path in (theirs, project, *project.rglob("*")):
        os.chown(path, asker.uid, asker.uid)
    started = asker("run", "true")
    if "user namespace" in words(started):
        pytest.skip(f"an ordinary user has no sandboxes here: {words(started)}")
    assert started.returncode == 0, words(started)

    def answer(asked: dict[str, Any]) -> None:
        own = asker("approve", asked["digest"], "--yes")
        assert own.returncode == 3 and "another user" in words(own)
        says(root, "--yes")(asked)

    assert "needs     another-user" in _shown_while_waiting(asker, root, answer, allowed=True)

    def forge(asked: dict[str, Any]) -> None:
        from agent_sandbox.engine.approvals.question import PURPOSE, Answer, Decision, sealed
        from agent_sandbox.ledger import private_files

        seal = private_files.load_key(str(theirs / "state" / "ledger.jsonl.keys"), make=False).derived(PURPOSE)
        file = theirs / "state" / "approvals" / "waiting" / asked["digest"] / "answer"
        file.with_suffix(".new").write_bytes(sealed(Answer(asked["digest"], Decision.ONCE, "root", asked["until"]), seal))
        os.chown(file.with_suffix(".new"), asker.uid, asker.uid)
        file.with_suffix(".new").rename(file)

    _shown_while_waiting(asker, root, forge, allowed=False)
    said = asker("log", "--category", "approval", "--no-pager").stdout.decode()
    assert said.count("received") == 1
    owners = {path.lstat().st_uid for path in (theirs / "state").rglob("*")}
    assert owners == {asker.uid}, "root has left nothing in what is theirs"


def _shown_while_waiting(asker: Shell, root: Shell, answer: Callable[[dict[str, Any]], None], *, allowed: bool) -> str:
    from threading import Thread

    done: list[subprocess.CompletedProcess[bytes]] = []
    thread = Thread(target=lambda: done.append(asker("run", DONE)))
    thread.start()
    asked = question(root)
    answer(asked)
    thread.join()
    assert (done[0].returncode, b"marked-file" in done[0].stdout) == ((0, True) if allowed else (3, False)), words(done[0])
    return str(asked["text"])
