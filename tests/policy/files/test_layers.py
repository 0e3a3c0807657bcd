"""Layers of policy: whatever they say and in whatever order, together they permit no more than the ceiling, nor than each of them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from agent_sandbox.errors import PolicyError
from agent_sandbox.policy.action import RunCode, RunCommand
from agent_sandbox.policy.decide import Allow, decide
from agent_sandbox.policy.files.document import Document, from_mapping
from agent_sandbox.policy.files.layers import Effective, effective, intersection, written
from agent_sandbox.policy.files.presets import PRESETS, preset
from agent_sandbox.policy.model import MIB, Guarantee, Policy, cloned, locked, with_network
from agent_sandbox.policy.network import network_rules
from agent_sandbox.policy.paths import matches, parse

HOME = "/home/u"
CEILING = cloned(masks=())
ONLINE = with_network(CEILING, network_rules(outbound=True))
PATHS = ["/", "/data", "/data/a", "/data/a/b.json", "/home/u", "/home/u/.ssh", "/home/u/x", "/srv/.git/x", "/data/secrets/k"]
PROGRAMS = ["git", "python3", "bash", "rm", "cat"]

patterns = st.lists(
    st.sampled_from(["/", "/data", "/data/*", "/data/a", "/data/.git", "~", "~/*", "/data/*.json", "**/*.json", "/srv"]),
    max_size=2,
    unique=True,
)
names = st.lists(st.sampled_from([*PROGRAMS, "python*", "*"]), max_size=3, unique=True)


def _table(**values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=values)


layers = st.fixed_dictionaries(
    {},
    optional={
        "extends": st.sampled_from(PRESETS),
        "files": _table(read=st.booleans(), write=st.booleans(), allowed=patterns, denied=patterns, allow_hidden=st.booleans()),
        "processes": _table(allow=st.booleans(), shell=st.booleans(), commands=names, denied_commands=names, max=st.integers(1, 9999)),
        "limits": _table(timeout_seconds=st.integers(1, 99), memory_mb=st.integers(1, 99999), open_files=st.integers(1, 9999)),
        "network": _table(outbound=st.booleans(), hosts=st.just(["*.example.com"])),
        "code": _table(validate=st.booleans(), blocked=st.just(["pickle"])),
        "requires": st.lists(st.sampled_from([each.value for each in Guarantee]), max_size=1),
    },
).map(lambda table: from_mapping(table, origin="layer"))


def laid(ceiling: Policy, *documents: Document) -> Effective:
    try:
        return effective(ceiling, documents, home=HOME)
    except PolicyError as error:
        assert "overlap in part" in error.message
        assume(False)
        raise


def permitted(policy: Policy) -> set[object]:
    """Everything of a small world that a policy permits."""
    files = policy.files
    found: set[object] = {("reach", path) for path in PATHS if files.reaches(path)}
    found |= {("read", path) for path in PATHS if files.read and files.reaches(path)}
    found |= {("write", path) for path in PATHS if files.write and files.reaches(path)}
    for program in PROGRAMS:
        if isinstance(decide(policy, (), RunCommand((program,)), now=0.0), Allow):
            found.add(("run", program))
    for path in PATHS:
        if isinstance(decide(policy, (), RunCode("python", "0" * 64, 1, path), now=0.0), Allow):
            found.add(("be in", path))
    return found


def no_looser(limits: Policy, than: Policy) -> bool:
    ours, theirs = vars(limits.limits), vars(than.limits)
    return all(theirs[name] is None or (ours[name] is not None and ours[name] <= theirs[name]) for name in theirs)


@settings(max_examples=40, deadline=None)
@given(layers, layers)
def test_merging_layers_never_widens(one: Document, other: Document) -> None:
    alone, together = laid(CEILING, one), laid(CEILING, one, other)
    assert permitted(together.policy) <= permitted(alone.policy) <= permitted(CEILING)
    assert permitted(together.policy) <= permitted(laid(CEILING, other).policy)
    assert no_looser(together.policy, alone.policy) and no_looser(alone.policy, CEILING)
    assert together.policy.requires >= alone.policy.requires
    assert together.validate >= alone.validate and set(together.blocked) >= set(alone.blocked)


@settings(max_examples=40, deadline=None)
@given(layers, layers)
def test_the_order_of_layers_does_not_matter_to_what_is_permitted(one: Document, other: Document) -> None:
    assert permitted(laid(CEILING, one, other).policy) == permitted(laid(CEILING, other, one).policy)


@settings(max_examples=40, deadline=None)
@given(layers)
def test_a_layer_twice_is_the_layer_once_and_the_answer_is_the_same_every_time(layer: Document) -> None:
    once, twice = laid(CEILING, layer), laid(CEILING, layer, layer)
    assert permitted(once.policy) == permitted(twice.policy)
    assert once == laid(CEILING, layer)
    assert once.policy.digest() == laid(CEILING, layer).policy.digest()


@settings(max_examples=40, deadline=None)
@given(layers, patterns, names)
def test_adding_a_deny_never_allows_more(layer: Document, paths: list[str], programs: list[str]) -> None:
    deny = from_mapping({"files": {"denied": paths}, "processes": {"denied_commands": programs}}, origin="deny")
    assert permitted(laid(CEILING, layer, deny).policy) <= permitted(laid(CEILING, layer).policy)


@settings(max_examples=40, deadline=None)
@given(layers)
def test_what_is_locked_stays_locked_whatever_a_layer_says(layer: Document) -> None:
    assert permitted(laid(locked(), layer).policy) <= {("be in", "/tmp")}


@settings(max_examples=40, deadline=None)
@given(patterns, patterns, st.sampled_from(PATHS))
def test_an_intersection_covers_exactly_what_both_sides_cover(one: list[str], other: list[str], path: str) -> None:
    ours, theirs = [parse(each, home=HOME) for each in one], [parse(each, home=HOME) for each in other]
    try:
        both = intersection(ours, theirs, "x")
    except PolicyError:
        assume(False)
        raise
    covered = any(matches(each, path) for each in ours) and any(matches(each, path) for each in theirs)
    assert any(matches(each, path) for each in both) == covered


@pytest.mark.parametrize(
    ("one", "other"), [("/data/*.json", "/data/a"), ("/data/*.json", "/data/x*"), ("**/*.json", "/data/*.md"), ("/data/a", "/data/*.json")]
)
def test_two_patterns_that_no_pattern_is_the_intersection_of_are_refused_by_name(one: str, other: str) -> None:
    with pytest.raises(PolicyError) as caught:
        effective(CEILING, [from_mapping({"files": {"allowed": [each]}}, origin="x.toml") for each in (one, other)], home=HOME)
    assert repr(written(parse(one))) in caught.value.message and repr(written(parse(other))) in caught.value.message
    assert "x.toml: files.allowed" in caught.value.message and caught.value.hint


def test_a_layer_narrows_every_part_of_a_policy() -> None:
    table = {
        "name": "mine",
        "requires": ["memory-hard"],
        "files": {"write": False, "allowed": ["~/x"], "denied": ["~/x/secret"], "allow_hidden": False},
        "processes": {"commands": ["git"], "denied_commands": ["rm"], "shell": False, "max": 7},
        "limits": {"timeout_seconds": 5, "memory_mb": 64, "disk_mb": 99999},
        "code": {"blocked": ["pickle"]},
    }
    found = effective(CEILING, [from_mapping(table, origin="x.toml")], home=HOME)
    policy = found.policy
    assert policy.name == "cloned+mine"
    assert policy.files.reaches("/home/u/x/a") and not policy.files.reaches("/home/u/x/secret") and not policy.files.reaches("/home/u/y")
    assert (policy.files.read, policy.files.write, policy.files.allow_hidden) == (True, False, False)
    assert policy.programs.permits("git") and not policy.programs.permits("cat")
    assert (policy.limits.processes, policy.limits.wall_seconds, policy.limits.memory_bytes) == (7, 5, 64 * MIB)
    assert policy.limits.disk_bytes == CEILING.limits.disk_bytes, "more than the ceiling is the ceiling"
    assert {Guarantee.MEMORY_HARD, Guarantee.PROGRAMS_CONFINED} <= policy.requires
    assert found.blocked == ("pickle",) and not found.validate, "nobody has asked for the default patterns"
    assert effective(found, [preset("low")], home=HOME).validate


def test_no_layer_shows_a_hidden_name_by_spelling_it_where_another_layer_hides_them() -> None:
    hiding = from_mapping({"files": {"allowed": ["/data"], "allow_hidden": False}}, origin="policy.toml")
    spelling = from_mapping({"files": {"allowed": ["/data/.git", "/data/.env/*", "/data/src"]}}, origin="agent-sandbox.toml")
    bare = from_mapping({"files": {"allow_hidden": False}}, origin="system")
    for layers in ([hiding, spelling], [spelling, hiding], [bare, spelling], [spelling, bare]):
        files = effective(CEILING, layers, home=HOME).policy.files
        assert not files.reaches("/data/.git/config") and not files.reaches("/data/.env/x") and files.reaches("/data/src/a")
    assert effective(CEILING, [spelling], home=HOME).policy.files.reaches("/data/.git/config"), "the control arm"
    own = from_mapping({"files": {"allowed": ["/data/.git"], "allow_hidden": False}}, origin="x")
    files = effective(CEILING, [own, own], home=HOME).policy.files
    assert files.reaches("/data/.git/config") and not files.reaches("/data/.git/.x"), "whoever hides may spell a name"


def test_a_layer_narrows_the_network_of_the_policy_above_and_opens_none() -> None:
    ask = from_mapping({"network": {"outbound": True, "hosts": ["example.com"]}}, origin="x.toml")
    assert not effective(CEILING, [ask], home=HOME).policy.network.outbound
    network = effective(ONLINE, [ask], home=HOME).policy.network
    assert network.permits("example.com", 443) and not network.permits("example.net", 443)
    for shut in ({"network": {"outbound": False}}, {"requires": ["no-network"]}):
        policy = effective(ONLINE, [from_mapping(shut, origin="x")], home=HOME).policy
        assert not policy.network.outbound and Guarantee.NO_NETWORK in policy.requires and Guarantee.EGRESS_ONLY not in policy.requires


def test_the_tiers_are_what_their_table_says() -> None:
    high, medium, low = (
        effective(CEILING, [from_mapping({"extends": tier}, origin="x")], home=HOME).policy for tier in ("high", "medium", "low")
    )
    assert permitted(high) == permitted(CEILING)
    assert medium.files.reaches("/home/u/x") and not medium.files.reaches("/data")
    assert medium.programs.permits("git") and not medium.programs.permits("sudo")
    assert not (low.files.read or low.files.write or low.files.reaches("/home/u"))
    assert low.programs.permits("cat") and not low.programs.permits("rm") and not low.programs.permits("bash")
    assert permitted(low) <= permitted(high)


def test_an_allowlist_is_written_where_it_is_asked_for_or_above_and_never_below() -> None:
    """The medium tier: a file of the project must not open what a file above it has closed."""
    medium, own = preset("medium"), from_mapping({"network": {"hosts": ["api.example.com"]}}, origin="hosts")
    both = from_mapping({"extends": "medium", "network": {"hosts": ["api.example.com"]}}, origin="both")

    def reaches(*layers: Document) -> list[bool]:
        network = effective(ONLINE, layers, home=HOME).policy.network
        return [network.permits(host, 443) for host in ("api.example.com", "example.net")]

    assert reaches() == [True, True] and reaches(medium) == [False, False]
    assert reaches(both) == reaches(own, medium) == [True, False]
    assert reaches(medium, own) == [False, False]
