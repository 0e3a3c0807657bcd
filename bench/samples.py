"""From single timings to the two figures of a row. Pure, so that the arithmetic of every claim can be tested."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of the values does not exceed (nearest rank: always one that was measured)."""
    if not values:
        raise ValueError("a percentile of nothing")
    if not 0 < share <= 1:
        raise ValueError(f"a share lies above 0 and at most at 1, not at {share}")
    return sorted(values)[math.ceil(share * len(values)) - 1]


@dataclass(frozen=True)
class Summary:
    """The middle, and what 95 of 100 runs are at least as good as."""

    p50: float
    p95: float
    runs: int


def summarise(values: Sequence[float], *, more_is_better: bool = False) -> Summary:
    """Two figures for many. Where more is better, as with runs a second, the bad end is the lower one."""
    if more_is_better:
        return Summary(-percentile([-value for value in values], 0.5), -percentile([-value for value in values], 0.95), len(values))
    return Summary(percentile(values, 0.5), percentile(values, 0.95), len(values))
