"""The order of attempts, their names, and their work as data."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import permutations

import pytest

from agent_sandbox.engine.experiment.model import (
    AttemptOutcome,
    AttemptWork,
    DiffSize,
    PlannedAttempt,
    StepEnd,
    check_names,
    checked_score,
    compared,
)
from agent_sandbox.engine.experiment.reports import TestCounts
from agent_sandbox.engine.experiment.saved import SavedExperiment, read_saved
from agent_sandbox.engine.work import Code, Command
from agent_sandbox.errors import PolicyError


def outcome(name: str, **fields: object) -> AttemptOutcome:
    return replace(AttemptOutcome(name, "passed"), **fields)  # type: ignore[arg-type]


def counts(passed: int, failed: int) -> TestCounts:
    return TestCounts(passed, failed, 0, "pytest")


def test_attempts_are_compared_in_the_documented_order() -> None:
    best_first = [
        outcome("scored", score=2.0, tests=counts(0, 9)),
        outcome("scored-less", score=1.0, tests=counts(99, 0)),
        outcome("no-failures", tests=counts(1, 0), diff=DiffSize(9, 99, 99)),
        outcome("more-passed", tests=counts(3, 1), diff=DiffSize(9, 99, 99)),
        outcome("fewer-passed", tests=counts(2, 1), diff=DiffSize(9, 2, 2)),
        outcome("more-lines", tests=counts(2, 1), diff=DiffSize(1, 3, 3)),
        outcome("more-files", tests=counts(2, 1), diff=DiffSize(2, 3, 3)),
        outcome("failed", state="failed", tests=counts(99, 0)),
        outcome("late", state="timed-out"),
        outcome("cancelled", state="cancelled"),
    ]
    backwards = compared(reversed(best_first))
    assert [each.name for each in backwards.results] == [each.name for each in best_first]
    assert [each.place for each in backwards.results] == [*range(1, 11)]
    assert backwards.winner == "scored"


def test_a_tie_goes_to_the_one_that_was_given_first_however_long_each_took() -> None:
    for order in permutations([outcome("a", seconds=9.0), outcome("b", seconds=1.0), outcome("c", seconds=5.0)]):
        assert compared(order).winner == order[0].name
        assert [each.name for each in compared(order).results] == [each.name for each in order]


def test_the_first_to_pass_wins_where_that_was_asked_for_and_no_failed_one_ever_does() -> None:
    results = [outcome("small", diff=DiffSize(1, 1)), outcome("quick", diff=DiffSize(9, 99))]
    assert compared(results).winner == "small" and compared(results, first="quick").winner == "quick"
    assert compared([outcome("a", state="failed"), outcome("b", state="broken")]).winner is None


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "a/b", "../x", "-rf", "a b", "a\n", "ü", "a" * 41, "x.check", "x.lock", "frozen", "held", "a\0", "\x1b[2J"],
)
def test_a_hostile_name_is_refused(name: str) -> None:
    check_names(["a", "B-2", "x.y_z"])
    with pytest.raises(PolicyError, match="cannot be the name"):
        check_names(["a", name])


def test_names_are_needed_and_each_is_used_once() -> None:
    with pytest.raises(PolicyError, match="no attempts"):
        check_names([])
    for names in (["a", "a"], ["a", "A"]):
        with pytest.raises(PolicyError, match="two attempts are called"):
            check_names(names)
    with pytest.raises(PolicyError, match="more than"):
        check_names([f"a{number}" for number in range(65)])


@pytest.mark.parametrize(
    "work",
    [
        AttemptWork(Command(("make", "-j2", "ü")), {"CI": "1"}, "sub/dir", b"\xff\0"),
        AttemptWork(Code("python", "print('hello')\n", ("--fast",)), {}, "."),
    ],
)
def test_work_is_data_that_survives_json_unchanged(work: AttemptWork) -> None:
    again = AttemptWork.from_data(json.loads(json.dumps(work.to_data())))
    assert again == work and again.to_data() == work.to_data()
    assert PlannedAttempt("a", work).portable and not PlannedAttempt("a", lambda sandbox: None).portable


@pytest.mark.parametrize("change", [{"format": 2}, {"argv": [1]}, {"argv": "make"}, {"env": []}, {"stdin_base64": "!"}, {"cwd": None}])
def test_data_that_is_no_work_is_refused(change: dict[str, object]) -> None:
    data = AttemptWork(Command(("make",))).to_data()
    assert AttemptWork.from_data(data).what == Command(("make",))
    with pytest.raises(PolicyError, match="no work of an attempt"):
        AttemptWork.from_data({**data, **change})


@pytest.mark.parametrize("score", [float("nan"), float("inf"), "9", None, [1]])
def test_a_score_without_an_order_is_refused(score: object) -> None:
    assert checked_score(True) == 1.0
    with pytest.raises(ValueError, match="finite number"):
        checked_score(score)


def test_a_kept_experiment_is_read_as_it_was_written() -> None:
    first = outcome("a", run=StepEnd(0, "exited", b"\xff", b"", ""), tests=counts(1, 2), notes=("x",), diff=DiffSize(1, 2, 3, 4), score=0.5)
    saved = SavedExperiment("/a\udcff", 12.5, 99, compared([first, outcome("b", state="failed", why="no")], seconds=1.5, ended="because"))
    assert read_saved(saved.text()) == saved
    for text in ("", "{}", '{"format": 9}', saved.text()[:-2]):
        with pytest.raises(PolicyError, match="cannot be read"):
            read_saved(text)
