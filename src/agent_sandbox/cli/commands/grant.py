"""`grant`, `revoke` and `capabilities`: pre-approve actions of a sandbox or relax a rule, for a limited time; end a grant; list all."""

from __future__ import annotations

import os
import shlex
import time

from agent_sandbox._fast.values import dataclass
from agent_sandbox.assembly import here
from agent_sandbox.cli.commands.approve import user_name
from agent_sandbox.cli.context import policy_of, project_of
from agent_sandbox.cli.options import PolicyOptions
from agent_sandbox.cli.parser import UsageError
from agent_sandbox.cli.permission_options import ElevationOptions, GrantOptions, RevokeOptions
from agent_sandbox.cli.render.messages import Console, counted, remark, shown
from agent_sandbox.cli.results import OMITTED, Omitted, VerbResult
from agent_sandbox.engine.elevations import Raised
from agent_sandbox.engine.grants import Standing
from agent_sandbox.errors import PolicyError
from agent_sandbox.policy.approval_rules import Word
from agent_sandbox.policy.network import canonical_entry
from agent_sandbox.policy.tokens import NETWORK, Pattern, spell
from agent_sandbox.workspace.store import sandbox_id

KINDS = ("run", "code", "promote", "undo", "call", "file", "propose", NETWORK)  # the first word of a pattern


@dataclass(frozen=True)
class GrantResult(VerbResult):
    """A granted capability token with its number of uses, or an elevation with the rules that it relaxes."""

    kind = "grant"

    token: str | Omitted
    elevation: str | Omitted
    sandbox: str
    seconds: float
    times: int | Omitted | None
    relaxes: str | Omitted = OMITTED

    def text(self, console: Console) -> None:
        if not isinstance(self.elevation, Omitted):
            print(self.elevation)
            console.note(f"{self.sandbox} is elevated for {self.seconds:g} s: {self.relaxes}; its runs end when that expires")
            return
        print(self.token)
        often = f", at most {counted(self.times, 'time')}" if isinstance(self.times, int) else ""
        how = "use it with --capability, or in AGENT_SANDBOX_CAPABILITY"
        console.note(f"granted to {self.sandbox} for {self.seconds:g} s{often}; {how}")


@dataclass(frozen=True)
class RevokeResult(VerbResult):
    """The names that were revoked. `going_on` lists processes that still run and have used a revoked capability."""

    kind = "revoke"

    revoked: tuple[str, ...]
    going_on: tuple[int, ...]
    started_under: dict[str, str]  # maps the process id to the capability

    def text(self, console: Console) -> None:
        console.note(f"revoked {counted(len(self.revoked), 'capability', 'capabilities')}; new requests are no longer allowed by them")
        for pid in self.going_on:
            console.note(f"process {pid}, started under {self.started_under[str(pid)]}, goes on; its new requests are refused")


@dataclass(frozen=True)
class CapabilityFacts:
    """A granted capability token, with its uses so far."""

    name: str
    sandbox: str
    patterns: tuple[str, ...]
    by: str
    granted: float
    until: float
    limit: int | None
    used: int
    revoked: bool


@dataclass(frozen=True)
class ElevationFacts:
    """An elevation (rules relaxed for a limited time) that is in force for `left` more seconds."""

    name: str
    sandbox: str
    programs: tuple[str, ...]
    limits: dict[str, float]
    paths: tuple[str, ...]
    by: str
    began: float
    left: float
    relaxes: str


@dataclass(frozen=True)
class CapabilitiesResult(VerbResult):
    """All granted capability tokens and elevations."""

    kind = "capabilities"

    capabilities: tuple[CapabilityFacts, ...]
    elevations: tuple[ElevationFacts, ...]

    def text(self, console: Console) -> None:
        for each in self.capabilities:
            left = "revoked" if each.revoked else f"{max(each.until - time.time(), 0):.0f} s left"
            often = f", used {each.used} of {each.limit}" if each.limit is not None else ""
            print(shown(f"{each.name}  {left}{often}  {each.sandbox}  by {each.by}: {'; '.join(each.patterns)}"))
        for lifted in self.elevations:
            print(shown(f"{lifted.name}  {lifted.left:.0f} s left  {lifted.sandbox}  by {lifted.by}: elevated, {lifted.relaxes}"))
        if not (self.capabilities or self.elevations):
            console.note("nothing is granted")


