"""The life of runs: many at once, many in a row, and what is left when any part of the machinery is killed."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from agent_sandbox.runtime.base import ExitReason
from agent_sandbox.runtime.process.guest_handle import ProcessGuest
from agent_sandbox.runtime.process.runtime import ProcessRuntime
from tests.leftovers import children, left_since, traces
from tests.patience import until
from tests.security.harness import Box

SOME = 40  # descriptors: those of guests that wait, and are made and cleared away beside us


@pytest.fixture
def own(box: Box) -> Iterator[Box]:
    """A box whose runtime may be ruined."""
    runtime = ProcessRuntime()
    yield box.with_(runtime=runtime)
    runtime.close()


@pytest.mark.parametrize("victim", ["zygote", "init"])
def test_a_run_whose_helper_is_killed_ends_and_leaves_nothing(own: Box, victim: str) -> None:
    assert own.run("true").exit.code == 0
    before = traces()
    assert isinstance(own.runtime, ProcessRuntime)
    zygote = own.runtime._zygotes[()].pid
    earlier = set(children(zygote))  # the guest of the first run may not have been waited for yet
    ready = threading.Event()
    ended: list[object] = []
    script = "(setsid sleep 300 &); echo ready; sleep 300"
    thread = threading.Thread(target=lambda: ended.append(own.shell(script, on_output=lambda *_: ready.set()).exit.reason))
    thread.start()
    assert ready.wait()
    (init,) = set(children(zygote)) - earlier
    os.kill({"zygote": zygote, "init": init}[victim], signal.SIGKILL)
    thread.join()
    assert not thread.is_alive()
    assert ended == [ExitReason.KILLED]
    assert own.run("true").exit.code == 0
    own.runtime.close()
    assert left_since(before) == []


def test_thirty_runs_at_once_do_not_mix(box: Box) -> None:
    def one(number: int) -> bytes:
        return box.shell(f"echo {number} > mine; sleep 0.1; cat mine; cat", stdin=b"%d" % number).stdout

    with ThreadPoolExecutor(30) as pool:
        assert list(pool.map(one, range(30))) == [b"%d\n%d" % (number, number) for number in range(30)]


def _held() -> tuple[int, int, int]:
    """Descriptors, mounts, and control groups of our own zygotes."""
    ours = tuple(f"-{zygote}-" for zygote in children(os.getpid()))
    names = (name for _, names, _ in os.walk("/sys/fs/cgroup") for name in names if name.startswith("agent-sandbox"))
    cgroups = sum(any(keeper in name for keeper in ours) for name in names)
    return len(os.listdir("/proc/self/fd")), len(Path("/proc/self/mountinfo").read_text().splitlines()), cgroups


@pytest.mark.slow
def test_two_hundred_runs_in_a_row_hold_on_to_nothing(box: Box) -> None:
    box.run("true")
    box.python("pass")
    descriptors, mounts, cgroups = _held()
    for number in range(200):
        if number % 4:
            box.run("true")
        else:
            box.python("x = 1")
    grown = _held()
    assert grown[1] == mounts
    assert grown[0] - descriptors < SOME, "a descriptor of each run would be two hundred"
    assert until(lambda: _held()[2] <= cgroups), "a keeper clears away after the run has been reported"


def test_orphans_are_reaped(box: Box) -> None:
    """Case 142 of the attack list."""
    outcome = box.python("""
import os, time
for _ in range(2000):
    if os.fork() == 0:
        if os.fork() == 0:
            os._exit(0)
        os._exit(0)
    os.wait()
deadline = time.monotonic() + 300
while len([pid for pid in os.listdir("/proc") if pid.isdecimal()]) > 2 and time.monotonic() < deadline:
    time.sleep(0.01)
print([pid for pid in os.listdir("/proc") if pid.isdecimal()])
""")
    assert outcome.stdout == b"['1', '2']\n", outcome.stderr


def test_an_interrupt_reaches_the_program(box: Box) -> None:
    guests: list[ProcessGuest] = []
    outcome = box.shell(
        "trap 'echo caught; exit 7' INT; echo ready; while :; do sleep 0.05; done",
        on_start=guests.append,
        on_output=lambda _, data: guests[0].interrupt(signal.SIGINT) if b"ready" in data else None,
    )
    assert (outcome.exit.code, outcome.stdout) == (7, b"ready\ncaught\n")
