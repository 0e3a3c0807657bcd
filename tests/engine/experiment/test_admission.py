"""How many attempts run at once."""

from __future__ import annotations

import pytest

from agent_sandbox.engine.experiment.admission import LEAST_BYTES, Admission, admit, processors
from agent_sandbox.errors import PolicyError, RuntimeUnavailable

GIB = 1 << 30


def test_memory_is_shared_so_that_all_together_never_need_more_than_there_is() -> None:
    for count in (1, 2, 8, 64):
        for available in (GIB // 4, GIB, 16 * GIB):
            admitted = admit(count, available, wanted=None, ceiling=8 * GIB)
            assert admitted.memory_bytes is not None
            assert 1 <= admitted.at_once <= count and admitted.at_once * admitted.memory_bytes <= available * 3 // 4
    assert admit(8, 16 * GIB, wanted=None, ceiling=GIB) == Admission(8, GIB), "the policy's limit holds"


def test_attempts_that_need_much_memory_run_fewer_at_once() -> None:
    assert admit(8, 16 * GIB, wanted=4 * GIB, ceiling=8 * GIB) == Admission(3, 4 * GIB)
    assert admit(8, 16 * GIB, wanted=4 * GIB, ceiling=8 * GIB, most=2) == Admission(2, 4 * GIB)
    assert admit(2, 16 * GIB, wanted=GIB, ceiling=None) == Admission(2, GIB)


def test_short_memory_is_refused_before_anything_runs() -> None:
    for wanted, available in ((4 * GIB, GIB), (None, LEAST_BYTES), (None, 0)):
        with pytest.raises(RuntimeUnavailable, match="memory is short"):
            admit(4, available, wanted=wanted, ceiling=8 * GIB)
    assert admit(4, None, wanted=None, ceiling=GIB) == Admission(4, GIB), "where it cannot be known, processors alone decide"


def test_at_least_one_runs_and_never_more_than_there_are_processors() -> None:
    assert admit(1, GIB, wanted=None, ceiling=None).at_once == 1 and admit(2, GIB, wanted=None, ceiling=None, most=9).at_once == 2
    assert processors() >= 1
    with pytest.raises(PolicyError):
        admit(2, GIB, wanted=None, ceiling=None, most=0)
