"""A run may be over before the kernel has taken its last process apart, and not before anything of it could still act."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agent_sandbox.kernel.cgroups import Cgroup
from agent_sandbox.kernel.mount_plan import ThrowAway
from agent_sandbox.policy.model import locked
from agent_sandbox.runtime.base import Completed, ExitReason, Launch
from agent_sandbox.runtime.process import departure
from agent_sandbox.runtime.process.guest_handle import ProcessGuest
from agent_sandbox.runtime.process.runtime import ProcessRuntime
from agent_sandbox.workspace.view.plan import MachineFacts, plan_view
from tests.patience import stretched
from tests.runtime.process.test_pool import PREPARED, launch_of

EXITING = 0x4
# A child that has closed its output and goes on, and a parent that ends as soon as the child has done so.
LEAVES_A_CHILD = """
import os, sys
ready, tell = os.pipe()
if os.fork() == 0:
    os.closerange(0, 3)
    os.write(tell, b".")
    while True:
        open("/tmp/count", "a").write(".")
os.read(ready, 1)
sys.exit(3)
"""


@pytest.fixture
def runtime() -> Iterator[ProcessRuntime]:
    made = ProcessRuntime()
    yield made
    made.close()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The supervisor looks until the guest has left, however long it takes to get from its last line into the kernel."""
    monkeypatch.setattr(departure, "_LOOKS", 10**9)


def departing(runtime: ProcessRuntime, launch: Launch) -> ProcessGuest:
    """A guest with its program, if this machine has the counters without which none departs."""
    guest = runtime.launch(launch)
    if not guest._guest:
        guest.close()
        pytest.skip("no cgroup counts processor time and memory here, so every run is waited for")
    return guest


def acting(guest: ProcessGuest) -> set[int]:
    """The tasks of a run, without its init, that could still execute something."""
    found = set()
    for task in guest._cgroup.tasks() - {guest.init}:
        try:
            fields = Path(f"/proc/{task}/stat").read_bytes().rpartition(b")")[2].split()
        except OSError:
            continue  # gone
        if not int(fields[6]) & EXITING:
            found.add(task)
    return found


def test_a_run_is_over_without_a_word_from_init_and_nothing_of_it_acts(patient: None, runtime: ProcessRuntime) -> None:
    with departing(runtime, launch_of("import sys; sys.stdin.read(); print('done'); sys.exit(7)", stdin=(given := os.pipe())[0])) as guest:
        assert acting(guest) == {guest._guest}
        os.kill(guest.init, signal.SIGSTOP)
        try:
            os.close(given[1])
            completed = guest.wait()
            assert not acting(guest)
        finally:
            os.kill(guest.init, signal.SIGCONT)
            os.close(given[0])
    assert (completed.exit.code, completed.exit.reason, completed.stdout) == (7, ExitReason.EXITED, b"done\n")
    assert completed.exit.usage.cpu_seconds > 0 and completed.exit.usage.peak_memory_bytes > 0 and completed.exit.usage.peak_processes >= 2


@pytest.mark.parametrize("code", [0, 1, 120, 255])
def test_the_exit_code_is_the_kernels(runtime: ProcessRuntime, code: int) -> None:
    with runtime.launch(
        launch_of(f"import ctypes, os; ctypes.CDLL(None).prctl(4, 0, 0, 0, 0); os.closerange(1, 3); os._exit({code})")
    ) as guest:
        assert guest.wait().exit.code == code, "also of a program that hides itself (PR_SET_DUMPABLE)"


