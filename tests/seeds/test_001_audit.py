"""The examples of the document "Agent Sandbox" that concern the audit log."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agent_sandbox import Sandbox
from agent_sandbox.audit import AuditLevel, AuditLog
from tests.seeds.conftest import Example
from tests.seeds.examples_001 import AUDIT


def test_the_audit_example_runs_as_written(
    example: Example, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names = example(AUDIT)
    assert (names["entries"], names["denied"]) == ([], [])
    assert capsys.readouterr().out == "Total: 0\nDenied: 0\n"
    assert (tmp_path / "audit.jsonl").read_text() == ""


def test_what_a_sandbox_did_is_in_its_audit_log(tmp_path: Path) -> None:
    with Sandbox(enable_audit=True, audit_level=AuditLevel.INFO) as sandbox:
        sandbox.execute("print(1)")
        sandbox.run(["ls"])
        audit = sandbox.audit
    assert isinstance(audit, AuditLog)
    assert [(entry.action, entry.allowed) for entry in audit.get_entries(sandbox_id=sandbox.id)] == [
        ("run_code", True),
        ("run_code_completed", True),
        ("run_command", False),
    ]
    (denied,) = audit.get_denied_actions(sandbox_id=sandbox.id)
    assert (denied.target, denied.category, denied.level) == ("ls", "process", AuditLevel.WARNING) and denied.reason
    assert audit.get_summary()["denied"] == 1
    assert audit.export_to_file(tmp_path / "audit.jsonl") == 3
    lines = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    assert [line["allowed"] for line in lines] == [True, True, False]


def test_without_audit_there_is_none() -> None:
    assert Sandbox(enable_audit=False).audit is None
