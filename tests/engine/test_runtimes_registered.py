"""A runtime that nobody here knows is registered by name, routed to, refused and explained, without another file being touched."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_sandbox import Sandbox
from agent_sandbox.assembly import registry
from agent_sandbox.engine.gate import Gate
from agent_sandbox.engine.run import Session
from agent_sandbox.engine.runtimes import AUTO, Registry, Runtimes
from agent_sandbox.engine.work import Code, Work
from agent_sandbox.errors import PolicyError, RuntimeUnavailable
from agent_sandbox.ledger.writer import Ledger
from agent_sandbox.policy.model import locked
from agent_sandbox.runtime.router.route import explain
from agent_sandbox.testing import FakeRuntime
from tests.registries import registry_of

WORK = Work(Code("python", "print(1)"), {})


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "ledger", clock=lambda: 0.0)


def session(wish: str, runtimes: Registry, ledger: Ledger) -> Session:
    return Session(Gate(locked(), ledger, clock=lambda: 0.0), Runtimes(wish, runtimes))


def test_it_is_used_by_its_name(ledger: Ledger) -> None:
    fake = FakeRuntime()
    outcome = session("fake", registry_of(fake=lambda: fake), ledger).run(WORK)
    assert (outcome.exit.code, outcome.route.runtime, len(fake.launches)) == (0, "fake", 1)


def test_it_is_routed_to_when_it_is_the_cheapest(ledger: Ledger) -> None:
    cheap, dear = FakeRuntime("cheap", cost=1), FakeRuntime("dear", cost=2)
    chosen = session(AUTO, registry_of(dear=lambda: dear, cheap=lambda: cheap), ledger)
    assert chosen.run(WORK).route.runtime == "cheap"
    assert explain(chosen.route(WORK))[1] == "passed over: dear: costs more"
    assert (len(cheap.launches), len(dear.launches)) == (1, 0)


@pytest.mark.parametrize(
    ("refusal", "why"),
    [({"absent": "it is asleep"}, "not available: it is asleep"), ({"objects": "it has no image"}, "not available: it has no image")],
)
def test_one_that_is_absent_or_objects_is_passed_over_with_its_reason(ledger: Ledger, refusal: dict[str, str], why: str) -> None:
    other = FakeRuntime("other", cost=2)
    outcome = session(AUTO, registry_of(fake=lambda: FakeRuntime(**refusal), other=lambda: other), ledger).run(WORK)  # type: ignore[arg-type]
    assert (outcome.route.runtime, outcome.route.passed_over) == ("other", (("fake", why),))


def test_one_that_cannot_launch_is_passed_over_or_its_error_is_raised(ledger: Ledger) -> None:
    other = FakeRuntime("other", cost=2)
    both = registry_of(fake=lambda: FakeRuntime(refuses="it is broken"), other=lambda: other)
    assert session(AUTO, both, ledger).run(WORK).route.runtime == "other"
    with pytest.raises(RuntimeUnavailable, match="it is broken"):
        session("fake", both, ledger).run(WORK)


@pytest.fixture
def registered() -> Iterator[FakeRuntime]:
    fake, shared = FakeRuntime(), registry()
    shared.register("fake", lambda: fake, automatic=False)
    yield fake
    shared.unregister("fake")


def test_a_program_asks_for_it_by_name(registered: FakeRuntime) -> None:
    result = Sandbox(runtime="fake").execute("print(1)")
    assert (result.exit_code, len(registered.launches)) == (0, 1), result


def test_a_name_that_nobody_registered_is_refused() -> None:
    with pytest.raises(PolicyError, match="no runtime 'fake'"):
        Sandbox(runtime="fake")
