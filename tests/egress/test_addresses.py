"""Addresses: which of those that a name resolves to are dialled."""

from __future__ import annotations

import pytest

from agent_sandbox.egress.addresses import dialled
from agent_sandbox.policy.hosts import canonical_address


@pytest.mark.parametrize("address", ["11.0.0.1", "93.184.216.34", "2606:2800:220:1::1"])
def test_a_public_address_is_dialled(address: str) -> None:
    assert dialled([address]) == ((address,), "")


INSIDE = ["127.0.0.1", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.1.1", "100.64.0.1", "169.254.1.1", "224.0.0.1", "255.255.255.255"]
INSIDE += [
    "::1",
    "::",
    "fe80::1",
    "fc00::1",
    "fec0::1",
    "ff02::1",
    "::ffff:127.0.0.1",
    "::ffff:10.0.0.1",
    "64:ff9b::7f00:1",
    "2002:7f00:1::",
    "::7f00:1",
]
METADATA = ["169.254.169.254", "::ffff:169.254.169.254", "fd00:ec2::254", "100.100.100.200", "168.63.129.16", "64:ff9b::a9fe:a9fe"]
METADATA += ["192.0.0.192", "fd00:ec2::23", "fd20:ce::254", "fd00:c1::a9fe:a9fe", "fd00:42::42"]


@pytest.mark.parametrize("address", [*INSIDE, *METADATA, "fe80::1%eth0", "nonsense"])
def test_no_other_address_is_dialled_and_none_beside_it(address: str) -> None:
    assert dialled([address])[0] == ()
    found, why = dialled(["11.0.0.1", address])
    assert found == ()
    assert why


def test_a_private_address_is_dialled_where_the_policy_allows_it_for_the_name() -> None:
    assert dialled(["10.1.2.3"], private=True) == (("10.1.2.3",), "")
    for address in ["127.0.0.1", "169.254.1.1", *METADATA]:
        assert dialled([address], private=True)[0] == ()


def test_an_address_that_the_policy_names_is_dialled() -> None:
    assert dialled(["10.1.2.3"], named=["10.1.2.3"])[0] == ("10.1.2.3",)
    assert dialled(["10.1.2.4"], named=["10.1.2.3"])[0] == ()


def test_an_ipv4_address_inside_of_ipv6_is_that_address() -> None:
    assert str(canonical_address("::ffff:1.2.3.4")) == "1.2.3.4"
    assert str(canonical_address("64:ff9b::102:304")) == "1.2.3.4"
