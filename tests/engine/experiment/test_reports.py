"""Reports of test runners, as they print them, and as a hostile program would."""

from __future__ import annotations

import pytest

from agent_sandbox.engine.experiment.reports import MOST_BYTES, TestCounts, read_counts, read_junit

JUNIT = b"""<?xml version="1.0" encoding="utf-8"?>
<testsuites><testsuite name="pytest" errors="9" failures="9" tests="99">
<testcase classname="a" name="one" time="0.1"/>
<testcase classname="a" name="two"><failure message="no">assert 1 == 2</failure><error/></testcase>
<testcase classname="a" name="three"><error message="boom"/></testcase>
<testcase classname="a" name="four"><skipped/></testcase>
<testcase classname="a" name="five"><system-out>text</system-out></testcase>
</testsuite></testsuites>"""
GO = b"""=== RUN   TestAdd
--- PASS: TestAdd (0.00s)
=== RUN   TestTable
    --- FAIL: TestTable/second (0.00s)
--- FAIL: TestTable (0.00s)
--- SKIP: TestSlow (0.00s)
FAIL
FAIL\texample.com/sum\t0.003s
"""
TAP = b"""TAP version 13
1..6
ok 1 - opens
not ok 2 - reads
ok 3 - writes # SKIP no disk
not ok 4 # todo later
    ok 1 - of a subtest
ok 5
"""


@pytest.mark.parametrize(
    ("output", "counts"),
    [
        (b"=== 2 failed, 10 passed, 1 skipped, 3 warnings in 0.12s ===", (10, 2, 1, "pytest")),
        (b"....\n4 passed in 0.01s\n", (4, 0, 0, "pytest")),
        (b"\x1b[31m=== \x1b[1m1 failed\x1b[0m, 2 errors, 1 xfailed, 1 xpassed in 61.00s (0:01:01) ===\x1b[0m", (1, 3, 1, "pytest")),
        (b"1 passed in 0.01s\nsecond run\n3 failed in 0.02s\n", (0, 3, 0, "pytest")),
        (b"..F\n-----\nRan 12 tests in 0.004s\n\nFAILED (failures=1, errors=2, skipped=3)\n", (6, 3, 3, "unittest")),
        (b"..\nRan 2 tests in 0.000s\n\nOK\n", (2, 0, 0, "unittest")),
        (b"Test Suites: 1 failed, 1 total\nTests:       1 failed, 2 skipped, 5 passed, 8 total\nTime: 1 s", (5, 1, 2, "jest")),
        (GO, (1, 2, 1, "go test")),
        (b"ok  \texample.com/a\t0.002s\nok  \texample.com/b\t(cached)\nFAIL\texample.com/c\t0.1s\n", (2, 1, 0, "go test, by package")),
        (b'{"Time":"2026-01-01T00:00:00Z","Action":"pass","Package":"p","Test":"TestA","Elapsed":0}\n', (1, 0, 0, "go test")),
        (TAP, (2, 2, 2, "TAP")),
        (JUNIT, (2, 2, 1, "JUnit XML")),
    ],
)
def test_the_numbers_of_each_runner_are_read(output: bytes, counts: tuple[int, int, int, str]) -> None:
    assert read_counts(output) == TestCounts(*counts)


@pytest.mark.parametrize(
    "output", [b"", b"all good\n", b"ok\n", b"no tests ran in 0.01s", b"\xff\xfe\0", b"3 apples in 2s", b"ok 1 - without a plan"]
)
def test_other_output_is_no_report(output: bytes) -> None:
    assert read_counts(output) is None


def test_a_plan_that_was_not_fulfilled_counts_as_failed() -> None:
    assert read_counts(b"1..5\nok 1\nok 2\n") == TestCounts(2, 3, 0, "TAP")


@pytest.mark.parametrize(
    "document",
    [
        b'<?xml version="1.0"?><!DOCTYPE t [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;&a;">]><testsuite><testcase name="&b;"/></testsuite>',
        b'<!DOCTYPE t SYSTEM "file:///etc/passwd"><testsuite><testcase/></testsuite>',
        b"<testsuite>" + b"<a>" * 10_000 + b"</a>" * 10_000 + b"</testsuite>",
        b"<html><testcase/></html>",
        b"<testsuite><testcase>",
        b"<testsuite><testcase/></testsuite>" + b" " * 100 + b"<testsuite/>",
    ],
)
def test_a_document_that_could_define_entities_or_is_none_is_not_read(document: bytes) -> None:
    assert read_junit(document) is None
    assert read_junit(b"<testsuite><testcase/></testsuite>") == TestCounts(1, 0, 0, "JUnit XML"), "the control"


@pytest.mark.parametrize(
    "line",
    [
        b"1 a, " * 200_000,
        b"9" * 1_000_000 + b" passed in 1s",
        b"=" * 1_000_000,
        b"1 passed, " * 100_000 + b"in 1",
        b"--- PASS: " * 100_000,
        b"\x1b[" * 500_000,
    ],
)
def test_hostile_output_is_read_in_bounded_time_and_claims_nothing_absurd(line: bytes) -> None:
    counts = read_counts(line + b"\n" + line)
    assert counts is None or counts.passed < 10**9


def test_only_the_end_of_long_output_is_read() -> None:
    assert read_counts(b"5 passed in 1s\n" + b"x\n" * MOST_BYTES) is None
    assert read_counts(b"x\n" * MOST_BYTES + b"5 passed in 1s\n") == TestCounts(5, 0, 0, "pytest")