def grant(options: GrantOptions) -> GrantResult:
    """Grant a capability token, or begin an elevation."""
    if options.elevation is not None:
        return _elevate(options, options.elevation)
    patterns = tuple(_pattern(text) for text in options.patterns)
    sandbox = options.sandbox or sandbox_id(project_of(options.project).path)
    factor = _second_factor(options.code)
    token = here().capabilities().grant(sandbox, patterns, seconds=options.seconds, times=options.times, by=user_name(), factor=factor)
    return GrantResult(spell(token), OMITTED, sandbox, options.seconds, options.times)


def _elevate(options: GrantOptions, rules: ElevationOptions) -> GrantResult:
    from agent_sandbox.cli import elevation  # only with --elevate

    project = project_of(options.project)
    sandbox, what = options.sandbox or sandbox_id(project.path), elevation.elevation_of(rules)
    word = Word(os.getuid(), _second_factor(options.code))
    policy = policy_of(PolicyOptions(), project)
    name = elevation.begin(policy, sandbox, what, seconds=options.seconds, by=user_name(), word=word)
    return GrantResult(OMITTED, name, sandbox, options.seconds, OMITTED, what.describe())


def revoke(options: RevokeOptions) -> RevokeResult:
    """Revoke capabilities and elevations by name, or all."""
    granted_here = here().capabilities()
    raised = {each.name for each in here().elevations().standing()}
    granted = [each.name for each in granted_here.standing() if not each.revoked]
    names = [*granted, *raised] if options.everything else list(options.names)
    going_on: dict[int, str] = {}
    for name in names:
        if name in raised:
            here().elevations().end(name, by=user_name())
            remark("a run that began under the elevation goes on until it ends; the next one does not have it")
            continue
        granted_here.revoke(name, by=user_name())
        going_on |= dict.fromkeys(granted_here.going_on(name), name)
    return RevokeResult(tuple(names), tuple(sorted(going_on)), {str(pid): name for pid, name in going_on.items()})


def capabilities() -> CapabilitiesResult:
    """List all granted capability tokens and elevations."""
    standing, raised = here().capabilities().standing(), here().elevations().standing()
    return CapabilitiesResult(tuple(map(_capability, standing)), tuple(map(_elevation, raised)))


def _capability(each: Standing) -> CapabilityFacts:
    patterns = tuple(shlex.join(pattern) for pattern in each.patterns)
    return CapabilityFacts(each.name, each.sandbox, patterns, each.by, each.granted, each.until, each.limit, each.used, each.revoked)


def _elevation(each: Raised) -> ElevationFacts:
    what = each.what
    limits, relaxes = dict(what.limits), what.describe()
    return ElevationFacts(each.name, each.sandbox, what.programs, limits, what.paths, each.by, each.began, each.left, relaxes)


def _pattern(text: str) -> Pattern:
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise UsageError(f"invalid pattern {text!r}: {error}", hint='for example "run git push **"') from None
    if len(words) < 2 or words[0] not in KINDS:
        kinds = f"{', '.join(KINDS[:-1])} or {KINDS[-1]}"
        raise UsageError(f"a pattern begins with {kinds}, not {text!r}", hint='for example "run git push **"')
    if words[0] == NETWORK and (
        len(words) > 3 or not all(word.isalpha() and word.isupper() for word in ",".join(words[2:]).split(",") if words[2:])
    ):
        raise UsageError(f"not a host with methods: {text!r}", hint='for example "network api.example.com GET,HEAD"')
    return (*words[:1], canonical_entry(words[1]), *words[2:]) if words[0] == NETWORK else words


def _second_factor(code: str | None) -> bool:
    """Return True for a valid code of the second factor, False without a code. Raises `PolicyError` for an invalid code."""
    if code is None:
        return False
    factor = here().second_factor()
    if not factor.enrolled or not factor.accepts(code):
        raise PolicyError("--code is not a valid second factor", hint="give a fresh code; to make one: agent-sandbox approve --enroll")
    return True
