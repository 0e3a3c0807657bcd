"""`replay`: run a recorded run again, in a throw-away sandbox, and say where it departs from its record."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from agent_sandbox import replays
from agent_sandbox._fast.values import replace
from agent_sandbox.assembly import here
from agent_sandbox.cli.context import project_of
from agent_sandbox.cli.environment import guest_environment
from agent_sandbox.cli.parser import Request
from agent_sandbox.cli.render import quantities
from agent_sandbox.cli.render.messages import remark, shown
from agent_sandbox.engine.records import Record, Recorder, departures, read, rules_of
from agent_sandbox.engine.work import Work
from agent_sandbox.policy.limits import Limits
from agent_sandbox.policy.model import CLONED_LIMITS, Policy, cloned, locked, repeatable
from agent_sandbox.sandbox import ENVIRONMENT

DEPARTED = 1


def replay(request: Request) -> int:
    """The verb `replay`."""
    record = read(request.words[0])
    what, stdin = replays.what_to_run(record, None, None)
    policy, env = _surroundings(request, record)
    runtimes = here().runtimes("wasm")
    cwd = request.value("--cwd") or record.cwd
    replays.check(record, policy, env, cwd, runtimes.identity)
    recorder = Recorder(Work(what, env, cwd=cwd, stdin=stdin, seed=record.seed, collect=False), salt=record.salt)
    try:
        # As when it was recorded: without it, a project below /tmp would not be seen.
        project = project_of(request, cwd).path if policy.files.read else None
        outcome = here().session(here().gate(policy), runtimes, project=project).run(recorder.work)
    finally:
        here().wasm().close(leaving=True)
    found = departures(record, recorder.record(outcome, policy, runtimes.identity))
    if request.has("--json"):
        from agent_sandbox.cli.render.json import print_document

        listed = [{"what": each.what, "message": shown(each.message)} for each in found]
        code = DEPARTED if found else 0
        print_document("replay", {"same": not found, "departures": listed, "fuel": outcome.exit.usage.fuel, "exit": code})
        return code
    if outcome.refused:
        remark(f"it could not be started: {shown(outcome.refused)}")
    for departure in found:
        print(f"{departure.what}: {shown(departure.message)}")
    if not request.has("--quiet"):
        size = record.stdout.size + record.stderr.size
        same = f"the same: {size} bytes of output, {len(record.changes)} changes, {record.fuel} units of fuel"
        remark(f"it departs from its record in {len(found)} ways" if found else same)
    return DEPARTED if found else 0


def _surroundings(request: Request, record: Record) -> tuple[Policy, Mapping[str, str]]:
    """The rules and the environment that fit the record: those of the command line, or those of `Sandbox()` in Python."""
    kinds = list(_kinds(request, _limits(request, record)))
    return next(((policy, env) for policy, env in kinds if rules_of(policy.files) == record.rules), kinds[0])


def _kinds(request: Request, limits: Limits) -> Iterator[tuple[Policy, Mapping[str, str]]]:
    home, asked = here().host.home, request.values("--env")
    masks = here().masks_for(os.getcwd())
    yield repeatable(cloned(masks=masks, limits=limits)), guest_environment(os.environ, asked, home=home, bare=True)
    given = guest_environment(os.environ, asked, home=home, bare=True)
    names = {text.partition("=")[0] for text in asked}
    yield repeatable(locked(limits=limits)), {**ENVIRONMENT, **{name: given[name] for name in names}}


def _limits(request: Request, record: Record) -> Limits:
    """Those of the record, where they shape what comes of it and are within what the command line gives anyway."""
    limits = CLONED_LIMITS
    if (text := request.value("--timeout")) is not None:
        limits = replace(limits, wall_seconds=quantities.seconds("--timeout", text))
    shaping: dict[str, Any] = {name: record.limits[name] for name in replays.within_reason(record)}
    return replace(limits, **shaping)
