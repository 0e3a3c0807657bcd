"""Effect plans for people and for programs: everything that `sim` and `carry-out` print except the diff.

Our own rows never begin with a blank, a sign or a name that a guest chose, so that they cannot be confused with file content (see
`workspace.diff.rows`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from shlex import join

from agent_sandbox._fast.values import dataclass, replace
from agent_sandbox.cli.render.changes import Material, PlanFacts, listed
from agent_sandbox.cli.render.messages import counted, human_size, shown
from agent_sandbox.cli.results import PathName
from agent_sandbox.engine.simulation.plan import EffectPlan, FileEffect, NetworkRequest
from agent_sandbox.engine.simulation.risk import Level, Risk, of_deletions, of_unlisted, of_unseen
from agent_sandbox.policy.programs import reads_a_line
from agent_sandbox.workspace.changes import Change, Kind
from agent_sandbox.workspace.diff.formats import FACT, HEADING, NOTE, WARNING, Row, ours
from agent_sandbox.workspace.escape import named
from agent_sandbox.workspace.protected import HISTORY, classes_of_path

SHORT = 12  # letters of a digest, where people read it
_NAMED = 3  # of the effects with one and the same risk
_LISTED = 50
_LONGEST = 500  # characters of a command


def opening(plan: EffectPlan) -> Iterator[Row]:
    """Return the rows before the changes: the plan, its command, how the command ended, and a summary."""
    yield ours(HEADING, f"# Effect plan {plan.digest[:SHORT]}: {plan.risk.level.value} risk")
    yield ours(FACT, f"command: {command_of(plan)}")
    limits = f", limits reached: {', '.join(plan.ended.limits_hit)}" if plan.ended.limits_hit else ""
    yield ours(FACT if plan.ended.risk.level is Level.LOW else WARNING, f"ended with {plan.ended.code} ({plan.ended.reason}){limits}")
    for words in plan.words[:_LISTED]:
        yield ours(FACT, words)
    yield from _more(plan.words)
    counts: dict[str, int] = {}
    for effect in plan.files:
        counts[effect.change] = counts.get(effect.change, 0) + 1
    summary = ", ".join(f"{count:,} {kind}" for kind, count in counts.items()) or "none changed"
    yield ours(HEADING, "")
    yield ours(HEADING, f"# Files: {summary}")
    if plan.unlisted:
        yield ours(WARNING, f"It cannot be carried out: {plan.unlisted}")
    if plan.on_the_sandbox:
        yield ours(NOTE, "The command saw the changes in the project's sandbox; the diff compares with the real files.")


def without_history(material: Material) -> tuple[Material, tuple[Change, ...]]:
    """Separate git's own bookkeeping in `.git`, unless everything is shown. Returns the other changes, and those of the bookkeeping."""
    if material.everything:
        return material, ()
    apart = tuple(change for change in material.files.project if _only_recorded(change, material))
    rest = tuple(change for change in material.files.project if not _only_recorded(change, material))
    return replace(material, files=replace(material.files, project=rest)), apart


def _only_recorded(change: Change, material: Material) -> bool:
    name = material.name(change)
    return classes_of_path(name) == {HISTORY} or name == ".git"


def recorded(changes: tuple[Change, ...], material: Material) -> Iterator[Row]:
    """Return the rows for git's own bookkeeping: one per change, and a single row for all git objects."""
    if not changes:
        return
    objects = [change for change in changes if "/objects/" in f"{material.name(change)}/"]
    yield ours(HEADING, "")
    yield ours(HEADING, f"# Recorded by git: {counted(len(changes), 'change')}, shown with --all")
    for change in [change for change in changes if change not in objects][:_LISTED]:
        yield listed(replace(change, path=material.name(change)))
    if objects:
        files = [change for change in objects if change.after is not None and change.after.size]
        size = sum(change.after.size for change in files if change.after is not None)
        gone = sum(change.kind is Kind.DELETED for change in objects)
        yield ours(FACT, f"and {counted(len(files), 'object')} of {human_size(size)}{f', {gone:,} removed' if gone else ''}")


