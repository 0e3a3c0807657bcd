"""What a run was seen to want of the network, as settings: what to permit once there is one for sandboxes."""

from __future__ import annotations

from collections.abc import Iterable

from agent_sandbox.errors import PolicyError
from agent_sandbox.policy.hosts import canonical_host, is_local
from agent_sandbox.policy.proposal import Asked, Line
from agent_sandbox.values import TYPE_CHECKING

if TYPE_CHECKING:
    from agent_sandbox.policy.learning import Seen

_NAMES = 53  # the port on which names are asked for: what was asked is seen as such
WITHOUT_EFFECT = "without effect until this version has a network for sandboxes"


def network_lines(seen: Iterable[Seen], left_out: list[str]) -> list[Line]:
    """Hosts and ports that were wanted. The sandbox's own loopback needs no setting."""
    hosts: dict[str, dict[str, None]] = {}
    ports: dict[int, dict[str, None]] = {}
    inbound: dict[str, None] = {}
    seen = [each for each in seen if each.kind in ("connect", "resolve", "listen")]
    resolves = any(each.kind == "resolve" for each in seen)
    for each in seen:
        host, port = (each.target, 0) if each.kind == "resolve" else _split(each.target)
        try:
            name = canonical_host(host)
        except PolicyError:
            left_out.append(f"the host {each.target!r}, which {each.program} asked for: that is no name of a host")
            continue
        if each.kind == "listen":
            if not is_local(name) or name in ("0.0.0.0", "::"):
                inbound[each.program] = None
        elif not is_local(name) and not (port == _NAMES and resolves):
            hosts.setdefault(name, {})[each.program] = None
            if port:
                ports.setdefault(port, {})[each.program] = None
    lines = []
    if hosts:
        lines.append(Line("network.outbound", True, WITHOUT_EFFECT))
        lines.append(Line("network.hosts", tuple(Asked(host, _by(programs)) for host, programs in sorted(hosts.items()))))
        left_out.append(f"the network itself: {', '.join(sorted(hosts))} is in the proposal, {WITHOUT_EFFECT}")
    if inbound:
        left_out.append(f"network.inbound: {_by(inbound)} waits for connections from outside, and there are none")
    if ports:
        numbers = ", ".join(f"{port} {_by(programs)}" for port, programs in sorted(ports.items()))
        lines.append(Line("network.ports", tuple(sorted(ports)), numbers))
    return lines


def _split(target: str) -> tuple[str, int]:
    host, _, port = target.rpartition(":")
    return host, int(port) if port.isdigit() and port.isascii() and 0 < int(port) < 65536 else 0


def _by(programs: Iterable[str]) -> str:
    return f"by {', '.join(sorted(program.rpartition('/')[2] or program for program in programs)[:3])}"
