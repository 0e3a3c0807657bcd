"""The claims that any runtime must keep, on each that we have."""

from __future__ import annotations

import pytest

from agent_sandbox.engine.work import Command, Work
from agent_sandbox.testing import CLAIMS, Bench, Claim
from tests.security.harness import ENVIRONMENT, Box


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.__name__)
def test_each_runtime_keeps_the_contract(claim: Claim, box: Box) -> None:
    plan = box.session().explain(Work(Command(("true",)), ENVIRONMENT))
    claim(Bench(box.runtime, plan))


def test_the_contract_finds_a_runtime_that_breaks_it(box: Box) -> None:
    class Deaf:
        """Ends every program's output early: what the claims are there to notice."""

        name = "deaf"
        probe = box.runtime.probe

        def launch(self, launch: object) -> object:
            process = box.runtime.launch(launch)  # type: ignore[arg-type]
            process.launch = type("Cut", (), {"__getattr__": lambda _, name: getattr(launch, name), "collect": False})()
            return process

    plan = box.session().explain(Work(Command(("true",)), ENVIRONMENT))
    with pytest.raises(AssertionError):
        next(claim for claim in CLAIMS if claim.__name__ == "streams_are_exact_and_apart")(Bench(Deaf(), plan))  # type: ignore[arg-type]
