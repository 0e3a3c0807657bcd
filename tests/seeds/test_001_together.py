"""The document "Agent Sandbox" from its beginning to its end, in one program; and every name of its reference."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

import agent_sandbox
from agent_sandbox import AuditLog, PermissionSet, SandboxStatus
from tests.images import slim
from tests.seeds import examples_001 as examples
from tests.seeds.conftest import Example

IN_ORDER = [
    examples.QUICK_START,
    examples.CONFIGURATION,
    examples.PERMISSIONS,
    examples.PROCESS_ISOLATION,
    examples.AUDIT,
    examples.VALIDATION,
    examples.EXECUTION,
    examples.PATTERNS,
    examples.CONTEXT_MANAGER,
    "sandbox = Sandbox()",  # the one of the context manager is closed
    examples.ERROR_HANDLING,
]
# Where the examples import from, or the package itself.
REFERENCE = {
    "agent_sandbox": ["Sandbox", "SandboxConfig", "SandboxResult", "SandboxStatus", "create_sandbox"],
    "agent_sandbox.permissions": ["PermissionSet", "PermissionLevel", "FilePermission", "NetworkPermission", "ProcessPermission"],
    "agent_sandbox.isolation": ["IsolationBackend", "IsolationConfig", "ProcessIsolation", "ContainerIsolation"],
    "agent_sandbox.executor": ["CodeExecutor", "ExecutionContext", "ExecutionResult"],
    "agent_sandbox.audit": ["AuditLog", "AuditEntry", "AuditLevel"],
}


def test_the_whole_document_runs_as_one_program(
    example: Example, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names = example("\n".join(IN_ORDER), SandboxStatus=SandboxStatus)
    printed = capsys.readouterr().out.splitlines()
    assert printed[:7] == ["Hello from sandbox!", "", "SandboxStatus.COMPLETED", "Total: 0", "Denied: 0", "False", printed[6]]
    assert "'pattern': 'socket'" in printed[6]
    assert printed[7:11] == ["managed", "", "Error: ValueError: oops", "Exit code: 1"]
    assert printed[11].startswith("Stderr: Traceback")
    audit = names["audit"]
    assert [(entry.action, entry.allowed) for entry in audit.get_entries()] == [("run_code", True), ("run_code_completed", True)]


def test_an_executor_writes_to_the_audit_log_that_it_was_given(example: Example, capsys: pytest.CaptureFixture[str]) -> None:
    audit = example(examples.AUDIT.partition("# Get entries")[0])["audit"]
    assert isinstance(audit, AuditLog)
    names = example(examples.VALIDATION, permissions=PermissionSet(), ProcessIsolation=agent_sandbox.ProcessIsolation, audit=audit)
    names["executor"].execute("import socket")
    assert capsys.readouterr().out.splitlines()[-1].startswith("DENIED: run_code on python")
    assert len(audit.get_denied_actions()) == 1


def test_container_isolation_runs_where_there_is_an_image(example: Example) -> None:
    assert slim() == "python:3.11-slim"
    names = example(examples.CONTAINER_ISOLATION, config=agent_sandbox.IsolationConfig())
    assert names["backend"].is_available() and names["result"].stdout == "in container\n"


@pytest.mark.parametrize(("module", "name"), [(module, name) for module, names in REFERENCE.items() for name in names])
def test_every_name_of_the_reference_is_there(module: str, name: str) -> None:
    assert getattr(importlib.import_module(module), name) is getattr(agent_sandbox, name)
