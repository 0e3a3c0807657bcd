"""`carry-out`: do what a plan says, exactly, after showing it once more."""

from __future__ import annotations

import time
from contextlib import ExitStack

from agent_sandbox.assembly import here
from agent_sandbox.cli.change_list import recover
from agent_sandbox.cli.commands.promote import NOBODY_AGREED, agreement, approved_kinds, done_fields, whole_diff
from agent_sandbox.cli.commands.sim import governing, print_plan
from agent_sandbox.cli.context import gate_for, project_of
from agent_sandbox.cli.parser import Request
from agent_sandbox.cli.render import effects
from agent_sandbox.cli.render.changes import check, gather
from agent_sandbox.cli.render.messages import remark, shown
from agent_sandbox.cli.render.quantities import counted
from agent_sandbox.engine.gate import Gate
from agent_sandbox.engine.promote import CarriedOver
from agent_sandbox.engine.simulation.apply import Ready, carry, kept_plans, opened
from agent_sandbox.engine.simulation.plan import EffectPlan
from agent_sandbox.errors import PolicyError
from agent_sandbox.workspace.diff.compare import Formerly
from agent_sandbox.workspace.project import find_project
from agent_sandbox.workspace.saved_plans import Plans
from agent_sandbox.workspace.store import Store
from agent_sandbox.workspace.stored_sandbox import Stored


def carry_out(request: Request) -> int:
    """The verb `carry-out`. It exits with 3 when nobody said yes, having changed nothing."""
    check(request)
    store = Store.open(here().host.state)
    if not request.words:
        return _list(request, kept_plans(Plans(store)))
    with ExitStack() as ends:
        return _carry_out(request, store, ends)


def _list(request: Request, plans: list[EffectPlan]) -> int:
    """All plans that are still good, of every project."""
    if request.has("--json"):
        from agent_sandbox.cli.render.json import print_document

        print_document("plans", {"plans": [{**effects.before_changes(plan), "created": plan.created} for plan in plans]})
        return 0
    for plan in plans:
        when = time.strftime("%H:%M:%S", time.localtime(plan.created))
        print(
            f"{plan.digest[: effects.SHORT]}  {when}  {plan.risk.level.value:<6}  {shown(plan.project)}  {shown(effects.command_of(plan))}"
        )
    if not plans:
        remark("there are no plans; `agent-sandbox sim COMMAND` makes one")
    return 0


def _carry_out(request: Request, store: Store, ends: ExitStack) -> int:
    plans = Plans(store)
    gates: list[Gate] = []

    def stored_of(project: str) -> Stored:
        if request.has("--project") and project_of(request).path != project:
            raise PolicyError(f"this is a plan of {project!r}", hint="leave out --project")
        found = find_project(project, home=here().host.home, explicit=True)
        stored = Stored(store.sandbox_for(found.path))
        gates.append(gate_for(request, governing(found), found, stored.state.id, prompt=True))
        ends.callback(gates[0].end)
        recover(stored, gates[0])
        return stored

    files_only, system, approved = request.has("--files-only"), request.has("--system"), approved_kinds(request)
    with opened(
        plans, request.words[0], stored_of, lambda project: gates[0].policy, approved=approved, system=system, files_only=files_only
    ) as ready:
        if not request.has("--quiet") and not request.has("--json"):
            _show(request, ready)
        agreed = agreement(request, ready.proposal)
        if agreed is None:
            return _end(request, ready, None, "nothing was carried out: nobody said yes (--yes; for each protected kind --approve KIND)")
        done = carry(ready, agreed, plans, gates[0], details=lambda: whole_diff(request, agreed))
    back = " · take it back: agent-sandbox undo" if done.promotion.number else ""
    if ready.plan.requests and not request.has("--json"):
        asked = ", ".join(ready.plan.requests[:5])
        remark(f"NOT carried out: what the command asked of {asked} over the network. Only its file changes were carried over.")
    _end(request, ready, done, f"carried out plan {ready.plan.digest[: effects.SHORT]}: {counted(len(agreed.changes), 'change')}{back}")
    if done.note:
        remark(done.note)
    return 0


def _show(request: Request, ready: Ready) -> None:
    proposal, clone = ready.proposal, ready.clone
    former = Formerly(bases=clone.bases(), open_base=clone.open_base)
    print_plan(request, ready.plan, gather(request, ready.plan.project, proposal.changes, proposal.contents, former), kept=False)
    if ready.left_out:
        remark(f"left out: {counted(len(ready.left_out), 'scratch file')} outside the project (--system)")


def _end(request: Request, ready: Ready, done: CarriedOver | None, words: str) -> int:
    if request.has("--json"):
        from agent_sandbox.cli.render.json import path_fields, print_document

        print_document(
            "carry-out",
            {
                "plan": ready.plan.digest,
                **path_fields("project", ready.plan.project),
                "carried_out": done is not None,
                "why_not": None if done else words,
                **(done_fields(done) if done else {}),
                "not_carried_out": list(ready.plan.requests),
                "left_out": [path_fields("path", path) for path in ready.left_out],
            },
        )
    else:
        remark(words)
    return 0 if done else NOBODY_AGREED
