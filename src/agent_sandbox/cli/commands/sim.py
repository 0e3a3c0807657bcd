"""`sim`, and `--simulate`: run a command on a throw-away clone, and print what it would do. Machine and sandbox stay as they are."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from agent_sandbox._fast.values import replace
from agent_sandbox.cli import streams
from agent_sandbox.cli.change_list import current_and_whole
from agent_sandbox.cli.commands.diff import aside, paged, show
from agent_sandbox.cli.context import policy_of
from agent_sandbox.cli.execute import code_of, say_how_it_ended
from agent_sandbox.cli.parser import Request, UsageError
from agent_sandbox.cli.render import diff_document, effects, pager
from agent_sandbox.cli.render.changes import Material, check, gather
from agent_sandbox.cli.render.colours import Painter, Style
from agent_sandbox.cli.render.messages import at_a_terminal, remark, says_yes
from agent_sandbox.engine.run import Session
from agent_sandbox.engine.simulation.plan import EffectPlan
from agent_sandbox.engine.simulation.run import simulated
from agent_sandbox.engine.work import Work
from agent_sandbox.errors import Busy
from agent_sandbox.policy.model import Policy
from agent_sandbox.workspace.diff.compare import Formerly
from agent_sandbox.workspace.project import Project
from agent_sandbox.workspace.saved_plans import Plans
from agent_sandbox.workspace.stored_sandbox import Stored

_NOT_WITH = ("--diff", "--watch-reads", "--record")


def refuse_mixtures(request: Request) -> None:
    """Raise `UsageError` for options that say something else than a simulation."""
    check(request)
    for option in _NOT_WITH:
        if request.has(option):
            raise UsageError(f"{option} does not go with a simulation", hint="a plan has the changes in it, and keeps nothing else")


def plan_for(request: Request, session: Session, work: Work, project: Project, on_busy: Callable[[Busy], None]) -> int:
    """Simulate the work and print its plan. Its own output goes to standard error; it exits as the command does."""
    found = current_and_whole(request)
    plans = Plans(found.state.store)
    waiting = None if request.has("--throw-away") else Stored(found.state)
    with ExitStack() as block:
        with streams.forwarding() as forward:
            made = block.enter_context(
                simulated(
                    session,
                    replace(work, on_start=forward.begin, on_output=aside),
                    plans,
                    project.path,
                    waiting=waiting,
                    governed=governing(project).digest(),
                    on_busy=None if request.has("--no-wait") else on_busy,
                )
            )
        code = code_of(made.outcome.exit, forward.received)
        say_how_it_ended(work, made.outcome)
        former = Formerly(bases=made.clone.bases(), open_base=made.clone.open_base)
        material = gather(request, project.path, made.changes, made.contents, former)
        print_plan(request, made.plan, material, kept=made.kept)
    if made.kept and not code and not request.has("--json") and not request.has("--quiet") and at_a_terminal():
        if says_yes(f"Carry out the plan {made.plan.digest[: effects.SHORT]}?"):
            from agent_sandbox.cli.commands.carry_out import carry_out

            return carry_out(Request("carry-out", (made.plan.digest,), {"--quiet": ("",), "--yes": ("",)}))
        remark(f"not carried out; within the hour: agent-sandbox carry-out {made.plan.digest[: effects.SHORT]}")
    return code


def governing(project: Project) -> Policy:
    """The policy that a plan of a project is good under: that of the policy files, whatever options there were."""
    return policy_of(Request("sim"), project)


def print_plan(request: Request, plan: EffectPlan, material: Material, *, kept: bool) -> None:
    """Print a plan in the form that was asked for."""
    with pager.output(paged=paged(request)) as write:
        if request.has("--json"):
            diff_document.begin(write, effects.before_changes(plan), "simulation")
            diff_document.changes(write, material, also=effects.of_change(plan))
            diff_document.end(write, {**effects.after_changes(plan), "kept": kept})
            return
        painter = Painter(Style.of_stdout().colours)
        rest, apart = effects.without_history(material)
        for row in effects.opening(plan):
            write(f"{painter.line(row)}\n".encode())
        show(request, rest, write)
        for row in (*effects.recorded(apart, material), *effects.closing(plan, kept=kept)):
            write(f"{painter.line(row)}\n".encode())
