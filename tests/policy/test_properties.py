"""What holds for every policy, layer and action: denied by default, never wider by a layer, and decided from what is given alone."""

from __future__ import annotations

import sys
from typing import Any

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from agent_sandbox.errors import PolicyError
from agent_sandbox.policy.action import (
    FILE_READS,
    FILE_WRITES,
    LANGUAGES,
    Action,
    CallTool,
    Connect,
    Promote,
    RunCode,
    RunCommand,
    Undo,
    UseFile,
)
from agent_sandbox.policy.code.patterns import granted
from agent_sandbox.policy.code.validate import validate
from agent_sandbox.policy.decide import LARGEST_SOURCE, Allow, Ask, Deny, decide
from agent_sandbox.policy.files.document import Document, from_mapping
from agent_sandbox.policy.files.layers import Effective, effective
from agent_sandbox.policy.files.presets import PRESETS
from agent_sandbox.policy.model import EFFECTS, LIFTABLE, NEEDS, FileRules, Guarantee, Limits, Policy, cloned, required
from agent_sandbox.policy.network import NetworkRules, network_rules
from agent_sandbox.policy.paths import Tree

HOME = "/home/u"
PATHS = ("/tmp", "/data", "/data/a", "/data/.env", "/data/.git/config", "/home/u", "/home/u/x", "/etc")
PROGRAMS = ("git", "ls", "python3", "bash", "curl", "rm")
HOSTS = ("api.example.com", "example.net", "localhost", "192.0.2.1", "pypi.org")
LINES = ("git push --force", "ls | grep x", "rm -rf data", "curl http://192.0.2.1", "$x y", "git status")
CODE = ("eval('1')", "open('x')", "import subprocess", "import socket", "import json", "import pickle")
NETWORKS = (
    network_rules(outbound=True),
    network_rules(outbound=True, hosts=["*", "api.example.com:22"], ports=[22, 80, 443], opaque=["*"], private=["*"], uninspected=["*"]),
    network_rules(outbound=True, hosts=["example.net"], asked=["*.example.com", "api.example.com:22"], opaque=["api.example.com:22"]),
)
EVERYTHING = Effective(cloned(masks=(), network=NETWORKS[1]))
NOTHING = Policy("nothing", FileRules(), False, Limits(), required(False, Limits()))
ORDER = {Deny: 0, Ask: 1, Allow: 2}


def _some(*values: Any) -> st.SearchStrategy[list[Any]]:
    return st.lists(st.sampled_from(values), max_size=3, unique=True)


def _table(**values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=values)


