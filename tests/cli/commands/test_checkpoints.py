"""`checkpoints`: saved sessions are listed, shown, deleted and carried elsewhere. What is in them is nothing that this verb reads."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from agent_sandbox.assembly import here
from agent_sandbox.checkpoints import store
from agent_sandbox.cli.main import main
from agent_sandbox.ledger.event import Noted
from tests.ledger.samples import read
from tests.workspace.test_checkpoint_store import FACTS, writing

HOSTILE = "gone\x1b[2K\r\u202eevil"


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AGENT_SANDBOX_STATE", str(tmp_path / "state"))
    return tmp_path / "state"


def said(capfd: pytest.CaptureFixture[str], *line: str, code: int = 0) -> str:
    assert main(["checkpoints", *line]) == code, line
    output = capfd.readouterr()
    return output.out if code == 0 else output.err


def test_checkpoints_are_listed_shown_exported_imported_and_deleted(state: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert said(capfd) == ""
    saved = store().save(writing(b"content"))
    odd = store().save(writing(b"other", replace(FACTS, name=HOSTILE, created=2.0)))
    lines = said(capfd).splitlines()
    assert [line.split()[0] for line in lines] == [saved.digest[:12], odd.digest[:12]] and all(line.isprintable() for line in lines)
    listed = json.loads(said(capfd, "--json"))
    assert [each["digest"] for each in listed["checkpoints"]] == [saved.digest, odd.digest] and listed[
        "schema"
    ] == "agent-sandbox/checkpoints/1"
    assert saved.digest in said(capfd, "show", "a name") and saved.digest in said(capfd, "show", saved.digest[:8])
    exported = tmp_path / "exported"
    said(capfd, "export", "a name", str(exported))
    assert "needs --yes" in said(capfd, "delete", "a name", code=3) and store().find("a name") == saved
    said(capfd, "delete", "a name", "--yes")
    assert "there is no checkpoint" in said(capfd, "show", "a name", code=125)
    said(capfd, "import", str(exported))
    assert store().find("a name") == saved
    noted = [entry.event for entry in read(here().ledger().path)]
    assert [(each.what, dict(each.facts)["target"]) for each in noted if isinstance(each, Noted)] == [
        (f"checkpoint.{what}", saved.digest) for what in ("exported", "deleted", "imported")
    ]
    assert main(["log", "--all", "--category", "checkpoint", "--json"]) == 0
    assert len(json.loads(capfd.readouterr().out)["entries"]) == 3


def test_bad_words_and_damaged_files_are_named(state: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for line in (["forget"], ["show"], ["show", "a", "b"], ["export", "a"], ["import"], ["import", "a", "--yes"], ["--yes"]):
        said(capfd, *line, code=2)
    saved = store().save(writing(b"content"))
    path = state / "checkpoints" / saved.digest
    path.write_bytes(path.read_bytes()[:-1])
    assert "does not have its digest" in said(capfd, "show", "a name", code=125)
    assert "does not have its digest" in said(capfd, "export", "a name", str(tmp_path / "exported"), code=125)
    path.write_bytes(b"")
    assert main(["checkpoints"]) == 0
    assert f"{saved.digest[:12]} is damaged" in capfd.readouterr().err
    said(capfd, "delete", saved.digest[:12], "--yes")
    assert not path.exists() and not (tmp_path / "exported").exists()
    for bad in ("/dev/zero", str(tmp_path), str(tmp_path / "missing")):
        said(capfd, "import", bad, code=125)
