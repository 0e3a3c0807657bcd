"""`log` as its readers see it: what is shown, exported and said about the record itself."""

from __future__ import annotations

import json
import shutil
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest

from agent_sandbox.assembly import here
from agent_sandbox.cli.commands import log as log_module
from agent_sandbox.cli.main import main
from agent_sandbox.ledger.event import Intent, OutcomeEvent, RefusalEvent
from agent_sandbox.ledger.writer import Ledger

HOSTILE = "rm\x1b[2K\r ls \u202e\u200bevil"


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ledger:
    monkeypatch.setenv("AGENT_SANDBOX_STATE", str(tmp_path / "state"))
    ledger = here().ledger()
    ledger.record(Intent({"kind": "RunCommand", "argv": ["make", "test"]}, "d", "p", "command", sandbox="box"))
    ledger.record(OutcomeEvent(1, "done", {"exit_code": 0}, sandbox="box"))
    ledger.record(RefusalEvent({"kind": "RunCommand", "argv": [HOSTILE]}, "d", "p", "processes", f"no {HOSTILE}"))
    return ledger


def said(capsys: pytest.CaptureFixture[str], *line: str, code: int = 0) -> str:
    assert main(["log", *line]) == code
    return capsys.readouterr().out


def test_what_happened_is_shown_line_by_line_and_nothing_in_it_acts_on_the_terminal(
    recorded: Ledger, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = said(capsys).splitlines()
    assert len(lines) == 3 and all(line.isprintable() for line in lines)
    assert "make test" in lines[0] and "exit_code 0" in lines[1] and "DENIED" in lines[2]
    assert "\\x1b[2K" in lines[2] and "\\u202e\\u200b" in lines[2]


@pytest.mark.parametrize(
    ("options", "numbers"),
    [
        (["--denied"], [3]),
        (["--category", "process"], [1, 3]),
        (["--level", "warning"], [3]),
        (["--sandbox", "box"], [1, 2]),
        (["--grep", "MAKE"], [1]),
        (["--limit", "2"], [2, 3]),
        (["--since", "1h"], [1, 2, 3]),
        (["--until", "2001-02-03"], []),
        (["--since", "7d", "--until", "1s"], []),
    ],
)
def test_what_is_asked_for_is_shown(recorded: Ledger, capsys: pytest.CaptureFixture[str], options: list[str], numbers: list[int]) -> None:
    document = json.loads(said(capsys, "--json", *options))
    assert document["schema"] == "agent-sandbox/log/1" and [entry["sequence"] for entry in document["entries"]] == numbers


@pytest.mark.parametrize(
    "line", [["--level", "loud"], ["--format", "xml"], ["--since", "soon"], ["--since", "2026-99-99"], ["forget"], ["--follow", "--json"]]
)
def test_what_cannot_be_understood_is_refused(recorded: Ledger, capsys: pytest.CaptureFixture[str], line: list[str]) -> None:
    said(capsys, *line, code=2)


@pytest.mark.parametrize("form", ["jsonl", "csv", "ocsf"])
def test_everything_can_be_exported(recorded: Ledger, capsys: pytest.CaptureFixture[str], form: str) -> None:
    lines = said(capsys, "--format", form).splitlines()
    assert len(lines) == 3 + (form == "csv") and all(line.isprintable() for line in lines)


def test_a_large_ledger_is_searched_through_its_index(
    recorded: Ledger, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = said(capsys, "--denied")
    monkeypatch.setattr(log_module, "_WORTH_AN_INDEX", 1)
    assert said(capsys, "--denied") == read
    assert Path(recorded.path).with_name(log_module.INDEX).exists()


def test_an_index_in_which_somebody_has_hidden_an_entry_does_not_outlive_a_look_at_the_ledger(
    recorded: Ledger, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is no part of the record, and nothing tells whether it leaves something out: so it is made again from what was examined."""
    monkeypatch.setattr(log_module, "_WORTH_AN_INDEX", 1)
    read = said(capsys, "--denied")
    with closing(sqlite3.connect(Path(recorded.path).with_name(log_module.INDEX))) as tables:
        tables.execute("UPDATE entries SET allowed = 1")
        tables.commit()
    assert read and said(capsys, "--denied") == "", "the control: what it leaves out is not found"
    said(capsys, "verify")
    assert said(capsys, "--denied") == read


def test_following_goes_on_until_it_is_interrupted(
    recorded: Ledger, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", interrupted)
    assert main(["log", "--follow"]) == 130
    assert len(capfd.readouterr().out.splitlines()) == 3


def test_a_ledger_that_is_whole_is_said_to_be(recorded: Ledger, capsys: pytest.CaptureFixture[str]) -> None:
    words = said(capsys, "verify")
    assert "integrity   holds" in words and "complete    holds" in words and recorded.keys in words


def test_integrity_and_completeness_are_told_apart(recorded: Ledger, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(recorded.path)
    whole = path.read_bytes()
    path.write_bytes(b"".join(whole.splitlines(keepends=True)[:2]))
    words = said(capsys, "verify", code=1)
    assert "integrity   holds" in words and "INCOMPLETE" in words and "entries 3 to 3" in words
    path.write_bytes(whole.replace(b"make", b"fake"))
    words = said(capsys, "verify", code=1)
    assert "BROKEN: the ledger is broken: entry 1 was changed" in words and "unknown" in words


def test_a_copy_is_examined_with_a_checkpoint_that_was_kept(recorded: Ledger, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "note").write_text(said(capsys, "checkpoint"))
    copy = shutil.copy(recorded.path, tmp_path / "copy")
    document = json.loads(said(capsys, "verify", str(copy), "--checkpoint", str(tmp_path / "note"), "--json"))
    assert (document["intact"], document["complete"], document["checkpoints"]) == (True, None, [3, 3])
    assert json.loads(said(capsys, "verify", str(copy), "--keys", recorded.keys, "--json"))["complete"] is True
    (tmp_path / "note").write_text("not a checkpoint")
    said(capsys, "verify", str(copy), "--checkpoint", str(tmp_path / "note"), code=125)


def test_before_anything_was_recorded_there_is_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AGENT_SANDBOX_STATE", str(tmp_path / "state"))
    assert said(capsys) == ""
    said(capsys, "verify", code=125)
    assert not (tmp_path / "state").exists(), "looking makes nothing"
