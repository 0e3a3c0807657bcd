"""Attachments: one more is one class, and however a run ends, all of them end in reverse order."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_sandbox._fast.values import replace
from agent_sandbox.engine.attachments import Attachment, Attachments
from agent_sandbox.engine.gate import Gate
from agent_sandbox.engine.run import Session
from agent_sandbox.engine.runtimes import Runtimes, only
from agent_sandbox.engine.turns import InterpreterTurns, Turn
from agent_sandbox.engine.work import Code, Outcome, Work
from agent_sandbox.errors import LaunchFailed, Overtaken, RuntimeUnavailable, SandboxError
from agent_sandbox.ledger.writer import Ledger
from agent_sandbox.policy.model import Policy, cloned, locked
from agent_sandbox.runtime.base import Completed, Confined, Guest, Launch, Runtime
from agent_sandbox.runtime.process.runtime import ProcessRuntime
from agent_sandbox.testing import FakeGuest, FakeRuntime
from tests.registries import registry_of

ENV = {"PATH": os.defpath}


class Timer(Attachment):
    """Notes how long each guest lived, from the moment at which it was confined. All that a new attachment takes is in this class."""

    def __init__(self) -> None:
        self.confined: list[Confined] = []
        self.ticks = 0
        self.open = 0
        self._began = 0.0

    def before(self, launch: Launch) -> Launch:
        self.open += 1
        return replace(launch, on_ready=(*launch.on_ready, self._ready), on_tick=(*launch.on_tick, self._tick))

    def _ready(self, guest: Confined) -> None:
        self.confined.append(guest)
        self._began = time.monotonic()

    def _tick(self) -> None:
        self.ticks += 1

    def ended(self, guest: Guest, completed: Completed, outcome: Outcome) -> Outcome:
        return replace(outcome, notes=(*outcome.notes, f"it took {time.monotonic() - self._began:.3f} s"))

    def release(self) -> None:
        self.open -= 1


class Witness(Attachment):
    """Writes down its moments, and raises in one of them."""

    def __init__(self, name: str, moments: list[str], *, raises: str = "") -> None:
        self._name, self._moments, self._raises = name, moments, raises

    def _now(self, moment: str) -> None:
        if moment == self._raises:
            raise OSError(f"{self._name} {moment}")
        self._moments.append(f"{self._name} {moment}")

    def before(self, launch: Launch) -> Launch:
        self._now("before")
        return launch

    def started(self, guest: Guest) -> None:
        self._now("started")

    def ended(self, guest: Guest, completed: Completed, outcome: Outcome) -> Outcome:
        self._now("ended")
        return outcome

    def release(self) -> None:
        self._now("release")


class FailingRuntime(FakeRuntime):
    """Raises each of these errors once, one in each launch."""

    def __init__(self, *errors: Exception, name: str = "fake", cost: int = 1) -> None:
        super().__init__(name, cost=cost)
        self._errors = [*errors]

    def launch(self, launch: Launch) -> FakeGuest:
        if self._errors:
            raise self._errors.pop(0)
        return super().launch(launch)


@pytest.fixture(scope="module")
def process() -> Iterator[ProcessRuntime]:
    runtime = ProcessRuntime()
    yield runtime
    runtime.close()


def session(runtime: Runtime | Runtimes, directory: Path, policy: Policy | None = None) -> Session:
    gate = Gate(policy or locked(), Ledger(directory / "ledger", clock=lambda: 0.0), clock=lambda: 0.0)
    return Session(gate, runtime if isinstance(runtime, Runtimes) else only(runtime))


def work(*attachments: Attachment, source: str = "print(1)") -> Work:
    return Work(Code("python", source), ENV, attachments=attachments)


def overtaken() -> Overtaken:
    return Overtaken("something was mounted", hint="")


def test_an_attachment_of_ones_own_sees_a_real_run_and_adds_to_its_outcome(process: ProcessRuntime, tmp_path: Path) -> None:
    timer = Timer()
    outcome = session(process, tmp_path, cloned(masks=())).run(work(timer, source="print(1)"))
    (note,) = [note for note in outcome.notes if note.startswith("it took ")]
    assert float(note.split()[2]) > 0
    (confined,) = timer.confined
    assert confined.process, "a guest of the process runtime has an init to look at"
    assert confined.layers is not None, "and layers, where it may write"
    assert timer.ticks > 0
    assert timer.open == 0


def test_an_attachment_sees_each_turn_of_a_session_and_is_released_at_its_end(process: ProcessRuntime, tmp_path: Path) -> None:
    timer = Timer()
    turns = InterpreterTurns(session(process, tmp_path), work(timer))
    try:
        taken = [turns.run(Turn(source)) for source in ("x = 20", "x + 1")]
        assert timer.open == 1
        assert [turned.value for turned in taken] == [None, 21]
        assert all(any(note.startswith("it took ") for note in turned.outcome.notes) for turned in taken)
    finally:
        turns.close()
    assert timer.open == 0


def test_a_session_whose_attachment_raises_at_its_start_ends_and_releases_all(process: ProcessRuntime, tmp_path: Path) -> None:
    moments: list[str] = []
    turns = InterpreterTurns(session(process, tmp_path), work(Witness("a", moments), Witness("b", moments, raises="started")))
    with pytest.raises(OSError, match="b started"):
        turns.run(Turn("x = 20"))
    assert moments == ["a before", "b before", "a started", "b release", "a release"]
    with pytest.raises(SandboxError, match="has ended"):
        turns.run(Turn("x + 1"))


def test_attachments_attach_in_order_and_end_in_reverse(tmp_path: Path) -> None:
    moments: list[str] = []
    session(FakeRuntime(), tmp_path).run(work(Witness("a", moments), Witness("b", moments)))
    assert moments == [
        *("a before", "b before", "a started", "b started"),
        *("b ended", "a ended", "b release", "a release"),
    ]


def test_attachments_are_released_when_the_launch_fails(tmp_path: Path) -> None:
    moments: list[str] = []
    runtime = FailingRuntime(LaunchFailed("no room", hint=""))
    with pytest.raises(LaunchFailed):
        session(runtime, tmp_path).run(work(Witness("a", moments), Witness("b", moments)))
    assert moments == ["a before", "b before", "b release", "a release"]


def test_attachments_are_released_before_a_launch_on_a_new_plan_or_in_another_runtime(tmp_path: Path) -> None:
    moments: list[str] = []
    first = FailingRuntime(overtaken(), RuntimeUnavailable("gone", missing=("it",), hint=""), name="first")
    second = FakeRuntime("second", cost=2)
    runtimes = Runtimes("auto", registry_of(first=lambda: first, second=lambda: second))
    outcome = session(runtimes, tmp_path).run(work(Witness("a", moments)))
    assert outcome.route.runtime == "second"
    assert moments == [*("a before", "a release") * 2, "a before", "a started", "a ended", "a release"]


@pytest.mark.parametrize(
    ("moment", "expected"),
    [
        ("before", ["a before", "a release"]),
        ("started", ["a before", "b before", "a started", "b release", "a release"]),
        ("ended", ["a before", "b before", "a started", "b started", "b release", "a release"]),
        ("release", ["a before", "b before", "a started", "b started", "b ended", "a ended", "a release"]),
    ],
)
def test_when_one_attachment_raises_the_others_are_released_all_the_same(tmp_path: Path, moment: str, expected: list[str]) -> None:
    moments: list[str] = []
    with pytest.raises(OSError, match=f"b {moment}"):
        session(FakeRuntime(), tmp_path).run(work(Witness("a", moments), Witness("b", moments, raises=moment)))
    assert moments == expected


def test_nothing_is_released_twice() -> None:
    moments: list[str] = []
    attached = Attachments(Witness("a", moments))
    attached.release()
    assert moments == []
