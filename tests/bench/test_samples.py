"""The arithmetic behind every figure."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.samples import Summary, percentile, summarise

VALUES = st.lists(st.floats(min_value=0.001, max_value=1e6), min_size=1, max_size=50)


@given(VALUES, st.floats(min_value=0.001, max_value=1.0))
def test_a_percentile_is_a_value_that_was_measured_and_covers_its_share(values: list[float], share: float) -> None:
    found = percentile(values, share)
    assert found in values
    assert sum(value <= found for value in values) >= share * len(values)


def test_one_slow_run_in_a_hundred_moves_neither_figure() -> None:
    assert summarise([1.0] * 99 + [1000.0]) == Summary(1.0, 1.0, 100)


def test_ten_slow_runs_in_a_hundred_show_in_the_second_figure_only() -> None:
    assert summarise([1.0] * 90 + [1000.0] * 10) == Summary(1.0, 1000.0, 100)


def test_where_more_is_better_the_bad_end_is_the_lower_one() -> None:
    assert summarise([100.0] * 90 + [5.0] * 10, more_is_better=True) == Summary(100.0, 5.0, 100)


@pytest.mark.parametrize("share", [0.0, 1.1, -1.0])
def test_a_share_that_is_none_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match="share"):
        percentile([1.0], share)


def test_nothing_measured_has_no_percentile() -> None:
    with pytest.raises(ValueError, match="nothing"):
        percentile([], 0.5)
