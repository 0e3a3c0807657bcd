"""Waiting guests: used once, for exactly what they were built for, and gone when nobody wants them."""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from agent_sandbox.engine.plan_launch import prepare
from agent_sandbox.kernel.mount_plan import Copies, MountPlan, OnDisk, ThrowAway
from agent_sandbox.policy.model import Limits, locked
from agent_sandbox.runtime.base import DEVNULL, Argv, Completed, Launch, PythonCode, Talk, Terminal
from agent_sandbox.runtime.process import pool
from agent_sandbox.runtime.process.guest_handle import ProcessGuest
from agent_sandbox.runtime.process.pool import Pool, kind_of
from agent_sandbox.runtime.process.runtime import ProcessRuntime
from agent_sandbox.runtime.process.zygote import Zygote
from agent_sandbox.workspace.view.plan import MachineFacts, plan_view
from tests.patience import stretched, until

PREPARED = prepare("python", "", arguments=(), search_path="/usr/bin:/bin", processes=False)
PLAN = plan_view(locked().files, PREPARED.needs, ThrowAway(16 << 20), host=MachineFacts.look())


def launch_of(source: str, **changes: object) -> Launch:
    made = Launch(PythonCode(source), PLAN, "/tmp", {"A": "1"}, Limits(), frozenset(), processes=False, writable=False)
    return replace(made, **changes)  # type: ignore[arg-type]


@pytest.fixture
def runtime() -> Iterator[ProcessRuntime]:
    made = ProcessRuntime(warm=4)
    yield made
    made.close()


def run(runtime: ProcessRuntime, launch: Launch) -> Completed:
    with runtime.launch(launch) as guest:
        return guest.wait()


def test_a_conversation_is_no_kind_of_its_own() -> None:
    """It is agreed on when a guest gets its program, so any waiting one will do."""
    plain = launch_of("pass")
    assert kind_of(replace(plain, talk=Talk(lambda words: b"", {"turns": True, "tools": []}))) == kind_of(plain) is not None


def waiting(runtime: ProcessRuntime) -> int:
    assert runtime._pool is not None
    return runtime._pool.waiting


def test_closing_leaves_no_zygote_though_a_guest_was_just_being_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool's thread is held where it asks for a zygote, until closing has gone as far as it goes without that thread."""
    runtime = ProcessRuntime(warm=1)
    asked, closing = threading.Event(), threading.Event()
    zygote_for = ProcessRuntime._zygote

    def asked_late(self: ProcessRuntime, launch: Launch) -> Zygote:
        if threading.current_thread() is not threading.main_thread():
            asked.set()
            assert closing.wait(stretched(60))
            until(lambda: not self._zygotes, seconds=1)
        return zygote_for(self, launch)

    monkeypatch.setattr(ProcessRuntime, "_zygote", asked_late)
    run(runtime, launch_of("1"))
    assert asked.wait(stretched(60))
    closing.set()
    runtime.close()
    assert runtime._zygotes == {}


class _Waiting:
    waiting = True

    def close(self) -> None:
        """Nothing to close."""


