"""Sandboxes that run on in the background, as root and as a user, with a daemon and without: the same machine for all of their commands."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from agent_sandbox.server.detached_places import DetachedPlaces
from agent_sandbox.server.output_log import read_output
from agent_sandbox.workspace.store import Store
from tests.e2e.program import Shell, processes_in, words
from tests.e2e.test_daemon import counts, serving
from tests.e2e.test_schemas import checked
from tests.patience import until

ANSWER = """
import http.server, pathlib, signal, sys
class Handler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *words): print('asked', self.path, file=sys.stderr, flush=True)
def end(*_):
    pathlib.Path('farewell.txt').write_text('in order\\n')
    sys.exit(7)
signal.signal(signal.SIGTERM, end)
http.server.HTTPServer(('127.0.0.1', 8000), Handler).serve_forever()
"""
ASK = """
import time, urllib.request
for left in reversed(range(1000)):
    try:
        print(urllib.request.urlopen('http://127.0.0.1:8000/note.txt').read().decode(), end='')
        break
    except urllib.error.URLError:
        if not left or {once}: raise
        time.sleep(0.02)
"""
WAITS = "trap 'exit 9' TERM; while :; do sleep 0.05; done"


@pytest.fixture(params=["alone", "daemon"])
def owned(request: pytest.FixtureRequest, shell: Shell) -> Iterator[Shell]:
    """Somebody standing in a project, with a daemon and without."""
    with ExitStack() as stack:
        if request.param == "daemon":
            stack.enter_context(serving(shell))
        stack.callback(shell, "stop", "--all", "--timeout", "0")
        yield shell


@pytest.fixture
def lonely(shell: Shell) -> Iterator[Shell]:
    """The same without a daemon."""
    yield shell
    shell("stop", "--all", "--timeout", "0")


def detached(shell: Shell, *line: str) -> str:
    """The name of a sandbox that runs on from now."""
    done = shell("--json", "run", "--detach", *line)
    assert done.returncode == 0, words(done)
    return str(checked(done)["name"])


def places_of(shell: Shell) -> DetachedPlaces:
    return DetachedPlaces(Store.open(shell.env["AGENT_SANDBOX_STATE"]))


def listed(shell: Shell, name: str) -> dict[str, Any]:
    (found,) = [each for each in checked(shell("--json", "ps", "--all"))["sandboxes"] if each["name"] == name]
    return dict(found)


def test_a_server_goes_on_between_commands_which_share_its_machine(owned: Shell) -> None:
    """The control arm is a run of its own, which has another network and other processes."""
    name = detached(owned, f"echo started; exec {sys.executable} -c {shlex.quote(ANSWER)}")
    assert owned("exec", name, "echo one >note.txt; echo $$ >/tmp/mine").returncode == 0
    asked = owned("exec", name, "--", sys.executable, "-c", ASK.format(once=False))
    assert asked.stdout == b"one\n", words(asked)
    told = checked(owned("--json", "exec", name, "cat /tmp/mine; exit 5"))
    assert told["exit"] == 5 and told["stdout"].strip().isdigit(), "/tmp stays, too"
    assert owned("exec", "--env", "GREETING=hi", "-i", name, "cat; echo $GREETING", stdin=b"typed ").stdout == b"typed hi\n"
    assert owned("run", "--throw-away", "--", sys.executable, "-c", ASK.format(once=True)).returncode == 1, "the control arm"
    assert listed(owned, name)["state"] == "running" and name in owned("ps").stdout.decode()
    assert f"detached {name}" in owned("list").stdout.decode(), "the sandbox of the project says who uses it"
    assert not (owned.cwd / "note.txt").exists()

    stopped = checked(owned("--json", "stop", name))["stopped"][0]
    assert stopped["exit"] == 7 and stopped["why"] == "it was stopped", "it was asked to end before it was ended"
    seen = owned("logs", name)
    assert seen.stdout == b"started\n" and b"asked /note.txt" in seen.stderr
    newest = checked(owned("--json", "logs", name, "--limit", "1"))["output"]
    assert {each["stream"] for each in newest} == {"stderr"}
    assert "".join(each["data"] for each in newest) == "asked /note.txt\n", "the line, in as many pieces as it came in"
    changed = owned("diff", "--name-only").stdout.decode().split()
    assert {"note.txt", "farewell.txt"} <= set(changed), "its changes are there for review, as those of any run"
    assert owned("promote", "--yes").returncode == 0 and (owned.cwd / "farewell.txt").read_text() == "in order\n"
    late = owned("exec", name, "--", "true")
    assert late.returncode == 125 and "does not run" in words(late)
    entries = [each for each in owned.json("log")["entries"] if each.get("category") == "process"]
    assert len(entries) >= 5, "every command is an entry of the ledger"


@pytest.mark.once
def test_it_is_decided_as_a_run_is(lonely: Shell) -> None:
    for line in (("--deny-command", "touch", "--", "touch", "x"), ("--", "no-such-program"), ("--cwd", "/no/such", "--", "true")):
        done, run = lonely("run", "--detach", *line), lonely("run", *line)
        assert done.returncode == run.returncode != 0, line
        assert done.stdout == b"", "no name of what does not run"
    assert lonely.json("ps", "--all")["sandboxes"] == []
    name = detached(lonely, "--deny-command", "touch", "--", "sleep", "1000")
    denied, allowed = lonely("exec", name, "--", "touch", "x"), lonely("exec", name, "--", "true")
    assert denied.returncode == 126 and "touch" in words(denied)
    assert allowed.returncode == 0, "the control arm"
    hidden = lonely("exec", name, "--", "ls", lonely.env["AGENT_SANDBOX_STATE"])
    assert hidden.returncode != 0, "no program in a sandbox finds the place of its holder"
    assert lonely("run", "--no-wait", "true").returncode == 125, "the sandbox is in use"
    second = lonely("run", "--detach", "--", "sleep", "1000")
    assert second.returncode == 125 and "agent-sandbox exec" in words(second), "and a second one does not wait for ever"


def test_what_it_runs_ends_with_its_caller_and_in_its_time(lonely: Shell) -> None:
    name = detached(lonely, "--throw-away", "--", "sleep", "1000")
    assert lonely("exec", "--timeout", "0.2", name, "--", "sleep", "1000").returncode == 124
    for number, code in ((signal.SIGTERM, 9), (signal.SIGKILL, -9)):
        with lonely.start("exec", name, f"echo ready $$; {WAITS}") as caller:
            assert caller.stdout is not None
            pid = caller.stdout.readline().split()[1].decode()
            caller.send_signal(number)
            caller.communicate()
        assert caller.returncode == code
        assert until(lambda pid=pid: lonely("exec", name, "--", "test", "-e", f"/proc/{pid}").returncode == 1)  # type: ignore[misc]
    assert lonely("exec", name, "--", "true").returncode == 0, "the others go on"


def test_one_whose_owner_is_killed_leaves_nothing_and_is_reported_as_lost(owned: Shell) -> None:
    name = detached(owned, f"echo here >kept.txt; echo up; {WAITS}")
    assert until(lambda: read_output(places_of(owned).record(name).place.path))
    held = listed(owned, name)
    daemon = counts(owned)
    assert held["by_daemon"] == daemon["running"]
    if daemon["running"]:  # which owns sessions, too
        (owned.cwd / "steps.py").write_text("x = 1\n")
        assert owned.json("run", "--timeline", "steps.py")["exit"] == 0
    os.kill(daemon["pid"] if daemon["running"] else held["pid"], signal.SIGKILL)
    assert until(lambda: not processes_in(owned)), "neither its holder nor a keeper goes on"
    assert owned.json("timeline", "--all")["sessions"] == []
    lost = listed(owned, name)
    assert lost["state"] == "lost" and lost["exit"] is None
    assert f"{name} " in owned("ps").stdout.decode() and "lost" in owned("ps").stdout.decode()
    assert owned("logs", name).stdout == b"up\n", "what it had printed is kept"
    assert "lost" in words(owned("exec", name, "--", "true"))
    assert owned("run", "cat kept.txt").stdout == b"here\n", "the sandbox itself is as after any run that was killed"


@pytest.mark.once
def test_a_daemon_that_is_asked_to_stop_ends_what_it_owns_in_order(shell: Shell) -> None:
    (shell.cwd / "steps.py").write_text("x = 1\n")
    with serving(shell) as daemon:
        name = detached(shell, "trap 'echo saved >saved.txt; exit 9' TERM; while :; do sleep 0.05; done")
        assert shell.json("run", "--timeline", "steps.py")["exit"] == 0
        assert counts(shell)["held"] == 2
        assert shell("serve", "--stop").returncode == 0
        assert daemon.wait() == 0
    ended = listed(shell, name)
    assert ended["state"] == "ended" and ended["exit"] == 9 and "asked to end" in ended["why"]
    assert "saved.txt" in shell("diff", "--name-only").stdout.decode()
    assert shell.json("timeline", "--all")["sessions"] == []
    assert until(lambda: not processes_in(shell))


HOG = f"exec {sys.executable} -c 'x = bytearray(400 << 20)'"


@pytest.mark.needs_root
def test_a_program_that_meets_the_memory_limit_says_so_and_the_others_go_on(lonely: Shell) -> None:
    name = detached(lonely, "--throw-away", "--memory", "128m", "--", "sleep", "1000")
    plain = lonely("exec", name, HOG)
    assert plain.returncode == 137 and "the memory limit was reached" in words(plain), words(plain)
    told = checked(lonely("--json", "exec", name, HOG))
    assert (told["exit"], told["reason"], told["limits_hit"]) == (137, "out-of-memory", ["memory"])
    inner = checked(lonely("--json", "exec", name, f"({HOG}); exit 3"))
    assert (inner["exit"], inner["reason"], inner["limits_hit"]) == (3, "exited", ["memory"])
    other = checked(lonely("--json", "exec", name, "kill -9 $$"))
    assert (other["exit"], other["reason"], other["limits_hit"]) == (137, "exited", []), "the control arm: another reason for the same code"
    assert lonely("exec", name, "--", "echo", "fine").stdout == b"fine\n"
    first = detached(lonely, "--throw-away", "--memory", "128m", HOG)
    assert until(lambda: listed(lonely, first)["state"] == "ended")
    assert "its first program reached the memory limit" in lonely("ps", "--all").stdout.decode()
