"""Our function tools behave as the real ones do: each claim is tried on both."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from agent_sandbox._fast import functions


@pytest.fixture(params=[functions, functools], ids=["ours", "the real one"])
def module(request: pytest.FixtureRequest) -> Any:
    return request.param


def test_a_cache_calls_once_for_each_argument(module: Any) -> None:
    calls: list[int] = []

    @module.cache  # type: ignore[untyped-decorator]
    def double(number: int) -> int:
        """Double."""
        calls.append(number)
        return 2 * number

    assert [double(1), double(1), double(number=1), double(2)] == [2, 2, 2, 4]
    assert calls == [1, 1, 2], "by position and by name are two questions"
    assert (double.__name__, double.__doc__, double.__wrapped__(3)) == ("double", "Double.", 6)
    assert tuple(double.cache_info()) == (1, 3, None, 3)
    double.cache_clear()
    double(1)
    assert calls[-1] == 1


def test_a_bounded_cache_forgets_what_was_used_least(module: Any) -> None:
    calls: list[int] = []

    @module.lru_cache(maxsize=2)  # type: ignore[untyped-decorator]
    def ask(number: int) -> int:
        calls.append(number)
        return number

    for number in (1, 2, 1, 3, 1, 2):
        ask(number)
    assert calls == [1, 2, 3, 2]


def test_an_exception_is_not_remembered(module: Any) -> None:
    @module.cache  # type: ignore[untyped-decorator]
    def fail() -> None:
        raise ValueError(str(len(seen)))

    seen: list[int] = []
    for number in range(2):
        with pytest.raises(ValueError, match=str(number)):
            fail()
        seen.append(number)


def test_a_cached_property_is_computed_once_for_each_value(module: Any) -> None:
    class Circle:
        computed = 0

        @module.cached_property  # type: ignore[untyped-decorator]
        def area(self) -> int:
            """The area."""
            Circle.computed += 1
            return Circle.computed

    one, other = Circle(), Circle()
    assert [one.area, one.area, other.area] == [1, 1, 2]
    assert one.__dict__ == {"area": 1}
    assert Circle.area.__doc__ == "The area."
    del one.area
    assert one.area == 3


def test_a_partial_call_keeps_its_arguments(module: Any) -> None:
    assert module.partial(int, base=2)("101") == 5
