"""`sim`: run a command on a throw-away clone and print a plan of its effects; and `carry-out`: apply exactly the effects of a plan."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack

from agent_sandbox._fast.values import dataclass, replace
from agent_sandbox.assembly import here
from agent_sandbox.cli.caller import EscapedOutput, forwarding
from agent_sandbox.cli.commands.promote import NEEDS_YES, agreement, promotion_facts
from agent_sandbox.cli.context import current_and_whole, gate_for, object_runtime, policy_of, project_of, recover
from agent_sandbox.cli.execute import code_of, refusal, say_how_it_ended
from agent_sandbox.cli.options import CarryOutOptions, CommandOptions, PolicyOptions, ShowOptions
from agent_sandbox.cli.render import pager
from agent_sandbox.cli.render.changes import Material, ShownChange, gather, show, shown_changes
from agent_sandbox.cli.render.colours import Painter
from agent_sandbox.cli.render.effects import (
    SHORT,
    EffectFacts,
    PlanHead,
    closing,
    command_of,
    effect_facts,
    opening,
    plan_head,
    plans_by_path,
    recorded,
    without_history,
)
from agent_sandbox.cli.render.messages import Console, counted, remark, reset_terminal, shown
from agent_sandbox.cli.results import NOT_APPROVED, OMITTED, Omitted, PathFacts, PathName, PromotionFacts, VerbResult
from agent_sandbox.engine.gate import Gate
from agent_sandbox.engine.review import diff_for_approver
from agent_sandbox.engine.run import Session
from agent_sandbox.engine.simulation.apply import Ready, carry, kept_plans, opened
from agent_sandbox.engine.simulation.plan import EffectPlan
from agent_sandbox.engine.simulation.run import simulated
from agent_sandbox.engine.work import Work
from agent_sandbox.errors import Busy, PolicyError
from agent_sandbox.policy.model import Policy
from agent_sandbox.workspace.diff.compare import Formerly
from agent_sandbox.workspace.project import Project, find_project
from agent_sandbox.workspace.saved_plans import Plans
from agent_sandbox.workspace.store import Store
from agent_sandbox.workspace.stored_sandbox import Stored


@dataclass(frozen=True)
class SimulationResult(VerbResult):
    """The effect plan of a simulated command.

    `changes` is empty, because the changes were already printed, while the clone existed.
    """

    kind = "simulation"
    streamed = True

    head: PlanHead
    changes: tuple[ShownChange, ...]
    effects: EffectFacts
    kept: bool
    exit: int

    @classmethod
    def of(cls, plan: EffectPlan, *, kept: bool, exit: int) -> SimulationResult:
        """Return the result for a plan. `kept` says whether the plan was stored, `exit` is the exit code."""
        return cls(plan_head(plan), (), effect_facts(plan), kept, exit)

    def text(self, console: Console) -> None:
        """Print nothing: the plan was already printed."""


@dataclass(frozen=True)
class ListedPlan:
    """A plan that can still be carried out."""

    plan: PlanHead
    created: float
    line: str  # the command as it could be typed


@dataclass(frozen=True)
class PlansResult(VerbResult):
    """The stored plans of all projects that can still be carried out."""

    kind = "plans"

    plans: tuple[ListedPlan, ...]

    def text(self, console: Console) -> None:
        for listed in self.plans:
            plan, when = listed.plan, time.strftime("%H:%M:%S", time.localtime(listed.created))
            print(f"{plan.digest[:SHORT]}  {when}  {plan.risk.level.value:<6}  {shown(plan.project)}  {shown(listed.line)}")
        if not self.plans:
            remark("there are no plans; make one with: agent-sandbox sim COMMAND")


@dataclass(frozen=True)
class CarryOutResult(VerbResult):
    """A plan, and whether it was carried out. `not_carried_out` lists its network requests, which are never repeated."""

    kind = "carry-out"

    plan: str
    project: PathName
    carried_out: bool
    why_not: str | None
    done: PromotionFacts | Omitted
    not_carried_out: tuple[str, ...]
    left_out: tuple[PathFacts, ...]
    changes: int

    @property
    def code(self) -> int:
        """3 if the plan was not approved, else 0."""
        return 0 if self.carried_out else NOT_APPROVED

    def text(self, console: Console) -> None:
        if self.why_not is not None:
            remark(self.why_not)
            return
        if self.not_carried_out:
            asked = ", ".join(self.not_carried_out[:5])
            remark(f"NOT carried out: network requests to {asked}. Only file changes were carried out.")
        back = " · take it back: agent-sandbox undo" if not isinstance(self.done, Omitted) and self.done.promotion else ""
        remark(f"carried out plan {self.plan[:SHORT]}: {counted(self.changes, 'change')}{back}")


def simulate(
    options: CommandOptions, session: Session, work: Work, project: Project, console: Console, on_busy: Callable[[Busy], None]
) -> VerbResult:
    """Simulate the work and print its plan. The work's own output goes to standard error. At a terminal, offer to carry out the plan."""
    sandbox = current_and_whole(options.project, options.policy)
    plans = Plans(sandbox.state.store)
    waiting = None if options.throw_away else Stored(sandbox.state)
    with ExitStack() as block:
        output = EscapedOutput(aside=True)
        with forwarding() as forward:
            simulation = block.enter_context(
                simulated(
                    session,
                    replace(work, on_start=forward.begin, on_output=output.pass_on),
                    plans,
                    project.path,
                    waiting=waiting,
                    governed=_governing(project).digest(),
                    on_busy=on_busy if options.wait else None,
                )
            )
        output.finish()
        plan, exit = simulation.plan, simulation.outcome.exit
        say_how_it_ended(refusal(work, simulation.outcome), exit.reason, exit.limits_hit)
        former = Formerly(bases=simulation.clone.bases(), open_base=simulation.clone.open_base)
        material = gather(options.show, project.path, simulation.changes, simulation.contents, former)
        result = SimulationResult.of(plan, kept=simulation.kept, exit=code_of(exit, forward.received))
        _print_plan(options.show, plan, material, result, console)
    if simulation.kept and not result.exit and not console.quiet and console.asks:
        if console.says_yes(f"Carry out the plan {plan.digest[:SHORT]}?"):
            return carry_out(CarryOutOptions(plan.digest, yes=True), replace(console, quiet=True))
        remark(f"not carried out; within the hour: agent-sandbox carry-out {plan.digest[:SHORT]}")
    return result


