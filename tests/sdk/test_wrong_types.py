"""An argument of the wrong type is a TypeError that names the right spelling, for every public constructor and for `run`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import agent_sandbox
import agentbox
from agent_sandbox import (
    AsyncSandbox,
    AuditLog,
    CodeExecutor,
    ExecutionContext,
    Sandbox,
    SandboxConfig,
    Workspace,
    create_sandbox,
    shell,
)
from agent_sandbox._calls import work_of

ANY: Any = object()


@pytest.mark.parametrize("make", [Sandbox, AsyncSandbox, agentbox.Sandbox, agentbox.AsyncSandbox])
@pytest.mark.parametrize(
    ("config", "right"),
    [
        ("python", "Sandbox().execute(code, 'python')"),
        ("js", "Sandbox().execute(code, 'javascript')"),
        ("wasm", "Sandbox(runtime='wasm')"),
        ({"timeout_seconds": 3}, "Sandbox(**settings)"),
        (3, "Sandbox(timeout_seconds=10)"),
        (SandboxConfig, "Sandbox(SandboxConfig(…))"),
    ],
    ids=repr,
)
def test_a_sandbox_from_something_else_says_what_to_write(make: Callable[[Any], object], config: object, right: str) -> None:
    with pytest.raises(TypeError) as refused:
        make(config)
    assert "config is a SandboxConfig" in str(refused.value) and right in str(refused.value)


@pytest.mark.parametrize(
    ("make", "right"),
    [
        (lambda: Sandbox(permissions=ANY), "permissions=PermissionSet("),
        (lambda: Sandbox(audit=ANY), "audit=AuditLog()"),
        (lambda: Sandbox(asks=ANY), "asks=AskRules("),
        (lambda: Sandbox(name=ANY), "name="),
        (lambda: create_sandbox(permissions=ANY), "permissions=PermissionSet("),
        (lambda: CodeExecutor(ANY), "permissions=PermissionSet("),
        (lambda: CodeExecutor(backend=ANY), "backend=ProcessIsolation()"),
        (lambda: CodeExecutor(audit=ANY), "audit=AuditLog()"),
        (lambda: ExecutionContext(language=ANY), 'language="python"'),
        (lambda: AuditLog(level=ANY), "level=AuditLevel.DEBUG"),
        (lambda: AuditLog(ANY), "AuditLog(max_entries="),
        (lambda: Workspace.over("/", config=ANY), "config=SandboxConfig("),
    ],
)
def test_every_other_argument_too(make: Callable[[], object], right: str) -> None:
    with pytest.raises(TypeError) as refused:
        make()
    assert " is a" in str(refused.value) and right in str(refused.value)


@pytest.mark.parametrize("work", [3, None, b"print(1)", {"a": 1}, {"ls"}, [1, 2], ["ls", None]], ids=repr)
def test_run_takes_code_words_or_a_command_line(work: Any) -> None:
    with pytest.raises(TypeError, match=r"run takes Python code"):
        work_of(work)
    assert [work_of(each) for each in ("1", ["ls"], ("ls",), shell("ls"))], "the right ones are taken"


def test_no_public_constructor_answers_a_word_with_an_attribute_error() -> None:
    """Every class that a program can import, with one word that it does not expect: accepted, or refused as a type or a policy error."""
    for name in agent_sandbox.__all__:
        made = getattr(agent_sandbox, name)
        if isinstance(made, type) and not issubclass(made, BaseException | Warning):
            make: Callable[[str], object] = made
            try:
                make("nonsense")
            except (TypeError, ValueError, agent_sandbox.PolicyError):
                continue
