"""Elevations (rules relaxed for a limited time): begin one, apply those in force to a run, and offer one after a refusal."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from agent_sandbox import policy_files
from agent_sandbox._fast.values import dataclass
from agent_sandbox.assembly import here, words_that_count
from agent_sandbox.cli.context import keeps_nothing, policy_of, project_of
from agent_sandbox.cli.options import CommandOptions
from agent_sandbox.cli.permission_options import ElevationOptions
from agent_sandbox.cli.render.messages import remark
from agent_sandbox.engine.approvals.question import Question
from agent_sandbox.engine.gate import APPROVAL_SECONDS, Refused
from agent_sandbox.errors import PolicyError
from agent_sandbox.policy.approval_rules import Word
from agent_sandbox.policy.decide import Deny
from agent_sandbox.policy.elevation import Elevation, elevated
from agent_sandbox.policy.files.layers import effective
from agent_sandbox.policy.model import CLONED_LIMITS, Limits, Policy, cloned
from agent_sandbox.policy.programs import is_pattern
from agent_sandbox.workspace.store import sandbox_id

OFFERED_SECONDS = 600  # of an elevation that is offered when a program was refused


@dataclass(frozen=True)
class Lifted:
    """A policy relaxed by the elevations in force. `left` returns the seconds until the first one expires, which ends the run."""

    policy: Policy
    note: str
    left: Callable[[], float]


def elevation_of(rules: ElevationOptions) -> Elevation:
    """Return the elevation that these options describe. Raises `PolicyError` for an invalid limit or a path that is never shown."""
    Limits(**dict(rules.limits))  # type: ignore[arg-type]  # it checks them
    paths = tuple(os.path.abspath(path) for path in rules.paths)
    for path in paths:
        for own in (here().host.state, here().host.keys):
            own = os.path.realpath(own)
            if os.path.commonpath((own, os.path.realpath(path))) in (own, os.path.realpath(path)):
                raise PolicyError(f"{path!r} holds the sandboxes' own state, and is never shown", hint="name another path")
    return Elevation(rules.programs, rules.limits, paths)


def begin(policy: Policy, sandbox: str, what: Elevation, *, seconds: float, by: str, word: Word) -> str:
    """Begin an elevation and return its name. Raises `PolicyError` if the policy files forbid it, or forbid it to this person."""
    if (counts := words_that_count(policy)) is not None and not counts(word):
        raise PolicyError("you may not relax a rule here", hint="see approvals of: agent-sandbox policy explain; or --code")
    check_elevation(policy, what)
    return here().elevations().begin(sandbox, what, seconds=seconds, by=by, word=word)


def check_elevation(policy: Policy, what: Elevation) -> None:
    """Raise `PolicyError` if the policy files forbid an elevation, or if it would have no effect."""
    if barred := [sort for sort in what.sorts() if policy.asks.elevate is not None and sort not in policy.asks.elevate]:
        raise PolicyError(
            f"the policy does not allow relaxing {', '.join(barred)}", hint="see approvals.elevate of: agent-sandbox policy explain"
        )
    raised = elevated(policy, what, _ceiling())
    for name in what.programs:
        if not is_pattern(name) and not raised.programs.permits(name):
            why = f"{name!r} would still be refused: by a pattern that denies others too, or by the system's policy file"
            raise PolicyError(why, hint="name that pattern instead; see: agent-sandbox policy explain")


def offer_elevation(options: CommandOptions, refusal: Deny) -> bool:
    """Ask the user to allow a refused program for a limited time, if the policy permits that. Returns whether the user allowed it.

    Does not ask about a program that the system's policy file would still refuse.
    """
    project = project_of(options.project, throw_away=keeps_nothing(options))
    policy, sandbox, what = policy_of(options.policy, project), sandbox_id(project.path), Elevation(programs=(refusal.program,))
    if "programs" not in (policy.asks.elevate or ()):
        return False
    if not elevated(policy, what, _ceiling()).programs.permits(refusal.program):
        return False
    from agent_sandbox.cli.approval_prompt import inbox_for  # only where somebody is asked

    now = time.time()
    question = Question(
        action={"kind": "Elevate", "lifts": what.describe(), "seconds": OFFERED_SECONDS},
        policy=policy.digest(),
        sandbox=sandbox,
        run=os.urandom(8).hex(),
        why=refusal.because.why,
        asked=now,
        until=now + APPROVAL_SECONDS,
        needs=", ".join(policy.asks.needs),
        asker=os.getuid(),
    )
    answer = inbox_for(policy, prompt=False).ask(question)
    if isinstance(answer, Refused):
        remark(f"not elevated: {answer.why}")
        return False
    begin(policy, sandbox, what, seconds=OFFERED_SECONDS, by=answer.by, word=answer.word)
    return True


def _ceiling() -> Policy:
    """Return the policy of the system's policy file alone. No elevation can permit more."""
    return effective(cloned(masks=(), limits=CLONED_LIMITS), policy_files.layers_of(None).system, home=here().host.home).policy


def lifted(policy: Policy, sandbox: str) -> Lifted | None:
    """Return the policy relaxed by the elevations of a sandbox; None if there are none. The system's policy file is never relaxed.

    An elevation is ignored if this policy does not accept approvals of the person who began it.
    """
    counts = words_that_count(policy)
    standing = [each for each in here().elevations().standing() if each.sandbox == sandbox and (counts is None or counts(each.word))]
    if not standing:
        return None
    for each in standing:
        policy = elevated(policy, each.what.only(policy.asks.elevate), _ceiling())
    names = {each.name for each in standing}

    def left() -> float:
        """Return the seconds until the first elevation expires; 0 if one was revoked."""
        now = [each.left for each in here().elevations().standing() if each.name in names]
        return min(now) if len(now) == len(names) else 0.0

    what = "; ".join(each.what.describe() for each in standing)
    shortest = min(each.left for each in standing)
    return Lifted(policy, f"elevated: {what}; the run ends when that expires, in at most {shortest:.0f} s", left)
