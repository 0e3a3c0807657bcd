"""Combine policies: a layer narrows the policy above it, a proposal widens one that a person wrote.

Narrowing is intersection, so the order of layers does not matter, and no file can widen the result of another.
"""

from __future__ import annotations

from collections.abc import Iterable

from agent_sandbox._fast.values import TYPE_CHECKING, dataclass, replace
from agent_sandbox.errors import PolicyError
from agent_sandbox.policy.files.document import Document
from agent_sandbox.policy.files.presets import preset
from agent_sandbox.policy.files.settings import BY_KEY, Shape
from agent_sandbox.policy.hosts import covers as covers_host
from agent_sandbox.policy.image_names import canonical_image
from agent_sandbox.policy.model import (
    EVERYWHERE,
    MIB,
    OFFLINE,
    AskRules,
    FileRules,
    Guarantee,
    Limits,
    Policy,
    implied,
    is_hidden,
    with_network,
)
from agent_sandbox.policy.network import NetworkRules, canonical_entry, network_rules, read_request, split_port
from agent_sandbox.policy.network_presets import HostList, opaque_of
from agent_sandbox.policy.network_presets import preset as preset_hosts
from agent_sandbox.policy.paths import Beneath, PathPattern, Tree, anchor, matches, parse
from agent_sandbox.policy.programs import covers
from agent_sandbox.policy.proposal import Asked, Proposal, ProposedSetting
from agent_sandbox.policy.traffic_budgets import read_budget

if TYPE_CHECKING:
    from typing import Any

AS_IT_WAS = "as it was"
# Settings where silence of a proposal permits everything. On the network, a proposal is silent if none was wanted.
_LEARNT = frozenset(
    {
        *("files.read", "files.write", "files.allowed", "processes.commands", "processes.max"),
        *("limits.timeout_seconds", "limits.cpu_seconds", "limits.memory_mb", "limits.disk_mb"),
    }
)
_LIMITS = {
    "limits.timeout_seconds": ("wall_seconds", 1),
    "limits.cpu_seconds": ("cpu_seconds", 1),
    "limits.memory_mb": ("memory_bytes", MIB),
    "limits.disk_mb": ("disk_bytes", MIB),
    "limits.output_bytes": ("output_bytes", 1),
    "limits.open_files": ("open_files", 1),
    "limits.fuel": ("fuel", 1),
    "processes.max": ("processes", 1),
}


@dataclass(frozen=True)
class Effective:
    """The policy in force, and the checks made before a run.

    `validate` is whether code is checked early for the default patterns; `blocked` are patterns that code is always checked for. `warnings`
    are sentences for people.
    """

    policy: Policy
    validate: bool = False
    blocked: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def effective(above: Policy | Effective, layers: Iterable[Document], *, home: str, indexes: Iterable[str] = ()) -> Effective:
    """Return the policy `above`, narrowed by each layer. Raises `PolicyError` naming the layer and the setting.

    `indexes` are the hosts of the package indexes of this machine, which belong to the network preset `packages`.
    """
    result = Effective(above) if isinstance(above, Policy) else above
    for layer in layers:
        base = layer.get("extends")
        parts = (layer,) if base is None else (preset(base), layer)
        for part in parts:
            result = narrowed(result, part, home=home, indexes=indexes)
        network = result.policy.network
        if any(part.get("network.listed", False) for part in parts) and not any(reach.lists for reach in network.reaches):
            # No list yet: a later layer's list would open what this layer has closed.
            result = replace(result, policy=with_network(result.policy, replace(OFFLINE, inbound=network.inbound)))
    return result


def narrowed(above: Effective, layer: Document, *, home: str, indexes: Iterable[str] = ()) -> Effective:
    """Return the policy `above`, narrowed by one layer."""
    policy = above.policy
    limits = _limits(policy.limits, layer)
    processes = policy.processes and layer.get("processes.allow", True)
    programs = policy.programs.narrowed(
        allowed=layer.get("processes.commands"), denied=layer.get("processes.denied_commands", ()), shell=layer.get("processes.shell", True)
    )
    name = f"{policy.name}+{layer.name}" if layer.settings else policy.name
    network = policy.network.narrowed(network_of_layer(layer, indexes))
    requires = policy.requires | {Guarantee(name) for name in layer.get("requires", ())} | implied(processes, limits, programs, network)
    if not network.outbound:
        network = replace(OFFLINE, inbound=network.inbound)
        requires -= {Guarantee.EGRESS_ONLY}  # no-network says more
    return Effective(
        replace(
            policy,
            name=name,
            files=_files(policy.files, layer, home),
            processes=processes,
            limits=limits,
            programs=programs,
            requires=requires,
            network=network,
            system=policy.system and processes,
            asks=policy.asks.narrowed(_asks(layer)),
            image=_image(policy.image, layer),
        ),
        above.validate or layer.get("code.validate", False),
        tuple(dict.fromkeys((*above.blocked, *layer.get("code.blocked", ())))),
        above.warnings,
    )


