"""Network rules that ask: which hosts may be reached, which only after a yes, and which never."""

from __future__ import annotations

import pytest

from agent_sandbox._fast.values import replace
from agent_sandbox.errors import PolicyError
from agent_sandbox.policy.action import Connect
from agent_sandbox.policy.decide import Allow, Ask, Deny, decide
from agent_sandbox.policy.files.document import parse_toml
from agent_sandbox.policy.files.layers import network_of_layer
from agent_sandbox.policy.intents import Declared, NetworkIntent, combined
from agent_sandbox.policy.model import cloned
from agent_sandbox.policy.network import NetworkRules, Reach, network_rules
from agent_sandbox.policy.network_presets import network_of


def of_file(text: str) -> NetworkRules:
    return network_of_layer(parse_toml(text, origin="policy.toml"))


def answer(rules: NetworkRules, host: str, port: int = 443) -> str:
    if not rules.objection(host, port):
        assert not rules.asks_for(host, port)
        return "yes"
    return "ask" if rules.asks_for(host, port) else "no"


def test_a_host_beyond_the_list_is_asked_for_and_a_denied_one_never() -> None:
    rules = network_of(["api.example.com", "*.example.com+ask", "db.example.org:5432+ask"])
    assert answer(rules, "api.example.com") == "yes"
    assert answer(rules, "other.example.com") == answer(rules, "other.example.com", 80) == "ask"
    assert answer(rules, "example.com") == answer(rules, "other.example.com", 22) == answer(rules, "example.net") == "no"
    assert answer(rules, "db.example.org", 5432) == "ask" and answer(rules, "db.example.org") == "no"
    assert rules.listened == (80, 443, 5432), "a port that is asked for has a door"
    assert rules.passes_opaque("db.example.org", 5432)
    denied = rules.narrowed(network_rules(outbound=True, denied=["other.example.com"]))
    assert answer(denied, "other.example.com") == "no" and answer(denied, "more.example.com") == "ask"
    every = network_of(["*+ask"])
    assert answer(every, "example.net") == "ask" and answer(every, "localhost") == answer(every, "127.0.0.1") == "no"
    assert not every.may_be_private("10.0.0.1") and network_of(["10.0.0.1+ask"]).may_be_private("10.0.0.1")
    with pytest.raises(PolicyError):
        network_of(["*+ask+private"])
    preset = network_of(["git-hosts", "github.com+ask", "*+ask"])
    assert answer(preset, "github.com") == "yes" and preset.request_objection("github.com", "POST", "/x/git-receive-pack")
    assert answer(preset, "example.net") == "ask", "what is asked for lies beyond the list, and lifts nothing within it"


def test_a_file_turns_a_yes_into_a_question_and_a_question_into_a_no_and_nothing_else() -> None:
    own = of_file('[network]\noutbound = true\nhosts = ["a.test"]\nask = ["*.b.test"]')
    assert [answer(own, host) for host in ("a.test", "x.b.test", "c.test")] == ["yes", "ask", "no"]
    for project, expected in (
        ('[network]\nask = ["*"]', ["ask", "ask", "no"]),
        ('[network]\nhosts = ["*"]', ["yes", "ask", "no"]),
        ('[network]\nhosts = ["a.test", "c.test"]', ["yes", "no", "no"]),
        ('[approvals]\nnetwork = ["*"]', ["ask", "ask", "no"]),
        ('[approvals]\nnetwork = ["c.test"]', ["yes", "ask", "no"]),
        ('[network]\ndenied_hosts = ["x.b.test"]', ["yes", "no", "no"]),
    ):
        rules = own.narrowed(of_file(project))
        assert [answer(rules, host) for host in ("a.test", "x.b.test", "c.test")] == expected, project


def test_a_file_that_only_asks_grants_and_takes_no_exception() -> None:
    above = network_of(["db.test:5432", "pinned.test+uninspected", "inner.test+private"])
    rules = above.narrowed(of_file('[approvals]\nnetwork = ["*"]'))
    assert rules.passes_opaque("db.test", 5432) and rules.passes_uninspected("pinned.test") and rules.may_be_private("inner.test")
    assert answer(rules, "db.test", 5432) == "ask"
    alone = network_rules(outbound=True, asked=["*"])
    assert not (alone.passes_opaque("db.test", 5432) or alone.passes_uninspected("db.test") or alone.may_be_private("10.0.0.1"))


def test_hosts_of_a_capability_widen_lists_and_nothing_that_is_kept_or_denied() -> None:
    system, own = Reach(("a.test",)), Reach(("a.test", "b.test"), opaque=("b.test:22",))
    rules = NetworkRules(True, False, (own,), ("evil.test",)).with_capable(["c.test", "evil.test", "b.test", "db.test:5432"])
    assert [answer(rules, host) for host in ("a.test", "b.test", "c.test", "evil.test", "d.test")] == ["yes", "yes", "ask", "no", "no"]
    assert answer(rules, "db.test", 5432) == "ask" and rules.passes_opaque("db.test", 5432) and 5432 in rules.listened
    assert not rules.asks_for("c.test", 443, person=True), "for those a capability answers, and nobody is asked"
    kept = NetworkRules(True, False, (system, own)).with_capable(["c.test"], kept={system})
    assert answer(kept, "c.test") == "no"
    assert (
        answer(NetworkRules().with_capable(["c.test"]), "c.test") == "ask"
        and answer(NetworkRules().with_capable(["c.test"]), "a.test") == "no"
    )
    web = network_rules(outbound=True, ports=(80, 443)).with_capable(["c.test", "db.test:5432"])
    assert answer(web, "c.test") == "yes" and answer(web, "db.test", 5432) == "ask" and answer(web, "c.test", 5432) == "no"


def test_nobody_is_asked_for_a_host_that_the_declared_intent_does_not_name() -> None:
    intents = combined([NetworkIntent("fetch", hosts=["b.test"]), NetworkIntent("read", hosts=["a.test"])])
    rules = replace(network_of(["a.test", "b.test+ask"]), intents=intents)
    assert [answer(rules, host) for host in ("a.test", "b.test")] == ["no", "no"], "none is declared"
    fetching, reading = (replace(rules, declared=Declared(name)) for name in ("fetch", "read"))
    assert [answer(fetching, host) for host in ("a.test", "b.test")] == ["no", "ask"]
    assert [answer(reading, host) for host in ("a.test", "b.test")] == ["yes", "no"]


def test_a_verdict_asks_for_hosts_and_for_data_and_suggests_the_grant() -> None:
    policy = cloned(masks=(), network=network_of(["a.test", "b.test+ask"]))
    verdicts = [decide(policy, (), Connect(host, 443, "GET", "/x"), now=0.0) for host in ("a.test", "b.test", "c.test")]
    assert [type(each) for each in verdicts] == [Allow, Ask, Deny]
    assert isinstance(verdicts[1], Ask) and verdicts[1].suggest == "network b.test:443" and "b.test:443" in verdicts[1].because.why
    found = decide(policy, (), Connect("a.test", 443, "POST", "/x", "email in the body"), now=0.0)
    assert isinstance(found, Ask) and found.because.rule == "dlp.ask" and not found.suggest
    assert isinstance(decide(policy, (), Connect("c.test", 443, "POST", "/x", "email in the body"), now=0.0), Deny)
