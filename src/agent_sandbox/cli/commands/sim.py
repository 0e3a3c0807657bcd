"""`sim`: run a command on a throw-away clone and print a plan of its effects; and `carry-out`: apply exactly the effects of a plan."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import ExitStack

from agent_sandbox._fast.values import dataclass, replace
from agent_sandbox.assembly import here
from agent_sandbox.cli.caller import EscapedOutput, forwarding, guest_environment
from agent_sandbox.cli.commands.promote import agreement, promotion_facts, why_not_agreed
from agent_sandbox.cli.context import current_and_whole, gate_for, object_runtime, policy_of, project_of, recover
from agent_sandbox.cli.execute import code_of, refusal, runtimes_for, say_how_it_ended, variables_of
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
from agent_sandbox.engine.promote import PromotionProposal
from agent_sandbox.engine.provisions import Provisions
from agent_sandbox.engine.review import diff_for_approver
from agent_sandbox.engine.run import Session
from agent_sandbox.engine.simulation.apply import Ready, carry, kept_plans, opened
from agent_sandbox.engine.simulation.plan import BARE, EffectPlan
from agent_sandbox.engine.simulation.run import simulated
from agent_sandbox.engine.work import Command, Work
from agent_sandbox.errors import Busy, PolicyError
from agent_sandbox.policy.model import Policy
from agent_sandbox.runtime.base import DEVNULL
from agent_sandbox.workspace.diff.compare import Formerly
from agent_sandbox.workspace.project import Project, find_project
from agent_sandbox.workspace.saved_plans import Plans
from agent_sandbox.workspace.store import Store, sandbox_id
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
    """A plan, and whether it was carried out. `not_carried_out` lists the network requests of a plan whose files alone were wanted.

    If the command ran again, `exit` is its exit code, `sent` are the requests that it sent, `refused` what it was refused, and `again` is
    the digest of the plan of its files, if they came out otherwise.
    """

    kind = "carry-out"

    plan: str
    project: PathName
    carried_out: bool
    why_not: str | None
    done: PromotionFacts | Omitted
    not_carried_out: tuple[str, ...]
    left_out: tuple[PathFacts, ...]
    changes: int
    exit: int | None = None
    sent: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    again: str | None = None

    @property
    def code(self) -> int:
        """0 if the plan was carried out, 1 if the command did something else, 3 if the plan was not approved."""
        return 0 if self.carried_out else NOT_APPROVED if self.exit is None else 1

    def text(self, console: Console) -> None:
        for each in self.sent:
            console.note(f"sent: {each}")
        for each in self.refused:
            remark(f"refused: {each}")
        if self.why_not is not None:
            remark(self.why_not)
            if self.again is not None:
                remark(f"its files are a plan of their own: agent-sandbox carry-out {self.again[:SHORT]} --files-only")
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
                    send=options.send,
                    secrets=options.secrets,
                    variables=tuple(sorted({each.partition("=")[0] for each in variables_of(options)})),
                )
            )
        output.finish()
        plan, exit = simulation.plan, simulation.outcome.exit
        say_how_it_ended(refusal(work, simulation.outcome), exit.reason, exit.limits_hit)
        former = Formerly(bases=simulation.clone.bases(), read_base=simulation.clone.read_base)
        material = gather(options.show, project.path, simulation.changes, simulation.contents, former)
        result = SimulationResult.of(plan, kept=simulation.kept, exit=code_of(exit, forward.received))
        _print_plan(options.show, plan, material, result, console)
    if simulation.kept and not result.exit and not console.quiet and console.asks:
        if console.says_yes(f"Carry out the plan {plan.digest[:SHORT]}?"):
            given = CarryOutOptions(plan.digest, yes=True, env=options.env, env_files=options.env_files)
            return carry_out(given, replace(console, quiet=True))
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
        reruns=True,
        home=here().host.home,
    ) as ready:
        again = _Again.of(options, ready.plan, gates[0].policy) if ready.plan.http and not options.files_only else None
        if console.shows and not console.quiet:
            _show(options, ready, console)
        agreed = _agreed(ready, console, yes=options.yes, runs=again is not None)
        if agreed is None:
            return _result(ready, f"not carried out: {why_not_agreed(console)}")
        done = None
        if again is not None and (not agreed.changes or not _must_fail(agreed)):
            ready.kept.begin()
        else:  # what must fail is refused here, before a request is sent
            done = carry(ready, agreed, plans, gates[0], details=lambda: diff_for_approver(agreed))
    if again is not None and done is None:
        return _run_again(options, again, agreed.wanted.approved, _result(ready, None), store, console)
    assert done is not None
    if done.note:
        remark(done.note)
    return replace(_result(ready, None), done=promotion_facts(done), changes=len(agreed.changes))


def _show(options: CarryOutOptions, ready: Ready, console: Console) -> None:
    proposal, clone = ready.proposal, ready.clone
    former = Formerly(bases=clone.bases(), read_base=clone.read_base)
    material = gather(options.show, ready.plan.project, proposal.changes, proposal.contents, former)
    _print_plan(options.show, ready.plan, material, SimulationResult.of(ready.plan, kept=False, exit=0), console)
    if ready.left_out:
        remark(f"left out: {counted(len(ready.left_out), 'change')} in caches and scratch directories (--caches)")


def _result(ready: Ready, why_not: str | None) -> CarryOutResult:
    left_out = tuple(PathFacts(PathName(path)) for path in ready.left_out)
    plan = ready.plan
    return CarryOutResult(plan.digest, PathName(plan.project), why_not is None, why_not, OMITTED, plan.requests, left_out, 0)


def _agreed(ready: Ready, console: Console, *, yes: bool, runs: bool) -> PromotionProposal | None:
    """Return the proposal as it was agreed to; None if it was not. With `runs`, the command runs again, and files may not change at all."""
    if not runs:
        return agreement(ready.proposal, console, yes=yes, project=None)
    if not yes:
        requests = counted(len(ready.plan.http), "request")
        if not console.asks or not console.says_yes(f"Run it again, and let it send {requests}?"):
            return None
    return agreement(ready.proposal, console, yes=True, project=None) if ready.plan.files else ready.proposal


def _must_fail(proposal: PromotionProposal) -> bool:
    """Return whether the files of a plan cannot be carried over, so that nothing should be sent either."""
    stuck = proposal.conflicts or proposal.plan().refused or (proposal.moved and proposal.wanted.drift == "refuse")
    return bool(stuck) or bool(frozenset(proposal.protected()) - proposal.wanted.approved)


@dataclass(frozen=True)
class _Again:
    """A command of a plan with requests, ready to run again."""

    plan: EffectPlan
    policy: Policy
    provisions: Provisions
    work: Work

    @classmethod
    def of(cls, options: CarryOutOptions, plan: EffectPlan, policy: Policy) -> _Again:
        """Return the command of a plan, under a policy that permits its requests alone. Raises `PolicyError` if something is missing."""
        from agent_sandbox.engine.simulation.rerun import permitting  # few plans have requests
        from agent_sandbox.policy.bound_secrets import Secret

        policy, rerun = permitting(plan, policy), plan.rerun
        assert rerun is not None  # for `permitting`
        variables = variables_of(CommandOptions(env=options.env, env_files=options.env_files))
        named = {each.partition("=")[0] for each in variables}
        if missing := sorted(set(rerun.variables) - named):
            raise PolicyError(f"the command was simulated with the variable {missing[0]}", hint=f"give it again: --env {missing[0]}")
        if more := sorted(named - set(rerun.variables)):
            raise PolicyError(f"the command was simulated without the variable {more[0]}", hint="leave it out")
        handed = [value if equals else os.environ.get(name, "") for name, equals, value in (each.partition("=") for each in variables)]
        secrets = tuple(map(Secret.read, rerun.secrets))
        provisions = here().provisions(policy, secrets, project=plan.project, handed=handed)
        env = guest_environment(os.environ, variables, home=here().host.home)
        stdin = 0 if options.yes and not os.isatty(0) else DEVNULL
        return cls(plan, policy, provisions, Work(Command(plan.command), env, cwd=plan.cwd, stdin=stdin, collect=False))


def _run_again(
    options: CarryOutOptions, again: _Again, approved: frozenset[str], result: CarryOutResult, store: Store, console: Console
) -> CarryOutResult:
    """Run the command of a plan under exactly its requests. Carry its files over if they come out as planned."""
    from agent_sandbox.engine.simulation.rerun import difference  # few plans have requests

    plan, rerun = again.plan, again.plan.rerun
    assert rerun is not None
    owner = find_project(plan.project, home=here().host.home, explicit=True)
    plans, output = Plans(store), EscapedOutput(aside=True)
    gate = gate_for(again.policy, owner, f"{sandbox_id(owner.path)}/carry-out", capabilities=options.capabilities, prompt=True)
    waiting = None if plan.base == BARE else Stored(store.sandbox_for(owner.path))
    with ExitStack() as block:
        block.callback(gate.end)
        runtimes = block.enter_context(runtimes_for(CommandOptions(), None, console))
        session = here().session(gate, runtimes, project=owner.path, provisions=again.provisions)
        with forwarding() as forward:
            work = replace(again.work, on_start=forward.begin, on_output=output.pass_on)
            made = block.enter_context(
                simulated(
                    *(session, work, plans, owner.path),
                    waiting=waiting,
                    governed=plan.governed,
                    send=True,
                    secrets=rerun.secrets,
                    variables=rerun.variables,
                )
            )
        output.finish()
        second, flows, kept = made.plan, made.outcome.network, made.kept
    why = difference(plan, second, flows)
    result = replace(
        result,
        exit=code_of(made.outcome.exit, forward.received),
        sent=tuple(f"{each.method} {shown(each.target)}" for each in second.http if each.sent),
        refused=tuple(f"{shown(flow.target)}: {shown(flow.refused)}" for flow in flows if flow.refused),
        not_carried_out=(),
    )
    if why:
        return replace(
            result,
            carried_out=False,
            why_not=f"not as planned, and no file was carried over: {shown(why)}",
            again=second.digest if kept else None,
        )
    if not second.files:
        return result
    with ExitStack() as ends:
        files = replace(options, files_only=True, yes=True, approved=approved)
        done = _carry_out(files, second.digest, store, ends, replace(console, quiet=True))
    return replace(result, done=done.done, changes=done.changes, left_out=done.left_out)
