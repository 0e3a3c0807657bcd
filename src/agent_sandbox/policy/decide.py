"""Decide whether an action is allowed.

Pure on purpose: everything a decision needs is in its arguments, so the same question always has the same answer and the world cannot
change between looking and deciding. Effects live in `engine.gate`. A verdict explains and stops early; the runtime is the wall.
"""

from __future__ import annotations

from agent_sandbox.policy.action import LANGUAGES, Action, RunCode, RunCommand
from agent_sandbox.policy.model import SCRATCH, Policy
from agent_sandbox.values import assert_never, dataclass

LARGEST_SOURCE = 16 << 20  # bytes; code that an agent writes is never near it, and it passes through memory several times


@dataclass(frozen=True)
class Reason:
    """The rule that decided, why, and what would change the answer."""

    rule: str
    why: str
    remedy: str = ""


@dataclass(frozen=True)
class Allow:
    """It may be done."""

    because: Reason


@dataclass(frozen=True)
class Deny:
    """It may not be done."""

    because: Reason


@dataclass(frozen=True)
class Ask:
    """It may be done if somebody with the right to say so agrees. `suggest` is what to ask them for."""

    because: Reason
    suggest: str


Verdict = Allow | Deny | Ask
Grants = tuple[()]  # what has been granted beyond the policy: nothing yet


def decide(policy: Policy, grants: Grants, action: Action, *, now: float) -> Verdict:
    """The verdict on an action: total, deterministic, and Deny unless a rule allows it."""
    refusal = _place(policy, action)
    match action:
        case RunCode():
            return refusal or _code(policy, action)
        case RunCommand():
            return refusal or _command(policy, action)
        case _:
            assert_never(action)


def _place(policy: Policy, action: Action) -> Deny | None:
    files = policy.files
    if action.cwd is None or action.cwd in SCRATCH or files.reaches(action.cwd) or files.leads_to(action.cwd):
        return None
    why = f"the policy {policy.name!r} does not show the working directory {action.cwd!r}"
    return Deny(Reason("cwd", why, "choose a directory inside what is allowed, or allow this one"))


def _code(policy: Policy, action: RunCode) -> Verdict:
    if action.language not in LANGUAGES:
        return Deny(Reason("language", f"unknown language {action.language!r}", f"use one of {', '.join(LANGUAGES)}"))
    if not 0 < action.size <= LARGEST_SOURCE:
        why = "there is no code to run" if action.size == 0 else f"the code has {action.size} bytes; at most {LARGEST_SOURCE} are taken"
        return Deny(Reason("code-size", why, "put large data into a file and let the code read it" if action.size else "pass some code"))
    return Allow(Reason("code", f"the policy {policy.name!r} lets code run in its view"))


def _command(policy: Policy, action: RunCommand) -> Verdict:
    if not policy.processes:
        why = f"the policy {policy.name!r} allows no processes, so {action.argv[0]!r} cannot be started"
        return Deny(Reason("processes", why, "allow processes, or run code instead"))
    return Allow(Reason("command", f"the policy {policy.name!r} lets commands run in its view"))
