"""The benchmark in bad surroundings: what could not be measured is said, the rest is kept, printed and written."""

from __future__ import annotations

import argparse
import errno
import json
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench import measures, run
from bench.crew import Crew
from bench.measures import Measure, take
from bench.run import Document
from bench.subjects import SUBJECTS, Subject
from bench.tables import Account, Table

DONE = Table("warm", "print(1)", "ms", (), "us", ())
Take = Callable[..., Iterator[Table]]


def measured(monkeypatch: pytest.MonkeyPatch, taking: Take) -> tuple[list[Account], bool]:
    """What is kept when `take` does this; and whether it counts as interrupted."""
    kept: list[Account] = []
    monkeypatch.setattr(run, "take", taking)
    interrupted = run._measure(measures.MEASURES[:3], argparse.Namespace(quick=True, before=""), kept.append)
    return kept, interrupted


@pytest.fixture(autouse=True)
def interrupts() -> Iterator[None]:
    """The handlers as they were."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_what_was_measured_before_something_broke_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaking(*_: object, **__: object) -> Iterator[Table]:
        yield DONE
        raise OSError(13, "Permission denied")

    kept, interrupted = measured(monkeypatch, breaking)
    assert [account.tables for account in kept] == [(DONE,), (DONE,)]
    assert not interrupted
    assert "STOPPED after 1 of 3" in kept[-1].problems[0] and "Permission denied" in kept[-1].problems[0]


def test_what_was_measured_before_an_interrupt_is_kept_and_a_second_one_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted_later(*_: object, **__: object) -> Iterator[Table]:
        yield DONE
        os.kill(os.getpid(), signal.SIGINT)
        yield DONE

    kept, interrupted = measured(monkeypatch, interrupted_later)
    assert interrupted and kept[-1].tables == (DONE,)
    assert kept[-1].problems == ("INTERRUPTED after 1 of 3 measures",)
    os.kill(os.getpid(), signal.SIGINT)  # while the report is being written


def test_a_measure_that_breaks_is_named_and_the_next_one_has_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    subjects = (Subject("python", "python", lambda: lambda: None),)
    monkeypatch.setitem(SUBJECTS, "command", subjects)
    monkeypatch.setitem(SUBJECTS, "turns", subjects)
    first = Measure("first", "", "turns", {"burst": None}, rounds=1, reference="python")
    second = Measure("second", "", "command", measures._burst(1, 1.0), rounds=1, reference="python")
    monkeypatch.setattr(measures, "Crew", _breaking_for("turns", Crew))
    failures: list[str] = []
    tables = list(take([first, second], quick=False, say=lambda _: None, failed=failures.append))
    assert [table.measure for table in tables] == ["second"]
    assert tables[0].rows[0].figures is not None
    assert failures == ["NOT MEASURED: first: OSError: [Errno 24] Too many open files"]


def _breaking_for(who: str, crew: type[Crew]) -> Callable[..., Crew]:
    def make(measure: str, *arguments: Any, **how: Any) -> Crew:
        if measure == who:
            raise OSError(errno.EMFILE, "Too many open files")
        return crew(measure, *arguments, **how)

    return make


def test_the_report_is_written_with_every_table_and_replaced_at_one_stroke(tmp_path: Path) -> None:
    output = tmp_path / "report.json"
    document = Document(output, {"kernel": "6.18"})
    document.keep(Account("root", 0, (DONE,)))
    first = output.stat().st_ino
    assert json.loads(output.read_text())["accounts"][0]["tables"][0]["measure"] == "warm"
    document.keep(Account("root", 0, (DONE, DONE)))
    assert output.stat().st_ino != first
    assert os.listdir(tmp_path) == ["report.json"]


def test_a_full_disk_spoils_no_earlier_report_and_the_new_one_is_printed_and_goes_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "full/report.json"
    output.parent.mkdir()
    output.write_text("earlier")
    real = tempfile.mkstemp
    monkeypatch.setattr(run, "_ELSEWHERE", tmp_path / "elsewhere.json")

    def mkstemp(prefix: str, dir: Path) -> tuple[int, str]:
        descriptor, name = real(prefix=prefix, dir=dir)
        if dir == output.parent:  # a device that is always full
            os.close(descriptor)
            descriptor = os.open("/dev/full", os.O_WRONLY)
        return descriptor, name

    monkeypatch.setattr(tempfile, "mkstemp", mkstemp)
    document = Document(output, {"kernel": "6.18"})
    for _ in range(3):
        document.keep(Account("root", 0, (DONE,)))
    document.finish()
    printed = capsys.readouterr()
    assert "print(1)" in printed.out
    assert printed.err.count("cannot be written: No space left on device") == 1
    assert output.read_text() == "earlier" and os.listdir(output.parent) == ["report.json"]
    assert json.loads((tmp_path / "elsewhere.json").read_text())["accounts"]


def test_where_the_directory_of_the_benchmark_belongs_to_another_the_scratch_is_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "HOME", tmp_path)
    real = tempfile.mkdtemp

    def mkdtemp(suffix: str | None, prefix: str, dir: str | Path) -> str:
        if dir == tmp_path:
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(suffix, prefix, dir)

    monkeypatch.setattr(tempfile, "mkdtemp", mkdtemp)
    with run._scratch() as scratch:
        assert scratch.startswith("/var/tmp/") and os.path.isdir(scratch)
    assert not os.path.exists(scratch)
    assert "cannot be written to (Permission denied)" in capsys.readouterr().err
