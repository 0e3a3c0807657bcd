"""`policy`: explain the policy files, check them, and test a command against them. Only `policy learn` runs a command."""

from __future__ import annotations

import json
from collections.abc import Mapping

from agent_sandbox._fast.values import dataclass
from agent_sandbox.cli.context import effective_of, layers_for, project_of
from agent_sandbox.cli.options import PolicyVerbOptions
from agent_sandbox.cli.render.messages import Console, counted, shown
from agent_sandbox.cli.results import VerbResult
from agent_sandbox.engine.work import Command
from agent_sandbox.policy.decide import Allow, Ask, Deny
from agent_sandbox.policy.explanation import Remark, Tried, explain, lint, try_command
from agent_sandbox.policy.files.layers import Effective
from agent_sandbox.policy.files.settings import json_schema
from agent_sandbox.policy_files import early_look

ASKED, DENIED = 3, 126  # as when it is run


@dataclass(frozen=True)
class PolicyResult(VerbResult):
    """The policy in force, in sentences."""

    kind = "policy"

    name: str
    digest: str
    lines: tuple[str, ...]
    warnings: tuple[str, ...]
    files: tuple[str, ...]

    def text(self, console: Console) -> None:
        for origin in self.files:
            print(f"from {shown(origin)}")
        for line in self.lines:
            print(shown(line))


@dataclass(frozen=True)
class PolicyLintResult(VerbResult):
    """Likely mistakes in the policy files."""

    kind = "policy-lint"

    remarks: tuple[Remark, ...]
    files: int

    @property
    def code(self) -> int:
        """1 if there are likely mistakes, else 0."""
        return 1 if self.remarks else 0

    def text(self, console: Console) -> None:
        for each in self.remarks:
            print(shown(f"{each.key}: {each.what} ({each.remedy})"))
        if not self.remarks:
            console.note(f"no problems in {counted(self.files, 'policy file')}" if self.files else "there are no policy files")


@dataclass(frozen=True)
class PolicySchemaResult(VerbResult):
    """The JSON Schema of policy files."""

    kind = ""  # it is a document of another standard, the same with and without --json

    schema: Mapping[str, object]

    def text(self, console: Console) -> None:
        print(json.dumps(self.schema, indent=2))


@dataclass(frozen=True)
class CommandEffect:
    """A known effect of a program, such as a file that it writes."""

    kind: str
    what: str


@dataclass(frozen=True)
class ToolFacts:
    """A program that a command would start, with its arguments and known effects."""

    tool: str
    arguments: tuple[str, ...]
    effects: tuple[CommandEffect, ...]


@dataclass(frozen=True)
class PolicyTestResult(VerbResult):
    """The verdict of the policy on a command, and the analysis of the command."""

    kind = "policy-test"

    allowed: bool
    rule: str
    why: str
    remedy: str
    tools: tuple[str, ...]
    uses: tuple[ToolFacts, ...]
    unknown: tuple[str, ...]
    asked: bool

    @property
    def code(self) -> int:
        """The exit code that running the command would have: 0 if allowed, 3 if it needs approval, 126 if denied."""
        return 0 if self.allowed else ASKED if self.asked else DENIED

    def text(self, console: Console) -> None:
        print(shown(f"{'allowed' if self.allowed else 'needs approval' if self.asked else 'denied'}: {self.why}"))
        if self.remedy:
            print(shown(f"  {self.remedy}"))
        for use in self.uses:
            effects = ", ".join(f"{effect.kind} {effect.what}".rstrip() for effect in use.effects) or "no known effect"
            print(shown(f"  {' '.join((use.tool, *use.arguments))}: {effects}"))
        for unknown in self.unknown:
            print(shown(f"  not known: {unknown}"))


def policy(options: PolicyVerbOptions, console: Console) -> VerbResult:
    """Perform a subcommand of `policy`: explain, lint, test, schema or learn."""
    if options.question == "learn":
        from agent_sandbox.cli.commands.learn import learn  # and with it all that runs something

        return learn(options, console)
    if options.question == "schema":
        return PolicySchemaResult(json_schema())
    project = project_of(options.run.project)
    effective, layers = effective_of(options.run.policy, project), layers_for(options.run.policy, project)
    if options.question == "test":
        return _test(effective, options.commands[0][-1])
    if options.question == "lint":
        return PolicyLintResult(tuple(lint(layers.all, effective)), len(layers.all))
    name, digest = effective.policy.name, effective.policy.digest()
    return PolicyResult(name, digest, explain(effective), tuple(effective.warnings), tuple(layer.origin for layer in layers.all))


def _tried(effective: Effective, command: str) -> Tried:
    """Return the policy's verdict on a command.

    If the policy allows the command, but a policy file turns on the check before a run and that check refuses, return the check's refusal.
    """
    tried, early = try_command(effective.policy, command), early_look(effective)
    reason = early.against(effective.policy, Command(("bash", "-c", command))) if early is not None else None
    return tried if reason is None or isinstance(tried.verdict, Deny) else Tried(Deny(reason), tried.understood)


def _test(effective: Effective, command: str) -> PolicyTestResult:
    tried = _tried(effective, command)
    because, understood = tried.verdict.because, tried.understood
    return PolicyTestResult(
        isinstance(tried.verdict, Allow),
        because.rule,
        because.why,
        because.remedy,
        tuple(understood.tools),
        tuple(
            ToolFacts(use.tool, tuple(use.arguments), tuple(CommandEffect(each.kind.value, each.what) for each in use.effects))
            for use in understood.uses
        ),
        (*understood.unknown, *((understood.unreadable,) if understood.unreadable else ())),
        isinstance(tried.verdict, Ask),
    )
