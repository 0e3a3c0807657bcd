"""Budgets of the network, as they are written."""

from __future__ import annotations

import pytest

from agent_sandbox.errors import PolicyError
from agent_sandbox.policy.network import network_rules
from agent_sandbox.policy.traffic_budgets import TrafficBudget, read_budget


@pytest.mark.parametrize(
    ("written", "budget"),
    [
        ("api.example.com 10MB", TrafficBudget("api.example.com", bytes=10_000_000)),
        ("*.Example.com sent:1KiB received:2gb", TrafficBudget("*.example.com", sent=1024, received=2_000_000_000)),
        ("*   requests:500  100/min", TrafficBudget("*", requests=500, requests_a_minute=100)),
        ("a.example 0B requests:0", TrafficBudget("a.example", bytes=0, requests=0)),
        ("[2001:db8::1] 1/minute", TrafficBudget("2001:db8::1", requests_a_minute=1)),
    ],
)
def test_a_budget_is_read_and_shown_as_it_was_written(written: str, budget: TrafficBudget) -> None:
    found = read_budget(written)
    assert [getattr(found, name) for name in vars(budget) if name != "written"] == [
        getattr(budget, name) for name in vars(budget) if name != "written"
    ]
    assert str(found) == " ".join(written.split())


@pytest.mark.parametrize(
    "written",
    [
        *(
            "",
            "api.example.com",
            "10MB",
            "a b/c 10MB",
            "a.example 10",
            "a.example MB",
            "a.example 10XB",
            "a.example -1MB",
            "a.example 1.5MB",
        ),
        *("a.example 10MB 20MB", "a.example 0/min", "a.example 5/h", "a.example requests:x", "a.example bytes:1MB", "a.example 1MB sent:"),
        *("a.example 99999999999999999GB", "a.example ١MB", 5, None),
    ],
)
def test_what_is_no_budget_is_refused_with_the_form(written: object) -> None:
    with pytest.raises(PolicyError) as refused:
        read_budget(written)
    assert "a budget" in str(refused.value) or "host" in str(refused.value)


def test_every_budget_of_every_layer_holds() -> None:
    one, two, three = (read_budget(each) for each in ("* 10MB", "* 5MB", "a.example 1/min"))
    above, below = network_rules(outbound=True, budgets=[one, three]), network_rules(outbound=True, budgets=[two, three])
    assert above.narrowed(below).budgets == (one, three, two)
