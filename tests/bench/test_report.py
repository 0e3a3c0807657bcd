"""What the report says of what was measured, and of what was not."""

from __future__ import annotations

import dataclasses
import json

import pytest

from bench import report
from bench.run import account_from
from bench.samples import Summary
from bench.tables import Account, Row, Table
from bench.targets import TARGETS, judge

MACHINE = {"kernel": "6.18", "versions": {"bwrap": "0.8"}}


def account(user: str = "root", *, us: float = 1.0, bubblewrap: float | None = 12.0, missing: str = "") -> Account:
    peer = Row("bubblewrap", "bubblewrap + python", Summary(bubblewrap, bubblewrap, 9) if bubblewrap else None, missing)
    table = Table("warm", "print(1), calls 30 ms apart", "ms", (Row("us", "us, locked", Summary(us, 2 * us, 9)), peer), "us")
    return Account(user, 0 if user == "root" else 1000, (table,))


def line_with(words: str, text: str) -> str:
    return next(line for line in text.splitlines() if words in line)


def test_a_ratio_says_how_many_times_our_figure_a_peers_is() -> None:
    line = line_with("bubblewrap + python  ", report.text(MACHINE, [account(us=2.0, bubblewrap=24.0)]))
    assert line.split()[-4:] == ["24.0", "24.0", "9", "12.0"]


def test_a_missing_peer_is_listed_with_its_reason() -> None:
    text = report.text(MACHINE, [account(bubblewrap=None, missing="bwrap is not installed")])
    assert "missing: bwrap is not installed" in text


def test_a_long_reason_is_shortened_for_people_and_whole_in_the_document() -> None:
    reason = "because " * 100
    accounts = [account(bubblewrap=None, missing=reason)]
    assert reason not in report.text(MACHINE, accounts)
    assert reason in json.dumps(report.document(MACHINE, accounts))


@pytest.mark.parametrize(("bubblewrap", "words"), [(12.0, "reached"), (10.0, "reached"), (9.0, "NOT REACHED"), (None, "not measured")])
def test_a_target_is_said_to_be_reached_or_not(bubblewrap: float | None, words: str) -> None:
    line = line_with("times faster than bubblewrap", report.text(MACHINE, [account(bubblewrap=bubblewrap)]))
    assert line.split("at least 10")[1].strip() == words


def test_a_target_that_is_a_bound_from_above_is_missed_by_more() -> None:
    rows = (Row("us", "", Summary(9.0, 9.0, 1)), Row("python", "", Summary(2.0, 2.0, 1)))
    times, _, milliseconds = judge(Account("root", 0, (Table("command", "", "ms", rows, "us"),)))
    assert (times.got, times.reached) == (4.5, False)
    assert (milliseconds.got, milliseconds.reached) == (9.0, True)


def test_a_target_for_the_bad_end_divides_p95_by_p50() -> None:
    table = Table("drained", "", "ms", (Row("us", "", Summary(2.0, 9.0, 1)),), "us")
    got = {verdict.target.claim: (verdict.got, verdict.reached) for verdict in judge(Account("root", 0, (table,)))}
    assert got["print(1), back to back: p95 over p50"] == (4.5, False)
    assert got["the same on a clone of the machine: p95 over p50"] == (None, None)


def test_root_and_rootless_have_targets_of_their_own() -> None:
    wanted = {
        user: [
            target.wanted
            for target in TARGETS
            if (target.measure, target.over, target.under) == ("drained", "bubblewrap", "us") and user in target.users
        ]
        for user in ("root", "rootless")
    }
    assert wanted == {"root": [2.5], "rootless": [1.5]}


def test_measures_that_were_not_taken_have_no_verdict() -> None:
    assert {verdict.target.measure for verdict in judge(account())} == {"warm"}
    assert judge(Account("rootless", -1, problems=("NOT MEASURED",))) == ()


def test_an_account_survives_the_way_from_one_process_to_another() -> None:
    sent = account("rootless", bubblewrap=None, missing="why")
    assert account_from(json.loads(json.dumps(dataclasses.asdict(sent)))) == sent


@pytest.mark.parametrize(("value", "text"), [(0.5, "0.50"), (9.876, "9.88"), (15.46, "15.5"), (1234.4, "1234")])
def test_numbers_have_three_digits_that_mean_something(value: float, text: str) -> None:
    assert report.number(value) == text
