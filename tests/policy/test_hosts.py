"""Hosts have one spelling, and only what is named can be reached."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_sandbox.errors import PolicyError
from agent_sandbox.policy.hosts import canonical_host, canonical_pattern, canonical_port
from agent_sandbox.policy.network import NetworkRules, network_rules

HOSTS = ["a.example.com", "example.com", "b.example.net", "localhost", "127.0.0.1", "192.0.2.1"]
PATTERNS = st.sampled_from([*HOSTS, "*.example.com", "*.com", "*"])
rules = st.builds(
    network_rules,
    outbound=st.booleans(),
    inbound=st.booleans(),
    hosts=st.none() | st.lists(PATTERNS, max_size=3),
    denied=st.lists(PATTERNS, max_size=2),
    ports=st.none() | st.lists(st.sampled_from([80, 443]), max_size=2),
    localhost=st.booleans(),
)


@pytest.mark.parametrize(
    ("written", "canonical"),
    [
        ("Example.COM", "example.com"),
        ("example.com.", "example.com"),
        ("bücher.example", "xn--bcher-kva.example"),
        ("192.0.2.1", "192.0.2.1"),
        ("[2001:DB8::1]", "2001:db8::1"),
        ("2001:db8:0::1", "2001:db8::1"),
        ("[::ffff:127.0.0.1]", "127.0.0.1"),
        ("[64:ff9b::5db8:d822]", "93.184.216.34"),
        ("[2002:5db8:d822::]", "93.184.216.34"),
        ("[::93.184.216.34]", "93.184.216.34"),
        ("_dmarc.example.com", "_dmarc.example.com"),
    ],
)
def test_a_host_has_one_spelling(written: str, canonical: str) -> None:
    assert canonical_host(written) == canonical
    assert canonical_host(canonical) == canonical


@pytest.mark.parametrize("written", ["93.184.216.34", "[64:ff9b::5db8:d822]", "[2002:5db8:d822::]", "[::93.184.216.34]"])
def test_a_denied_address_is_denied_however_it_is_written(written: str) -> None:
    rules = network_rules(outbound=True, hosts=["*"], denied=["93.184.216.34"])
    assert not rules.permits(written, 443)
    assert network_rules(outbound=True, hosts=["*"]).permits(written, 443), "the control arm"


@pytest.mark.parametrize(
    ("written", "why"),
    [
        ("", "no name"),
        (5, "no name"),
        ("https://example.com", "an address"),
        ("example.com/x", "an address"),
        ("example.com:443", "names a port"),
        ("a.*.com", "in the middle"),
        ("*example.com", "in the middle"),
        ("a b", "cannot be"),
        ("-a.com", "cannot be"),
        ("a..b", "cannot be"),
        ("a" * 64 + ".com", "cannot be"),
        ("\ud800.com", "cannot be"),
        ("300.1.1.1", "no address"),
        ("[fe80::1%lo]", "no address"),
        ("127.1", "no address"),
        ("0x7f.0.0.0x1", "no address"),
        ("[::g]", "no address"),
    ],
)
def test_what_is_no_host_is_refused_and_never_guessed_at(written: str, why: str) -> None:
    with pytest.raises(PolicyError, match=why):
        canonical_host(written)


@pytest.mark.parametrize("port", [0, 65536, -1, True, "80", 1.5])
def test_what_is_no_port_is_refused(port: object) -> None:
    with pytest.raises(PolicyError, match="not a port"):
        canonical_port(port)


def test_a_pattern_covers_all_names_beneath_it_but_not_itself() -> None:
    network = network_rules(outbound=True, hosts=["*.Example.com"])
    assert network.permits("a.b.example.com", 443)
    assert not network.permits("example.com", 443)
    assert not network.permits("notexample.com", 443)
    assert canonical_pattern("*") == "*"


def test_nothing_is_permitted_unless_it_is_asked_for() -> None:
    assert not NetworkRules().asks
    assert not NetworkRules().permits("example.com", 443)
    assert network_rules(outbound=True).permits("example.com", 443)
    assert not network_rules(outbound=True).permits("localhost", 443)
    assert network_rules(outbound=True, hosts=["example.com"], localhost=True).permits("[::1]", 443)
    assert not network_rules(outbound=True, ports=[80]).permits("example.com", 443)
    assert network_rules(inbound=True).asks


@settings(max_examples=60, deadline=None)
@given(rules, rules, st.sampled_from(HOSTS), st.sampled_from([80, 443, 22]))
def test_narrowing_permits_exactly_what_both_permit(one: NetworkRules, other: NetworkRules, host: str, port: int) -> None:
    assert one.narrowed(other).permits(host, port) == (one.permits(host, port) and other.permits(host, port))
