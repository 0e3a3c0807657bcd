"""A run that starts again elsewhere: whose output is shown, and what is left of the first."""

from __future__ import annotations

from pathlib import Path

from agent_sandbox._fast.values import replace
from agent_sandbox.engine.gate import Gate
from agent_sandbox.engine.run import Session
from agent_sandbox.engine.runtimes import Runtimes
from agent_sandbox.engine.work import Code, Outcome, Work
from agent_sandbox.ledger.writer import Ledger
from agent_sandbox.policy.model import locked
from agent_sandbox.runtime.base import Completed, Exit, Launch
from agent_sandbox.testing import FakeGuest, FakeRuntime
from tests.registries import registry_of

LACKS = b"Traceback (most recent call last):\nModuleNotFoundError: No module named '_socket'\n"


class PrintingGuest(FakeGuest):
    """A guest that prints to standard error and ends with 1."""

    def __init__(self, launch: Launch, words: bytes) -> None:
        super().__init__(launch)
        self._words = words

    def wait(self) -> Completed:
        if self.launch.on_output is not None:
            self.launch.on_output("stderr", self._words)
        return Completed(Exit(1), b"", self._words)


class PrintingRuntime(FakeRuntime):
    """A runtime whose guests print these words. One that is not `whole` may lack something."""

    def __init__(self, name: str, words: bytes, *, cost: int, whole: bool, refuses: str = "") -> None:
        super().__init__(name, cost=cost, refuses=refuses)
        if not whole:
            self.traits = replace(self.traits, features=frozenset(), modules=frozenset({"sys"}))
        self._words = words

    def launch(self, launch: Launch) -> FakeGuest:
        super().launch(launch)
        return PrintingGuest(launch, self._words)


def run(directory: Path, refuses: str = "") -> tuple[Outcome, list[bytes]]:
    first = PrintingRuntime("first", LACKS, cost=1, whole=False)
    second = PrintingRuntime("second", b"from the second", cost=2, whole=True, refuses=refuses)
    runtimes = Runtimes("auto", registry_of(first=lambda: first, second=lambda: second))
    shown: list[bytes] = []
    gate = Gate(locked(), Ledger(directory / "ledger", clock=lambda: 0.0), clock=lambda: 0.0)
    work = Work(Code("python", "import sys"), {}, on_output=lambda stream, data: shown.append(data), collect=False)
    return Session(gate, runtimes).run(work), shown


def test_only_the_output_of_the_second_run_is_shown(tmp_path: Path) -> None:
    outcome, shown = run(tmp_path)
    assert outcome.route.runtime == "second"
    assert shown == [b"from the second"]


def test_when_the_second_run_cannot_start_the_output_of_the_first_is_shown(tmp_path: Path) -> None:
    outcome, shown = run(tmp_path, refuses="out of order")
    assert outcome.route.runtime == "first"
    assert shown == [LACKS]
    assert any("could not start again on second: out of order" in note for note in outcome.route.notes)
