"""Fuel: the same work takes the same, a limit ends only the run that reaches it, and however a program ends it is told how much it took."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import replace

import pytest

from agent_sandbox.errors import RuntimeUnavailable
from agent_sandbox.policy.model import Guarantee, locked
from agent_sandbox.runtime.base import Completed, ExitReason, Launch
from agent_sandbox.runtime.process.probe import trial
from agent_sandbox.runtime.process.runtime import ProcessRuntime
from agent_sandbox.runtime.wasm.runtime import WasmRuntime
from tests import compiled

PLENTY = 10**12


@pytest.fixture(scope="module")
def runtime() -> Iterator[WasmRuntime]:
    made = compiled.runtime(warm=2)
    yield made
    made.close()


def with_fuel(source: str, fuel: int | None) -> Launch:
    launch = trial(source)
    return replace(launch, limits=replace(launch.limits, fuel=fuel))


def run(runtime: WasmRuntime, source: str, fuel: int | None = PLENTY) -> Completed:
    with runtime.launch(with_fuel(source, fuel)) as guest:
        return guest.wait()


def used(runtime: WasmRuntime, source: str) -> int:
    fuel = run(runtime, source).exit.usage.fuel
    assert fuel is not None
    return fuel


def test_more_work_takes_more_and_nobody_counts_unasked(runtime: WasmRuntime) -> None:
    little, much = used(runtime, "for _ in range(10_000): pass"), used(runtime, "for _ in range(1_000_000): pass")
    assert 0 < little < much / 10
    assert run(runtime, "pass", fuel=None).exit.usage.fuel is None


def test_a_limit_ends_the_run_that_reaches_it_and_no_other(runtime: WasmRuntime) -> None:
    ran = run(runtime, "print('begun')\nwhile True: pass", fuel=50_000_000)
    assert (ran.exit.reason, ran.exit.limits_hit, ran.exit.usage.fuel) == (ExitReason.FUEL_LIMIT, ("fuel",), 50_000_000)
    assert ran.exit.code == 128 + signal.SIGKILL and ran.stdout == b"begun\n"
    assert run(runtime, "print('fine')", fuel=50_000_000).stdout == b"fine\n"


def test_it_cannot_be_caught(runtime: WasmRuntime) -> None:
    source = "import atexit\natexit.register(print, 'still')\nwhile 1:\n    try:\n        while 1: pass\n    except BaseException: pass"
    ran = run(runtime, source, fuel=50_000_000)
    assert ran.exit.reason is ExitReason.FUEL_LIMIT and ran.stdout == b""


ENDS = {
    "its end": ("pass", 0),
    "an exit code": ("import sys; sys.exit(3)", 3),
    "an exception": ("1 / 0", 1),
    "a hard exit": ("import os; os._exit(200)", 200),
    "an abort": ("import os; os.abort()", 128 + signal.SIGABRT),
}


@pytest.mark.parametrize(("source", "code"), ENDS.values(), ids=ENDS.keys())
def test_it_is_told_however_a_program_ends(runtime: WasmRuntime, source: str, code: int) -> None:
    ended = run(runtime, source).exit
    assert ended.code == code and ended.usage.fuel is not None and 0 < ended.usage.fuel < PLENTY


def test_a_program_that_is_killed_by_another_limit_has_not_reached_this_one(runtime: WasmRuntime) -> None:
    launch = with_fuel("while True: pass", PLENTY)
    with runtime.launch(replace(launch, limits=replace(launch.limits, wall_seconds=0.3))) as guest:
        ended = guest.wait().exit
    assert (ended.reason, ended.limits_hit) == (ExitReason.TIMED_OUT, ("wall",))


@pytest.mark.parametrize("guarantee", [Guarantee.FUEL_LIMITED, Guarantee.DETERMINISTIC])
def test_the_process_runtime_does_not_promise_what_it_cannot_keep(guarantee: Guarantee) -> None:
    runtime = ProcessRuntime()
    launch = trial("pass")
    with pytest.raises(RuntimeUnavailable, match=guarantee.value):
        runtime.launch(replace(launch, requires=launch.requires | {guarantee}))


def test_a_limit_on_fuel_is_a_promise_that_a_policy_requires() -> None:
    limits = replace(trial("").limits, fuel=1)
    assert Guarantee.FUEL_LIMITED in locked(limits=limits).requires
    assert Guarantee.FUEL_LIMITED not in locked().requires


def test_the_guarantee_alone_makes_a_run_deterministic(runtime: WasmRuntime) -> None:
    launch = trial("import time; print(time.time())")
    launch = replace(launch, requires=launch.requires | {Guarantee.DETERMINISTIC})
    said = set()
    for _ in range(2):
        with runtime.launch(launch) as guest:
            said.add(guest.wait().stdout)
    assert len(said) == 1
