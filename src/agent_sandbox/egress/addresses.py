"""Addresses: which of those that a name resolves to may be dialled.

A public name may resolve to an address inside the machine or its network, by mistake or by somebody's design. Only addresses that are
public are dialled, unless the policy names the address itself. All answers are judged: one that is not public refuses the name, because
a mixture is how such a design looks.
"""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address

from agent_sandbox.policy.hosts import canonical_address

# Of AWS (with ECS), Alibaba, Azure, Google, Oracle and Scaleway. Others are link-local.
_METADATA = frozenset(
    map(
        ip_address,
        (
            *("169.254.169.254", "169.254.170.2", "100.100.100.200", "168.63.129.16", "192.0.0.192"),
            *("fd20:ce::254", "fd00:c1::a9fe:a9fe", "fd00:42::42"),
        ),
    )
)
_AWS = IPv6Network("fd00:ec2::/32")  # its services for instances: metadata, credentials of pods, time, names


def objection(address: IPv4Address | IPv6Address) -> str:
    """Return why an address is not dialled; empty if it is public."""
    if address in _METADATA or (isinstance(address, IPv6Address) and address in _AWS):
        return "it is the address of the machine's metadata service"
    if address.is_loopback or address.is_unspecified:
        return "it is this machine"
    if address.is_link_local:
        return "it is link-local"
    site_local = isinstance(address, IPv6Address) and address.is_site_local  # deprecated, and private where it is still in use
    if address.is_multicast or address.is_reserved or site_local or not address.is_global:
        return "it is not public"
    return ""


def dialled(answers: Iterable[str], *, named: Iterable[str] = (), private: bool = False) -> tuple[tuple[str, ...], str]:
    """Return the addresses of a name that may be dialled, in order, and else why none may be.

    `named` are addresses that the policy names. `private` says that the policy allows this name on private addresses; even then no
    loopback, link-local or metadata address is dialled.
    """
    allowed = {canonical_address(each) for each in named}
    good: list[str] = []
    for text in answers:
        try:
            address = canonical_address(text)
        except ValueError:
            return (), f"it resolves to {text}, which is no plain address"
        why = objection(address)
        if why and address not in allowed and not (private and address.is_private and why == "it is not public"):
            return (), f"it resolves to {address}, and {why}"
        if str(address) not in good:
            good.append(str(address))
    return tuple(good), "" if good else "it has no address"