def closing(plan: EffectPlan, *, kept: bool) -> Iterator[Row]:
    """Return the rows after the changes: programs, network, secrets and risks."""
    if plan.programs:
        yield from _section(f"Programs: {len(plan.programs)}" + ("" if plan.watched else ", by the text of the command"))
        for use in plan.programs[:_LISTED]:
            yield ours(
                FACT if use.allowed else WARNING,
                f"program {named(use.program)}{_times(use.times)}{'' if use.allowed else ' [not allowed]'}",
            )
        yield from _more(plan.programs)
    if plan.network or plan.requests:
        blocked = "" if any(each.allowed for each in plan.network) else ", all blocked"
        yield from _section(f"Network: {len(plan.network) or len(plan.requests)}{blocked}")
        for request in plan.network[:_LISTED]:
            yield ours(WARNING, f"{request.action} {named(request.target)}{_by(request.program)}{_times(request.times)}{_allowed(request)}")
        for target in plan.requests[:_LISTED] if not plan.network else ():
            yield ours(WARNING, f"request {named(target)}, by the text of the command")
        yield from _more(plan.network)
    if plan.http:
        held = sum(not each.sent for each in plan.http)
        yield from _section(f"Requests: {len(plan.http) + plan.untold}{f', {held:,} not sent by the simulation' if held else ''}")
        for each in plan.http[:_LISTED]:
            using = f" with {', '.join(map(named, each.secrets))}" if each.secrets else ""
            row = f"{each.method} {named(each.target)}{using}{_times(each.times)} [{'sent' if each.sent else 'would be sent'}]"
            yield ours(FACT if each.risk.level is Level.LOW else WARNING, f"request {row}: {each.risk.level.value}, {each.risk.why}")
        yield from _more(plan.http)
        if plan.untold:
            yield ours(WARNING, f"and {plan.untold:,} more requests, which are not listed")
    if plan.secrets:
        yield from _section(f"Secrets: {len(plan.secrets)}")
        for secret in plan.secrets[:_LISTED]:
            yield ours(WARNING, f"{secret.sort} {named(secret.name)}{_by(secret.program)}: {secret.why}")
        yield from _more(plan.secrets)
    yield from _section(f"Risk: {plan.risk.level.value}")
    for (level, why), names in _grouped(plan).items():
        more = f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else ""
        yield ours(WARNING, f"{level.value}: {why}: {', '.join(names[:_NAMED])}{more}")
    for note in plan.notes[:_LISTED]:
        yield ours(NOTE, f"note: {note}")
    if kept:
        yield ours(NOTE, f"Carry it out within the hour: agent-sandbox carry-out {plan.digest[:SHORT]}")


def _section(title: str) -> Iterator[Row]:
    yield ours(HEADING, "")
    yield ours(HEADING, f"# {title}")


def _more(every: tuple[object, ...]) -> Iterator[Row]:
    if len(every) > _LISTED:
        yield ours(WARNING, f"and {len(every) - _LISTED:,} more (--json has all)")


def _allowed(request: NetworkRequest) -> str:
    return " [allowed]" if request.allowed else ""


def _times(times: int) -> str:
    return f", {times:,} times" if times > 1 else ""


def _by(program: str) -> str:
    return f" by {named(program)}" if program else ""


def command_of(plan: EffectPlan) -> str:
    """Return the command as it could be typed, shortened if it is long. Not escaped."""
    text = plan.command[2] if reads_a_line(plan.command) else join(plan.command)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}… ({len(text):,} characters)"


def minded(plan: EffectPlan) -> Iterator[tuple[Risk, str]]:
    """Return the medium and high risks, each with a description of what it is about; the highest first."""
    about = [(effect.risk, named(_relative(effect, plan))) for effect in plan.files]
    about += [(of_unlisted(plan.unlisted), "the files"), (of_unseen(plan.unseen), "the command")]
    about += [(of_deletions(plan.deletions), "all together"), (plan.ended.risk, "the command")]
    about += [(each.risk, named(each.what) if each.what else each.effect) for each in plan.predicted]
    about += [(each.risk, named(each.program)) for each in plan.programs]
    about += [(each.risk, named(each.target)) for each in plan.network]
    about += [(each.risk, named(each.target)) for each in plan.http]
    about += [(each.risk, named(each.name)) for each in plan.secrets]
    for level in (Level.HIGH, Level.MEDIUM):
        yield from (each for each in about if each[0].level is level)


def _relative(effect: FileEffect, plan: EffectPlan) -> str:
    return effect.path.removeprefix(plan.project.rstrip("/") + "/")


