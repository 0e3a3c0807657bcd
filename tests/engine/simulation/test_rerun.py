"""The second run of a plan with requests: exactly these are permitted, and what comes out otherwise is told."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_sandbox._fast.encoding import as_json
from agent_sandbox._fast.values import replace
from agent_sandbox.egress.orders import FlowRecord, encode_rules
from agent_sandbox.engine.simulation.apply import _refuse_beyond_files
from agent_sandbox.engine.simulation.plan import EffectPlan, Ended, FileEffect, HttpRequest, NetworkRequest, Rerun, read
from agent_sandbox.engine.simulation.rerun import difference, permitted, permitting
from agent_sandbox.engine.simulation.run import apart_from_network
from agent_sandbox.errors import PolicyError
from agent_sandbox.policy.model import ProgramRules, cloned
from agent_sandbox.policy.network import network_rules, public_web
from agent_sandbox.policy.network_presets import network_of

WIDE = network_of(["a.test", "b.test", "c.test:8080", "inner.test+private", "pinned.test+uninspected"])


RERUN = Rerun(as_json(encode_rules(WIDE), sort_keys=True), apart_from_network(cloned(masks=(), network=WIDE)))


def plan(*http: HttpRequest) -> EffectPlan:
    return EffectPlan(("x",), "/p", "/p", 0.0, "g", "", Ended(0, "exited"), http=http, rerun=RERUN)


def http(method: str = "GET", host: str = "a.test", path: str = "/x", *, port: int = 443, sent: bool = True) -> HttpRequest:
    return HttpRequest(method, host, port, port == 443, path, sent=sent)


def test_exactly_the_requests_of_a_plan_are_permitted() -> None:
    made = plan(http(), http("POST", path="/y"), http(host="inner.test", path="/"), http(host="c.test", port=8080, path="/"))
    rules = permitting(made, cloned(masks=())).network
    assert not rules.objection("a.test", 443) and not rules.request_objection("a.test", "GET", "/x")
    assert not rules.request_objection("a.test", "POST", "/y") and not rules.objection("c.test", 8080)
    assert rules.may_be_private("inner.test") and not rules.may_be_private("a.test")
    assert rules.objection("a.test", 80) and rules.objection("b.test") and rules.objection("c.test", 443)
    for method, path in (("POST", "/x"), ("GET", "/y"), ("GET", "/x/"), ("GET", "/"), ("DELETE", "/x")):
        assert rules.request_objection("a.test", method, path), (method, path)
    assert not rules.passes_opaque("c.test", 8080) and not rules.passes_uninspected("pinned.test")
    assert not WIDE.request_objection("a.test", "DELETE", "/x") and WIDE.passes_opaque("c.test", 8080), "the control: more was open"


@given(
    st.lists(
        st.tuples(st.sampled_from(("GET", "PUT")), st.sampled_from(("a.test", "b.test")), st.sampled_from(("/", "/x", "/x/y"))), min_size=1
    ),
    st.sampled_from(("GET", "PUT", "POST")),
    st.sampled_from(("a.test", "b.test", "d.test")),
    st.sampled_from(("/", "/x", "/x/y", "/z")),
)
def test_a_request_is_permitted_if_and_only_if_it_is_in_the_plan(
    asked: list[tuple[str, str, str]], method: str, host: str, path: str
) -> None:
    rules = permitted(plan(*(http(*each) for each in asked)), public_web())
    refused = rules.objection(host, 443) or rules.request_objection(host, method, path)
    assert bool(refused) is ((method, host, path) not in asked)


def test_the_rules_of_the_simulation_still_hold() -> None:
    narrow = network_rules(outbound=True, hosts=["a.test"], denied=["b.test"])
    rules = permitted(plan(http(host="b.test")), narrow)
    assert rules.objection("b.test", 443)


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (plan(http(path="/a*")), r"holds a \*"),
        (plan(http(path="")), "found data"),
        (replace(plan(http()), untold=1), "1 more"),
        (replace(plan(http()), rerun=None), "without a network"),
        (replace(plan(http()), rerun=replace(RERUN, code=True)), "one of code"),
        (replace(plan(http()), rerun=replace(RERUN, apart="other")), "other rules"),
    ],
)
def test_what_cannot_be_permitted_exactly_is_refused(made: EffectPlan, why: str) -> None:
    with pytest.raises(PolicyError, match=why):
        permitting(made, cloned(masks=()))


def test_a_simulation_under_other_rules_about_programs_is_noticed() -> None:
    only = cloned(masks=(), programs=ProgramRules((("curl",),)), network=WIDE)
    assert apart_from_network(only) != apart_from_network(cloned(masks=()))
    assert apart_from_network(cloned(masks=(), network=WIDE)) == apart_from_network(cloned(masks=()))


def test_a_plan_with_requests_is_read_as_it_was_written() -> None:
    made = plan(http(), http("POST", sent=False))
    assert read(made.text()) == made and made.http[1].target == "https://a.test/x"


def test_what_comes_out_otherwise_is_told() -> None:
    file = FileEffect("/p/a", "added", "project", sha256="1")
    made = replace(
        plan(http("POST", sent=False)),
        files=(file,),
        network=(NetworkRequest("connect", "a.test:443"), NetworkRequest("resolve", "t.test")),
    )
    assert difference(made, made) == ""
    assert "/p/a" in difference(made, replace(made, files=(replace(file, sha256="2"),)))
    assert "/p/a" in difference(made, replace(made, files=()))
    assert "ended with 7" in difference(made, replace(made, ended=Ended(7, "exited")))
    assert difference(replace(made, ended=Ended(7, "exited")), replace(made, ended=Ended(0, "exited"))) == "", "it got further"
    for target, known in (("t.test", True), ("u.test", False), ("a.test:443", False)):
        name, _, port = target.partition(":")
        flow = FlowRecord(name, int(port or 0), refused="the policy does not allow it")
        assert (difference(made, made, [flow]) == "") is known, target


def test_whoever_cannot_send_requests_does_not_carry_out_the_files_alone_by_mistake() -> None:
    made = plan(http("POST", sent=False))
    with pytest.raises(PolicyError, match="the plan sends requests"):
        _refuse_beyond_files(made, files_only=False, reruns=False)
    _refuse_beyond_files(made, files_only=False, reruns=True)
    with pytest.raises(PolicyError, match="changes no files"):
        _refuse_beyond_files(made, files_only=True, reruns=False)
