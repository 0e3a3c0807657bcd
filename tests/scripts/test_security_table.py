"""The table of attacks: what is shown, and what it refuses to call a success."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from scripts.security_table import Row, beside, row_of, table
from tests.security.cases import CASES, COMPLETE


def case_of(name: str, inside: str = "") -> ElementTree.Element:
    return ElementTree.fromstring(f'<testcase name="{name}">{inside}</testcase>')


TOLD = '<properties><property name="happened" value="EPERM"/><property name="control" value="works outside"/></properties>'


def row(name: str, inside: str = "") -> Row:
    found = row_of(case_of(name, inside), "root")
    assert found is not None
    return found


def test_a_row_says_which_case_on_which_runtime_and_what_happened() -> None:
    assert row("test_a_thing_holds[process-/p/[a-z]-11]", TOLD) == Row(
        "11", "P0", "process", "root", "a thing holds (/p/[a-z])", "holds", "EPERM", "works outside"
    )
    assert row("test_of_ours[172]", TOLD)[:5] == ("172", "P1", "host", "root", "of ours")
    assert row("test_both[process-17+2]", TOLD).prio == "P0", "the graver of the two"


def test_a_test_that_tries_no_case_is_no_row() -> None:
    assert row_of(case_of("test_a_helper"), "root") is None
    assert row_of(case_of("test_garbage[no UTF-0]"), "root") is None, "a number that is no case"


@pytest.mark.parametrize(
    ("inside", "verdict", "sinks"),
    [
        (TOLD, "holds", False),
        ("", "NO CONTROL", True),
        ('<failure message="assert 1 == 2&#10;more"/>', "FAILED", True),
        ('<error message="fixture"/>', "BROKEN", True),
        ('<skipped message="no strace"/>', "NOT TRIED", True),
    ],
)
def test_only_what_held_beside_a_control_is_a_success(inside: str, verdict: str, sinks: bool) -> None:
    found = row("test_it[process-1]", inside)
    assert (found.verdict, found.sinks_the_release) == (verdict, sinks)


@pytest.mark.parametrize("runtime", ["container", "gvisor", "microvm"])
def test_each_runtime_has_rows_of_its_own(runtime: str) -> None:
    assert row(f"test_it[{runtime}-/p/?-11]", TOLD)[2:6] == (runtime, "root", "it (/p/?)", "holds")


@pytest.mark.parametrize(
    ("message", "verdict", "happened"),
    [("does not apply: it has no terminal", "does not apply", "it has no terminal"), ("not on this machine: gvisor", "NOT HERE", "gvisor")],
)
def test_a_stated_reason_is_a_row_and_no_failure(message: str, verdict: str, happened: str) -> None:
    found = row("test_it[gvisor-1]", f'<skipped message="{message}"/>')
    assert (found.verdict, found.happened, found.sinks_the_release) == (verdict, happened, False)
    assert row("test_it[gvisor-1]", '<skipped message="no time"/>').sinks_the_release, "any other skip is one"


def test_a_skip_sinks_only_the_highest_priority() -> None:
    assert not row("test_it[process-17]", '<skipped message="no disk"/>').sinks_the_release


@pytest.fixture
def excused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A case that nothing tries, with a reason."""
    monkeypatch.setitem(CASES, 146, CASES[146]._replace(untried="it cannot be tried yet"))


@pytest.mark.usefixtures("excused")
def test_every_case_without_a_test_is_named_with_its_reason_or_as_missing() -> None:
    listed = {int(each.case) for each in beside([])}
    assert listed == {case.number for case in CASES.values() if case.surface in COMPLETE}
    verdicts = {each.case: each.verdict for each in beside([])}
    assert verdicts["1"] == "MISSING" and verdicts["146"] == "NOT TRIED"


@pytest.mark.usefixtures("excused")
def test_a_reason_that_a_test_has_made_untrue_is_outdated() -> None:
    verdicts = {each.case: each.verdict for each in beside([row("test_promotion[146]", TOLD)])}
    assert verdicts["146"] == "OUTDATED" and "1" in verdicts


def test_the_part_of_a_case_that_is_left_open_is_shown_beside_its_tests() -> None:
    assert [each.verdict for each in beside([row("test_wheel[172]", TOLD)]) if each.case == "172"] == ["LEFT OPEN"]


def test_the_table_is_in_the_order_of_the_cases() -> None:
    lines = table([row("test_b[process-11]", TOLD), row("test_a[process-2]", TOLD)])
    assert [line.split()[0] for line in lines] == ["case", "2", "11"]
