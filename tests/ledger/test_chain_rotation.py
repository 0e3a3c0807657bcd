"""A file is closed and the next one begun: whatever fails on the way, and whoever looks meanwhile."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path

import pytest

from agent_sandbox.errors import LedgerUnavailable
from agent_sandbox.ledger import private_files
from agent_sandbox.ledger.chain import closed, entries, files
from agent_sandbox.ledger.verify import evidence, examine
from agent_sandbox.ledger.writer import Ledger
from tests.ledger.samples import exit_code, in_child, intent, write_many


def nearly_full(path: Path) -> Ledger:
    """A ledger whose next entry stands in the next file."""
    ledger = Ledger(path, clock=lambda: 1.5, segment_bytes=2_000)
    ledger.record(intent())
    while os.path.getsize(path) < 2_000:
        ledger.record(intent())
    return ledger


def test_where_a_file_has_one_name_only_it_grows_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = nearly_full(tmp_path / "ledger.jsonl")

    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", refuse)
        for _ in range(10):
            ledger.record(intent())
    assert len(files(ledger.path)) == 1 and examine(ledger.path, evidence(ledger.keys)).complete
    ledger.record(intent())
    assert len(files(ledger.path)) == 2, "where it can be closed again, it is"


@pytest.mark.parametrize("failing", ["link", "rename", "fsync", "pwrite"])
def test_a_failure_on_the_way_is_said_and_leaves_nothing_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    ledger = nearly_full(tmp_path / "ledger.jsonl")
    before, count = os.listdir("/proc/self/fd"), sum(1 for _ in entries(ledger.path))

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, failing, fail)
        with pytest.raises(LedgerUnavailable, match="No space left"):
            ledger.record(intent())
    assert os.listdir("/proc/self/fd") == before
    assert ledger.record(intent("after")).sequence > count
    report = examine(ledger.path, evidence(ledger.keys))
    assert report.intact and report.complete and len(files(ledger.path)) == 2


def test_a_new_file_begins_with_a_whole_entry_also_if_the_kernel_takes_it_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger, write = nearly_full(tmp_path / "ledger.jsonl"), os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:50]))
    ledger.record(intent())
    monkeypatch.undo()
    report = examine(ledger.path, evidence(ledger.keys))
    assert len(files(ledger.path)) == 2 and report.intact and report.complete and not report.torn


def test_a_closed_file_of_another_ledger_is_not_written_over(tmp_path: Path) -> None:
    ledger = nearly_full(tmp_path / "ledger.jsonl")
    (tmp_path / "ledger.closed").mkdir()
    (tmp_path / "ledger.closed/000000000001.jsonl").write_text("of a ledger that was here before")
    with pytest.raises(LedgerUnavailable, match="File exists"):
        ledger.record(intent())
    assert (tmp_path / "ledger.closed/000000000001.jsonl").read_text() == "of a ledger that was here before"


def test_what_has_another_name_among_the_closed_files_is_left_alone(tmp_path: Path) -> None:
    ledger = nearly_full(tmp_path / "ledger.jsonl")
    (tmp_path / "ledger.closed").mkdir()
    (tmp_path / "ledger.closed/notes.txt").write_text("mine")
    ledger.record(intent())
    assert [each.first for each in closed(ledger.path)] == [1] and (tmp_path / "ledger.closed/notes.txt").exists()


def test_who_looks_while_files_are_closed_sees_one_moment(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl", clock=lambda: 1.5, segment_bytes=1_500, kept_bytes=6_000)
    ledger.record(intent())
    writer = in_child(lambda: write_many(ledger, 1, 1_000_000))
    seen = set[int]()
    try:
        while len(seen) < 25:
            report = examine(ledger.path, evidence(ledger.keys))
            assert report.intact and report.complete, report
            seen.add(report.last)
            assert [entry.sequence for entry in entries(ledger.path)]
    finally:
        os.kill(writer, signal.SIGKILL)
        assert exit_code(writer) == -signal.SIGKILL
    assert private_files.read_anchor(ledger.keys) is not None