def _governing(project: Project) -> Policy:
    """Return the policy that plans of a project are checked against: that of the policy files, without command line options."""
    return policy_of(PolicyOptions(), project)


def _print_plan(options: ShowOptions, plan: EffectPlan, material: Material, result: SimulationResult, console: Console) -> None:
    reset_terminal()
    with pager.output(paged=options.pager) as write:
        if options.form == "json":
            from agent_sandbox.cli.render.json import begin_document, end_document, write_changes  # only with --json

            begin_document(write, result)
            write_changes(write, shown_changes(material, plans_by_path(plan)))
            end_document(write, result)
            return
        painter = Painter(console.style.colours)
        rest, apart = without_history(material)
        for row in opening(plan):
            write(f"{painter.line(row)}\n".encode())
        show(options, rest, write, console)
        for row in (*recorded(apart, material), *closing(plan, kept=result.kept)):
            write(f"{painter.line(row)}\n".encode())


def carry_out(options: CarryOutOptions, console: Console) -> VerbResult:
    """Carry out a plan after showing it once more, or list the plans."""
    store = Store.open(here().host.state)
    if options.digest is None:
        return PlansResult(tuple(ListedPlan(plan_head(plan), plan.created, command_of(plan)) for plan in kept_plans(Plans(store))))
    with ExitStack() as ends:
        return _carry_out(options, options.digest, store, ends, console)


def _carry_out(options: CarryOutOptions, digest: str, store: Store, ends: ExitStack, console: Console) -> CarryOutResult:
    plans = Plans(store)
    gates: list[Gate] = []

    def stored_of(project: str) -> Stored:
        if options.project is not None and project_of(options.project).path != project:
            raise PolicyError(f"this is a plan of {project!r}", hint="leave out --project")
        owner = find_project(project, home=here().host.home, explicit=True)
        stored = Stored(store.sandbox_for(owner.path))
        gates.append(gate_for(_governing(owner), owner, stored.state.id, capabilities=options.capabilities, prompt=True))
        ends.callback(gates[0].end)
        recover(stored, gates[0])
        return stored

    with opened(
        plans,
        digest,
        stored_of,
        lambda project: gates[0].policy,
        ends.enter_context(object_runtime()),
        approved=options.approved,
        system=options.system,
        caches=options.caches,
        files_only=options.files_only,
        home=here().host.home,
    ) as ready:
        if console.shows and not console.quiet:
            _show(options, ready, console)
        agreed = agreement(ready.proposal, console, yes=options.yes, project=None)
        if agreed is None:
            return _result(ready, f"not carried out: {NEEDS_YES}")
        done = carry(ready, agreed, plans, gates[0], details=lambda: diff_for_approver(agreed))
    if done.note:
        remark(done.note)
    return replace(_result(ready, None), done=promotion_facts(done), changes=len(agreed.changes))


def _show(options: CarryOutOptions, ready: Ready, console: Console) -> None:
    proposal, clone = ready.proposal, ready.clone
    former = Formerly(bases=clone.bases(), open_base=clone.open_base)
    material = gather(options.show, ready.plan.project, proposal.changes, proposal.contents, former)
    _print_plan(options.show, ready.plan, material, SimulationResult.of(ready.plan, kept=False, exit=0), console)
    if ready.left_out:
        remark(f"left out: {counted(len(ready.left_out), 'change')} in caches and scratch directories (--caches)")


def _result(ready: Ready, why_not: str | None) -> CarryOutResult:
    left_out = tuple(PathFacts(PathName(path)) for path in ready.left_out)
    plan = ready.plan
    return CarryOutResult(plan.digest, PathName(plan.project), why_not is None, why_not, OMITTED, plan.requests, left_out, 0)
