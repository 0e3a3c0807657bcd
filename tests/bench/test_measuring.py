"""How bursts are taken, and what becomes of a subject that cannot."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.crew import BEFORE, ROOT, Crew
from bench.measures import MEASURES, with_earlier
from bench.peers import PRINT, Missing, Staged, command, expect, python
from bench.subjects import SUBJECTS
from bench.targets import TARGETS
from bench.worker import burst, rate


def test_the_first_runs_of_a_burst_with_gaps_are_not_counted() -> None:
    runs: list[int] = []
    values = burst(lambda: runs.append(1), calls=5, seconds=60, gap=0.0001, skip=2)
    assert (len(runs), len(values)) == (7, 5)


def test_of_a_burst_back_to_back_the_first_half_is_not_counted() -> None:
    runs: list[int] = []
    values = burst(lambda: runs.append(1), calls=1_000, seconds=60, gap=0.0, skip=0)
    assert len(runs) == 1_000
    assert 0 < len(values) < len(runs)


def test_a_slow_subject_is_asked_less_often_but_never_without_an_answer() -> None:
    assert len(burst(lambda: None, calls=1_000_000, seconds=0, gap=0.0001, skip=1)) == 1


def test_what_has_to_be_done_before_each_run_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("bench.worker.time.perf_counter", lambda: clock[0])

    def passes(seconds: float) -> None:
        clock[0] += seconds

    staged = Staged(before=lambda: passes(5.0), run=lambda: passes(0.25))
    assert burst(staged, calls=2, seconds=60, gap=0.0001, skip=0) == [250.0, 250.0]


def test_every_thread_counts_towards_a_rate() -> None:
    (value,) = rate(lambda: None, seconds=0.2, threads=2)
    assert value > 0


def test_a_run_that_fails_in_a_thread_is_no_rate() -> None:
    def call() -> None:
        raise Missing("broken")

    with pytest.raises(Missing, match="broken"):
        rate(call, seconds=1, threads=2)


def test_a_program_that_is_not_there_is_missing_and_named() -> None:
    with pytest.raises(Missing, match="no-such-sandbox is not installed"):
        command(("no-such-sandbox", "true"))


def test_a_run_without_its_output_is_not_a_fast_run() -> None:
    with pytest.raises(Missing, match="did not print '1': Killed"):
        expect("1\n", "", "starting\nKilled\n")


def test_a_program_that_fails_after_printing_is_missing() -> None:
    with pytest.raises(Missing, match="ended with 3"):
        command(("sh", "-c", "echo 1; exit 3"), "1\n")()


def test_a_program_that_prints_less_than_it_should_is_missing() -> None:
    command(("sh", "-c", "echo 1; echo 2"), None, lines=2)()
    with pytest.raises(Missing, match="less than 2 lines: no more"):
        command(("sh", "-c", "echo 1; echo no more >&2"), None, lines=2)()


def test_a_program_that_hangs_is_missing() -> None:
    with pytest.raises(Missing, match="it hung: no end within 0 s"):
        command(("sleep", "1000"), longest=0.01)()


def test_the_job_is_done_by_a_plain_interpreter() -> None:
    python(PRINT)()


def test_every_measure_and_every_target_names_subjects_that_exist() -> None:
    keys = {measure.key: {subject.key for subject in SUBJECTS[measure.subjects]} for measure in MEASURES}
    assert all(measure.reference in keys[measure.key] for measure in MEASURES)
    assert all(measure.reference in {each.key for each in SUBJECTS[measure.when_quick]} for measure in MEASURES if measure.when_quick)
    assert all({target.over, target.under or target.over} <= keys[target.measure] for target in TARGETS)


def test_beside_an_earlier_commit_every_row_of_ours_stands_twice_and_no_peer_does() -> None:
    for subjects in SUBJECTS.values():
        keys = [subject.key for subject in with_earlier(subjects, "v0.1")]
        ours = [subject.key for subject in subjects if not subject.peer]
        assert [key for key in keys if key.endswith(BEFORE)] == [key + BEFORE for key in ours]
        assert [key for key in keys if not key.endswith(BEFORE)] == [subject.key for subject in subjects]
    assert {subject.key for subject in SUBJECTS["command"] if subject.peer} == {"bubblewrap", "python"}


@pytest.mark.parametrize(("understood", "place"), [("exit 1", "checkout"), ("exit 0", ROOT.name)])
def test_the_worker_of_an_earlier_commit_has_that_commits_program_on_a_store_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, understood: str, place: str
) -> None:
    """This benchmark measures it, so that both do the same; its own does where it is too old for that."""
    (tmp_path / "venv/bin").mkdir(parents=True)
    (tmp_path / "checkout").mkdir()
    python = tmp_path / "venv/bin/python"
    answer = """printf '{"missing": "%s in %s on %s"}\\n' "$4" "$(basename "$PWD")" "$AGENT_SANDBOX_STATE" """
    python.write_text(f"#!/bin/sh\n[ $1 != -c ] || {understood}\n{answer}\n")
    python.chmod(0o755)
    monkeypatch.setattr("bench.crew.EARLIER", tmp_path)
    monkeypatch.setenv("AGENT_SANDBOX_STATE", "/state")
    with Crew("print", ["us" + BEFORE]) as crew:
        assert crew.missing("us" + BEFORE) == f"us in {place} on /state-before"