def _grouped(plan: EffectPlan) -> dict[tuple[Level, str], list[str]]:
    groups: dict[tuple[Level, str], dict[str, None]] = {}
    for risk, what in minded(plan):
        groups.setdefault((risk.level, risk.why), {})[what] = None
    return {key: list(names) for key, names in groups.items()}


@dataclass(frozen=True)
class EndedFacts:
    """How the command of a plan ended."""

    code: int
    reason: str
    limits_hit: tuple[str, ...]


@dataclass(frozen=True)
class PlanHead:
    """An effect plan's command, risk and outcome, without its effects."""

    inline = True

    digest: str
    project: PathName
    command: tuple[str, ...]
    cwd: PathName
    risk: Risk
    ended: EndedFacts
    words: tuple[str, ...]
    unlisted: str | None  # why it cannot be carried out
    on_the_sandbox: bool


@dataclass(frozen=True)
class ReadFacts:
    """A file of the project that the command read."""

    path: PathName
    sha256: str | None


@dataclass(frozen=True)
class ProgramFacts:
    """A program that the command started."""

    program: PathName
    times: int
    allowed: bool
    risk: Risk


@dataclass(frozen=True)
class NetworkFacts:
    """A network request of the command, such as a name lookup or a connection, and whether the policy allows it."""

    action: str
    target: str
    program: PathName
    times: int
    risk: Risk
    allowed: bool


@dataclass(frozen=True)
class HttpFacts:
    """A request over HTTP that the policy allows. `sent` is whether the simulation sent it; if not, carrying the plan out would.

    `secrets` are the names of those that were put in.
    """

    method: str
    target: str
    times: int
    sent: bool
    secrets: tuple[str, ...]
    risk: Risk


@dataclass(frozen=True)
class SecretFacts:
    """A secret that the command tried to read, or that it was given."""

    sort: str
    name: PathName
    why: str
    risk: Risk


@dataclass(frozen=True)
class PredictionFacts:
    """An effect that was predicted from the text of the command, not observed."""

    effect: str
    what: str
    risk: Risk


@dataclass(frozen=True)
class EffectFacts:
    """The effects of a plan except its file changes."""

    inline = True

    watched: bool
    read: tuple[ReadFacts, ...]
    needs: Mapping[str, tuple[str, ...]]
    programs: tuple[ProgramFacts, ...]
    network: tuple[NetworkFacts, ...]
    http: tuple[HttpFacts, ...]
    requests: tuple[str, ...]
    secrets: tuple[SecretFacts, ...]
    predicted: tuple[PredictionFacts, ...]
    notes: tuple[str, ...]


def effect_facts(plan: EffectPlan) -> EffectFacts:
    """Return the effects of a plan except its file changes, as data."""
    return EffectFacts(
        plan.watched,
        tuple(ReadFacts(PathName(each.path), each.sha256 or None) for each in plan.read),
        {name: tuple(shown(each) for each in wanted) for name, wanted in plan.needs.items()},
        tuple(ProgramFacts(PathName(each.program), each.times, each.allowed, each.risk) for each in plan.programs),
        tuple(
            NetworkFacts(each.action, shown(each.target), PathName(each.program), each.times, each.risk, each.allowed)
            for each in plan.network
        ),
        tuple(HttpFacts(each.method, shown(each.target), each.times, each.sent, each.secrets, each.risk) for each in plan.http),
        tuple(shown(target) for target in plan.requests),
        tuple(SecretFacts(each.sort, PathName(each.name), each.why, each.risk) for each in plan.secrets),
        tuple(PredictionFacts(each.effect, shown(each.what), each.risk) for each in plan.predicted),
        tuple(shown(note) for note in plan.notes),
    )


def plan_head(plan: EffectPlan) -> PlanHead:
    """Return a plan's command, risk and outcome as data, without its effects."""
    return PlanHead(
        plan.digest,
        PathName(plan.project),
        tuple(shown(word) for word in plan.command),
        PathName(plan.cwd),
        plan.risk,
        EndedFacts(plan.ended.code, plan.ended.reason, plan.ended.limits_hit),
        tuple(shown(words) for words in plan.words),
        plan.unlisted or None,
        plan.on_the_sandbox,
    )


def plans_by_path(plan: EffectPlan) -> dict[str, PlanFacts]:
    """Return the risk and digest that a plan gives for each changed path."""
    return {effect.path: PlanFacts(effect.sha256 or None, effect.risk) for effect in plan.files}
