"""The daemon beside clients and workers that are silent, stopped, interrupted or gone, and killed itself at any moment."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from agent_sandbox.cli import errand
from agent_sandbox.kernel import wire
from agent_sandbox.server import daemon as daemons
from tests.e2e.program import Shell, processes_in
from tests.e2e.test_daemon import connected, counts, serving
from tests.e2e.test_detached import detached
from tests.leftovers import adopting, children, command, descendants, left_since, running, traces
from tests.patience import stretched, until

SEED = int(os.environ.get("AGENT_SANDBOX_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 32)
LOST = b"the daemon ended before this command did"
QUICK = ("run", "--throw-away", "echo 1")
# A daemon in whose worker nothing is waited for as long as in a real one.
SOON = """
import sys
from agent_sandbox.server import daemon
daemon.TAKING_SECONDS = daemon.ENDING_SECONDS = daemon.FRONT_SECONDS = 0.5
daemon.Daemon(sys.argv[1], http=True).serve()
"""


@contextmanager
def serving_soon(shell: Shell) -> Iterator[subprocess.Popen[bytes]]:
    state = shell.env["AGENT_SANDBOX_STATE"]
    with subprocess.Popen([sys.executable, "-c", SOON, state], cwd=shell.cwd, env=shell.environment) as process:
        try:
            assert until(lambda: counts(shell)["ready"] == 1)
            yield process
        finally:
            process.kill()


def test_connections_that_say_nothing_keep_no_command_waiting(shell: Shell) -> None:
    with serving(shell, "--most", "1"), ExitStack() as stack:
        silent = [stack.enter_context(connected(shell)) for _ in range(3 * daemons.MOST_SILENT)]
        assert shell(*QUICK).stdout == b"1\n"
        assert counts(shell)["performed"] == 1, "it was performed beside them, and not handed back"
        assert silent[0].recv(1) == b"", "the oldest one was closed"
        here = os.open(shell.cwd, os.O_PATH)
        with (shell.cwd / "out").open("w") as out:
            line = [os.fsencode(word) for word in QUICK]
            late = errand.stamp(), line, list({**os.environb, **_encoded(shell)}.items()), 0o022
            wire.send(silent[-1], late, (out.fileno(), out.fileno(), out.fileno(), here))
            assert silent[-1].recv(1) == errand.TAKEN, "the control arm: one that speaks at last is heard"
            assert silent[-1].recv(2) in (errand.ENDED, errand.ENDED + b"\0")
        os.close(here)
        assert (shell.cwd / "out").read_text() == "1\n"


def _encoded(shell: Shell) -> dict[bytes, bytes]:
    return {name.encode(): value.encode() for name, value in shell.env.items()}


def test_as_many_may_wait_as_there_are_descriptors_for(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (100, 100))
    made = daemons.Daemon(shell.env["AGENT_SANDBOX_STATE"])
    assert made._longest == 50
    made._end()
    monkeypatch.undo()
    made = daemons.Daemon(shell.env["AGENT_SANDBOX_STATE"], waiting=3)
    assert made._longest == 3, "the control arm"
    made._end()


def test_a_caller_that_is_interrupted_before_its_turn_ends_and_nothing_of_it_is_performed(shell: Shell) -> None:
    with (
        serving(shell, "--most", "1"),
        shell.start("run", "--throw-away", "echo ready; read line; echo $line", stdin=subprocess.PIPE) as first,
    ):
        assert first.stdout is not None
        assert first.stdout.readline() == b"ready\n"
        for number in (signal.SIGINT, signal.SIGTERM):
            with shell.start("run", "touch canary") as second:
                assert until(lambda: counts(shell)["waiting"] >= 1)
                second.send_signal(number)
                second.communicate()
            assert second.returncode == -number
        assert first.communicate(b"last\n")[0] == b"last\n", "nobody else's command is touched"
        assert until(lambda: counts(shell)["waiting"] == counts(shell)["performing"] == 0)
        assert shell("run", "ls canary").returncode == 2
        assert shell("run", "touch canary && ls canary").stdout == b"canary\n", "the control arm"


def test_an_http_client_that_goes_away_before_its_turn_has_asked_for_nothing(shell: Shell) -> None:
    place = Path(shell.env["AGENT_SANDBOX_STATE"], errand.PLACE)
    asked = json.dumps({"words": ["touch canary"], "directory": str(shell.cwd)})
    curl = ["curl", "--silent", "--unix-socket", "http", "-d", asked, "http://x/v1/verbs/run"]
    with (
        serving(shell, "--most", "1", "--http"),
        shell.start("run", "--throw-away", "echo ready; read line", stdin=subprocess.PIPE) as first,
    ):
        assert first.stdout is not None
        assert first.stdout.readline() == b"ready\n"
        assert until(lambda: (place / "http").exists())
        with subprocess.Popen(curl, cwd=place, stdout=subprocess.DEVNULL) as asking:
            assert until(lambda: counts(shell)["waiting"] == 1)
            asking.kill()
        assert until(lambda: counts(shell)["waiting"] == 0), "it waits no more, though nobody has ended yet"
        first.communicate(b"\n")
        assert until(lambda: counts(shell)["waiting"] == counts(shell)["performing"] == 0)
        assert shell("run", "ls canary").returncode == 2
        subprocess.run(curl, cwd=place, stdout=subprocess.DEVNULL, check=True)
        assert shell("run", "ls canary").returncode == 0, "the control arm"


def test_a_worker_that_is_stopped_keeps_nobody_waiting_for_ever(shell: Shell) -> None:
    with serving_soon(shell) as daemon:
        stopped = _workers(daemon.pid)
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        assert shell(*QUICK).stdout == b"1\n"
        now = counts(shell)
        assert (now["handed_back"], now["performed"]) == (1, 0), f"its caller performed it: {now}"
        assert shell(*QUICK).stdout == b"1\n" and counts(shell)["performed"] == 1, "the control arm: the next worker moves"


def test_where_no_worker_can_be_made_what_runs_goes_on_and_callers_perform_their_own(shell: Shell) -> None:
    with serving(shell, "--most", "1", "--log", "json") as daemon:
        assert daemon.stderr is not None
        kept = detached(shell, "sleep 1000")
        assert until(lambda: counts(shell)["ready"] == 1)
        # A new worker needs three descriptors beside those that stay, which are all but two of the worker that is ready.
        enough = sum(int(number) < 64 for number in os.listdir(f"/proc/{daemon.pid}/fd")) - 2 + 1
        with shell.start("run", "--throw-away", "echo ready; read line", stdin=subprocess.PIPE) as first:
            assert first.stdout is not None
            assert first.stdout.readline() == b"ready\n"
            assert until(lambda: counts(shell)["ready"] == 1)
            with shell.start(*QUICK) as second:
                assert until(lambda: counts(shell)["waiting"] == 1)
                with shell.start("run", "--throw-away", "echo 2") as third:
                    assert until(lambda: counts(shell)["waiting"] == 2)
                    limits = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)
                    resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (enough, limits[1]))
                    first.communicate(b"\n")
                    assert second.communicate()[0] == b"1\n", "by the worker that was ready"
                    assert third.communicate()[0] == b"2\n", "by its own process"
        assert any(json.loads(line)["event"] == "no worker" for line in daemon.stderr)
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, limits)
        assert until(lambda: counts(shell)["ready"] >= 1)
        assert [each["state"] for each in shell.json("ps", "--all")["sandboxes"] if each["name"] == kept] == ["running"]
        before = counts(shell)
        assert before["handed_back"] >= 1
        assert shell(*QUICK).stdout == b"1\n" and counts(shell)["performed"] == before["performed"] + 1, "the control arm"


def _workers(daemon: int) -> list[int]:
    """The workers that are ready, by the keeper that each has forked; the process of the HTTP interface has none."""
    assert until(lambda: any(children(pid) for pid in children(daemon)))
    return [pid for pid in children(daemon) if children(pid)]


def test_a_daemon_ends_though_a_worker_and_the_http_interface_are_stopped(shell: Shell) -> None:
    with adopting():
        before = traces(adopted=True)
        with serving_soon(shell) as daemon:
            family = children(daemon.pid)
            assert len(family) == 2
            for pid in family:
                os.kill(pid, signal.SIGSTOP)
            daemon.terminate()
            assert daemon.wait() == 0
        assert left_since(before, adopted=True) == []


# Ask the egress for an address that it denies, before and after a line from outside: an answer of it, or none at all.
ASK_TWICE = """
import urllib.error, urllib.request
for last in (False, True):
    try:
        urllib.request.urlopen("http://93.184.215.14/", timeout=60)
    except urllib.error.HTTPError as error:
        print(error.code, flush=True)
    except OSError:
        print("no answer", flush=True)
    last or input()
