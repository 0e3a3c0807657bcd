"""Ways: what was opened while a run went on, beside what the layers of the policy permit."""

from __future__ import annotations

from agent_sandbox.egress.orders import decode_rules, encode_rules
from agent_sandbox.policy.network import NetworkRules, network_rules, read_request
from agent_sandbox.policy.network_presets import network_of


def way(*entries: str, requests: tuple[str, ...] = ()) -> NetworkRules:
    rules = network_of(entries)
    more = network_rules(outbound=True, requests=map(read_request, requests), localhost=True, inbound=True)
    return rules.narrowed(more) if requests else rules


BASE = network_of(["a.example"])


def test_an_opened_way_permits_what_lies_within_it_and_nothing_else() -> None:
    rules = BASE.opened(way("b.example").reaches)
    assert not rules.objection("a.example", 443) and not rules.objection("b.example", 443)
    assert BASE.objection("b.example", 443), "the control: it was closed before"
    assert rules.objection("c.example", 443) and rules.objection("b.example", 8443)


def test_what_is_denied_stays_denied_on_every_way() -> None:
    closed = BASE.narrowed(network_rules(outbound=True, inbound=True, denied=["b.example"], localhost=True))
    assert closed.opened(way("b.example").reaches).objection("b.example", 443) == "the policy denies b.example"


def test_a_request_is_judged_by_one_way_alone() -> None:
    """Else a method that one way permits at one port would pass at the port of the other."""
    both = network_of(["x.example:80"]).opened(way("x.example:443", requests=("GET x.example",)).reaches)
    assert not both.request_objection("x.example", "POST", "/", 80)
    assert not both.request_objection("x.example", "GET", "/", 443)
    assert both.request_objection("x.example", "POST", "/", 443)


def test_an_exception_of_one_way_does_not_hold_on_another() -> None:
    both = network_of(["x.example:80"]).opened(network_of(["x.example:443+private+uninspected"]).reaches)
    assert both.may_be_private("x.example", 443) and not both.may_be_private("x.example", 80)
    assert both.passes_uninspected("x.example", 443) and not both.passes_uninspected("x.example", 80)


def test_narrowing_narrows_every_way() -> None:
    rules = BASE.opened(way("b.example").reaches).narrowed(network_rules(outbound=True, hosts=["b.example"]))
    assert not rules.objection("b.example", 443) and rules.objection("a.example", 443)


def test_ways_reach_the_egress_process_as_they_are() -> None:
    rules = BASE.opened(way("b.example:9000+private", requests=("GET b.example/v1/*",)).reaches)
    assert decode_rules(encode_rules(rules)) == rules
    assert rules.listened == (80, 443, 9000)