paths = _some("/", "/data", "/data/*", "/data/*.json", "/data/.git", "/data/.env", "~", "~/x", "/etc", "**/*.md")
names = _some(*PROGRAMS, "python*", "*")
flags, counts = st.booleans(), st.integers(1, 99_999)
limits = dict.fromkeys(("timeout_seconds", "cpu_seconds", "memory_mb", "disk_mb", "output_bytes", "open_files", "fuel"), counts)
layers = _table(
    extends=st.sampled_from(PRESETS),
    requires=_some(*(each.value for each in Guarantee)),
    files=_table(read=flags, write=flags, allowed=paths, denied=paths, allow_hidden=flags),
    processes=_table(allow=flags, shell=flags, commands=names, denied_commands=names, max=counts),
    network=_table(
        **{"outbound": flags, "inbound": flags, "localhost": flags, "listed": flags, "ports": _some(22, 80, 443)},
        **{"hosts": _some(*HOSTS, "*.example.com", "*", "api.example.com:22"), "denied_hosts": _some(*HOSTS)},
        **{"presets": _some("packages", "git-hosts"), "requests": _some("GET api.example.com", "* *.example.com/v1/*", "POST pypi.org")},
        **{"uninspected": _some(*HOSTS, "*"), "opaque": _some("api.example.com:22", "*"), "private": _some(*HOSTS, "*")},
        **{"ask": _some(*HOSTS, "*.example.com", "*", "api.example.com:22")},
    ),
    limits=_table(**limits),
    code=_table(validate=flags, blocked=_some("pickle", "json", "eval(", "subprocess")),
    approvals=_table(
        **{"commands": _some("git push **", "rm **"), "effects": _some(*EFFECTS), "tools": _some("send", "read*"), "opaque": flags},
        **{"promotions": flags, "protected": flags, "approvers": _some("ada", "bob"), "high_risk": st.sampled_from(NEEDS)},
        **{"elevate": _some(*LIFTABLE), "network": _some(*HOSTS, "*")},
    ),
).map(lambda table: from_mapping(table, origin="layer"))
where = st.none() | st.sampled_from(PATHS)
kinds = st.lists(st.sampled_from(("ci", "git-hooks")), max_size=2, unique=True).map(tuple)
actions: st.SearchStrategy[Action] = st.one_of(
    st.builds(
        RunCode,
        st.sampled_from((*LANGUAGES, "cobol")),
        st.just("0" * 64),
        st.sampled_from((0, 1, LARGEST_SOURCE, LARGEST_SOURCE + 1)),
        where,
        programs=st.lists(st.sampled_from(PROGRAMS), max_size=2).map(tuple),
    ),
    st.builds(
        RunCommand, st.sampled_from(LINES).map(lambda line: ("bash", "-c", line)) | st.sampled_from(PROGRAMS).map(lambda p: (p, "x")), where
    ),
    st.builds(Promote, st.sampled_from((*PATHS, "/")), st.just("0" * 64), st.just(1), kinds, kinds),
    st.builds(Undo, st.sampled_from((*PATHS, "/")), st.just("1")),
    st.builds(CallTool, st.sampled_from(("send", "read_mail", "other")), st.just("0" * 64), st.just(1)),
    st.builds(UseFile, st.sampled_from((*FILE_READS, *FILE_WRITES, "burn")), st.sampled_from((*PATHS, "/", "/tmp/x"))),
    st.builds(
        Connect, st.sampled_from(HOSTS), st.sampled_from((22, 80, 443)), st.sampled_from(("", "GET")), data=st.sampled_from(("", "x"))
    ),
)
policies = st.builds(
    lambda files, processes, tools: Policy("any", files, processes, Limits(), required(processes, Limits()), tools=tools),
    st.builds(
        FileRules, flags, flags, st.lists(st.sampled_from([Tree(path) for path in PATHS]), max_size=2).map(tuple), allow_hidden=flags
    ),
    flags,
    st.sampled_from(((), ("send",))),
)


def laid(above: Effective, *documents: Document) -> Effective:
    try:
        return effective(above, documents, home=HOME)
    except PolicyError as error:
        assert "overlap in part" in error.message
        assume(False)
        raise


def rank(policy: Policy, action: Action) -> int:
    return ORDER[type(decide(policy, (), action, now=0.0))]


def holes(found: Effective) -> set[str]:
    """The code of a small world that the early look lets pass."""
    grants = granted(found.policy)
    rules = None if found.validate else ()
    return {code for code in CODE if validate(code, grants=grants, rules=rules, more=found.blocked).valid}


def reached(found: Effective) -> set[tuple[object, ...]]:
    """What may leave in a small world: connections, requests, and exceptions from what is read and where it lies.

    A place that somebody is asked for is less than one that may be reached, and more than none.
    """
    network = found.policy.network
    free = {(host, port) for host in HOSTS for port in (22, 80, 443) if not network.objection(host, port)}
    places = free | {(host, port) for host in HOSTS for port in (22, 80, 443) if network.asks_for(host, port)}
    requests = {
        (host, method, path)
        for host, _ in places
        for method in ("GET", "POST")
        for path in ("/", "/v1/x", "/a/git-upload-pack")
        if not network.request_objection(host, method, path)
    }
    unread: set[tuple[object, ...]] = {("unread", host) for host, _ in places if network.passes_uninspected(host)}
    unread |= {("any bytes", *place) for place in places if network.passes_opaque(*place)}
    private = {("private", host) for host, _ in places if network.may_be_private(host)}
    return {*places, *requests, *unread, *private, *(("unasked", *place) for place in free)}


