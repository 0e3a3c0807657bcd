"""Carry out a plan with requests: the command runs again, on a clone, under exactly the requests of the plan.

Requests cannot be applied like files: only the command knows what it sends. So it runs again, and may reach the hosts and ports of the
plan with its methods and paths, and nothing else. Its files are compared with the plan: whatever came out otherwise is a plan of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from json import loads

from agent_sandbox._fast.values import TYPE_CHECKING, replace
from agent_sandbox.egress.orders import decode_rules
from agent_sandbox.engine.simulation.plan import EffectPlan, HttpRequest
from agent_sandbox.engine.simulation.risk import NONE
from agent_sandbox.engine.simulation.run import apart_from_network
from agent_sandbox.errors import PolicyError
from agent_sandbox.policy.hosts import bracketed
from agent_sandbox.policy.model import Policy, with_network
from agent_sandbox.policy.network import NetworkRules, Reach, RequestRule

if TYPE_CHECKING:
    from agent_sandbox.egress.orders import FlowRecord

_HINT = "--files-only applies its file changes alone; or run the command yourself, with --network"


def permitting(plan: EffectPlan, policy: Policy) -> Policy:
    """Return a policy that permits the requests of a plan and no others. `policy` is that of the policy files.

    Raises `PolicyError` if the plan's requests cannot be permitted exactly, or if it was made under other rules than those of the files.
    """
    rerun = plan.rerun
    if rerun is None:
        raise PolicyError("the plan was made without a network", hint=_HINT)
    if rerun.code:
        raise PolicyError("the plan is one of code, which it does not hold, so its requests cannot be sent", hint=_HINT)
    if rerun.apart != apart_from_network(policy):
        why = "the plan was made with options that change other rules than those of the network, so the command cannot run under the same"
        raise PolicyError(why, hint=_HINT)
    return with_network(policy, permitted(plan, decode_rules(loads(rerun.rules))))


def permitted(plan: EffectPlan, rules: NetworkRules) -> NetworkRules:
    """Return rules within `rules` that permit the requests of a plan and no others. Raises `PolicyError`."""
    if plan.untold:
        raise PolicyError(f"the plan lists only some of its requests: {plan.untold:,} more were made", hint=_HINT)
    for each in plan.http:
        if not each.path or "*" in each.path:
            why = f"a path of {each.host} is too long, holds found data, or holds a *" if not each.path else f"{each.path!r} holds a *"
            raise PolicyError(f"the requests of the plan cannot be permitted exactly: {why}", hint=_HINT)
    hosts = dict.fromkeys(each.host for each in plan.http)
    reach = Reach(
        tuple(dict.fromkeys(_entry(each) for each in plan.http)),
        None,
        tuple(dict.fromkeys(RequestRule(each.host, (each.method,), (each.path,)) for each in plan.http)),
        private=tuple(host for host in hosts if rules.may_be_private(host)),
    )
    return replace(rules, reaches=(*rules.reaches, reach))


def _entry(request: HttpRequest) -> str:
    return f"{bracketed(request.host)}:{request.port}"


def difference(plan: EffectPlan, again: EffectPlan, flows: Iterable[FlowRecord] = ()) -> str:
    """Return how a second run differs from the plan: in how it ended, its files, or what it asked of the network; empty if it does not.

    `flows` are those of the second run. One that was refused is no difference if the simulation was refused the same.
    """
    held = {_entry(each) for each in plan.http if not each.sent}
    known = {each.target for each in plan.network if not each.allowed} - held
    if beyond := next((flow for flow in flows if flow.refused and flow.target not in known), None):
        return f"it asked for something that is not in the plan, at {beyond.target}"
    if again.unlisted:
        return f"its changes cannot be listed: {again.unlisted}"
    if again.ended.code not in (0, plan.ended.code) or again.ended.reason != plan.ended.reason:
        return f"it ended with {again.ended.code} ({again.ended.reason}) instead of {plan.ended.code}"
    before, after = ({each.path: replace(each, risk=NONE) for each in files} for files in (plan.files, again.files))
    for path in sorted({*before, *after}):
        if before.get(path) != after.get(path):
            return f"{path!r} came out otherwise than planned"
    return ""