def _image(above: str, layer: Document) -> str:
    """Return the image of a policy and a layer. Raises `PolicyError` if they name two: no layer can take an image away."""
    named = layer.get("container.image")
    if named is None:
        return above
    image = canonical_image(named)
    if above and image != above:
        why = f"{layer.origin}: container.image: {image!r} is named, and the layer above or the command line names {above!r}"
        raise PolicyError(why, hint="name the same image, or leave one of them out")
    return image


def _asks(layer: Document) -> AskRules:
    need = layer.get("approvals.high_risk")
    return AskRules(
        commands=layer.get("approvals.commands", ()),
        effects=layer.get("approvals.effects", ()),
        tools=layer.get("approvals.tools", ()),
        promotions=layer.get("approvals.promotions", False),
        protected=layer.get("approvals.protected", False),
        opaque=layer.get("approvals.opaque"),
        approvers=layer.get("approvals.approvers"),
        needs=(need,) if need is not None else (),
        elevate=layer.get("approvals.elevate"),
    )


def _files(files: FileRules, layer: Document, home: str) -> FileRules:
    written, denied = layer.get("files.allowed"), layer.get("files.denied", ())
    shows_hidden = layer.get("files.allow_hidden", True)
    theirs = EVERYWHERE if written is None else tuple(parse(each, home=home) for each in written)
    allowed = files.allowed if written is None else intersection(files.allowed, theirs, layer.origin)
    # A pattern that spells a hidden name shows it. It must not show what the other side hides.
    for patterns, shown in ((files.allowed, files.allow_hidden), (theirs, shows_hidden)):
        allowed = allowed if shown else tuple(each for each in allowed if _spelt_by(patterns, each))
    return replace(
        files,
        read=files.read and layer.get("files.read", True),
        write=files.write and layer.get("files.write", True),
        allowed=allowed,
        denied=tuple(dict.fromkeys((*files.denied, *(parse(each, home=home) for each in denied)))),
        allow_hidden=files.allow_hidden and shows_hidden,
    )


def _spelt_by(patterns: Iterable[PathPattern], inner: PathPattern) -> bool:
    """Return whether one of these patterns covers another one, and spells every hidden name that the other one spells."""
    return any(_holds(each, inner) and not is_hidden(anchor(inner), each) for each in patterns)


def _limits(limits: Limits, layer: Document) -> Limits:
    changes: dict[str, float] = {}
    for key, (name, unit) in _LIMITS.items():
        value, before = layer.get(key), getattr(limits, name)
        if value is not None and (before is None or value * unit < before):
            changes[name] = value * unit
    return replace(limits, **changes)  # type: ignore[arg-type]  # `Limits` checks that whole numbers are whole


def network_of_layer(layer: Document, indexes: Iterable[str] = ()) -> NetworkRules:
    """Return the network rules of a layer. A layer without network settings restricts nothing."""
    hosts, ports, groups = layer.get("network.hosts"), layer.get("network.ports"), layer.get("network.presets")
    asked = layer.get("network.ask")
    listed = HostList(
        hosts or (),
        tuple(map(read_request, layer.get("network.requests", ()))),
        layer.get("network.uninspected", ()),
        (*layer.get("network.opaque", ()), *opaque_of((*(hosts or ()), *(asked or ())), ())),
        layer.get("network.private", ()),
        asked or (),
    )
    for name in groups or ():
        listed = listed.joined(preset_hosts(name, indexes))
    rules = network_rules(
        outbound=layer.get("network.outbound", True) and Guarantee.NO_NETWORK.value not in layer.get("requires", ()),
        inbound=layer.get("network.inbound", True) and Guarantee.NO_NETWORK.value not in layer.get("requires", ()),
        hosts=None if hosts is groups is asked is None else listed.hosts,
        denied=layer.get("network.denied_hosts", ()),
        ports=ports,
        requests=listed.requests,
        uninspected=listed.uninspected,
        opaque=listed.opaque,
        private=listed.private,
        asked=listed.asked,
        localhost=layer.get("network.localhost", True),
        budgets=map(read_budget, layer.get("network.budgets", ())),
    )
    approved = network_rules(outbound=True, inbound=True, asked=layer.get("approvals.network", ()), localhost=True)
    return rules.narrowed(approved) if approved.reaches else rules


def asks_for_network(layer: Document) -> bool:
    """Return whether a document says `network.outbound = true`, itself or by the preset that it extends."""
    base = layer.get("extends")
    return bool(layer.get("network.outbound", base is not None and preset(base).get("network.outbound", False)))


