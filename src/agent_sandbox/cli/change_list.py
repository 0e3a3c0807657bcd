"""The changes that wait in a sandbox: read them, sort them, remark on them."""

from __future__ import annotations

import os

from agent_sandbox._fast.values import dataclass
from agent_sandbox.assembly import here
from agent_sandbox.cli.context import Current, current, policy_of
from agent_sandbox.cli.parser import Request
from agent_sandbox.cli.render.messages import remark
from agent_sandbox.cli.render.quantities import counted
from agent_sandbox.engine.gate import Gate
from agent_sandbox.engine.recover import interrupted, recovered
from agent_sandbox.engine.work import Outcome
from agent_sandbox.errors import Busy, SandboxError
from agent_sandbox.policy.model import Policy
from agent_sandbox.workspace.changes import Change, ChangeSet, place_of
from agent_sandbox.workspace.stored_sandbox import Stored


@dataclass(frozen=True)
class Pending:
    """Changes, or the reason why they cannot be told."""

    changes: ChangeSet
    problem: str = ""


@dataclass(frozen=True)
class Sorted:
    """Changes as a person wants to see them."""

    project: tuple[Change, ...]
    elsewhere: tuple[Change, ...]
    noise: tuple[Change, ...]


def sort(changes: ChangeSet, project: str) -> Sorted:
    """Apart: the project's, those elsewhere, and by-products."""
    places = [(place_of(change.path, project), change) for change in changes]
    return Sorted(*(tuple(change for place, change in places if place == name) for name in ("project", "elsewhere", "noise")))


def stored(found: Current, policy: Policy) -> Pending:
    """What waits in the current sandbox."""
    try:
        return Pending(Stored(found.state).changes(policy))
    except SandboxError as error:
        return Pending(ChangeSet(), error.message)


def remark_on_changes(outcome: Outcome, policy: Policy, found: Current | None) -> None:
    """One quiet line after a run, when there is something to look at."""
    if found is None:
        if outcome.changes:
            remark(f"{counted(len(outcome.changes), 'change')} thrown away with the sandbox")
        return
    pending = stored(found, policy)
    if pending.problem:
        remark(pending.problem)
    elif pending.changes:
        files = sort(pending.changes, found.project.path)
        noise = f" and {len(files.noise):,} in caches" if files.noise else ""
        remark(f"{counted(len(files.project) + len(files.elsewhere), 'change')}{noise} in the sandbox · agent-sandbox diff")


def recover(stored: Stored, gate: Gate) -> None:
    """For a verb that promotes. Raises `Busy` while somebody has the sandbox."""
    for words in recovered(stored, gate):
        remark(words)


def current_and_whole(request: Request) -> Current:
    """The current sandbox for a verb that does not promote: what is under way just now is left alone, what cannot be ended is said.

    Plans that nobody carried out in time go by the way.
    """
    found = current(request)
    if os.path.isdir(os.path.join(found.state.store.path, "plans")):
        from agent_sandbox.workspace.saved_plans import Plans

        Plans(found.state.store).sweep()
    if interrupted(found.state):
        try:
            policy = policy_of(request, found.project)
            recover(Stored(found.state), here().gate(policy, sandbox=found.state.id))
        except Busy:
            pass
        except (SandboxError, OSError) as error:
            remark(f"a promotion was cut off and could not be brought to its end: {error}")
    return found
