"""Changes to the network of a sandbox while it is in use: its agent declares an intent, or proposes hosts that it lacks.

An approved proposal opens only what the policy files permit: they bind the settings of a program, and what is opened later as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from agent_sandbox import policy_files
from agent_sandbox._fast.values import replace
from agent_sandbox.assembly import here
from agent_sandbox.engine.gate import Approver, EntryWriter
from agent_sandbox.errors import PolicyError
from agent_sandbox.ledger.event import Facts, Noted
from agent_sandbox.policy.action import OpenNetwork
from agent_sandbox.policy.decide import Reason
from agent_sandbox.policy.intents import LONGEST_SECONDS
from agent_sandbox.policy.model import Policy
from agent_sandbox.policy.network import NetworkRules, is_address, read_request, split_port
from agent_sandbox.policy.network_presets import PRESETS

LONGEST_REASON = 1000


class NetworkChanges:
    """The changes to the network of one sandbox. `approver` makes whoever decides on proposals under a policy."""

    def __init__(self, sandbox: str, ledger: EntryWriter, approver: Callable[[Policy], Approver], project: str | None = None) -> None:
        def note(what: str, facts: Facts) -> None:
            ledger.record(Noted(what, facts, sandbox))

        self.control = here().network_control(note)
        self._sandbox, self._ledger, self._approver, self._project = sandbox, ledger, approver, project

    def declare(self, policy: Policy, intent: str | None) -> None:
        """Declare an intent of the policy, or none. Raises `PolicyError` for an unknown one."""
        if not policy.network.outbound:
            raise _no_network()
        self.control.declare(policy.network, intent)

    def propose(self, policy: Policy, hosts: Iterable[str], requests: Iterable[str], *, seconds: float, reason: str) -> tuple[str, ...]:
        """Ask whether these hosts may be reached, and open them if so. Return what can be reached by that, in sentences.

        Raises `Denied` if it is refused, and `PolicyError` for a proposal that cannot be understood.
        """
        action = OpenNetwork(_texts("hosts", hosts), _texts("requests", requests), _seconds(seconds), _reason(reason))
        if not action.hosts:
            raise PolicyError("a proposal names no host", hint='propose_network("api.example.com")')
        wanted = self._wanted(policy, action)
        gate = here().gate(policy, sandbox=self._sandbox, approver=self._approver(policy), ledger=self._ledger)
        if why := _unreachable(wanted, action.hosts):
            gate.refuse(action, Reason("network", f"it would open nothing: {why}", "the policy files close it"))
        from agent_sandbox.policy.explanation import reachable  # few sandboxes propose anything

        lines = reachable(wanted, doors=policy.network.listened)

        def deed(_: object) -> tuple[str, ...]:
            self.control.open(wanted.reaches, seconds=action.seconds)
            return lines

        return gate.perform(action, deed, describe=lambda opened: {"opened": opened}, details=lambda: "\n".join(lines))

    def _wanted(self, policy: Policy, action: OpenNetwork) -> NetworkRules:
        """Return the rules that a proposal asks for, narrowed by the policy files and by what the policy denies."""
        rules = here().network(action.hosts, project=self._project)
        if action.requests:
            first = rules.reaches[0]
            addresses = [host for host, _ in map(split_port, first.hosts or ()) if is_address(host)]
            only = replace(first, hosts=None, ports=None, requests=tuple(map(read_request, action.requests)))
            rules = replace(rules, reaches=(first, replace(only, private=(*first.private, *addresses))))
        rules = policy_files.network_within_files(policy, rules, self._project)
        return replace(rules, denied=policy.network.denied, search=policy.network.search, intents=())


def _unreachable(rules: NetworkRules, hosts: Iterable[str]) -> str:
    """Return why none of the hosts can be reached under the rules; empty if one can be, or if that depends on the name."""
    if not rules.outbound:
        return "the policy files allow no network"
    objections = []
    for entry in hosts:
        host, port = split_port(entry.partition("+")[0])
        if entry in PRESETS or host.startswith("*"):
            return ""
        objections.append(rules.objection(host.lower().removesuffix("."), port))
    return objections[0] if all(objections) else ""


def _texts(name: str, values: Iterable[str]) -> tuple[str, ...]:
    listed: tuple[object, ...] = () if isinstance(values, str | bytes) else tuple(values)
    texts = tuple(each for each in listed if isinstance(each, str) and each.isprintable() and len(each) <= LONGEST_REASON)
    if isinstance(values, str | bytes) or len(texts) < len(listed):
        hint = 'propose_network("api.example.com", requests=["GET api.example.com"])'
        raise PolicyError(f"{name} must be a list of texts", hint=hint)
    return texts


def _seconds(value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= LONGEST_SECONDS:
        raise PolicyError(f"what is opened holds for a day at most, not for {value!r} seconds", hint="seconds=600")
    return float(value)


def _reason(value: object) -> str:
    if not isinstance(value, str) or len(value) > LONGEST_REASON:
        raise PolicyError(f"the reason must be a text of at most {LONGEST_REASON} characters", hint="say it in a sentence")
    return value


def _no_network() -> PolicyError:
    return PolicyError("this sandbox has no network", hint='make it with network=["api.example.com"]')
