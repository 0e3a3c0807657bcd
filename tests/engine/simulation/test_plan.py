"""A plan has one spelling, which can be read back, and any other is none."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_sandbox._fast.values import replace
from agent_sandbox.engine.simulation.plan import (
    EffectPlan,
    Ended,
    FileEffect,
    NetworkRequest,
    Prediction,
    ProgramUse,
    SecretUse,
    digest_of,
    read,
)
from agent_sandbox.engine.simulation.risk import Level, Risk
from tests.engine.simulation.made_up import plans


@settings(max_examples=50, deadline=None)
@given(plans, st.integers(0, 1 << 30))
def test_it_is_read_back_as_it_was_and_no_other_text_is_taken_for_it(plan: EffectPlan, at: int) -> None:
    text = plan.text()
    assert read(text) == plan and read(text).digest == plan.digest == digest_of(text)
    chosen = random.Random(at)
    place = chosen.randrange(len(text))
    changed = text[:place] + chr(chosen.randrange(32, 127)) + text[place + 1 :]
    if changed != text:
        assert digest_of(changed) != plan.digest
        try:
            other = read(changed)
        except ValueError:
            return
        assert other != plan  # a number or a name that is another: and so is its digest


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format":1}', '{"format":1,"plan":{"kind":"Risk"}}', '{"format":2,"plan":{}}', "nul"])
def test_what_is_no_plan_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        read(text)


def test_its_risk_is_the_worst_of_all_and_its_needs_are_what_it_used() -> None:
    high, low = Risk(Level.HIGH, "h"), Risk(Level.LOW, "l")
    plan = EffectPlan(
        command=("true",),
        cwd="/p",
        project="/p",
        created=1.0,
        governed="",
        base="",
        ended=Ended(0, "exited"),
        files=(FileEffect("/p/a", "added", "project", risk=low),),
        programs=(ProgramUse("/usr/bin/git", 3), ProgramUse("/usr/bin/curl", allowed=False)),
        network=(
            NetworkRequest("resolve", "example.com"),
            NetworkRequest("connect", "example.com:443"),
            NetworkRequest("listen", "[::]:80"),
        ),
        watched=True,
    )
    assert plan.risk.level is Level.LOW and replace(plan, secrets=(SecretUse("file", "/x", risk=high),)).risk == high
    assert plan.needs == {"programs": ("/usr/bin/git",), "write": ("/p/a",), "hosts": ("example.com:443",)}
    assert plan.requests == ("example.com:443",)
    unwatched = replace(plan, watched=False, network=(), predicted=(Prediction("network", "https://example.com", low),))
    assert unwatched.requests == ("https://example.com",)
    many = replace(plan, files=tuple(FileEffect(f"/p/{n}", "deleted", "project") for n in range(200)))
    assert many.risk.level is Level.HIGH and "200" in many.risk.why