def test_a_run_that_is_interrupted_while_it_waits_for_a_guest_is_counted_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each interrupt would keep one more guest waiting, for as long as runs of its kind come."""
    go_on = threading.Event()

    def make(_: Launch) -> ProcessGuest:
        if threading.current_thread() is not threading.main_thread():
            assert go_on.wait(stretched(60))
        return _Waiting()  # type: ignore[return-value]

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    guests = Pool(make, most=4)
    try:
        guests.take(launch_of("1"))
        (shelf,) = guests._shelves.values()
        assert until(lambda: shelf.making == 1)
        with monkeypatch.context() as patched:
            patched.setattr(guests._changed, "wait", interrupted)
            with pytest.raises(KeyboardInterrupt):
                guests.take(launch_of("2"))
        assert (shelf.running, shelf.awaited) == (1, 0)
    finally:
        go_on.set()
        guests.close()


def test_after_a_run_a_guest_waits_for_the_next_like_it_and_is_used_once(runtime: ProcessRuntime) -> None:
    run(runtime, launch_of("1"))
    assert until(lambda: waiting(runtime) == 1)
    seen = {
        run(runtime, launch_of("import os; print(os.urandom(4).hex(), os.path.exists('/tmp/x')); open('/tmp/x', 'w')")).stdout
        for _ in range(4)
    }
    assert len(seen) == 4
    assert all(line.endswith(b"False\n") for line in seen), "no file of one run is seen by another"


def test_a_waiting_guest_learns_program_environment_input_and_directory_only_when_it_is_used(runtime: ProcessRuntime) -> None:
    source = "import os; print(os.environ, os.getcwd(), input())"
    run(runtime, launch_of("1"))
    assert until(lambda: waiting(runtime) == 1)
    done = run(runtime, launch_of(source, env={"B": "2"}, cwd="/usr/lib", stdin=b"hello\n"))
    assert done.stdout == b"environ({'B': '2'}) /usr/lib hello\n"


def test_the_wall_time_is_the_runs_own(runtime: ProcessRuntime) -> None:
    run(runtime, launch_of("1", limits=Limits(wall_seconds=None)))
    assert until(lambda: waiting(runtime) == 1)
    done = run(runtime, launch_of("while True: pass", limits=Limits(wall_seconds=0.2)))
    assert done.exit.limits_hit == ("wall",)


@pytest.mark.parametrize(
    "other",
    [
        {"limits": Limits(memory_bytes=64 << 20)},
        {"limits": Limits(processes=5)},
        {"processes": True},
        {"writable": True},
        {"preload": ("json",)},
        {"stdin": DEVNULL},
        {"program": Argv(("true",))},
        {"root": MountPlan(ThrowAway(17 << 20), PLAN.steps)},
        {"root": MountPlan(PLAN.layers, PLAN.steps[:-1])},
    ],
    ids=lambda other: str(next(iter(other))),
)
def test_a_guest_built_for_something_else_is_not_used(other: dict[str, object]) -> None:
    assert kind_of(launch_of("1")) != kind_of(launch_of("1", **other))
    assert kind_of(launch_of("1", **other)) == kind_of(launch_of("2", **(other | ({} if "program" in other else {"env": {}}))))


@pytest.mark.parametrize(
    "other",
    [
        {"terminal": Terminal(24, 80)},
        {"root": MountPlan(OnDisk("/nowhere"), PLAN.steps)},
        {"root": MountPlan(PLAN.layers, (*PLAN.steps, Copies("/etc", "/etc", "etc")))},
    ],
    ids=["terminal", "kept layers", "copies"],
)
def test_what_belongs_to_one_run_is_never_made_beforehand(other: dict[str, object]) -> None:
    assert kind_of(launch_of("1", **other)) is None


def test_no_code_environment_or_input_stays_on_a_shelf(runtime: ProcessRuntime) -> None:
    run(runtime, launch_of("'s3cret'", env={"KEY": "s3cret"}, stdin=b"s3cret"))
    assert runtime._pool is not None
    (shelf,) = runtime._pool._shelves.values()
    assert "s3cret" not in repr(shelf.launch)


def test_a_guest_that_was_killed_while_it_waited_is_not_handed_out(runtime: ProcessRuntime) -> None:
    run(runtime, launch_of("1"))
    assert until(lambda: waiting(runtime) == 1)
    assert runtime._pool is not None
    (shelf,) = runtime._pool._shelves.values()
    guest = shelf.guests[0]
    guest.kill()
    assert until(lambda: not guest.waiting)
    assert run(runtime, launch_of("print(1)")).stdout == b"1\n"


def test_an_unused_shelf_is_cleared_and_its_thread_ends(runtime: ProcessRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "IDLE_SECONDS", 0.0)
    monkeypatch.setattr(pool, "CALM_SECONDS", 0.01)
    run(runtime, launch_of("1"))
    assert runtime._pool is not None
    assert until(lambda: runtime._pool is not None and not runtime._pool._makers)
    assert waiting(runtime) == 0


def test_no_more_wait_than_may(runtime: ProcessRuntime) -> None:
    for number in range(6):
        run(runtime, launch_of("1", limits=Limits(processes=10 + number)))
    assert until(lambda: waiting(runtime) == 4)
    assert runtime._pool is not None
    assert runtime._pool._most_wanting() is None


class HeldMaker:
    """Makes guests of a runtime, each when it is told to."""

    def __init__(self, runtime: ProcessRuntime) -> None:
        self._runtime = runtime
        self.begun, self.told = threading.Semaphore(0), threading.Semaphore(0)
        self.made = 0

    def make(self, launch: Launch) -> ProcessGuest:
        self.begun.release()
        assert self.told.acquire(timeout=stretched(60))
        self.made += 1
        return self._runtime._make(launch)


@pytest.fixture
def held() -> Iterator[tuple[Pool, HeldMaker]]:
    runtime = ProcessRuntime()
    maker = HeldMaker(runtime)
    made = Pool(maker.make, most=4)
    yield made, maker
    for _ in range(16):
        maker.told.release()
    made.close()
    runtime.close()


def test_a_run_that_finds_no_guest_takes_the_one_that_is_being_made(held: tuple[Pool, HeldMaker], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two guests are made for two runs. As the control: a third run, for which none is being made, makes its own."""
    monkeypatch.setattr(pool, "MAKERS", 1)  # a second one might begin a guest for the third run before it comes
    made, maker = held
    taken: list[ProcessGuest] = []

    def take() -> threading.Thread:
        thread = threading.Thread(target=lambda: taken.append(made.take(launch_of("1"))))
        thread.start()
        return thread

    first = take()  # makes its own, and the pool begins the next
    assert maker.begun.acquire(timeout=stretched(60))
    assert maker.begun.acquire(timeout=stretched(60))
    (shelf,) = made._shelves.values()
    second = take()
    assert until(lambda: shelf.awaited == 1), "it waits for the pool's"
    third = take()
    assert maker.begun.acquire(timeout=stretched(60)), "nobody makes one for the third, so it does"
    for _ in range(8):  # for these three, and for those that the pool goes on to make
        maker.told.release()
    for thread in (first, second, third):
        thread.join(stretched(60))
    assert len({guest.init for guest in taken}) == 3
    for guest in taken:
        guest.close()
    assert shelf.running == 0


