"""Simulate a command: run it on a clone of the machine as the project's sandbox sees it, and plan its effects.

The clone has a copy of the sandbox's unpromoted changes, and layers of its own on top. Neither the sandbox nor the machine is written. If
the sandbox and the command have both changed a path, the plan has the path as it would be on the machine. A path that only the sandbox has
changed is not part of the plan.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from agent_sandbox._fast.encoding import as_json, canonical_form, digest_of_form, sha256
from agent_sandbox._fast.values import dataclass, replace
from agent_sandbox.engine.plan_launch import SCRATCH
from agent_sandbox.engine.run import Session
from agent_sandbox.engine.simulation import effects, git, risk
from agent_sandbox.engine.simulation.plan import BARE, NOTHING_WAITS, EffectPlan, Ended, FileEffect, Rerun
from agent_sandbox.engine.work import Code, Outcome, Work
from agent_sandbox.errors import Busy, WorkspaceError
from agent_sandbox.policy.model import CLONED_LIMITS, OFFLINE, Policy, with_network
from agent_sandbox.runtime.observe import NOT_ALL
from agent_sandbox.workspace.changes import ChangeSet, Contents
from agent_sandbox.workspace.promotion.inspect import TreeContext
from agent_sandbox.workspace.saved_plans import Plans, PlanState
from agent_sandbox.workspace.stored_sandbox import Stored


@dataclass(frozen=True)
class Simulated:
    """A plan, the outcome of its run, and its changes. `kept` says whether the plan was saved. Valid in the block of `simulated`."""

    plan: EffectPlan
    outcome: Outcome
    changes: ChangeSet
    contents: Contents
    clone: Stored
    kept: bool = False


@contextmanager
def simulated(
    session: Session,
    work: Work,
    plans: Plans,
    project: str,
    *,
    waiting: Stored | None,
    governed: str,
    on_busy: Callable[[Busy], None] | None = None,
    keep: bool = True,
    send: bool = False,
    secrets: tuple[str, ...] = (),
    variables: tuple[str, ...] = (),
    clock: Callable[[], float] = time.time,
) -> Iterator[Simulated]:
    """Simulate the work, and yield its plan. Raises as `Session.run` does.

    `waiting` is the project's sandbox with unpromoted changes, or None for a clone of the bare machine. `governed` is the digest of the
    policy under which the plan is valid. If the sandbox is in use, `on_busy` is called with the `Busy` error and this waits; without
    `on_busy`, `Busy` is raised. Without `keep` the plan is removed after the block. Without `send`, requests that may change something at
    their host are not sent. `secrets` and `variables` are what the run was given: see `Rerun`.
    """
    policy = session.policy
    with plans.making(project) as state:
        before = _seeded(state, waiting, policy, on_busy) if waiting is not None else {}
        since_ns = time.time_ns()
        outcome = session.on(state).run(replace(_held(work, policy, send=send), on_changes=None, observe=True))
        clone = Stored(state)
        with clone.opened() as stack:
            everything, problem = _listed(lambda: clone.changes_in(stack, policy))
            after, unread = effects.file_effects(everything, stack, project)
            problem = problem or unread
            touched = {path for path, effect in after.items() if before.get(path) != effect}
            changes = everything.chosen(lambda change: change.path in touched)
            files = effects.with_risks(
                [after[change.path] for change in changes], changes, stack, project, TreeContext.of(project, policy.files)
            )
            read, all_of_it = effects.inputs_of(outcome.observed, project, since_ns=since_ns, besides=after)
            given_up = sorted(path for path in before if path not in after)
            plan = plan_of(work, outcome, policy, project, files, governed=governed, clock=clock)
            plan = replace(
                plan,
                base=base_of(before) if waiting is not None else BARE,
                read=read,
                words=(*git.words(changes, everything, stack, project), *map(_given_up, given_up)),
                notes=plan.notes if all_of_it else (*plan.notes, effects.NOT_ALL),
                unlisted=problem,
            )
            if policy.network.outbound:
                plan = replace(plan, rerun=_rerun(work, session, secrets, variables))
            kept = keep and bool(files or plan.http) and not problem
            if kept:
                try:
                    plans.keep(state, plan.text())
                except WorkspaceError as error:
                    kept, plan = False, replace(plan, notes=(*plan.notes, f"it cannot be carried out later: {error.message}"))
            yield Simulated(plan, outcome, changes, stack, clone, kept)


def _held(work: Work, policy: Policy, *, send: bool = False) -> Work:
    """Return the work of a simulation: unless `send` is said, it sends no request that may change something."""
    if send or not policy.network.outbound:
        return work
    from agent_sandbox.engine.exchange_records import ExchangeOptions  # few simulations have a network

    return replace(work, exchanges=replace(work.exchanges or ExchangeOptions(), hold=True))


def _rerun(work: Work, session: Session, secrets: tuple[str, ...], variables: tuple[str, ...]) -> Rerun:
    from agent_sandbox.egress.orders import encode_rules  # few simulations have a network

    network = session.policy.network if session.control is None else session.control.declared_in(session.policy.network)
    rules = as_json(encode_rules(network), sort_keys=True)
    return Rerun(rules, apart_from_network(session.policy), secrets, variables, isinstance(work.what, Code))


def apart_from_network(policy: Policy) -> str:
    """Return the digest of a policy without its network and without its limits."""
    return replace(with_network(policy, OFFLINE), limits=CLONED_LIMITS).digest()


def _listed(read: Callable[[], ChangeSet]) -> tuple[ChangeSet, str]:
    try:
        return read(), ""
    except WorkspaceError as error:
        return ChangeSet(), f"its changes cannot be listed: {error.message}"


def plan_apart(session: Session, work: Work, project: str, *, clock: Callable[[], float] = time.time) -> EffectPlan:
    """Simulate work on throw-away layers, without a stored sandbox. The plan cannot be applied."""
    file_effects: list[tuple[FileEffect, ...]] = []
    problems: list[str] = []

    def keep(changes: ChangeSet, contents: Contents) -> None:
        known, unread = effects.file_effects(changes, contents, project)
        problems.append(unread)
        file_effects.append(effects.with_risks(known.values(), changes, contents, project, TreeContext.of("/", session.policy.files)))

    outcome = session.run(replace(_held(work, session.policy), on_changes=keep, observe=True))
    policy = session.policy
    plan = plan_of(work, outcome, policy, project, file_effects[0] if file_effects else (), governed=policy.digest(), clock=clock)
    listed = bool(problems) or not policy.files.write
    return replace(plan, unlisted=problems[0] if problems else "" if listed else "its changes cannot be listed")


def _given_up(path: str) -> str:
    return f"sandbox: its unpromoted change at {path} is undone"


def _seeded(state: PlanState, waiting: Stored, policy: Policy, on_busy: Callable[[Busy], None] | None) -> dict[str, FileEffect]:
    """Copy the unpromoted changes of the sandbox `waiting` into the clone, and return them as effects by path."""
    if not waiting.state.exists:
        return {}
    with ExitStack() as held:
        try:
            held.enter_context(waiting.state.lock(command="simulation"))
        except Busy as busy:
            if on_busy is None:
                raise
            on_busy(busy)
            held.enter_context(waiting.state.lock(wait=True, command="simulation"))
        unpromoted = pending(waiting, policy)
        if unpromoted:
            waiting.copy_to(state, policy.limits.disk_bytes)
    return unpromoted


def pending(stored: Stored, policy: Policy) -> dict[str, FileEffect]:
    """Return the unpromoted changes of a sandbox as effects, by path. Raises `WorkspaceError` if they cannot be read completely."""
    if not stored.state.exists:
        return {}
    with stored.opened() as stack:
        found, problem = effects.file_effects(stored.changes_in(stack, policy), stack, stored.state.project)
    if problem:
        raise WorkspaceError(
            f"the unpromoted changes of the sandbox cannot be read completely, so nothing can be simulated on them: {problem}",
            hint="promote it or drop it first, or simulate on the bare machine: --throw-away",
        )
    return found


def base_of(unpromoted: dict[str, FileEffect]) -> str:
    """Return the digest of a sandbox's unpromoted changes, which a plan is based on."""
    return digest_of_form([canonical_form(effect) for effect in unpromoted.values()]) if unpromoted else NOTHING_WAITS


