"""Very many runs, one after the other and at the same time: what they hold on to is a slope, and it has to be flat."""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from agent_sandbox import Sandbox, SandboxResult, SandboxStatus
from agent_sandbox.assembly import here
from agent_sandbox.kernel import cgroups
from tests.leftovers import CGROUPS, adopting, children, left_since, traces
from tests.security.conftest import Tell
from tests.security.harness import Box, case

SAMPLES = 20  # looks at what is held, spread over a soak
# How much each may seem to grow over a whole soak: waiting guests come and go, and memory is had in pages. One descriptor for each run
# would be 300 in the shortest soak.
TOLERATED = {"descriptors": 24, "threads": 3, "mounts": 1, "cgroups": 12, "files": 0.5}
TOLERATED_KIB = 4096  # of the supervisor and of its zygotes: the interpreter's own caches fill up for a while


@dataclass
class Soak:
    """What was held after how many runs."""

    runs: list[int] = field(default_factory=list)
    held: dict[str, list[float]] = field(default_factory=dict)

    def look(self, runs: int, state: Path) -> None:
        self.runs.append(runs)
        for name, value in _held(state).items():
            self.held.setdefault(name, []).append(value)

    def growth(self, name: str) -> float:
        """Over all the runs, by the slope of the straight line through what was seen. The first look comes before caches are warm."""
        slope = statistics.linear_regression(self.runs[1:], self.held[name][1:]).slope
        return slope * self.runs[-1]

    def __str__(self) -> str:
        return ", ".join(
            f"{name} {values[1]:.0f} to {values[-1]:.0f} (slope {self.growth(name):+.1f})" for name, values in self.held.items()
        )


def _held(state: Path) -> dict[str, float]:
    """The least that is seen within a moment: the pool makes and clears away guests beside us."""
    looks = [_held_now(state)]
    while len(looks) < 5:
        time.sleep(0.05)
        looks.append(_held_now(state))
    return {name: min(look[name] for look in looks) for name in looks[0]}


def _held_now(state: Path) -> dict[str, float]:
    zygotes = children(os.getpid())
    ours = [f"-{zygote}-" for zygote in zygotes]
    groups = [name for _, names, _ in os.walk(CGROUPS) for name in names if name.startswith(cgroups.PREFIX)]
    return {
        "descriptors": len(os.listdir("/proc/self/fd")) + sum(map(_descriptors, zygotes)),
        "threads": threading.active_count(),
        "mounts": len(Path("/proc/self/mountinfo").read_text().splitlines()),
        "cgroups": sum(any(keeper in name for keeper in ours) for name in groups),
        "files": sum(len(names) for _, _, names in os.walk(state)),  # the ledger is one, and grows by design
        "supervisor KiB": _resident(os.getpid()),
        "zygotes KiB": sum(_resident(zygote) for zygote in zygotes),
    }


def _descriptors(pid: int) -> int:
    """The descriptors of a process. None of one that has ended, nor of a helper that only root may look into, as that of the egress."""
    with suppress(FileNotFoundError, PermissionError):
        return len(os.listdir(f"/proc/{pid}/fd"))
    return 0


def _resident(pid: int) -> float:
    """Its anonymous memory, in KiB. Not what is private to it: that goes up and down with the forks that share it for a while.

    One that has ended and is not collected yet has none.
    """
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return next((float(line.split()[1]) for line in lines if line.startswith("RssAnon:")), 0.0)


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("AGENT_SANDBOX_STATE", str(tmp_path / "state"))
    here().process().close()  # what earlier tests have used is not ours to count
    yield tmp_path / "state"
    here().process().close()


