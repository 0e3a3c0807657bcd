"""`log` as its readers see it: what is shown, exported and said about the record itself."""

from __future__ import annotations

import json
import os
import re
import shutil
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest

from agent_sandbox.assembly import here
from agent_sandbox.cli.commands import log as log_module
from agent_sandbox.cli.main import main
from agent_sandbox.engine import observation
from agent_sandbox.ledger import event
from agent_sandbox.ledger.event import CATEGORIES, Intent, OutcomeEvent, RefusalEvent
from agent_sandbox.ledger.writer import Ledger
from agent_sandbox.workspace.store import sandbox_id

BOX = sandbox_id(os.getcwd())  # of the project in which the tests run
HOSTILE = "rm\x1b[2K\r ls \u202e\u200bevil"


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ledger:
    monkeypatch.setenv("AGENT_SANDBOX_STATE", str(tmp_path / "state"))
    ledger = here().ledger()
    ledger.record(Intent({"kind": "RunCommand", "argv": ["make", "test"]}, "d", "p", "command", sandbox=BOX))
    ledger.record(OutcomeEvent(1, "done", {"exit_code": 0}, sandbox=BOX))
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
        (["--sandbox", BOX], [1, 2]),
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
    "line",
    [
        ["--level", "loud"],
        ["--format", "xml"],
        ["--since", "soon"],
        ["--since", "2026-99-99"],
        ["forget"],
        ["--follow", "--json"],
        ["--category", "proces"],
        ["--all", "--project", "."],
        ["--keys", "x"],
        ["verify", "--denied"],
    ],
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


def test_the_entries_of_another_project_are_counted_and_shown_with_all(recorded: Ledger, capfd: pytest.CaptureFixture[str]) -> None:
    recorded.record(Intent({"kind": "RunCommand", "argv": ["canary"]}, "e", "p", "command", sandbox="other-0123"))
    recorded.record(Intent({"kind": "RunCommand", "argv": ["clone"]}, "f", "p", "command", sandbox=f"{BOX}/throw-away"))
    assert main(["log"]) == 0
    shown = capfd.readouterr()
    assert "canary" not in shown.out and "1 entry of other projects: agent-sandbox log --all" in shown.err
    assert [line.split()[3:5] for line in shown.out.splitlines() if "clone" in line] == [["NO", "END"]] and "throw-away" in shown.out
    assert "canary" in (everything := said(capfd, "--all"))
    assert [line.split()[5] for line in everything.splitlines() if "canary" in line] == ["other-0123"], "the project has a column"
    assert "canary" in said(capfd, "--sandbox", "other-0123") and "canary" in said(capfd, "--format", "jsonl")
    assert "clone" in said(capfd, "--sandbox", BOX) and "canary" not in said(capfd, "--format", "jsonl", "--project", ".")


def test_the_index_tells_projects_and_unended_actions_apart_as_the_ledger_does(
    recorded: Ledger, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded.record(Intent({"kind": "RunCommand", "argv": ["canary"]}, "e", "p", "command", sandbox="other-0123"))
    recorded.record(Intent({"kind": "RunCommand", "argv": ["clone"]}, "f", "p", "command", sandbox=f"{BOX}/throw-away"))
    lines = (["--json"], ["--json", "--all"], ["--json", "--sandbox", BOX], ["--json", "--denied"])
    read = [said(capsys, *line) for line in lines]
    monkeypatch.setattr(log_module, "_WORTH_AN_INDEX", 1)
    assert [said(capsys, *line) for line in lines] == read and json.loads(read[0])["elsewhere"] == 1


def test_an_action_that_was_begun_and_never_ended_is_marked(recorded: Ledger, capsys: pytest.CaptureFixture[str]) -> None:
    recorded.record(Intent({"kind": "RunCommand", "argv": ["sleep"]}, "e", "p", "command", sandbox=BOX))
    lines = said(capsys).splitlines()
    assert ["NO END" in line for line in lines] == [False, False, False, True]
    assert [entry["ended"] for entry in json.loads(said(capsys, "--json"))["entries"]] == [True, None, None, False]
    recorded.record(OutcomeEvent(4, "done", {}, sandbox=BOX))
    assert "NO END" not in said(capsys)


@pytest.mark.parametrize("limit", ["1", "2"])
def test_following_begins_with_the_newest_entries(
    recorded: Ledger, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    pauses: list[float] = []

    def paused(seconds: float) -> None:
        if pauses:
            raise KeyboardInterrupt
        pauses.append(seconds)
        recorded.record(OutcomeEvent(1, "done", {"late": 1}, sandbox=BOX))

    monkeypatch.setattr(time, "sleep", paused)
    assert main(["log", "--follow", "--limit", limit]) == 130
    lines = capfd.readouterr().out.splitlines()
    assert len(lines) == int(limit) + 1 and "DENIED" in lines[-2] and "late 1" in lines[-1]


def test_a_ledger_that_was_removed_is_missing_and_not_new(recorded: Ledger, capfd: pytest.CaptureFixture[str]) -> None:
    whole = Path(recorded.path).read_bytes()
    os.unlink(recorded.path)
    assert main(["log"]) == 1
    assert "is missing: it had 3 entries" in capfd.readouterr().err
    assert json.loads(said(capfd, "--json", code=1))["missing"]
    words = said(capfd, "verify", code=1)
    assert "INCOMPLETE" in words and "entries 1 to 3" in words
    Path(recorded.path).write_bytes(b"".join(whole.splitlines(keepends=True)[:2]))
    assert main(["log"]) == 1
    assert "has lost its end: it had 3 entries, and the last one here is 2" in capfd.readouterr().err
    Path(recorded.path).write_bytes(whole)
    said(capfd)  # the control: with its entries there is nothing to say


@pytest.mark.parametrize("content", [b"", b"hello\n", b"\0" * 4096, b"{}\n"])
def test_a_file_that_is_no_ledger_is_not_called_intact(
    recorded: Ledger, capfd: pytest.CaptureFixture[str], tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "file").write_bytes(content)
    assert main(["log", "verify", str(tmp_path / "file")]) == 125
    shown = capfd.readouterr()
    assert "is not a ledger" in shown.err and "holds" not in shown.out


def test_every_category_that_is_recorded_can_be_asked_for() -> None:
    """The categories of noted facts are the words before the dot."""
    sources = Path(log_module.__file__).parents[2].rglob("*.py")
    noted = {match for path in sources for match in re.findall(r'Noted\("(\w+)\.', path.read_text())}
    assert {"approval", "capability", "elevation"} <= noted <= set(CATEGORIES)
    assert {category for category, _ in event._ACTIONS.values()} | set(observation._CATEGORIES.values()) <= set(CATEGORIES)