def plan_of(
    work: Work,
    outcome: Outcome,
    policy: Policy,
    project: str,
    files: tuple[FileEffect, ...],
    *,
    governed: str,
    clock: Callable[[], float],
) -> EffectPlan:
    """Return the plan of a run, without the facts that the caller reads from the layers and adds."""
    read = effects.understood(work)
    observed = outcome.observed
    watched = bool(observed)  # an observed run has at least the start of its program
    end = outcome.exit
    http = effects.http_requests(outcome.requests)
    return EffectPlan(
        command=_command(work),
        cwd=work.cwd or SCRATCH,
        project=project,
        created=clock(),
        governed=governed,
        base=BARE,
        ended=Ended(end.code, end.reason.value, end.limits_hit, risk.of_end(end.code, end.reason.value)),
        files=files,
        programs=effects.programs(observed, read, watched=watched),
        network=effects.requests(observed, http),
        http=http,
        untold=outcome.untold,
        secrets=effects.secrets(observed, policy.files.masks, work.env),
        predicted=tuple(effects.predictions(read)),
        notes=outcome.notes,
        watched=watched,
        unseen=next((note for note in outcome.notes if any(part in note for part in NOT_ALL)), ""),
    )


def _command(work: Work) -> tuple[str, ...]:
    """Return the words of a command; for code the language, the digest of the source, and the arguments."""
    if isinstance(work.what, Code):
        return (f"{work.what.language} code", f"sha256:{sha256(work.what.source.encode()).hexdigest()}", *work.what.arguments)
    return work.what.argv
