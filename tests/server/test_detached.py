"""The process that holds a sandbox in the background: how long it does, for how many, and what its readers see."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_sandbox.server.admission import MOST
from tests.e2e.program import Shell, processes_in, words
from tests.e2e.test_detached import detached, listed, places_of
from tests.patience import given_time, stretched, until


@pytest.fixture
def lonely(project: Path, tmp_path: Path) -> Iterator[Shell]:
    """Somebody standing in a project, without a daemon."""
    shell = Shell(project, {"AGENT_SANDBOX_STATE": str(tmp_path / "state")})
    yield shell
    shell("stop", "--all", "--timeout", "0")


def ended(shell: Shell, *names: str) -> bool:
    """Whether these run no more. It is looked up here, because a process for each look would keep the machine busy."""
    return not any(places_of(shell).record(name).running for name in names)


def test_it_ends_after_its_lifetime_and_when_nobody_uses_it(lonely: Shell) -> None:
    short = detached(lonely, "--throw-away", "--for", "1", "--", "sleep", "1000")
    idle = f"{stretched(3):.0f}"  # in which one that prints ten times a second gets a turn, on a busy machine too
    unused = detached(lonely, "--throw-away", "--idle", idle, "--", "sleep", "1000")
    used = detached(lonely, "--throw-away", "--idle", idle, "while :; do echo .; sleep 0.1; done")
    assert until(lambda: ended(lonely, short, unused))
    assert listed(lonely, short)["why"] == "its lifetime was over"
    assert listed(lonely, unused)["why"] == "nobody had used it for its time"
    assert listed(lonely, used)["state"] == "running", "the control arm: one that prints is in use"


def test_one_under_an_elevation_has_no_time_left_after_it(lonely: Shell) -> None:
    (lonely.cwd / "agent-sandbox.toml").write_text('[processes]\ncommands = ["sh", "sleep"]\n')
    line = ("sh", "-c", "trap 'sleep 3; echo saved; exit' TERM; echo ready; while :; do sleep 0.1; done")

    def printed(*options: str) -> bytes:
        name = detached(lonely, "--throw-away", *options, "--", *line)
        assert until(lambda: ended(lonely, name))
        assert listed(lonely, name)["why"] == "its lifetime was over"
        return lonely("logs", name).stdout

    def elevated(seconds: float) -> bytes:
        assert lonely("grant", "--elevate", "--allow", "seq", "--for", str(seconds)).returncode == 0
        return printed()

    assert printed("--for", "2") == b"ready\nsaved\n", "the control arm"
    assert given_time(elevated, lambda output: b"ready" in output, seconds=2) == b"ready\n"


def test_no_more_run_on_than_there_may(lonely: Shell) -> None:
    one = Shell(lonely.cwd, {**lonely.env, MOST: "1"})
    name = detached(one, "--throw-away", "--", "sleep", "1000")
    refused = one("run", "--detach", "--throw-away", "--", "sleep", "1000")
    assert refused.returncode == 125 and "not started: 1 detached sandbox runs already" in words(refused)
    assert one("stop", name, "--timeout", "0").returncode == 0
    detached(one, "--throw-away", "--", "sleep", "1000")


def test_somebody_who_follows_its_output_sees_all_of_it_and_its_end(lonely: Shell) -> None:
    name = detached(lonely, "--throw-away", "mkfifo /tmp/door; echo first; read line </tmp/door; echo $line; exit 3")
    with lonely.start("logs", name, "--follow") as follower:
        assert follower.stdout is not None and follower.stdout.readline() == b"first\n"
        assert lonely("exec", name, "echo last >/tmp/door").returncode in (0, 125)
        assert follower.communicate()[0] == b"last\n"
    assert follower.returncode == 0
    assert until(lambda: ended(lonely, name)) and listed(lonely, name)["exit"] == 3


def test_a_caller_that_is_killed_before_it_has_a_name_leaves_nothing(lonely: Shell) -> None:
    """The sandbox of the project is in use, so that the second one waits."""
    detached(lonely, "--", "sleep", "1000")
    with lonely.start("run", "--detach", "--wait", "--", "sleep", "1000") as waiting:
        assert waiting.stderr is not None and b"waiting for it" in waiting.stderr.readline()
        waiting.kill()
        waiting.communicate()
    assert lonely("stop", "--all", "--timeout", "0").returncode == 0
    assert until(lambda: not processes_in(lonely))
