"""A lower-level way to run code: look at it first, then run it under permissions, with a context that says whose it is.

`validate_code` is an early warning. It stops ordinary mistakes before they run and says why in words; who wants to get past a reader of
text can. The sandbox is the wall, and it is there in any case.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from agent_sandbox import places
from agent_sandbox.config import PathLike, environment
from agent_sandbox.engine.gate import Gate
from agent_sandbox.errors import Denied, PolicyError
from agent_sandbox.isolation import IsolationBackend, IsolationConfig, ProcessIsolation
from agent_sandbox.permissions import PermissionSet
from agent_sandbox.policy.action import LANGUAGES, RunCode, canonical_language
from agent_sandbox.policy.code.model import Rule, Validation
from agent_sandbox.policy.code.validate import validate
from agent_sandbox.policy.decide import LARGEST_SOURCE, Reason
from agent_sandbox.result import SandboxResult, refused
from agent_sandbox.sandbox import Sandbox
from agent_sandbox.work import encoded


@dataclass(frozen=True)
class ExecutionContext:
    """Whose execution it is, and its surroundings. `metadata` is the caller's own and comes back with the result."""

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
        object.__setattr__(self, "env_vars", environment(self.env_vars))


@dataclass(frozen=True)
class ExecutionResult(SandboxResult):
    """What came of an execution: a result as of a sandbox, the context it ran in, and what was found in the code."""

    context: ExecutionContext | None = None
    issues: tuple[Mapping[str, Any], ...] = ()


class CodeExecutor:
    """Runs code under permissions once it has been looked at. Safe to use from many threads."""

    def __init__(
        self,
        permissions: PermissionSet | None = None,
        backend: IsolationBackend | None = None,
        audit: object | None = None,
        *,
        blocked_patterns: Iterable[str | Rule] | None = None,
        validate: bool = True,
    ) -> None:
        """Without permissions everything is denied but the code itself.

        `blocked_patterns` are used in place of the default ones; a default pattern keeps all that it catches, any other is a name, a dotted
        name or `name(`. `validate=False` turns the early warning off, never the wall. Every execution and every refusal is in the ledger,
        of which an audit log is a view. Raises `PolicyError` for what cannot be enforced.
        """
        self.permissions = permissions or PermissionSet()
        self.backend = backend or ProcessIsolation()
        self.audit = audit
        self._rules = None if blocked_patterns is None else tuple(blocked_patterns)
        self._validates = validate
        if isinstance(blocked_patterns, str):
            raise PolicyError(f"blocked_patterns must be a list, not {blocked_patterns!r}", hint=f"write [{blocked_patterns!r}]")
        if not isinstance(self.backend, ProcessIsolation) and list(self.permissions):
            raise PolicyError(f"{self.backend!r} takes no permissions", hint="use ProcessIsolation(), or no permissions")

    def validate_code(self, code: str, language: str = "python") -> dict[str, Any]:
        """`valid`, and `issues`: for each pattern that was found its name, the reason why it is one, and the line. Runs nothing."""
        found = self._look(code, language)
        return {"valid": found.valid, "issues": _issues(found)}

    def execute(self, code: str, context: ExecutionContext | None = None) -> ExecutionResult:
        """Look at the code, run it if nothing is wrong, and wait for its end. What is refused is FAILED, with `issues` and `verdict`.

        Raises as `Sandbox.execute` does.
        """
        context = context or ExecutionContext()
        known = canonical_language(context.language) in LANGUAGES  # if not, the sandbox says so
        found = self._look(code, context.language) if known and self._validates else Validation()
        made = self._refused(code, context, found) if not found.valid else self._run(code, context)
        notes = (*made.notes, *self.permissions.warnings)
        values = {each.name: getattr(made, each.name) for each in fields(SandboxResult)} | {"notes": notes}
        return ExecutionResult(**values, context=context, issues=tuple(_issues(found)))

    def _look(self, code: str, language: str) -> Validation:
        return validate(code, language, grants=self.permissions.grants, rules=self._rules)

    def _run(self, code: str, context: ExecutionContext) -> SandboxResult:
        surroundings: dict[str, Any] = {
            "timeout_seconds": context.timeout,
            "max_memory_mb": context.max_memory_mb,
            "env_vars": context.env_vars,
            "working_dir": context.working_dir,
        }
        if not isinstance(self.backend, ProcessIsolation):
            return self.backend.execute(code, context.language, IsolationConfig(**surroundings))
        with Sandbox(self.permissions.settings(**surroundings)) as sandbox:
            return sandbox.execute(code, context.language)

    def _refused(self, code: str, context: ExecutionContext, found: Validation) -> SandboxResult:
        """Refused through the gate, so that the refusal is in the ledger as every other is."""
        what = "; ".join(f"line {issue.line}: {issue.pattern} {issue.reason}" for issue in found.issues[:3])
        remedy = "change the code, grant what it needs, or choose other blocked_patterns"
        gate = Gate(self.permissions.policy(), places.ledger(), clock=time.time)
        source = encoded(code)[: LARGEST_SOURCE + 1]
        action = RunCode.of(context.language, source, environment=context.env_vars)
        try:
            gate.refuse(action, Reason("code", f"the code reaches for what is not permitted: {what}", remedy))
        except Denied as error:
            return refused(str(error), sandbox_id=context.id, language=action.language, verdict=error.verdict)


def _issues(found: Validation) -> list[dict[str, Any]]:
    return [{"pattern": issue.pattern, "reason": issue.reason, "line": issue.line} for issue in found.issues]
