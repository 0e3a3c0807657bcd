"""The daemon of a user performs command lines as their callers would, only sooner. Nothing outlives its caller or the daemon."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent_sandbox.assembly import Host
from agent_sandbox.cli import errand
from agent_sandbox.kernel import wire
from agent_sandbox.server.worker import LARGEST_REQUEST
from tests.e2e.program import PROGRAM, Shell, processes_in, words
from tests.patience import until

ALONE = {errand.OFF: "1"}
# A caller that gets no further, when its whole request is sent, until the daemon has performed it and taken leave.
HELD_UP = """
import _socket, select, sys
class HeldUp(_socket.socket):
    def sendmsg(self, buffers, *rest):
        sent, gone = super().sendmsg(buffers, *rest), select.poll()
        gone.register(self, 0)
        gone.poll()
        return sent
_socket.socket = HeldUp
from agent_sandbox.cli.errand import program
program()
"""
BEAT = "while :; do echo x >>{file}; sleep 0.05; done"


@contextmanager
def serving(shell: Shell, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """A daemon for what this shell types."""
    with shell.start("serve", *options) as process:
        assert until(lambda: counts(shell)["running"])
        yield process
        process.send_signal(signal.SIGTERM)
        process.communicate()


@pytest.fixture
def served(shell: Shell) -> Iterator[Shell]:
    """Somebody standing in a project, with a daemon."""
    with serving(shell):
        yield shell


def counts(shell: Shell) -> dict[str, Any]:
    return shell.json("serve", "--status")


def alone(shell: Shell) -> Shell:
    """The same without the daemon."""
    return Shell(shell.cwd, {**shell.env, **ALONE})


def connected(shell: Shell) -> socket.socket:
    link = socket.socket(socket.AF_UNIX)
    place = os.open(Path(shell.env["AGENT_SANDBOX_STATE"], errand.PLACE), os.O_PATH)
    try:
        link.connect(f"/proc/self/fd/{place}/{errand.SOCKET}")
    finally:
        os.close(place)
    return link


def test_what_it_performs_is_what_the_caller_would_have_performed(served: Shell) -> None:
    (served.cwd / "below").mkdir()
    below = Shell(served.cwd / "below", {**served.env, "MINE": "ünï", "LC_ALL": "C.UTF-8"})
    shows = "cat; pwd; umask; echo $MINE >&2; printf '\\377\\000'; exit 7"
    lines: list[tuple[str, ...]] = [
        ("run", "--throw-away", "--env", "MINE", shows),
        ("--json", "run", "--throw-away", "echo 1"),
        ("code", "--throw-away", "-", "--language", "python"),
        ("run", "--throw-away", "--", "no-such-program"),
        ("run", "--deny-command", "touch", "--", "touch", "x"),
        ("status",),
        ("diff",),
        ("run", "--no-such-option"),
        ("run", "--throw-away", "--timeout", "0.2", "sleep 100"),
    ]
    for line in lines:
        before = counts(served)["performed"]
        by_daemon, by_itself = (each(*line, stdin=b"print('typed')\n") for each in (below, alone(below)))
        assert counts(served)["performed"] == before + 1, f"the daemon performed only the first: {line}"
        assert by_daemon.returncode == by_itself.returncode, line
        if "--json" in line:
            told, expected = json.loads(by_daemon.stdout), json.loads(by_itself.stdout)
            del told["usage"], expected["usage"]
            assert told == expected
        else:
            assert (by_daemon.stdout, by_daemon.stderr) == (by_itself.stdout, by_itself.stderr), line


def test_what_it_has_performed_before_its_caller_goes_on_is_not_performed_again(served: Shell) -> None:
    kept, wrong = ("run", "echo once >>file"), ("run", "--no-such-option")
    run, refused = (
        subprocess.run(
            [sys.executable, "-c", HELD_UP, *line], cwd=served.cwd, env=served.environment, stdin=subprocess.DEVNULL, capture_output=True
        )
        for line in (kept, wrong)
    )
    assert counts(served)["performed"] == 2
    assert run.returncode == 0, run.stderr
    assert served("run", "cat file").stdout == b"once\n"
    expected = alone(served)(*wrong)
    assert (refused.returncode, refused.stderr) == (expected.returncode, expected.stderr)


@pytest.mark.once
def test_the_times_that_it_tells_and_understands_are_those_of_the_callers_zone(served: Shell) -> None:
    assert served("run", "--throw-away", "true").returncode == 0
    told = set()
    for zone in ("ONE-9", "TWO+8"):
        there = Shell(served.cwd, {**served.env, "TZ": zone})
        told.add(now := there("log", "--no-pager").stdout)
        assert now == alone(there)("log", "--no-pager").stdout
        written = now.decode().split(maxsplit=3)[1:3]
        since = ("log", "--no-pager", "--since", "T".join(written))
        assert there(*since).stdout == alone(there)(*since).stdout == now
    assert len(told) == 2, "the control arm: the zones differ"
    assert counts(served)["performed"] == 5


@pytest.mark.once
def test_a_file_that_only_the_caller_has_open_is_read(served: Shell) -> None:
    program = " ".join(PROGRAM)
    for line, output in {
        f"{program} run --throw-away --env-file <(echo MINE=7) -- sh -c 'echo $MINE'": b"7\n",
        f"{program} code --throw-away --language=bash <(echo echo 1)": b"1\n",
        f"exec 9<.; {program} run --throw-away --project=/proc/self/fd/9 -- pwd": os.fsencode(served.cwd) + b"\n",
    }.items():
        done = subprocess.run(
            ["bash", "-c", line], cwd=served.cwd, env=served.environment, stdin=subprocess.DEVNULL, capture_output=True, check=False
        )
        assert done.stdout == output, done.stderr
    assert counts(served)["performed"] == 0
    (served.cwd / "mine.env").write_text("MINE=7\n")
    named = served("run", "--throw-away", "--env-file", "mine.env", "--", "sh", "-c", "echo $MINE")
    assert named.stdout == b"7\n" and counts(served)["performed"] == 1, "the control arm"


def test_what_is_kept_is_kept_in_the_same_sandbox(served: Shell) -> None:
    assert served("run", "echo 1 >kept").returncode == 0
    assert alone(served)("run", "cat kept; echo 2 >>kept").stdout == b"1\n"
    assert served("run", "cat kept").stdout == b"1\n2\n"
    assert not (served.cwd / "kept").exists()


@pytest.mark.once
def test_a_signal_to_the_caller_reaches_the_program(served: Shell) -> None:
    line = "run", "--throw-away", "trap 'echo told; exit 9' TERM; echo ready; while :; do sleep 0.05; done"
    ends = []
    for shell in (served, alone(served)):
        with shell.start(*line) as caller:
            assert caller.stdout is not None
            assert caller.stdout.readline() == b"ready\n"
            caller.terminate()
            ends.append((caller.communicate()[0], caller.returncode))
    assert ends == [(b"told\n", 9)] * 2


def test_a_caller_that_is_killed_takes_its_command_with_it(served: Shell) -> None:
    beat = served.cwd / "beat"
    with served.start("run", "--throw-away", f"echo ready; {BEAT.format(file='beat')}") as caller:
        assert caller.stdout is not None
        assert caller.stdout.readline() == b"ready\n"
        assert counts(served)["performing"] == 1
        caller.kill()
    assert until(lambda: counts(served)["performing"] == 0)
    assert counts(served)["lost"] == 1 and not beat.exists()


def test_a_daemon_that_is_killed_leaves_nothing_and_the_next_one_begins_anew(shell: Shell) -> None:
    with serving(shell) as daemon:
        with shell.start("run", "--throw-away", "echo ready; sleep 1000") as caller:
            assert caller.stdout is not None
            assert caller.stdout.readline() == b"ready\n"
            daemon.kill()
            said = caller.communicate()[1]
        assert caller.returncode == 125 and b"the daemon ended before this command did" in said
        daemon.wait()
        assert until(lambda: not processes_in(shell))
        assert shell("run", "--throw-away", "echo 1").stdout == b"1\n", "the socket of the dead one is in nobody's way"
        with serving(shell):
            assert shell("run", "--throw-away", "echo 2").stdout == b"2\n"
            assert counts(shell)["performed"] == 1


@pytest.mark.once
def test_there_is_one_for_each_directory_of_state(served: Shell) -> None:
    second = served("serve")
    assert second.returncode == 125 and "a daemon of this user runs already" in words(second)
    assert served("run", "--throw-away", "true").returncode == 0


@pytest.mark.once
def test_it_ends_when_it_is_asked_to_and_what_is_under_way_ends_first(shell: Shell) -> None:
    with serving(shell) as daemon, shell.start("run", "--throw-away", "echo ready; read line; echo $line", stdin=subprocess.PIPE) as caller:
        assert caller.stdout is not None
        assert caller.stdout.readline() == b"ready\n"
        with shell.start("serve", "--stop") as stopping:
            assert until(lambda: not Path(shell.env["AGENT_SANDBOX_STATE"], errand.PLACE, errand.SOCKET).exists())
            assert caller.communicate(b"last\n")[0] == b"last\n" and caller.returncode == 0
            stopping.communicate()
        assert daemon.wait() == 0 and stopping.returncode == 0
        assert not counts(shell)["running"]
        assert shell("run", "--throw-away", "echo 1").stdout == b"1\n"


@pytest.mark.once
def test_more_than_it_may_perform_at_once_wait_for_their_turn(shell: Shell) -> None:
    with serving(shell, "--most", "1"), shell.start("run", "--throw-away", "echo ready; read line", stdin=subprocess.PIPE) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == b"ready\n"
        with shell.start("run", "--throw-away", "echo second") as second:
            assert until(lambda: counts(shell)["waiting"] == 1)
            assert counts(shell)["performing"] == 1
            first.communicate(b"\n")
            assert second.communicate()[0] == b"second\n"


@pytest.mark.once
@pytest.mark.parametrize("how", ["limits", "priority", "processors", "nohup"])
def test_a_caller_under_other_circumstances_performs_it_itself(served: Shell, how: str) -> None:
    before = {
        "limits": "ulimit -n 200",
        "priority": "renice -n $(($(nice) + 1)) $$ >/dev/null",
        "processors": "taskset -cp 0 $$ >/dev/null",
        "nohup": "trap '' HUP",
    }[how]
    if how == "processors" and len(os.sched_getaffinity(0)) == 1:
        pytest.skip("this machine has one processor")
    if how == "priority" and os.nice(0) == 19:
        pytest.skip("the tests have the lowest priority already")
    program = [*(["sh", "-c", f'{before}; exec "$@"', "sh"]), str(Path(sys.executable).with_name("agent-sandbox"))]
    done = subprocess.run(
        [*program, "run", "--throw-away", "echo 1"], cwd=served.cwd, env=served.environment, stdin=subprocess.DEVNULL, capture_output=True
    )
    assert done.stdout == b"1\n", done.stderr
    assert counts(served)["performed"] == 0
    assert served("run", "--throw-away", "echo 1").stdout == b"1\n" and counts(served)["performed"] == 1, "the control arm"


@pytest.mark.once
def test_of_another_version_it_performs_nothing(served: Shell) -> None:
    package, inode, written = errand.stamp()
    with (served.cwd / "out").open("w") as out, connected(served) as link:
        here = os.open(served.cwd, os.O_PATH)
        streams = (out.fileno(), out.fileno(), out.fileno(), here)
        wire.send(link, ((package, inode, written + 1), [b"run", b"--throw-away", b"true"], list(os.environb.items()), 0o022), streams)
        assert link.recv(1) == b""
        os.close(here)
    assert until(lambda: counts(served)["handed_back"] == 1)


@pytest.mark.once
def test_garbage_harms_nobody(served: Shell) -> None:
    noise = random.Random(0)
    for size in (0, 1, 4, 100, 70_000):
        with connected(served) as link:
            link.settimeout(60)
            try:
                link.sendall(b"\0\0\0\x10" + noise.randbytes(size))
                link.shutdown(socket.SHUT_WR)
                assert link.recv(1) == b""
            except ConnectionError:
                pass
    assert served("run", "--throw-away", "echo 1").stdout == b"1\n"


@pytest.mark.once
def test_a_request_that_is_too_large_is_not_read(served: Shell) -> None:
    with connected(served) as link, pytest.raises(ConnectionError):
        link.sendall((LARGEST_REQUEST + 1).to_bytes(4, "big") + bytes(LARGEST_REQUEST + 1))
    with connected(served) as link:  # the control arm: one that may be as large is taken in, whatever it is
        link.sendall(LARGEST_REQUEST.to_bytes(4, "big") + bytes(LARGEST_REQUEST))
    assert served("run", "--throw-away", "echo 1").stdout == b"1\n"


def test_a_program_in_a_sandbox_cannot_ask_it(served: Shell) -> None:
    place = Path(served.env["AGENT_SANDBOX_STATE"], errand.PLACE)
    ask = f"import os, socket; os.chdir({str(place)!r}); socket.socket(socket.AF_UNIX).connect({errand.SOCKET!r}); print('asked')"
    outside = subprocess.run([sys.executable, "-c", ask], capture_output=True, check=False)
    assert outside.stdout == b"asked\n", "the control arm"
    inside = served("run", "--reveal", str(place), "--", sys.executable, "-c", ask)
    assert b"asked" not in inside.stdout and inside.returncode != 0


def test_it_listens_only_where_nobody_else_can_come(served: Shell, tmp_path: Path) -> None:
    place = Path(served.env["AGENT_SANDBOX_STATE"], errand.PLACE)
    assert place.stat().st_mode & 0o777 == 0o700
    assert all(each.stat().st_mode & 0o077 == 0 for each in place.iterdir())
    other = replace_state(served, tmp_path / "open")
    Path(other.env["AGENT_SANDBOX_STATE"], errand.PLACE).mkdir(parents=True)
    Path(other.env["AGENT_SANDBOX_STATE"], errand.PLACE).chmod(0o755)
    refused = other("serve")
    assert refused.returncode == 125 and "not a directory of yours alone" in words(refused)


def replace_state(shell: Shell, state: Path) -> Shell:
    return replace(shell, env={**shell.env, "AGENT_SANDBOX_STATE": str(state)})


@pytest.mark.once
@pytest.mark.parametrize(
    "chosen", [{"AGENT_SANDBOX_STATE": "relative"}, {"XDG_STATE_HOME": "/x/y"}, {"XDG_STATE_HOME": "no"}, {"HOME": "/h/"}]
)
def test_the_first_lines_find_the_directory_that_the_program_finds(chosen: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AGENT_SANDBOX_STATE", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in chosen.items():
        monkeypatch.setenv(name, value)
    assert errand._state() == Host.here().state