def _mixture(box: Box) -> list[Callable[[], object]]:
    """Pooled Python, native programs, failures and timeouts, in both presets."""
    locked, open_ = Sandbox(validate_code=False), Sandbox(validate_code=False, allow_subprocess=True)

    def run(expected: SandboxStatus, sandbox: Sandbox, work: str | list[str], timeout: float = 600.0) -> SandboxResult:
        result = sandbox.run(work, timeout=timeout)
        assert result.status is expected, result
        return result

    return [
        lambda: run(SandboxStatus.COMPLETED, locked, "print(1)"),
        lambda: run(SandboxStatus.COMPLETED, open_, ["true"]),
        lambda: run(SandboxStatus.FAILED, locked, "1 / 0"),
        lambda: run(SandboxStatus.FAILED, open_, ["no-such-program"]),
        lambda: run(SandboxStatus.TIMEOUT, locked, "while True: pass", timeout=0.02),
        lambda: box.shell("echo x > file; (setsid sleep 300 &)"),
        lambda: box.python("open('file', 'w').write('x')"),
    ]


def _soak(runs: int, box: Box, state: Path) -> Soak:
    works = _mixture(box)
    soak = Soak()
    for number in range(runs + 1):
        if number % (runs // SAMPLES) == 0:
            soak.look(number, state)
        works[number % len(works)]()
    return soak


def _check(soak: Soak) -> None:
    grown = {name: soak.growth(name) for name in soak.held}
    over = {name: grown[name] for name, most in TOLERATED.items() if grown[name] > most}
    over |= {name: growth for name, growth in grown.items() if name.endswith("KiB") and growth > TOLERATED_KIB}
    assert not over, f"{over} grew: {soak}"


@case(152, prio="P1")
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_three_hundred_mixed_runs_hold_on_to_nothing(number: int, box: Box, state: Path, tell: Tell) -> None:
    soak = _soak(300, box, state)
    _check(soak)
    leaking = Soak(
        soak.runs, {**soak.held, "descriptors": [value + at for value, at in zip(soak.held["descriptors"], soak.runs, strict=True)]}
    )
    with pytest.raises(AssertionError, match="descriptors"):
        _check(leaking)
    tell(str(soak), control="one descriptor more for each run is seen")


@case(152, prio="P1")
@pytest.mark.torture
@pytest.mark.timeout(3000)
def test_five_thousand_mixed_runs_hold_on_to_nothing(number: int, box: Box, state: Path, tell: Tell) -> None:
    soak = _soak(5000, box, state)
    print(soak)
    _check(soak)
    tell(str(soak), control="one descriptor more for each run is seen")


def _all_at_once(many: int) -> int:
    """So many runs in one sandbox, all of them alive until the last one is. Returns how many were alive together."""
    up = threading.Barrier(many + 1)
    sandbox = Sandbox(validate_code=False, allow_subprocess=True, timeout_seconds=300)
    seen: list[str] = []

    def one(number: int) -> SandboxResult:
        waiting = [up]

        def on_output(_: str, text: str) -> None:
            seen.append(text)
            if waiting:
                waiting.pop().wait()

        return sandbox.run(["sh", "-c", f"echo {number} > /tmp/mine; cat /tmp/mine; exec sleep 300"], on_output=on_output)

    with ThreadPoolExecutor(many) as pool:
        runs = [pool.submit(one, number) for number in range(many)]
        up.wait()
        guests = sum(len(children(init)) for zygote in children(os.getpid()) for init in children(zygote))
        sandbox.kill()
        results = [run.result() for run in runs]
    assert sorted(seen, key=int) == [f"{number}\n" for number in range(many)], "each sees its own file"
    assert {result.exit.code for result in results if result.exit is not None} == {137}
    return guests


def _beside_each_other(many: int, state: Path, tell: Tell) -> None:
    before = traces(adopted=True)
    with adopting():
        alive = _all_at_once(many)
        assert alive >= many
        here().process().close()
        assert left_since(before, adopted=True) == []
    tell(f"{alive} guests alive at once, then nothing", control="each wrote and read a file of the same name")


@case(152, prio="P1")
@pytest.mark.slow
def test_forty_runs_at_once_are_apart_and_leave_nothing(number: int, state: Path, tell: Tell) -> None:
    _beside_each_other(40, state, tell)


@case(152, prio="P1")
@pytest.mark.torture
@pytest.mark.timeout(600)
def test_two_hundred_runs_at_once_and_a_thousand_in_a_row_leave_nothing(number: int, box: Box, state: Path, tell: Tell) -> None:
    _check(_soak(1000, box, state))
    here().process().close()
    _beside_each_other(200, state, tell)
