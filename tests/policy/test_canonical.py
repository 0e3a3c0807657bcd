"""One spelling for each value, and an error for what has none."""

from __future__ import annotations

import pytest

from agent_sandbox.policy import canonical


def test_what_has_no_canonical_form_is_a_programming_error() -> None:
    with pytest.raises(TypeError, match="list has no canonical form"):
        canonical.plain([1])


def test_a_set_has_one_order_and_a_number_one_spelling() -> None:
    assert canonical.plain((frozenset({"b", "a"}), 30.0, 1.5, None)) == [["a", "b"], 30, 1.5, None]
