"""What is shown of a plan: nothing that a guest named reaches a terminal as it is, and no row of ours can be taken for content."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from agent_sandbox.cli.render import effects
from agent_sandbox.cli.render.colours import Painter
from agent_sandbox.cli.render.json import encoded
from agent_sandbox.engine.simulation.plan import EffectPlan, Ended, FileEffect, NetworkRequest, ProgramUse, SecretUse
from agent_sandbox.engine.simulation.risk import Level, Risk
from tests.engine.simulation.made_up import plans
from tests.workspace.view.hidden import ESCAPED


def shown(plan: EffectPlan) -> list[str]:
    painter = Painter(False)
    return [painter.line(row) for row in (*effects.opening(plan), *effects.closing(plan, kept=True))]


def check(plan: EffectPlan) -> None:
    for line in shown(plan):
        assert line.isprintable(), line
        assert not any(character in line for character in ESCAPED.values()), line
    facts = (effects.plan_head(plan), effects.effect_facts(plan), effects.plans_by_path(plan))
    document = json.dumps([encoded(each) for each in facts])
    assert document.isascii() and document.isprintable()


@settings(max_examples=30, deadline=None)
@given(plans, st.sampled_from(sorted({*ESCAPED.values()} - {"\ud800"})))
def test_whatever_is_in_a_plan_is_shown_escaped(plan: EffectPlan, hidden: str) -> None:
    check(plan)
    check(of_names([f"n{hidden}m", hidden]))


def of_names(names: list[str]) -> EffectPlan:
    high, name = Risk(Level.HIGH, "a reason"), cycle(names)
    return EffectPlan(
        command=tuple(names),
        cwd=next(name),
        project=next(name),
        created=1.0,
        governed="",
        base="",
        ended=Ended(1, "exited", risk=high),
        files=tuple(FileEffect(f"/p/{each}", "added", "project", risk=high) for each in names),
        programs=tuple(ProgramUse(each, risk=high) for each in names),
        network=tuple(NetworkRequest("connect", each, next(name), risk=high) for each in names),
        secrets=tuple(SecretUse("file", each, "why", next(name), risk=high) for each in names),
        words=tuple(f"git: {each}" for each in names),
        notes=tuple(names),
        watched=True,
    )


def test_a_request_that_the_policy_allows_is_told_from_one_that_was_blocked() -> None:
    asked = NetworkRequest("connect", "a.example:443", "/usr/bin/curl"), NetworkRequest("connect", "b.example:443", allowed=True)
    plan = of_names(["x"])
    rows = ["\n".join(shown(replace(plan, network=network))) for network in (asked[:1], asked)]
    assert "Network: 1, all blocked" in rows[0] and "[allowed]" not in rows[0]
    assert "all blocked" not in rows[1] and "b.example:443 [allowed]" in rows[1]


def test_strings_that_have_hurt_others_are_harmless(evaluation_file: Callable[[str], Path]) -> None:
    naughty: list[str] = json.loads(evaluation_file("blns.json").read_text())
    for start in range(0, len(naughty), 40):
        check(of_names(naughty[start : start + 40]))


def test_no_row_of_ours_begins_as_content_does() -> None:
    plan = of_names(["+ added", "- removed", " same", "# Risk: low", "high: nothing"])
    for line in shown(plan):
        assert not line.startswith(("+", "-", " ")), line
    assert [line for line in shown(plan) if line.startswith("# Risk:")] == ["# Risk: high"]
