"""The index finds what reading finds, and is made again whenever it does not fit."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from agent_sandbox.ledger.chain import entries
from agent_sandbox.ledger.query import Filter, Index, select
from agent_sandbox.ledger.writer import Ledger
from tests.ledger.samples import intent, ledger_at
from tests.ledger.test_query import EVENTS

FILTERS = (
    *(Filter(), Filter(kind="refusal"), Filter(category="file"), Filter(level="warning"), Filter(sandbox="b"), Filter(allowed=False)),
    *(
        Filter(allowed=True),
        Filter(words="PUSH"),
        Filter(words="%"),
        Filter(since=1.0, until=2.0),
        Filter(after=9),
        Filter(words="' OR 1=1 --"),
    ),
)


def small(path: Path, rounds: int) -> Ledger:
    ledger = Ledger(path, clock=lambda: 1.5, segment_bytes=3_000)
    for _ in range(rounds):
        for event in EVENTS:
            ledger.record(event)
    return ledger


def agrees(ledger: Ledger, index: Index) -> bool:
    return all(index.find(wanted, newest=1000) == [entry for entry, _ in select(entries(ledger.path), wanted)] for wanted in FILTERS)


def test_what_it_finds_is_what_reading_finds_also_after_more_was_written(tmp_path: Path) -> None:
    ledger = small(tmp_path / "ledger.jsonl", 3)
    index = Index(ledger.path, str(tmp_path / "index"))
    assert agrees(ledger, index)
    small(tmp_path / "ledger.jsonl", 3)
    assert agrees(ledger, index)
    assert stat.S_IMODE(os.stat(tmp_path / "index").st_mode) == 0o600
    assert [entry.sequence for entry in index.find(Filter(), newest=2)] == [entry.sequence for entry in entries(ledger.path)][-2:]


def test_files_that_were_removed_are_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    index = Index(str(path), str(tmp_path / "index"))
    ledger = Ledger(path, clock=lambda: 1.5, segment_bytes=2_000, kept_bytes=4_000)
    for number in range(40):
        ledger.record(intent(str(number)))
        if number % 10 == 5:
            assert agrees(ledger, index)
    assert agrees(ledger, index)


def test_a_torn_write_is_passed_over(tmp_path: Path) -> None:
    ledger = small(tmp_path / "ledger.jsonl", 1)
    index = Index(ledger.path, str(tmp_path / "index"))
    with open(ledger.path, "ab") as file:
        file.write(b'{"seq":')
    assert len(index.find(Filter(), newest=100)) == len(EVENTS)
    ledger_at(Path(ledger.path)).record(intent())
    assert agrees(ledger, index)


@pytest.mark.parametrize("harm", ["garbage", "gone", "of another ledger", "of another version"])
def test_an_index_that_does_not_fit_is_made_again(tmp_path: Path, harm: str) -> None:
    ledger = small(tmp_path / "ledger.jsonl", 2)
    place = tmp_path / "index"
    index = Index(ledger.path, str(place))
    assert agrees(ledger, index)
    match harm:
        case "garbage":
            place.write_bytes(b"\xff" * 8192)
        case "gone":
            place.unlink()
        case "of another ledger":
            other = Ledger(tmp_path / "other.jsonl", clock=lambda: 2.5)
            for _ in range(30):
                other.record(intent("other"))
            Index(other.path, str(tmp_path / "second")).find(Filter(), newest=1)
            os.replace(tmp_path / "second", place)
        case "of another version":
            import sqlite3
            from contextlib import closing

            with closing(sqlite3.connect(place)) as tables:
                tables.execute("PRAGMA user_version = 99")
    assert agrees(ledger, index)


def test_a_ledger_without_entries_has_none(tmp_path: Path) -> None:
    assert Index(str(tmp_path / "none"), str(tmp_path / "index")).find(Filter(), newest=5) == []
