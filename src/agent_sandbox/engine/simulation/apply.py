"""Apply a plan: promote exactly its file changes, as `engine.promote` promotes the changes of a sandbox.

Before any change, the layers of the plan are read again and compared with the plan, byte for byte. The policy and the unpromoted changes of
the project's sandbox must be the same as during the simulation. The real files must be as they were when the simulation began. A plan can
be applied once: when its promotion has begun, nobody can begin it again, unless the promotion failed and changed nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from agent_sandbox._fast.values import dataclass, replace
from agent_sandbox.engine.gate import Gate
from agent_sandbox.engine.git_objects import RuntimeOf
from agent_sandbox.engine.promote import CarriedOver, PromotionProposal, Wanted, carry_out, proposed
from agent_sandbox.engine.simulation import effects
from agent_sandbox.engine.simulation.plan import BARE, EffectPlan, read
from agent_sandbox.engine.simulation.risk import NONE
from agent_sandbox.engine.simulation.run import base_of, pending
from agent_sandbox.errors import LedgerBroken, LedgerUnavailable, PolicyError, SandboxError, Unfinished
from agent_sandbox.kernel.mount_plan import IMAGES
from agent_sandbox.policy.model import Policy
from agent_sandbox.policy.paths import contains
from agent_sandbox.workspace.changes import ChangeSet
from agent_sandbox.workspace.saved_plans import Plans, PlanState, SavedPlan
from agent_sandbox.workspace.stored_sandbox import Stored


@dataclass(frozen=True)
class Ready:
    """A checked plan that can be applied, and the promotion that applies it. Valid in the block of `opened`."""

    plan: EffectPlan
    kept: SavedPlan
    stored: Stored  # the project's sandbox
    clone: Stored  # the sandbox that the simulation ran in
    proposal: PromotionProposal
    left_out: tuple[str, ...] = ()  # caches and scratch files, which are not promoted


@contextmanager
def opened(
    plans: Plans,
    prefix: str,
    stored_of: Callable[[str], Stored],
    policy_of: Callable[[str], Policy],
    runtime: RuntimeOf,
    *,
    approved: frozenset[str] = frozenset(),
    system: bool = False,
    caches: bool = False,
    files_only: bool = False,
    reruns: bool = False,
    home: str = "",
) -> Iterator[Ready]:
    """Open and check the plan whose digest begins with `prefix`, and lock the project's sandbox. Changes nothing yet.

    `stored_of` and `policy_of` return the sandbox and the current policy of a project; `runtime` is as for `proposed`. `files_only` accepts
    a plan that also needs the network. With `reruns`, the caller sends the requests of a plan: see `rerun`. Raises `PolicyError` for a plan
    that is missing, already begun, altered or out of date. Drift is checked later, by `carry`.
    """
    with plans.opened(prefix) as kept:
        plan = _read(kept)
        stored, policy = stored_of(plan.project), policy_of(plan.project)
        _refuse_beyond_files(plan, files_only=files_only, reruns=reruns)
        _refuse_elsewhere(plan, system=system)
        left_out = tuple(_left_out(plan, system=system, caches=caches))
        promoted = [effect for effect in plan.files if not effect.path.startswith(IMAGES)]  # what is in an image stays there
        chosen = {effect.path for effect in promoted if system or effect.place != "elsewhere"}.difference(left_out)
        clone = Stored(PlanState(stored.state.store, plan.project, kept.state.id))
        wanted = Wanted(lambda change: change.path in chosen, system=system, approved=approved, caches=caches, plan=plan.digest, home=home)
        with stored.state.lock(command="carry-out"), proposed(clone, policy, wanted, runtime) as proposal:
            _refuse_changed(plan, proposal, chosen, governed=policy.digest(), base=base_of(pending(stored, policy)))
            yield Ready(plan, kept, stored, clone, proposal, left_out)


def carry(ready: Ready, proposal: PromotionProposal, plans: Plans, gate: Gate, *, details: Callable[[], str] = str) -> CarriedOver:
    """Apply a plan. `proposal` is `ready.proposal`, possibly with more approvals. Raises what `promote.carry_out` raises."""
    ready.kept.begin()
    try:
        done = carry_out(proposal, ready.stored, gate, details=details)
    except (Unfinished, LedgerUnavailable, LedgerBroken):  # files may have been changed, so the plan cannot begin again
        raise
    except SandboxError:
        ready.kept.recall()
        raise
    plans.drop(ready.kept)
    return done


def kept_plans(plans: Plans) -> list[EffectPlan]:
    """Return all plans that can be applied, the newest first."""
    readable: list[EffectPlan] = []
    for _, text in plans.all():
        with suppress(ValueError):  # a plan of another version
            readable.append(read(text))
    return readable


def _read(kept: SavedPlan) -> EffectPlan:
    try:
        plan = read(kept.text)
    except ValueError as error:
        raise PolicyError(f"the plan cannot be read: {error}", hint="simulate the command again") from error
    if not (plan.files or plan.http):
        raise PolicyError("the plan changes no files, so there is nothing to carry out", hint="run the command")
    return plan


def _refuse_beyond_files(plan: EffectPlan, *, files_only: bool, reruns: bool) -> None:
    if plan.http and not (files_only or reruns):
        why = f"the plan sends requests, the first of them {plan.http[0].method} {plan.http[0].target}"
        raise PolicyError(why, hint="files_only=True applies its files alone; to send its requests, run the command")
    if plan.requests and not plan.http and not files_only:
        raise PolicyError(
            f"the plan needs the network, which it was made without: it asked for {', '.join(plan.requests[:5])}"
            f"{' and more' if len(plan.requests) > 5 else ''}",
            hint="--files-only applies its file changes alone; or simulate the command with --network",
        )
    if files_only and not plan.files:
        raise PolicyError("the plan changes no files", hint="leave out --files-only")


def _refuse_elsewhere(plan: EffectPlan, *, system: bool) -> None:
    outside = [effect.path for effect in plan.files if effect.place == "elsewhere"]
    if outside and not system:
        raise PolicyError(
            f"the plan changes {len(outside):,} paths outside the project, the first of them {outside[0]!r}",
            hint="--system carries those over, too; to choose among its changes: run the command, then promote",
        )


def _left_out(plan: EffectPlan, *, system: bool, caches: bool) -> Iterator[str]:
    """Yield the paths of caches and scratch files that are not promoted.

    Without `caches`, these are all of them. With `caches` but not `system`, these are the ones outside the project.
    """
    for effect in plan.files:
        if effect.place == "noise" and not (caches and (system or contains(plan.project, effect.path))):
            yield effect.path


def _refuse_changed(plan: EffectPlan, proposal: PromotionProposal, chosen: set[str], *, governed: str, base: str) -> None:
    again = "simulate the command again"
    if plan.governed != governed:
        raise PolicyError("the policy has changed since the plan was made", hint=again)
    if plan.base not in (BARE, base):
        raise PolicyError("the unpromoted changes of the project's sandbox have changed since the plan was made", hint=again)
    if read := next(effects.moved(plan.read, plan.project), None):
        raise PolicyError(f"{read!r}, which the command read, has changed since", hint=again)
    if proposal.moved:
        return  # the promotion itself refuses drift, and names the paths
    raw = proposal.history.raw  # the files of the sandbox's repositories, as the plan has them
    files = [change for change in proposal.changes if change.path not in proposal.history.changes]
    files += [change for change in proposal.pending if change.path in raw and change.path in chosen]
    now, problem = effects.file_effects(ChangeSet(tuple(files)), proposal.contents.sandbox, plan.project)
    if problem:
        raise PolicyError(f"the plan's files cannot be read any more: {problem}", hint=again)
    wanted = chosen.difference(set(proposal.settled) - raw)
    if now != {effect.path: replace(effect, risk=NONE) for effect in plan.files if effect.path in wanted}:
        raise PolicyError("the plan's files have changed since it was shown", hint=again)
