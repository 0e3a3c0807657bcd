"""A lower-level way to run code: check the code, then run it under a set of permissions, with a context.

The check, `validate_code`, is an early warning. It stops ordinary mistakes before they run, and gives the reason. A program can hide its
intent from a check of its text; the sandbox isolates the program in any case.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from agent_sandbox._calls import check_type, code_of
from agent_sandbox.assembly import here
from agent_sandbox.audit import AuditLog
from agent_sandbox.config import SandboxConfig, environment
from agent_sandbox.engine.work import Code, Work, action_of
from agent_sandbox.errors import Denied, PolicyError
from agent_sandbox.isolation import IsolationBackend, IsolationConfig, ProcessIsolation
from agent_sandbox.options import PathLike
from agent_sandbox.permissions import PermissionSet
from agent_sandbox.policy.action import LANGUAGES, canonical_language
from agent_sandbox.policy.code.patterns import Rule, Validation
from agent_sandbox.policy.decide import Deny
from agent_sandbox.result import SandboxResult, refused
from agent_sandbox.sandbox import Sandbox


@dataclass(frozen=True)
class ExecutionContext:
    """The user, session and environment of an execution. `metadata` is data of the caller, returned with the result."""

    id: str = field(default_factory=lambda: secrets.token_hex(8))
    language: str = "python"
    timeout: float | None = 30.0
    max_memory_mb: float | None = 256
    env_vars: Mapping[str, str] = field(default_factory=dict, repr=False)  # values are often secrets
    metadata: Mapping[str, Any] = field(default_factory=dict)
    working_dir: PathLike | None = None

    def __post_init__(self) -> None:
        if not self.id:
            raise PolicyError("id is empty", hint='write id="task_123", or leave it out')
        check_type("language", self.language, str, write='language="python"')
        object.__setattr__(self, "env_vars", environment(self.env_vars))


@dataclass(frozen=True, repr=False)
class ExecutionResult(SandboxResult):
    """The sandbox's result of an execution, with its context and the issues found in the code."""

    context: ExecutionContext | None = None
    issues: tuple[Mapping[str, Any], ...] = ()


class CodeExecutor:
    """Checks code, and runs it under permissions. Safe to use from many threads."""

    def __init__(
        self,
        permissions: PermissionSet | None = None,
        backend: IsolationBackend | None = None,
        audit: AuditLog | None = None,
        *,
        blocked_patterns: Iterable[str | Rule] | None = None,
        validate: bool = True,
    ) -> None:
        """Without permissions, code may run, but gets no files, processes or network.

        `blocked_patterns` replace the default patterns. A default pattern among them keeps its meaning; any other pattern is a name, a
        dotted name or `name(`. `validate=False` turns off the early warning, never the isolation. Every execution and every refusal is in
        the ledger, and in `audit` as well. Raises `PolicyError` for permissions that cannot be enforced.
        """
        if permissions is not None:
            check_type("permissions", permissions, PermissionSet, write="permissions=PermissionSet(…)")
        if backend is not None:
            check_type("backend", backend, IsolationBackend, write="backend=ProcessIsolation()")
        if audit is not None:
            check_type("audit", audit, AuditLog, write="audit=AuditLog()")
        self.permissions = permissions if permissions is not None else PermissionSet()
        self.backend = backend or ProcessIsolation()
        self.audit = audit
        checked = SandboxConfig(validate_code=validate, blocked_patterns=blocked_patterns)  # type: ignore[arg-type]  # made a sequence there
        self._looking: dict[str, Any] = {"validate_code": validate, "blocked_patterns": checked.blocked_patterns}
        if not isinstance(self.backend, ProcessIsolation) and list(self.permissions):
            raise PolicyError(f"{self.backend!r} takes no permissions", hint="use ProcessIsolation(), or no permissions")

    def validate_code(self, code: str, language: str = "python") -> dict[str, Any]:
        """Return a dict with `valid` and a list of `issues`, each with its pattern, reason and line. Runs nothing."""
        if canonical_language(language) not in LANGUAGES:
            raise PolicyError(f"unknown language {language!r}", hint=f"use one of {', '.join(LANGUAGES)}")
        issues = self._issues(code, language)
        return {"valid": not issues, "issues": issues}

    def execute(self, code: str, context: ExecutionContext | None = None) -> ExecutionResult:
        """Check the code, run it if there are no issues, and wait for its end. Refused code has status FAILED, `issues` and a `verdict`.

        Raises as `Sandbox.execute` does.
        """
        context = context or ExecutionContext()
        result = self._run(code, context)
        because_of_code = isinstance(result.verdict, Deny) and result.verdict.because.rule == "code"
        issues = self._issues(code, context.language) if because_of_code else []
        return ExecutionResult(
            **{each.name: getattr(result, each.name) for each in fields(SandboxResult)}, context=context, issues=tuple(issues)
        )

    def _issues(self, code: str, language: str) -> list[dict[str, Any]]:
        look = self.permissions.settings(**{**self._looking, "validate_code": True})._early_look()
        assert look is not None, "it was asked for"
        validation = look.issues(self.permissions.policy(), code_of(code, language)) or Validation()
        return [{"pattern": issue.pattern, "reason": issue.reason, "line": issue.line} for issue in validation.issues]

    def _run(self, code: str, context: ExecutionContext) -> SandboxResult:
        surroundings: dict[str, Any] = {
            "timeout_seconds": context.timeout,
            "max_memory_mb": context.max_memory_mb,
            "env_vars": context.env_vars,
            "working_dir": context.working_dir,
        }
        if isinstance(self.backend, ProcessIsolation):
            with Sandbox(permissions=self.permissions, audit=self.audit, **surroundings, **self._looking) as sandbox:
                return sandbox.execute(code, context.language)
        what = code_of(code, context.language)
        try:
            self._look_first(what, context)
        except (Denied, PolicyError) as error:
            verdict = error.verdict if isinstance(error, Denied) else None
            return refused(str(error), sandbox_id=context.id, language=what.language, verdict=verdict)
        return self.backend.execute(code, context.language, IsolationConfig(**surroundings))

    def _look_first(self, what: Code, context: ExecutionContext) -> None:
        """Check code before a backend that the caller supplied runs it. A refusal is recorded in the ledger."""
        config = SandboxConfig(**self._looking)
        ledger = here().ledger() if self.audit is None else self.audit.over(here().ledger())
        gate = here().gate(config.policy(), sandbox=context.id, ledger=ledger)
        if (look := config._early_look()) is not None:
            look.check(gate, what, action_of(Work(what, context.env_vars)), gate.policy)
