"""What policies decide about the search of what leaves."""

from __future__ import annotations

import pytest

from agent_sandbox.errors import PolicyError
from agent_sandbox.policy.search_rules import SearchRules


def test_the_rule_counts_before_its_kind_and_the_table_last() -> None:
    rules = SearchRules(actions=(("personal", "alert"), ("card", "redact")))
    assert [rules.action(rule, kind, "block") for rule, kind in (("card", "personal"), ("iban", "personal"), ("token", "secret"))] == [
        "redact",
        "alert",
        "block",
    ]


def test_a_floor_makes_stricter_and_never_milder() -> None:
    rules = SearchRules(actions=(("card", "alert"),), floor=(("personal", "redact"),))
    assert rules.action("card", "personal", "block") == "redact"
    assert rules.action("iban", "personal", "block") == "block"
    assert SearchRules().narrowed(SearchRules(True, (("card", "alert"),), (("iban", "block"),))) == SearchRules(floor=(("iban", "block"),))


def test_a_rule_that_is_not_there_is_refused() -> None:
    SearchRules(actions=(("card", "alert"), ("secret", "block"))).check_names(frozenset({"card"}))
    with pytest.raises(PolicyError, match="cart"):
        SearchRules(floor=(("cart", "alert"),)).check_names(frozenset({"card"}))
