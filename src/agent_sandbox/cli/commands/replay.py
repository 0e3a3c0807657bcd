"""`replay`: repeat a recorded run in a throw-away sandbox, and report the differences from its record."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from agent_sandbox import replays
from agent_sandbox._calls import ENVIRONMENT
from agent_sandbox._fast.values import dataclass, replace
from agent_sandbox.assembly import here
from agent_sandbox.cli.caller import guest_environment
from agent_sandbox.cli.context import project_of
from agent_sandbox.cli.options import ReplayOptions
from agent_sandbox.cli.render.messages import Console, remark, shown
from agent_sandbox.cli.results import VerbResult
from agent_sandbox.engine.records import Record, Recorder, departures, read, rules_of
from agent_sandbox.engine.work import Work
from agent_sandbox.policy.model import CLONED_LIMITS, Limits, Policy, cloned, locked, repeatable


@dataclass(frozen=True)
class DepartureFacts:
    """A difference between a run and its record."""

    what: str
    message: str


@dataclass(frozen=True)
class RecordedFacts:
    """Figures of the recorded run: bytes of output, number of changes, fuel used."""

    output_bytes: int
    changes: int
    fuel: int | None


@dataclass(frozen=True)
class ReplayResult(VerbResult):
    """A replayed run, compared with its record."""

    kind = "replay"

    same: bool
    departures: tuple[DepartureFacts, ...]
    fuel: int | None
    exit: int
    refused: str | None
    recorded: RecordedFacts

    def text(self, console: Console) -> None:
        if self.refused:
            remark(f"it could not be started: {self.refused}")
        for departure in self.departures:
            print(f"{departure.what}: {departure.message}")
        was = self.recorded
        same = f"the same: {was.output_bytes} bytes of output, {was.changes} changes, {was.fuel} units of fuel"
        console.note(same if self.same else f"it departs from its record in {len(self.departures)} ways")


def replay(options: ReplayOptions) -> ReplayResult:
    """Repeat a recorded run, and compare the two."""
    record = read(options.record)
    what, stdin = replays.what_to_run(record, None, None)
    policy, env = _surroundings(options, record)
    runtimes = here().runtimes("wasm")
    cwd = options.cwd or record.cwd
    replays.check(record, policy, env, cwd, runtimes.identity)
    recorder = Recorder(Work(what, env, cwd=cwd, stdin=stdin, seed=record.seed, collect=False), salt=record.salt)
    try:
        # The project is the same as in the recorded run. Without it, the view would not show a project below /tmp.
        project = project_of(options.project, cwd, throw_away=True).path if policy.files.read else None
        outcome = here().session(here().gate(policy), runtimes, project=project).run(recorder.work)
    finally:
        here().wasm().close(leaving=True)
    differences = departures(record, recorder.record(outcome, policy, runtimes.identity))
    return ReplayResult(
        not differences,
        tuple(DepartureFacts(each.what, shown(each.message)) for each in differences),
        outcome.exit.usage.fuel,
        1 if differences else 0,
        shown(outcome.refused) if outcome.refused else None,
        RecordedFacts(record.stdout.size + record.stderr.size, len(record.changes), record.fuel),
    )


def _surroundings(options: ReplayOptions, record: Record) -> tuple[Policy, Mapping[str, str]]:
    """Return a policy and environment with the same file rules as the record.

    They are those of the command line or of `Sandbox()` in Python, whichever match; those of the command line if neither does.
    """
    kinds = list(_kinds(options, _limits(options, record)))
    return next(((policy, env) for policy, env in kinds if rules_of(policy.files) == record.rules), kinds[0])


def _kinds(options: ReplayOptions, limits: Limits) -> Iterator[tuple[Policy, Mapping[str, str]]]:
    home, asked = here().host.home, options.env
    masks = here().masks_for(os.getcwd())
    yield repeatable(cloned(masks=masks, limits=limits)), guest_environment(os.environ, asked, home=home, bare=True)
    given = guest_environment(os.environ, asked, home=home, bare=True)
    names = {text.partition("=")[0] for text in asked}
    yield repeatable(locked(limits=limits)), {**ENVIRONMENT, **{name: given[name] for name in names}}


def _limits(options: ReplayOptions, record: Record) -> Limits:
    """Return the limits of a replay. Limits that affect the outcome come from the record, the others from the options or the defaults.

    Raises `RecordError` if a limit of the record exceeds the default.
    """
    shaping: dict[str, Any] = {name: record.limits[name] for name in replays.within_reason(record)}
    return replace(CLONED_LIMITS, **dict(options.limits) | shaping)