def test_a_shelf_keeps_one_guest_more_than_runs_were_under_way(runtime: ProcessRuntime) -> None:
    """A program that runs one after the other, however fast, needs no large stock: a second guest is always being made."""
    for _ in range(12):
        run(runtime, launch_of("1"))
    assert runtime._pool is not None
    (shelf,) = runtime._pool._shelves.values()
    assert shelf.wanted <= 2
    guests = [runtime.launch(launch_of("import time; time.sleep(60)")) for _ in range(3)]
    assert shelf.running == 3
    for guest in guests:
        guest.close()
    assert shelf.running == 0


def test_a_fork_of_the_application_has_a_pool_and_a_zygote_of_its_own(runtime: ProcessRuntime) -> None:
    run(runtime, launch_of("1"))
    assert until(lambda: waiting(runtime) == 1)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if run(runtime, launch_of("print(1)")).stdout == b"1\n" else 2
            runtime.close()
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert run(runtime, launch_of("print(1)")).stdout == b"1\n"


def descendants(pid: int) -> list[int]:
    """Handles of all that descend from a process, by any thread of it. What is ending just now is passed over."""
    found = []
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):
            for child in map(int, listed.read_text().split()):
                with suppress(ProcessLookupError):
                    found.append(os.pidfd_open(child))
                found += descendants(child)
    return found


def test_waiting_guests_end_with_their_supervisor() -> None:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            made = ProcessRuntime(warm=2)
            run(made, launch_of("1"))
            assert until(lambda: waiting(made) == 1)
            os.write(writing, b"x")
            signal.pause()
        finally:
            os._exit(1)
    try:
        assert os.read(reading, 1) == b"x"
        handles = descendants(child)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert len(handles) >= 3, "zygote, init and guest lived while their supervisor did"
    for handle in handles:
        assert select.select([handle], [], [], 60.0)[0], "it has outlived its supervisor"
        os.close(handle)
    os.close(reading)
    os.close(writing)