"""


@pytest.mark.parametrize("killed", [True, False], ids=["killed", "control"])
def test_when_the_egress_of_a_run_is_killed_its_network_is_gone_and_the_daemon_goes_on(shell: Shell, killed: bool) -> None:
    asking = "run", "--throw-away", "--network", "allowed.example", "--", sys.executable, "-c", ASK_TWICE
    with serving(shell) as daemon, shell.start(*asking, stdin=subprocess.PIPE) as caller:
        assert caller.stdout is not None
        assert caller.stdout.readline() == b"403\n"
        egress = [pid for pid in descendants(daemon.pid, running()) if "agent_sandbox.egress" in command(pid)]
        assert egress
        for pid in egress if killed else []:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert until(lambda: not killed or not {pid for pid, found in running().items() if not found.zombie}.intersection(egress))
        answer, told = caller.communicate(b"\n")
        assert answer == (b"no answer\n" if killed else b"403\n")
        assert (b"the network was lost" in told) is killed
        assert counts(shell)["performed"] == 1
        assert shell("run", "--throw-away", "--network", "allowed.example", "echo 1").stdout == b"1\n", "the next one has its own"


def test_a_worker_whose_keeper_was_killed_takes_another(shell: Shell) -> None:
    with adopting():
        before = traces(adopted=True)
        with serving(shell) as daemon:
            for worker in _workers(daemon.pid):
                for keeper in children(worker):
                    os.kill(keeper, signal.SIGKILL)
            done = shell(*QUICK)
            assert done.stdout == b"1\n", done.stderr
            assert counts(shell)["performed"] == 1, "and the caller did not perform it"
        assert left_since(before, adopted=True) == []


def _keepers_of_guests(daemon: int) -> list[int]:
    """The keepers of runs that are under way. The init that waits in a worker has started nothing."""
    keepers = [keeper for worker in children(daemon) for keeper in children(worker)]
    return [keeper for keeper in keepers if any(children(init) for init in children(keeper))]


def test_a_keeper_that_is_killed_under_a_run_ends_that_run_alone(shell: Shell) -> None:
    with adopting():
        before = traces(adopted=True)
        with serving(shell) as daemon, ExitStack() as stack:
            line = "run", "--throw-away", "echo ready; read line; echo $line"
            callers: list[subprocess.Popen[bytes]] = []
            keepers: list[int] = []
            for _ in range(2):
                callers.append(caller := stack.enter_context(shell.start(*line, stdin=subprocess.PIPE)))
                assert caller.stdout is not None
                assert caller.stdout.readline() == b"ready\n"
                keepers += [keeper for keeper in _keepers_of_guests(daemon.pid) if keeper not in keepers]
            struck, spared = callers
            os.kill(keepers[0], signal.SIGKILL)
            struck.wait()  # before its input is closed, which would end it, too
            said, why = struck.communicate()
            assert (said, struck.returncode) == (b"", 137), why
            assert spared.communicate(b"last\n")[0] == b"last\n", "the control arm"
            assert shell(*QUICK).stdout == b"1\n"
        assert left_since(before, adopted=True) == []


@pytest.fixture
def shells(shell: Shell, tmp_path: Path) -> list[Shell]:
    """Two projects with one directory of state."""
    (tmp_path / "other" / ".git").mkdir(parents=True)
    return [shell, Shell(tmp_path / "other", shell.env)]


def _line(chance: random.Random) -> tuple[str, ...]:
    """A command line of the kinds that leave something while they run."""
    lines = [
        ("run", f"echo {chance.random()} >kept-{chance.randrange(3)}; sleep 0.0{chance.randrange(10)}"),
        ("run", "--throw-away", "dd if=/dev/zero of=big bs=64k count=20 2>/dev/null; sleep 0.05"),
        ("run", "--throw-away", "--", "sleep", "1"),
        ("run", "--throw-away", "--allow-network", "sleep 0.1"),
        ("run", "--throw-away", "--detach", "sleep 1000"),
        ("snapshot",),
        ("status",),
    ]
    return chance.choice(lines)


def _strike(shells: list[Shell], chance: random.Random) -> int:
    """Kill the daemon at a random moment under load. Return how many of its callers it took along: at least one, which is waited for.

    Nothing that it had started goes on, and sandboxes that it held are reported as lost.
    """
    with serving(shells[0]) as daemon, ExitStack() as stack:
        held = detached(shells[1], "--throw-away", "sleep 1000")
        endless = stack.enter_context(shells[0].start("run", "--throw-away", "echo ready; sleep 1000"))
        assert endless.stdout is not None
        assert endless.stdout.readline() == b"ready\n"
        lines = [_line(chance) for _ in range(5)]
        callers = [stack.enter_context(chance.choice(shells).start(*line)) for line in lines]
        time.sleep(chance.random() * stretched(0.4))  # the moment
        family = descendants(daemon.pid, running())
        daemon.kill()
        daemon.wait()
        outputs, said = zip(*(caller.communicate() for caller in (endless, *callers)), strict=True)
    lost = [LOST in words for words in said]
    assert lost[0] and endless.returncode == 125
    assert until(lambda: not family.intersection(pid for pid, each in running().items() if not each.zombie))
    begun = [output for output, line in zip(outputs[1:], lines, strict=True) if "--detach" in line]
    states = {each["name"]: each["state"] for each in shells[0].json("ps", "--all")["sandboxes"]}
    assert states[held] == "lost"
    assert {states[name] for name in b"".join(begun).decode().split()} <= {"lost", "running"}, "a caller that came too late holds its own"
    assert shells[0]("stop", "--all", "--timeout", "0").returncode == 0
    for caller, line, words in zip(callers, lines, said[1:], strict=True):
        assert caller.returncode == (125 if LOST in words or b"error: this sandbox is in use by" in words else 0), (
            line,
            caller.returncode,
            words,
        )
    return sum(lost)


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("times", [pytest.param(1, id="some"), pytest.param(200, id="many", marks=pytest.mark.torture)])
def test_a_daemon_killed_at_any_moment_leaves_nothing_and_every_sandbox_is_accounted_for(shells: list[Shell], times: int) -> None:
    print(f"seed {SEED}: to repeat, AGENT_SANDBOX_SEED={SEED}")
    chance, struck = random.Random(SEED), 0
    state = Path(shells[0].env["AGENT_SANDBOX_STATE"])
    for shell in shells:
        assert shell("run", f"echo {shell.cwd} >precious").returncode == 0
    with adopting():
        before = traces(adopted=True)
        for number in range(times):
            print(f"blow {number + 1} of {times}", flush=True)
            struck += _strike(shells, chance)
            assert left_since(before, adopted=True) == []
            assert until(lambda: not processes_in(shells[0]))
            with serving(shells[0]):
                _check_accounts(shells, state)
        assert left_since(before, adopted=True) == []
    print(f"{struck} command lines were under way when it was killed")


def _check_accounts(shells: list[Shell], state: Path) -> None:
    """What is on the disk is what is listed, and all of it can be used; nothing of a throw-away run is left."""
    listed = shells[0].json("list")["sandboxes"]
    stored = {path.name for path in (state / "sandboxes").iterdir() if path.is_dir() and not path.name.startswith(".")}
    assert {each["sandbox"] for each in listed} == stored and len(stored) == len(shells)
    assert all(each["problem"] is None and each["in_use_by"] is None for each in listed)
    for shell in shells:
        assert shell("run", "cat precious").stdout == f"{shell.cwd}\n".encode()
        assert shell("status").returncode == shell("snapshots").returncode == 0
    assert not (state / "trash").exists() or os.listdir(state / "trash") == []
    assert shells[0]("log", "verify").returncode == 0


def test_a_sandbox_that_nobody_accounts_for_is_seen(shell: Shell) -> None:
    """The control arm of the accounts."""
    state = Path(shell.env["AGENT_SANDBOX_STATE"])
    assert shell("run", f"echo {shell.cwd} >precious").returncode == 0
    _check_accounts([shell], state)
    (state / "sandboxes" / "left-0123456789abcdef").mkdir()
    with pytest.raises(AssertionError):
        _check_accounts([shell], state)
