"""Limits that cannot be are refused when they are made."""

from __future__ import annotations

from typing import Any

import pytest

from agent_sandbox.errors import PolicyError
from agent_sandbox.policy.limits import Limits


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"wall_seconds": "5"}, "wall_seconds must be a number"),
        ({"wall_seconds": True}, "wall_seconds must be a number"),
        ({"memory_bytes": 0}, "memory_bytes must be positive and finite"),
        ({"cpu_seconds": float("inf")}, "cpu_seconds must be positive and finite"),
        ({"open_files": 1.5}, "open_files must be a whole number"),
    ],
)
def test_an_absurd_limit_is_refused_by_name(limits: dict[str, Any], words: str) -> None:
    with pytest.raises(PolicyError, match=words):
        Limits(**limits)


def test_a_limit_may_be_left_out() -> None:
    assert Limits(wall_seconds=None, memory_bytes=None).wall_seconds is None
