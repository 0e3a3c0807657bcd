"""Comparisons as text."""

from __future__ import annotations

from agent_sandbox.engine.experiment.comparison import beside, table
from agent_sandbox.engine.experiment.model import AttemptOutcome, DiffSize, compared
from agent_sandbox.engine.experiment.reports import TestCounts


def test_the_table_has_the_winner_first_and_calls_numbers_of_tests_claims() -> None:
    good = AttemptOutcome("b", "passed", tests=TestCounts(3, 0, 0, "pytest"), diff=DiffSize(1, 2, 1), seconds=1.25)
    lines = [*table(compared([AttemptOutcome("a", "failed", "its check \x1b[2Jfailed"), good]))]
    assert lines[1].split() == ["*", "b", "passed", "3", "passed,", "0", "failed", "(claimed)", "1", "file", "+2", "-1", "1.2", "s"]
    assert "\x1b" not in "".join(lines) and "no changes" in lines[2] and "score" not in lines[0]


def test_diffs_stand_beside_one_another_and_nothing_is_cut_off() -> None:
    long = "+" + "x" * 50
    lines = [*beside({"a": {"f": ("diff --git a/f b/f", "-one", long)}, "b": {"g": ("+漢字",)}}, 43)]
    assert lines[0].split() == ["a", "│", "b"] and "diff --git" not in "".join(lines)
    assert sum(line.partition("│")[0].count("x") for line in lines) == 50
    assert all("(not changed)" in line for line in (lines[3], lines[lines.index("── g") + 1]))
    assert [*beside({}, 80)] == []
