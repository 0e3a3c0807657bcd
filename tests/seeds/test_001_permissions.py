"""The examples of the document "Agent Sandbox" that concern permissions, the code executor and pattern detection."""

from __future__ import annotations

from typing import Any

import pytest

from agent_sandbox import CodeExecutor, PermissionSet, ProcessIsolation, SandboxStatus
from agent_sandbox.policy.code.patterns import DEFAULT
from tests.seeds.conftest import Example
from tests.seeds.examples_001 import EXECUTION, PATTERNS, PERMISSIONS, VALIDATION

MEETS = {
    "os.system": "import os\nos.system('ls')",
    "subprocess": "import subprocess",
    "__import__": "__import__('json')",
    "eval(": "eval('1')",
    "exec(": "exec('1')",
    "compile(": "compile('1', 'x', 'eval')",
    "open(": "open('x')",
    "socket": "import socket",
    "requests": "import requests",
    "urllib": "import urllib.request",
}


def names_of(example: Example, permissions: PermissionSet) -> dict[str, Any]:
    return example(VALIDATION, permissions=permissions, ProcessIsolation=ProcessIsolation, audit=None)


def test_the_permissions_are_what_the_policy_says(example: Example) -> None:
    permissions = example(PERMISSIONS)["permissions"]
    policy = permissions.policy()
    assert (policy.files.read, policy.files.write, policy.files.allow_hidden) == (True, False, False)
    reached = [
        path for path in ("/data/a", "/data/secrets/x", "/data/.hidden", "/config/a.json", "/config/a.txt") if policy.files.reaches(path)
    ]
    assert reached == ["/data/a", "/config/a.json"]
    permitted = [
        program for program in ("python3", "pip", "git", "rm", "dd", "mkfs.ext4", "curl", "bash", "sh") if policy.programs.permits(program)
    ]
    assert permitted == ["python3", "pip", "git"]
    assert (policy.processes, policy.limits.processes) == (True, 5)


def test_the_network_permission_is_what_the_policy_says(example: Example) -> None:
    permissions = example(PERMISSIONS)["permissions"]
    network = permissions.network
    asked = [
        ("api.openai.com", 443),
        ("raw.github.com", 80),
        ("github.com", 443),
        ("x.malware.com", 443),
        ("api.openai.com", 22),
        ("localhost", 80),
    ]
    assert [network.permits(host, port) for host, port in asked] == [True, True, False, False, False, True]
    assert permissions.policy().network == network and permissions.warnings == ()


def test_the_code_is_validated_without_being_run(example: Example, capsys: pytest.CaptureFixture[str]) -> None:
    names = names_of(example, example(PERMISSIONS)["permissions"])
    valid, issues = capsys.readouterr().out.splitlines()
    assert valid == "False"
    assert "'pattern': 'socket'" in issues
    (issue,) = names["validation"]["issues"]
    assert issue["pattern"] == "socket" and issue["reason"]


def test_the_executor_runs_code_in_its_context(example: Example) -> None:
    names = names_of(example, PermissionSet())
    result = example(EXECUTION, **names)["result"]
    assert (result.status, result.stdout) == (SandboxStatus.COMPLETED, "executed\n"), result.error
    assert (result.context.id, result.context.metadata) == ("task_123", {"user": "agent_1"})


def test_the_executor_runs_code_under_the_permissions_of_the_document(example: Example) -> None:
    names = names_of(example, example(PERMISSIONS)["permissions"])
    assert example(EXECUTION, **names)["result"].stdout == "executed\n"


def test_the_patterns_of_the_document_are_blocked_by_default(example: Example) -> None:
    listed = example(PATTERNS)["blocked_patterns"]
    assert [rule.pattern for rule in DEFAULT["python"]][: len(listed)] == listed
    executor = CodeExecutor()
    for pattern in listed:
        found = executor.validate_code(MEETS[pattern])
        assert pattern in [issue["pattern"] for issue in found["issues"]], pattern
        assert not found["valid"]


def test_a_blocked_pattern_keeps_the_code_from_running() -> None:
    result = CodeExecutor().execute("print('ran')\nimport socket")
    assert (result.status, result.stdout, result.exit_code) == (SandboxStatus.FAILED, "", None)
    assert result.issues[0]["pattern"] == "socket"
    assert result.error is not None and "socket" in result.error
    assert result.verdict is not None and result.verdict.because.rule == "code"