def test_a_guest_that_closes_its_output_and_goes_on_is_waited_for(runtime: ProcessRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    looked, answers = threading.Event(), list[departure.Departed | None]()
    await_departure = departure.await_departure

    def look(*args: object) -> departure.Departed | None:
        answers.append(await_departure(*args))  # type: ignore[arg-type]
        looked.set()
        return answers[-1]

    monkeypatch.setattr(departure, "await_departure", look)
    reading, writing = os.pipe()
    code = "import os, sys; os.closerange(1, 3); sys.stdin.read(); os._exit(7)"
    with departing(runtime, launch_of(code, stdin=reading)) as guest:
        thread, result = _waiting(guest)
        assert looked.wait(stretched(60)) and answers == [None]
        assert acting(guest) == {guest._guest} and thread.is_alive()
        os.close(writing)
        thread.join()
    os.close(reading)
    assert result[0].exit.code == 7 and answers == [None]


@pytest.mark.parametrize("lie", [False, True])
def test_a_child_that_has_closed_its_output_has_ended_when_the_run_is_over(
    runtime: ProcessRuntime, monkeypatch: pytest.MonkeyPatch, lie: bool
) -> None:
    """The control arm: if the list of tasks hid the child, and init did nothing, the run would be over while the child acts."""
    reading, writing = os.pipe()
    launch = launch_of(f"import sys; sys.stdin.read()\n{LEAVES_A_CHILD}", processes=True, stdin=reading)
    with departing(runtime, launch) as guest:
        tasks = Cgroup.tasks
        if lie:
            monkeypatch.setattr(departure, "_LOOKS", 10**9)
            os.kill(guest.init, signal.SIGSTOP)
            monkeypatch.setattr(Cgroup, "tasks", lambda self: tasks(self) & {guest.init, guest._guest})
        os.close(writing)
        completed = guest.wait()
        monkeypatch.setattr(Cgroup, "tasks", tasks)
        alive = acting(guest)
        os.kill(guest.init, signal.SIGCONT)
    os.close(reading)
    assert bool(alive) == lie and completed.exit.code == 3


def test_a_list_of_tasks_that_cannot_be_read_lets_nothing_depart(runtime: ProcessRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    with departing(runtime, launch_of("import sys; sys.exit(3)")) as guest:
        monkeypatch.setattr(Cgroup, "tasks", lambda self: frozenset())
        assert guest.wait().exit.code == 3 and guest._departure is None


THREADS_GO_ON = """
import os, threading
def spin():
    while True:
        open("/tmp/count", "a").write(".")
for _ in range(5):
    threading.Thread(target=spin, daemon=True).start()
os.closerange(1, 3)
os._exit(5)
"""
FIRST_THREAD_LEAVES = """
import ctypes, os, threading
def go_on():
    for _ in range(2000):
        open("/tmp/count", "a").write(".")
    os._exit(5)
os.closerange(1, 3)
threading.Thread(target=go_on).start()
threading.Thread(target=go_on).start()
ctypes.CDLL(None).syscall({"x86_64": 60}.get(os.uname().machine, 93), 0)  # exit(2), of this thread alone
"""
FORKS_LAST = """
import os
os.closerange(1, 3)
for _ in range(3):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            while True:
                open("/tmp/count", "a").write(".")
        os._exit(0)
os._exit(5)
"""


@pytest.mark.parametrize("source", [THREADS_GO_ON, FIRST_THREAD_LEAVES, FORKS_LAST])
def test_however_a_guest_leaves_nothing_of_it_acts_when_the_run_is_over(runtime: ProcessRuntime, source: str) -> None:
    for _ in range(5):
        with runtime.launch(launch_of(source, processes=True)) as guest:
            completed = guest.wait()
            assert not acting(guest) and completed.exit.code == 5


def test_a_program_that_is_killed_as_it_leaves_was_killed(runtime: ProcessRuntime) -> None:
    with runtime.launch(launch_of("import os, signal; os.closerange(1, 3); os.kill(os.getpid(), signal.SIGKILL)")) as guest:
        end = guest.wait().exit
    assert (end.code, end.reason, guest._departure) == (137, ExitReason.SIGNALLED, None)


@pytest.mark.parametrize(("megabytes", "departs"), [(16, True), (128, False)])
def test_a_run_that_used_much_memory_is_waited_for(patient: None, runtime: ProcessRuntime, megabytes: int, departs: bool) -> None:
    source = f"import sys; sys.stdin.read(); kept = bytearray({megabytes} << 20); kept[::4096] = bytes(len(kept) // 4096)"
    reading, writing = os.pipe()
    with departing(runtime, launch_of(source, stdin=reading)) as guest:
        if departs:
            os.kill(guest.init, signal.SIGSTOP)  # else its word may come first
        os.close(writing)
        used = guest.wait().exit.usage
        os.kill(guest.init, signal.SIGCONT)
    os.close(reading)
    assert used.peak_memory_bytes > megabytes << 20 and (guest._departure is not None) == departs


def test_a_full_scratch_directory_is_reported(patient: None, runtime: ProcessRuntime) -> None:
    source = """
import sys
sys.stdin.read()
try:
    with open("/tmp/large", "wb", buffering=0) as file:
        while True:
            file.write(bytes(65536))
except OSError:
    pass
"""
    reading, writing = os.pipe()
    small = plan_view(locked().files, PREPARED.needs, ThrowAway(16 << 20), host=MachineFacts.look(), scratch_bytes=4 << 20)
    with departing(runtime, launch_of(source, stdin=reading, root=small)) as guest:
        os.kill(guest.init, signal.SIGSTOP)
        os.close(writing)
        end = guest.wait().exit
        os.kill(guest.init, signal.SIGCONT)
    os.close(reading)
    assert end.limits_hit == ("disk",) and end.code == 0


@pytest.mark.parametrize("what", ["the next run", "closing"])
def test_what_comes_next_waits_for_the_real_end(runtime: ProcessRuntime, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    waiting, done = threading.Event(), threading.Event()
    await_end = departure.await_end

    def tell(process: int) -> None:
        waiting.set()
        await_end(process)

    monkeypatch.setattr(departure, "await_end", tell)
    begin = ProcessGuest.begin

    def begun(self: ProcessGuest, launch: Launch) -> None:
        done.set()
        begin(self, launch)

    monkeypatch.setattr(ProcessGuest, "begin", begun)

    def act() -> None:
        if what == "closing":
            runtime.close()
            done.set()
        else:
            with runtime.launch(launch_of("pass")) as guest:
                guest.wait()

    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as leaving:
        runtime._departed.append(os.pidfd_open(leaving.pid))
        thread = threading.Thread(target=act)
        thread.start()
        assert waiting.wait(stretched(60)) and not done.is_set()
        leaving.kill()
        thread.join()
    assert done.is_set()


def test_runs_one_after_the_other_leave_one_descriptor_at_most(runtime: ProcessRuntime) -> None:
    with runtime.launch(launch_of("pass")) as guest:
        guest.wait()
    before = len(os.listdir("/proc/self/fd")) - len(runtime._departed)
    for _ in range(5):
        with runtime.launch(launch_of("pass")) as guest:
            guest.wait()
    assert len(os.listdir("/proc/self/fd")) - len(runtime._departed) == before and len(runtime._departed) <= 1


@pytest.mark.parametrize("change", [{"writable": True}, {"observe": True}, {"on_tick": (lambda: None,)}])
def test_a_run_of_which_something_is_read_or_served_is_waited_for(runtime: ProcessRuntime, change: dict[str, object]) -> None:
    launch = launch_of("pass", **change)
    assert launch_of("pass").leaves_nothing and not launch.leaves_nothing
    with runtime.launch(launch) as guest:
        assert guest.wait().exit.code == 0 and guest._departure is None


def _waiting(guest: ProcessGuest) -> tuple[threading.Thread, list[Completed]]:
    result = list[Completed]()
    wait: Callable[[], None] = lambda: result.append(guest.wait())  # noqa: E731
    thread = threading.Thread(target=wait)
    thread.start()
    return thread, result
