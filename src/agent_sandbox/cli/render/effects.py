"""An effect plan for people and for programs: what `sim` and `carry-out` print besides the diff.

No row of ours begins with a blank or a sign, which are for content (see `workspace.diff.formats`), or with anything that a guest named.
"""

from __future__ import annotations

from collections.abc import Iterator
from shlex import join
from typing import Any

from agent_sandbox._fast.values import replace
from agent_sandbox.cli.render.changes import Material, listed
from agent_sandbox.cli.render.json import path_fields
from agent_sandbox.cli.render.messages import shown
from agent_sandbox.cli.render.quantities import counted, human_size
from agent_sandbox.engine.simulation.plan import EffectPlan, FileEffect
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


def opening(plan: EffectPlan, *, carrying: bool = False) -> Iterator[Row]:
    """Which plan, of what, how it ended, and what it comes to."""
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
    told = ", ".join(f"{count:,} {kind}" for kind, count in counts.items()) or "none changed"
    yield ours(HEADING, "")
    yield ours(HEADING, f"# Files: {told}")
    if plan.unlisted:
        yield ours(WARNING, f"It cannot be carried out: {plan.unlisted}")
    if plan.on_the_sandbox:
        yield ours(NOTE, "Made on what waits in the project's sandbox; compared with the machine as it is.")


def without_history(material: Material) -> tuple[Material, tuple[Change, ...]]:
    """The material without what git only records, unless everything is asked for; and that."""
    if material.everything:
        return material, ()
    apart = tuple(change for change in material.files.project if _only_recorded(change, material))
    rest = tuple(change for change in material.files.project if not _only_recorded(change, material))
    return replace(material, files=replace(material.files, project=rest)), apart


def _only_recorded(change: Change, material: Material) -> bool:
    name = material.name(change)
    return classes_of_path(name) == {HISTORY} or name == ".git"


def recorded(changes: tuple[Change, ...], material: Material) -> Iterator[Row]:
    """What git records: one line each, and one for all objects."""
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
    """What it did besides, and the risks."""
    if plan.programs:
        yield from _section(f"Programs: {len(plan.programs)}" + ("" if plan.watched else ", by the text of the command"))
        for use in plan.programs[:_LISTED]:
            yield ours(
                FACT if use.allowed else WARNING,
                f"program {named(use.program)}{_times(use.times)}{'' if use.allowed else ' [not allowed]'}",
            )
        yield from _more(plan.programs)
    if plan.network or plan.requests:
        yield from _section(f"Network: {len(plan.network) or len(plan.requests)}, none of which was let out")
        for request in plan.network[:_LISTED]:
            yield ours(WARNING, f"{request.action} {named(request.target)}{_by(request.program)}{_times(request.times)}")
        for target in plan.requests[:_LISTED] if not plan.network else ():
            yield ours(WARNING, f"request {named(target)}, by the text of the command")
        yield from _more(plan.network)
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


def _more(found: tuple[object, ...]) -> Iterator[Row]:
    if len(found) > _LISTED:
        yield ours(WARNING, f"and {len(found) - _LISTED:,} more (--json has all)")


def _times(times: int) -> str:
    return f", {times:,} times" if times > 1 else ""


def _by(program: str) -> str:
    return f" by {named(program)}" if program else ""


def command_of(plan: EffectPlan) -> str:
    """The command as it could be typed, of a shell its line, cut where it is long. Not escaped."""
    text = plan.command[2] if reads_a_line(plan.command) else join(plan.command)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}… ({len(text):,} characters)"


def minded(plan: EffectPlan) -> Iterator[tuple[Risk, str]]:
    """Each effect that is not low, with what it is about, ready to be shown; the highest first."""
    about = [(effect.risk, named(_relative(effect, plan))) for effect in plan.files]
    about += [(of_unlisted(plan.unlisted), "the files"), (of_unseen(plan.unseen), "the command")]
    about += [(of_deletions(plan.deletions), "all together"), (plan.ended.risk, "the command")]
    about += [(each.risk, named(each.what) if each.what else each.effect) for each in plan.predicted]
    about += [(each.risk, named(each.program)) for each in plan.programs]
    about += [(each.risk, named(each.target)) for each in plan.network]
    about += [(each.risk, named(each.name)) for each in plan.secrets]
    for level in (Level.HIGH, Level.MEDIUM):
        yield from (each for each in about if each[0].level is level)


def _relative(effect: FileEffect, plan: EffectPlan) -> str:
    return effect.path.removeprefix(plan.project.rstrip("/") + "/")


def _grouped(plan: EffectPlan) -> dict[tuple[Level, str], list[str]]:
    found: dict[tuple[Level, str], dict[str, None]] = {}
    for risk, what in minded(plan):
        found.setdefault((risk.level, risk.why), {})[what] = None
    return {key: list(names) for key, names in found.items()}


def before_changes(plan: EffectPlan) -> dict[str, Any]:
    """The fields of the document that stand before the changes."""
    return {
        "digest": plan.digest,
        **path_fields("project", plan.project),
        "command": [shown(word) for word in plan.command],
        **path_fields("cwd", plan.cwd),
        "risk": _risk(plan.risk),
        "ended": {"code": plan.ended.code, "reason": plan.ended.reason, "limits_hit": list(plan.ended.limits_hit)},
        "words": [shown(words) for words in plan.words],
        "unlisted": plan.unlisted or None,
        "on_the_sandbox": plan.on_the_sandbox,
    }


def after_changes(plan: EffectPlan) -> dict[str, Any]:
    """Those that stand after them."""
    return {
        "watched": plan.watched,
        "read": [{**path_fields("path", each.path), "sha256": each.sha256 or None} for each in plan.read],
        "needs": {name: [shown(each) for each in wanted] for name, wanted in plan.needs.items()},
        "programs": [
            {**path_fields("program", use.program), "times": use.times, "allowed": use.allowed, "risk": _risk(use.risk)}
            for use in plan.programs
        ],
        "network": [
            {
                "action": each.action,
                "target": shown(each.target),
                **path_fields("program", each.program),
                "times": each.times,
                "risk": _risk(each.risk),
            }
            for each in plan.network
        ],
        "requests": [shown(target) for target in plan.requests],
        "secrets": [
            {"sort": each.sort, **path_fields("name", each.name), "why": each.why, "risk": _risk(each.risk)} for each in plan.secrets
        ],
        "predicted": [{"effect": each.effect, "what": shown(each.what), "risk": _risk(each.risk)} for each in plan.predicted],
        "notes": [shown(note) for note in plan.notes],
    }


def of_change(plan: EffectPlan) -> dict[str, dict[str, Any]]:
    """What the document says of each changed path beyond the diff."""
    return {effect.path: {"sha256": effect.sha256 or None, "risk": _risk(effect.risk)} for effect in plan.files}


def _risk(risk: Risk) -> dict[str, str]:
    return {"level": risk.level.value, "why": risk.why}