@settings(max_examples=100, deadline=None)
@given(layers, layers, actions)
def test_a_layer_more_never_widens_anything(one: Document, other: Document, action: Action) -> None:
    alone, together = laid(EVERYTHING, one), laid(EVERYTHING, one, other)
    before, after = alone.policy, together.policy
    assert rank(after, action) <= rank(before, action) <= rank(EVERYTHING.policy, action)
    for path in PATHS:
        assert after.files.reaches(path) <= before.files.reaches(path)
    assert after.files.read <= before.files.read and after.files.write <= before.files.write and after.processes <= before.processes
    assert all(after.programs.permits(name) <= before.programs.permits(name) for name in PROGRAMS)
    assert all(_no_more(getattr(after.limits, name), getattr(before.limits, name)) for name in vars(before.limits))
    assert after.requires | ({Guarantee.EGRESS_ONLY} if Guarantee.NO_NETWORK in after.requires else set()) >= before.requires
    assert reached(together) <= reached(alone) <= reached(EVERYTHING)
    assert holes(together) <= holes(alone)
    assert {*after.asks.needs} >= {*before.asks.needs}
    for mine, theirs in ((after.asks.approvers, before.asks.approvers), (after.asks.elevate, before.asks.elevate)):
        assert theirs is None or (mine is not None and {*mine} <= {*theirs})


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(NETWORKS), layers, layers)
def test_a_layer_more_opens_nothing_of_the_network(network: NetworkRules, one: Document, other: Document) -> None:
    """Also where the policy above says little: no layer lends it a port, or an exception for a host."""
    above = Effective(cloned(masks=(), network=network))
    alone, together = laid(above, one), laid(above, one, other)
    assert reached(together) <= reached(alone) <= reached(above)
    assert reached(above) > reached(Effective(cloned(masks=()))) == set(), "there is something to lose"


def _no_more(ours: float | None, theirs: float | None) -> bool:
    return theirs is None or (ours is not None and ours <= theirs)


@settings(max_examples=100, deadline=None)
@given(layers, paths, names, _some(*HOSTS), actions)
def test_a_deny_more_never_allows_more(layer: Document, denied: list[str], commands: list[str], hosts: list[str], action: Action) -> None:
    denying = {"files": {"denied": denied}, "processes": {"denied_commands": commands}, "network": {"denied_hosts": hosts}}
    before, after = laid(EVERYTHING, layer), laid(EVERYTHING, layer, from_mapping(denying, origin="deny"))
    assert rank(after.policy, action) <= rank(before.policy, action)
    assert reached(after) <= reached(before)
    assert not any(after.policy.programs.permits(name) for name in commands)


@settings(max_examples=200, deadline=None)
@given(actions)
def test_without_a_permission_everything_is_denied_but_code_and_files_in_scratch_space(action: Action) -> None:
    verdict = decide(NOTHING, (), action, now=0.0)
    code = isinstance(action, RunCode) and action.language in LANGUAGES and 0 < action.size <= LARGEST_SOURCE and not action.programs
    file = isinstance(action, UseFile) and action.operation != "burn" and action.path in ("/tmp", "/tmp/x")
    assert isinstance(verdict, Allow) == (file or (code and action.cwd in (None, "/tmp")))  # type: ignore[union-attr]  # code has one
    assert verdict.because.rule and verdict.because.why
    assert isinstance(verdict, Allow) or verdict.because.remedy, "who is refused is told what would change it"


class _Watching:
    """Raises for whatever Python does that reaches out of the program, while it is on. Such a hook cannot be taken away again."""

    on = False
    reaches_out = ("open", "os.", "socket.", "subprocess.", "import", "time.", "ctypes.", "shutil.", "tempfile.", "fcntl.", "mmap.")

    def __call__(self, event: str, arguments: object) -> None:
        if self.on and event.startswith(self.reaches_out):
            self.on = False  # what tells of it may open files
            raise AssertionError(f"a decision reached out: {event} {arguments!r}")


_watching = _Watching()
sys.addaudithook(_watching)


@settings(max_examples=200, deadline=None)
@given(layers, policies, actions, st.floats(0, 1e12), st.floats(0, 1e12))
def test_a_decision_is_a_pure_function(layer: Document, policy: Policy, action: Action, now: float, later: float) -> None:
    """The same every time, at any time, and without a look at the machine."""
    for each in (policy, laid(EVERYTHING, layer).policy):
        first, spelt = decide(each, (), action, now=now), (repr(each), repr(action))  # what it loads, it loads now
        _watching.on = True
        try:
            second = decide(each, (), action, now=later)
        finally:
            _watching.on = False
        assert first == second and spelt == (repr(each), repr(action))


def test_the_watch_over_decisions_would_see_one_that_reaches_out() -> None:
    _watching.on = True
    try:
        open("/dev/null").close()
    except AssertionError as error:
        assert "reached out: open" in str(error)
    else:
        raise AssertionError("it was not seen")
    finally:
        _watching.on = False
