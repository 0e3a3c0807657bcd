"""Intents: which part of the network a declared one opens, who may name them, and what stays closed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_sandbox.egress.orders import decode_rules, encode_rules
from agent_sandbox.errors import PolicyError
from agent_sandbox.policy.explanation import explain, lint
from agent_sandbox.policy.files.document import from_mapping
from agent_sandbox.policy.files.layers import Effective
from agent_sandbox.policy.intents import (
    Declared,
    NetworkIntent,
    canonical_intent,
    combined,
    for_request,
    known_intent,
    narrowed_intents,
    seconds_of,
)
from agent_sandbox.policy.model import cloned
from agent_sandbox.policy.network import NetworkRules, network_rules
from agent_sandbox.policy.network_presets import network_of

HOSTS = ("a.example", "b.example", "c.example", "x.c.example")


def rules(*intents: NetworkIntent, declared: str | None = None, hosts: tuple[str, ...] = HOSTS[:3]) -> NetworkRules:
    return replace(network_of(hosts), intents=combined(intents), declared=None if declared is None else Declared(declared))


def reached(found: NetworkRules) -> set[str]:
    return {name for name in HOSTS if not found.objection(name, 443)}


READ, WRITE = NetworkIntent("read", hosts=["a.example"], requests=["GET a.example/v1/*"]), NetworkIntent("write", hosts=["b.example"])


def test_only_the_declared_intent_is_open_and_without_one_nothing() -> None:
    assert reached(rules()) == {"a.example", "b.example", "c.example"}, "the control: without intents the whole allowlist is open"
    assert reached(rules(READ, WRITE)) == set()
    assert reached(rules(READ, WRITE, declared="read")) == {"a.example"}
    assert reached(rules(READ, WRITE, declared="write")) == {"b.example"}
    assert reached(rules(READ, WRITE, declared="nothing")) == set()


def test_an_intent_opens_nothing_beyond_the_other_rules() -> None:
    wide = NetworkIntent("all", hosts=["*", "*:22"])
    assert reached(rules(wide, declared="all")) == {"a.example", "b.example", "c.example"}
    assert rules(wide, declared="all").objection("a.example", 22)
    denied = rules(wide, declared="all").narrowed(network_rules(outbound=True, inbound=True, denied=["a.example"], localhost=True))
    assert reached(denied) == {"b.example", "c.example"}


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from((*HOSTS, "*.c.example", "*")), max_size=3), st.lists(st.sampled_from(HOSTS), min_size=1, max_size=3))
def test_whatever_an_intent_names_the_allowlist_is_the_bound(named: list[str], allowed: list[str]) -> None:
    found = rules(NetworkIntent("any", hosts=named), declared="any", hosts=tuple(allowed))
    assert reached(found) <= reached(rules(hosts=tuple(allowed)))


def test_an_intent_limits_methods_paths_and_ports() -> None:
    found = rules(READ, NetworkIntent("odd", hosts=["b.example:8443", "c.example"], ports=[443]), declared="read")
    assert not found.request_objection("a.example", "GET", "/v1/x", 443)
    assert found.request_objection("a.example", "POST", "/v1/x", 443) and found.request_objection("a.example", "GET", "/v2", 443)
    odd = replace(found, declared=Declared("odd"))
    assert not odd.objection("c.example", 443) and odd.objection("c.example", 80) and odd.objection("b.example", 8443)


def test_exceptions_are_those_of_the_other_rules() -> None:
    base = network_of(["a.example+private", "b.example+uninspected", "db.example:5432", "c.example"])
    every = NetworkIntent("every", hosts=["*", "*:5432"])
    found = replace(base, intents=combined([every]), declared=Declared("every"))
    assert found.may_be_private("a.example", 443) and not found.may_be_private("c.example", 443)
    assert found.passes_uninspected("b.example", 443) and not found.passes_uninspected("c.example", 443)
    assert found.passes_opaque("db.example", 5432) and not found.passes_opaque("c.example", 443)
    closed = replace(found, declared=None)
    assert not (closed.passes_opaque("db.example", 5432) or closed.passes_uninspected("b.example", 443))


def test_one_that_is_always_open_needs_no_declaration() -> None:
    always = NetworkIntent("model", hosts=["c.example"], always=True)
    assert reached(rules(READ, always)) == {"c.example"}
    assert reached(rules(READ, always, declared="read")) == {"a.example", "c.example"}


def test_a_request_of_one_intent_cannot_use_the_method_of_another() -> None:
    always = NetworkIntent("look", hosts=["a.example"], requests=["GET a.example"], always=True)
    found = rules(always, NetworkIntent("send", hosts=["a.example:80"]), declared="send")
    assert not found.request_objection("a.example", "POST", "/", 80), "the declared one opens it"
    assert found.request_objection("a.example", "POST", "/", 443) and not found.request_objection("a.example", "GET", "/", 443)


def test_refusals_say_what_is_declared_and_what_would_open_it() -> None:
    found = rules(READ, WRITE)
    assert found.objection("a.example", 443) == "no intent is declared; --intent 'read' would open a.example:443"
    assert found.objection("c.example", 443) == "no intent is declared; no intent of the policy opens c.example:443"
    other = replace(found, declared=Declared("write"))
    assert other.objection("a.example", 443) == "the intent 'write' does not open a.example:443; --intent 'read' would open a.example:443"
    late = replace(found, declared=Declared("read", 5.0)).at(5.0)
    assert late.objection("a.example", 443) == "the intent 'read' has expired; --intent 'read' would open a.example:443"
    assert found.objection("z.example", 443) == "the policy does not allow z.example; --network z.example would"


def test_it_expires_and_says_when_it_will() -> None:
    found = replace(rules(READ, WRITE), declared=Declared("read", 10.0)).opened(network_of(["z.example"]).reaches, until=4.0)
    assert found.expires == 4.0 and not found.objection("z.example", 443)
    early, late = found.at(4.0), found.at(10.0)
    assert early.objection("z.example", 443) and reached(early) == {"a.example"} and early.expires == 10.0
    assert reached(late) == set() and late.expires is None
    assert found.at(3.9) is found


def test_names_are_compared_without_case_and_with_single_blanks() -> None:
    found = rules(NetworkIntent("Install  Python packages", hosts=["a.example"]))
    for written in ("install python packages", " INSTALL python\tpackages ", "Install Python Packages"):
        assert known_intent(found, written).name == "install python packages"
    for wrong in ("", "   ", "installer\0", "é", "ⅰnstall", "x" * 81, 5, None):
        with pytest.raises(PolicyError, match="not the name of an intent"):
            canonical_intent(wrong)


def test_an_unknown_one_is_refused_with_the_names_of_those_there_are() -> None:
    with pytest.raises(PolicyError, match="there is no intent 'erase'; the policy names 'read', 'write'"):
        known_intent(rules(READ, WRITE), "Erase")
    with pytest.raises(PolicyError, match="there is no intent 'read': the policy names none"):
        known_intent(rules(), "read")


def test_a_request_declares_its_own_unless_one_was_declared_from_outside() -> None:
    assert reached(for_request(rules(READ, WRITE), "WRITE")) == {"b.example"}
    assert reached(for_request(rules(READ, WRITE, declared="write"), "write")) == {"b.example"}
    with pytest.raises(PolicyError, match="the intent of this run is 'read', declared from outside; a request cannot change it to 'write'"):
        for_request(rules(READ, WRITE, declared="read"), "write")
    lapsed = replace(rules(READ, WRITE), declared=Declared("read", 1.0, True))
    assert reached(for_request(lapsed, "read")) == set(), "a request does not renew it"
    with pytest.raises(PolicyError, match="cannot change it"):
        for_request(lapsed, "write")


def test_a_layer_narrows_an_intent_and_adds_none() -> None:
    own = combined([NetworkIntent("read", hosts=["a.example", "b.example"], seconds=60), WRITE])
    others = [NetworkIntent("READ", hosts=["b.example", "c.example"], seconds=10, always=True), NetworkIntent("new", hosts=["c.example"])]
    read, write = narrowed_intents(own, others)
    assert (read.seconds, read.always, write.seconds) == (10.0, False, 600.0)
    found = replace(network_of(HOSTS[:3]), intents=(read, write), declared=Declared("read"))
    assert reached(found) == {"b.example"}
    longer = narrowed_intents(own, [NetworkIntent("read", requests=["GET *"], seconds=3600)])[0]
    assert longer.seconds == 60.0
    only = replace(network_of(HOSTS[:3]), intents=(longer, write), declared=Declared("read"))
    assert reached(only) == {"a.example", "b.example"} and only.request_objection("a.example", "POST", "/", 443)


def test_an_intent_that_is_taken_away_does_not_open_the_rest() -> None:
    """Without any intent the whole allowlist would be open, so one that opens nothing stays."""
    emptied = narrowed_intents(combined([READ]), [NetworkIntent("read", hosts=[])])
    found = replace(network_of(HOSTS[:3]), intents=emptied)
    assert reached(found) == reached(replace(found, declared=Declared("read"))) == set()
    apart = rules(READ).narrowed(rules(WRITE))
    assert (
        reached(apart) == reached(replace(apart, declared=Declared("read"))) == reached(replace(apart, declared=Declared("write"))) == set()
    )


def test_narrowing_keeps_the_intents_of_either_side() -> None:
    both = rules(READ, WRITE).narrowed(network_of(["a.example"]))
    assert (
        reached(replace(both, declared=Declared("read"))) == {"a.example"} and reached(replace(both, declared=Declared("write"))) == set()
    )
    assert reached(network_of(["a.example"]).narrowed(rules(READ))) == set()


def test_an_intent_names_hosts_and_nothing_else_is_taken_for_them() -> None:
    with pytest.raises(PolicyError, match="the intent 'empty' names no hosts"):
        combined([NetworkIntent("empty", requests=["GET *"])])
    for wrong in ({"hosts": "a.example"}, {"presets": ["all"]}, {"requests": ["a.example"]}, {"ports": [0]}, {"seconds": 0}, {"always": 1}):
        with pytest.raises(PolicyError):
            NetworkIntent("x", **wrong)
    for text, seconds in (("90", 90.0), ("10m", 600.0), ("24h", 86400.0)):
        assert seconds_of(text) == seconds
    for text in ("", "0", "25h", "-1", "1.5m", "10 m", "m", "9999999"):
        with pytest.raises(PolicyError, match="not a time of a day at most"):
            seconds_of(text)


def test_they_reach_the_egress_process_as_they_are() -> None:
    found = replace(rules(READ, NetworkIntent("db", hosts=["a.example:5432"], always=True)), declared=Declared("read", 7.5))
    assert decode_rules(encode_rules(found)) == found
    assert found.listened == (80, 443, 5432), "there is a door for what may be declared later"


def test_a_policy_file_names_them_and_an_invalid_one_is_refused_with_its_place() -> None:
    table = {
        "Read Docs": {"hosts": ["a.example"], "requests": ["GET a.example"], "for": "5m"},
        "p": {"presets": ["llm-apis"], "always": True},
    }
    document = from_mapping({"intents": table}, origin="x.toml")
    assert document.intents == (
        NetworkIntent("read docs", hosts=["a.example"], requests=["GET a.example"], seconds=300.0),
        NetworkIntent("p", presets=["llm-apis"], always=True),
    )
    for intents, words in (
        (5, "intents is a table"),
        ({"a": 5}, "intents.'a' is a table"),
        ({"a": {"host": []}}, "intents.'a' has no setting 'host'"),
        ({"a": {"hosts": ["https://x"]}}, "intents.'a'.hosts: the host"),
        ({"a": {"for": "1w"}}, "intents.'a'.for: not a time"),
        ({"": {"hosts": []}}, "intents.'': not the name of an intent"),
        ({"a b": {"hosts": []}, "A  B": {"hosts": []}}, "there are two intents 'a b'"),
    ):
        with pytest.raises(PolicyError, match=words):
            from_mapping({"intents": intents}, origin="x.toml")


def test_explain_shows_each_and_lint_those_that_open_nothing() -> None:
    found = Effective(cloned(masks=(), network=rules(READ, WRITE)))
    lines = explain(found)
    assert "network: by intent: only what the declared intent opens of this can be reached" in lines
    assert "network: intent 'read' opens a.example, for requests only as: GET a.example/v1/*, for 600 s" in lines
    layer = from_mapping({"intents": {"read": {"hosts": ["a.example", "z.example"]}, "new": {"hosts": ["a.example"]}}}, origin="x")
    assert [each.what for each in lint([layer], found)] == [
        "'read' names z.example, which the other rules do not allow",
        "'new' is left out: this file narrows intents, and names none",
    ]
