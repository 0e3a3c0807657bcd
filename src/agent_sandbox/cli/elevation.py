"""Elevations on the command line: what a person lifts for a sandbox, what its runs have of it, and asking for one that is missing."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from agent_sandbox import policy_files
from agent_sandbox._fast.values import dataclass
from agent_sandbox.assembly import here, words_that_count
from agent_sandbox.cli.context import names_in, policy_of, project_of
from agent_sandbox.cli.parser import Request
from agent_sandbox.cli.render import quantities
from agent_sandbox.cli.render.messages import remark
from agent_sandbox.engine.approvals.question import Question
from agent_sandbox.engine.gate import APPROVAL_SECONDS, Refused
from agent_sandbox.errors import PolicyError
from agent_sandbox.policy.approval_rules import Word
from agent_sandbox.policy.decide import Deny
from agent_sandbox.policy.elevation import Elevation, elevated
from agent_sandbox.policy.files.layers import effective
from agent_sandbox.policy.limits import Limits
from agent_sandbox.policy.model import CLONED_LIMITS, Policy, cloned
from agent_sandbox.policy.programs import is_pattern
from agent_sandbox.workspace.store import sandbox_id

OFFERED_SECONDS = 600  # for which a program is permitted that an agent has asked for
_LIMITS = {
    "--timeout": ("wall_seconds", quantities.seconds),
    "--memory": ("memory_bytes", quantities.size),
    "--disk": ("disk_bytes", quantities.size),
    "--processes": ("processes", quantities.count),
}


@dataclass(frozen=True)
class Lifted:
    """A policy with what is lifted for now. `left` tells how many seconds it holds yet; runs end with it."""

    policy: Policy
    note: str
    left: Callable[[], float]


def of_request(request: Request) -> Elevation:
    """What the options of `grant --elevate` lift. Raises `PolicyError` for what cannot be."""
    programs = names_in(request, "--allow")
    limits: list[tuple[str, float]] = []
    for option, (name, read) in _LIMITS.items():
        if (text := request.value(option)) is not None:
            if (value := read(option, text)) is None:
                raise PolicyError(f"{option} none would lift the limit for good", hint=f"say how much: {option} {text}")
            limits.append((name, value))
    Limits(**dict(limits))  # type: ignore[arg-type]  # it says what is wrong
    paths = tuple(os.path.abspath(path) for path in request.values("--reveal"))
    for path in paths:
        for own in (here().host.state, here().host.keys):
            own = os.path.realpath(own)
            if os.path.commonpath((own, os.path.realpath(path))) in (own, os.path.realpath(path)):
                raise PolicyError(f"{path!r} holds what decides about sandboxes, and is shown in none", hint="name another path")
    return Elevation(programs, tuple(limits), paths)


def begin(policy: Policy, sandbox: str, what: Elevation, *, seconds: float, by: str, word: Word) -> str:
    """Lift it, if the policy files let somebody, and them. Returns its name. Raises `PolicyError`."""
    if (counts := words_that_count(policy)) is not None and not counts(word):
        raise PolicyError("your word is not enough to lift a rule here", hint="see approvals of: agent-sandbox policy explain; or --code")
    if barred := [sort for sort in what.sorts() if policy.asks.elevate is not None and sort not in policy.asks.elevate]:
        raise PolicyError(f"the policy lets nobody lift {', '.join(barred)}", hint="see approvals.elevate of: agent-sandbox policy explain")
    raised = elevated(policy, what, _ceiling())
    for name in what.programs:
        if not is_pattern(name) and not raised.programs.permits(name):
            why = f"{name!r} would not be permitted all the same: a pattern denies it together with others, or the system's own file does"
            raise PolicyError(why, hint="name the pattern to lift all of it; see: agent-sandbox policy explain")
    return here().elevations().begin(sandbox, what, seconds=seconds, by=by, word=word)


def somebody_lifts(request: Request, refusal: Deny) -> bool:
    """Ask whether the program that was refused may be started for a time, where the policy lets somebody say so. True when it may now be.

    Nobody is asked for what the system's own file would still refuse.
    """
    project = project_of(request)
    policy, sandbox, what = policy_of(request, project), sandbox_id(project.path), Elevation(programs=(refusal.program,))
    if "programs" not in (policy.asks.elevate or ()):
        return False
    if not elevated(policy, what, _ceiling()).programs.permits(refusal.program):
        return False
    from agent_sandbox.cli.approval_prompt import inbox_for

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
        remark(f"nobody lifts that for now: {answer.why}")
        return False
    begin(policy, sandbox, what, seconds=OFFERED_SECONDS, by=answer.by, word=answer.word)
    return True


def _ceiling() -> Policy:
    """What the system's own file leaves, beyond which nothing is lifted."""
    return effective(cloned(masks=(), limits=CLONED_LIMITS), policy_files.layers_of(None).system, home=here().host.home).policy


def lifted(policy: Policy, sandbox: str) -> Lifted | None:
    """The policy with all that is lifted for a sandbox now, up to the system's own file; None where nothing is.

    Whose word it was is asked again: it may have been given where another policy counts.
    """
    counts = words_that_count(policy)
    standing = [each for each in here().elevations().standing() if each.sandbox == sandbox and (counts is None or counts(each.word))]
    if not standing:
        return None
    for each in standing:
        policy = elevated(policy, each.what.only(policy.asks.elevate), _ceiling())
    names = {each.name for each in standing}

    def left() -> float:
        """Of the first that ends; nothing, once one of them was taken back."""
        now = [each.left for each in here().elevations().standing() if each.name in names]
        return min(now) if len(now) == len(names) else 0.0

    what = "; ".join(each.what.describe() for each in standing)
    shortest = min(each.left for each in standing)
    return Lifted(policy, f"elevated: {what}; the run ends with that, in {shortest:.0f} s at the latest", left)
