"""The code executor: what is found is refused before it runs and recorded, and everything else runs in a sandbox."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agent_sandbox import (
    CodeExecutor,
    ExecutionContext,
    FilePermission,
    IsolationBackend,
    IsolationConfig,
    NetworkPermission,
    PermissionLevel,
    PermissionSet,
    SandboxResult,
    SandboxStatus,
)
from agent_sandbox.assembly import here
from agent_sandbox.errors import PolicyError
from agent_sandbox.result import refused


class Elsewhere(IsolationBackend):
    """A backend of somebody else's: it only says what it was given."""

    def is_available(self) -> bool:
        return True

    def execute(self, code: str, language: str = "python", config: IsolationConfig | None = None) -> SandboxResult:
        assert config is not None
        return refused(f"{language}: {code} ({config.timeout_seconds})", sandbox_id="x", language=language)


def test_code_that_meets_no_pattern_runs_with_the_environment_and_limits_of_its_context() -> None:
    context = ExecutionContext(env_vars={"WHO": "me"}, timeout=20, max_memory_mb=128)
    result = CodeExecutor().execute("import os\nprint(os.environ['WHO'])", context)
    assert (result.status, result.stdout, result.issues) == (SandboxStatus.COMPLETED, "me\n", ())
    assert result.context is context


def test_a_refusal_is_in_the_ledger_and_holds_no_source() -> None:
    result = CodeExecutor().execute("password = 'hunter2'\neval('1')")
    assert result.status is SandboxStatus.FAILED and "eval( evaluates text as code" in (result.error or "")
    last = json.loads(Path(here().host.state, "ledger.jsonl").read_bytes().splitlines()[-1])
    assert "code" in json.dumps(last) and "hunter2" not in json.dumps(last)


def test_a_permission_lifts_what_it_covers() -> None:
    opens = "print(open('/etc/hostname').read() != '')"
    assert not CodeExecutor().validate_code(opens)["valid"]
    permitted = CodeExecutor(PermissionSet([FilePermission(PermissionLevel.READ, ["/etc/hostname"], allow_hidden=True)]))
    assert permitted.validate_code(opens) == {"valid": True, "issues": []}
    assert permitted.execute(opens).stdout == "True\n"


def test_code_may_use_the_network_that_was_permitted() -> None:
    connects = "import socket\nprint(1)"
    assert not CodeExecutor().validate_code(connects)["valid"]
    permitted = CodeExecutor(PermissionSet([NetworkPermission(allow_outbound=True)]))
    assert permitted.validate_code(connects) == {"valid": True, "issues": []}
    assert permitted.execute(connects).stdout == "1\n"


def test_the_patterns_can_be_replaced_and_the_look_can_be_left_out() -> None:
    assert CodeExecutor(blocked_patterns=["json"]).validate_code("import json")["issues"][0]["pattern"] == "json"
    assert CodeExecutor(blocked_patterns=[]).execute("print(eval('6 * 7'))").stdout == "42\n"
    assert CodeExecutor(validate=False).execute("print(eval('6 * 7'))").stdout == "42\n"
    with pytest.raises(PolicyError, match="blocked_patterns must be a list"):
        CodeExecutor(blocked_patterns="eval(")


def test_a_language_that_is_not_known_is_refused_by_the_sandbox() -> None:
    assert "cobol" in (CodeExecutor().execute("x", ExecutionContext(language="cobol")).error or "")


def test_another_backend_runs_code_without_permissions_and_takes_none() -> None:
    result = CodeExecutor(backend=Elsewhere()).execute("1 + 1", ExecutionContext(language="ruby", timeout=5))
    assert result.error == "ruby: 1 + 1 (5)"
    with pytest.raises(PolicyError, match="takes no permissions"):
        CodeExecutor(PermissionSet([FilePermission(PermissionLevel.READ)]), Elsewhere())


def test_a_context_without_a_name_is_refused_and_each_has_one_of_its_own() -> None:
    assert ExecutionContext().id != ExecutionContext().id
    with pytest.raises(PolicyError, match="id is empty"):
        ExecutionContext(id="")
