"""The audit log shows what the ledger has, in memory and no more than it was told to keep."""

from __future__ import annotations

import stat
from pathlib import Path
from threading import Thread

import pytest

from agent_sandbox.audit import AuditEntry, AuditLevel, AuditLog
from agent_sandbox.errors import LedgerUnavailable
from agent_sandbox.ledger.event import Intent, Noted
from tests.ledger.samples import intent, ledger_at
from tests.ledger.test_query import EVENTS


@pytest.fixture
def audit(tmp_path: Path) -> AuditLog:
    made = AuditLog()
    watched = made.over(ledger_at(tmp_path / "ledger"))
    for event in EVENTS:
        watched.record(event)
    return made


def test_entries_are_found_by_level_category_sandbox_and_number(audit: AuditLog) -> None:
    def numbers(**wanted: object) -> list[int]:
        return [entry.sequence for entry in audit.get_entries(**wanted)]  # type: ignore[arg-type]

    assert numbers() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert numbers(level=AuditLevel.WARNING) == [3, 5, 6]
    assert numbers(category="file") == [6, 7]
    assert numbers(sandbox_id="a") == [1, 2]
    assert numbers(limit=2) == [7, 8] and numbers(limit=0) == []
    assert numbers(since=99.0) == []
    assert [entry.sequence for entry in audit.get_denied_actions()] == [3, 6]
    assert [entry.sequence for entry in audit.get_denied_actions(sandbox_id="b", limit=1)] == [6]


def test_an_outcome_names_the_action_that_it_ends(audit: AuditLog) -> None:
    by_number = {entry.sequence: entry for entry in audit.get_entries()}
    assert (by_number[2].category, by_number[2].action, by_number[2].target) == ("process", "run_command_completed", "git push 'two words'")
    assert (by_number[5].action, by_number[5].level) == ("run_code_failed", AuditLevel.ERROR)


def test_the_summary_counts(audit: AuditLog) -> None:
    summary = audit.get_summary()
    assert (summary["total_entries"], summary["allowed"], summary["denied"], summary["forgotten"]) == (8, 6, 2, 0)
    assert summary["by_category"] == {"code": 2, "file": 2, "process": 3, "promotion": 1}
    assert summary["by_sandbox"] == {"a": 2, "b": 5}


def test_the_oldest_is_forgotten_when_it_is_full_and_the_ledger_keeps_it(tmp_path: Path) -> None:
    small = AuditLog(max_entries=3)
    ledger = ledger_at(tmp_path / "ledger")
    for number in range(10):
        small.over(ledger).record(intent(str(number)))
    assert [entry.sequence for entry in small.get_entries()] == [8, 9, 10]
    assert (len(small), small.get_summary()["forgotten"]) == (3, 7)
    everything = AuditLog()
    everything.load(ledger.path)
    assert len(everything) == 10
    small.clear()
    assert len(small) == 0


def test_milder_entries_than_asked_for_are_not_kept(tmp_path: Path) -> None:
    grave = AuditLog(level=AuditLevel.WARNING)
    for event in EVENTS:
        grave.over(ledger_at(tmp_path / "ledger")).record(event)
    assert [entry.level for entry in grave.get_entries()] == [AuditLevel.WARNING, AuditLevel.ERROR, AuditLevel.WARNING]


def test_what_is_not_recorded_is_not_shown_and_what_is_shown_is_recorded(tmp_path: Path) -> None:
    ledger = ledger_at(tmp_path / "ledger")
    seen: list[bool] = []
    audit = AuditLog(on_entry=lambda entry: seen.append(entry.details["hash"] in Path(ledger.path).read_text()))
    audit.over(ledger).record(intent())
    assert seen == [True]
    tmp_path.joinpath("file").write_text("")
    with pytest.raises(LedgerUnavailable):
        audit.over(ledger_at(tmp_path / "file" / "ledger")).record(intent())
    assert len(audit) == 1


def test_an_onlooker_that_fails_stops_nothing(tmp_path: Path) -> None:
    def fails(entry: AuditEntry) -> None:
        raise ValueError(entry)

    audit = AuditLog(on_entry=fails)
    audit.over(ledger_at(tmp_path / "ledger")).record(intent())
    assert len(audit) == 1 and audit.get_summary()["callback_errors"] == 1


def test_an_export_is_for_this_user_and_nothing_in_it_ends_a_line(tmp_path: Path) -> None:
    audit = AuditLog()
    watched = audit.over(ledger_at(tmp_path / "ledger"))
    watched.record(Noted("file.read", {"target": 'x\n{"forged": true}\u202e\x7f\x1b', "raw": b"\xff"}))
    watched.record(Intent({"kind": "RunCommand", "argv": ["word"] * 100_000}, "", "", ""))
    assert audit.export_to_file(tmp_path / "out") == 2
    lines = (tmp_path / "out").read_text("ascii").splitlines()
    assert len(lines) == 2 and all(line.isprintable() for line in lines)
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o600


def test_many_threads_are_shown_at_once(tmp_path: Path) -> None:
    audit, ledger = AuditLog(), ledger_at(tmp_path / "ledger")
    threads = [Thread(target=lambda: [audit.over(ledger).record(intent()) for _ in range(50)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(entry.sequence for entry in audit.get_entries()) == list(range(1, 401))