def intersection(ours: Iterable[PathPattern], theirs: Iterable[PathPattern], origin: str) -> tuple[PathPattern, ...]:
    """Return patterns that cover what both sides cover. Raises `PolicyError` if two patterns overlap only in part."""
    theirs = tuple(theirs)
    pairs = (_both(one, other, origin) for one in ours for other in theirs)
    return tuple(dict.fromkeys(each for each in pairs if each is not None))


def _both(one: PathPattern, other: PathPattern, origin: str) -> PathPattern | None:
    if one == other or _holds(other, one):
        return one
    if _holds(one, other):
        return other
    if not _meet(one, other):
        return None
    why = f"{origin}: files.allowed: {written(other)!r} and {written(one)!r} of the layer above overlap in part"
    raise PolicyError(why, hint="write a pattern that lies within one of the layer above")


def _holds(outer: PathPattern, inner: PathPattern) -> bool:
    """Return whether the outer pattern covers everything that the inner one covers; False also if that cannot be decided."""
    top = anchor(inner)
    match outer:
        case Tree():
            return matches(outer, top)
        case Beneath(path=path):
            return matches(outer, top) or (path == top and not isinstance(inner, Tree))
        case _:
            return matches(outer, top)  # a match on a directory covers everything beneath it


def _meet(one: PathPattern, other: PathPattern) -> bool:
    """Return whether two patterns may overlap, if neither covers the other: the anchor of one is at or below the anchor of the other."""
    first, second = anchor(one), anchor(other)
    return matches(Tree(first), second) or matches(Tree(second), first)


def written(pattern: PathPattern) -> str:
    """Return a pattern as a user would write it."""
    match pattern:
        case Tree(path=path):
            return path
        case Beneath(path=path):
            return f"{path.rstrip('/')}/*"
        case _:
            return f"{pattern.directory.rstrip('/')}/{pattern.pattern}"


def widened(own: Document, proposal: Proposal, *, home: str) -> Proposal:
    """Return the policy that permits what a person's own policy or the proposal permits, as a proposal.

    Settings that were not learnt stay as the person wrote them.
    """
    learnt = {line.key: _without_narrowing(own, line) for line in proposal.lines}
    needs_files = "files.read" not in learnt
    lines = []
    for key, value in own.settings:
        line = learnt.pop(key, None)
        if key == "processes.allow":  # a command is a process
            continue
        if key.startswith("files.") and not needs_files:
            lines.append(_kept(key, value))
        elif line is not None:
            lines.append(_joined(line, value, home))
        elif key not in _LEARNT or key in proposal.unknown:
            lines.append(_kept(key, value))
    # A policy without network settings asks for no network. Without other settings, it permits everything.
    lines += [line for line in learnt.values() if line.key.startswith("network.") and line.value != ()]
    if own.get("files.read") is False and needs_files and "files.allowed" in learnt:
        lines.append(learnt["files.allowed"])
    return replace(proposal, lines=tuple(lines), intents=own.intents)


def _without_narrowing(own: Document, line: ProposedSetting) -> ProposedSetting:
    """Return learnt requests without those for hosts that the person's policy opens for any request: a line would narrow that."""
    if line.key != "network.requests":
        return line
    hosts, every = own.get("network.hosts"), own.get("network.hosts") is None and own.get("network.presets") is None
    patterns = ["*"] if every and own.get("network.outbound") else [split_port(canonical_entry(each))[0] for each in hosts or ()]
    ruled = [read_request(each).host for each in own.get("network.requests", ())]
    asked = [(each, read_request(each.text).host) for each in line.value]
    return replace(line, value=tuple(each for each, host in asked if not covers_host(patterns, host) or covers_host(ruled, host)))


def _kept(key: str, value: Any) -> ProposedSetting:
    if BY_KEY[key].shape is Shape.TEXTS:
        return ProposedSetting(key, tuple(Asked(each, AS_IT_WAS) for each in value))
    return ProposedSetting(key, value, AS_IT_WAS)


def _joined(line: ProposedSetting, value: Any, home: str) -> ProposedSetting:
    if not isinstance(value, tuple):
        wider = value or line.value if isinstance(value, bool) else max(value, line.value)
        return ProposedSetting(line.key, wider, AS_IT_WAS if wider == value else line.because)
    if BY_KEY[line.key].shape is Shape.COUNTS:
        return ProposedSetting(line.key, tuple(sorted({*value, *line.value})), line.because)
    new = [each for each in line.value if not _has(line.key, value, each.text, home)]
    return ProposedSetting(line.key, (*(Asked(each, AS_IT_WAS) for each in value), *new))


def _has(key: str, value: Iterable[str], text: str, home: str) -> bool:
    """Return whether the list in the setting `key` already covers an item."""
    if key == "files.allowed":
        wanted = parse(text, home=home)
        return isinstance(wanted, Tree) and any(matches(parse(each, home=home), wanted.path) for each in value)
    return covers(value, text) if key == "processes.commands" else text in value
