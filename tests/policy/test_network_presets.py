"""A list of hosts and presets opens exactly what it names."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_sandbox.errors import PolicyError
from agent_sandbox.policy.hosts import canonical_pattern
from agent_sandbox.policy.network import NetworkRules, RequestRule, network_rules, read_request
from agent_sandbox.policy.network_presets import PRESETS, network_of, opaque_of, preset

LABELS = st.sampled_from(("a", "b", "example", "com", "x-y"))
NAMES = st.lists(LABELS, min_size=1, max_size=4).map(".".join)


def opens(rules: NetworkRules, host: str, port: int = 443) -> bool:
    return not rules.objection(host, port)


def sends(rules: NetworkRules, method: str, host: str, path: str = "/") -> bool:
    return opens(rules, host) and not rules.request_objection(host, method, path)


def test_every_preset_is_of_well_formed_hosts_and_one_that_is_unknown_is_refused() -> None:
    for name in PRESETS:
        hosts = preset(name).hosts
        assert len(set(hosts)) == len(hosts) > 10
        assert [canonical_pattern(each) for each in hosts] == list(hosts)
    with pytest.raises(PolicyError, match="there is no network preset 'everything'"):
        preset("everything")


def test_packages_can_be_fetched_and_nothing_can_be_published() -> None:
    rules = network_of(["packages"])
    for host in ("pypi.org", "files.pythonhosted.org", "static.crates.io", "proxy.golang.org"):
        assert sends(rules, "GET", host) and sends(rules, "HEAD", host)
        assert not sends(rules, "POST", host) and not sends(rules, "PUT", host)
    assert not opens(rules, "example.com") and not opens(rules, "upload.pypi.org") and not opens(rules, "pypi.org", 22)


def test_the_indexes_of_this_machine_belong_to_packages_and_may_lie_on_private_addresses() -> None:
    rules = network_of(["packages"], indexes=lambda: ["index.corp:8443", "mirror.corp", "10.1.2.3", "pypi.org"])
    assert opens(rules, "index.corp", 8443) and not opens(rules, "index.corp", 443) and opens(rules, "mirror.corp")
    assert [rules.may_be_private(each) for each in ("index.corp", "mirror.corp", "10.1.2.3", "pypi.org")] == [True] * 4
    assert not rules.may_be_private("static.crates.io"), "an index that this machine does not use has no business on a private address"
    assert not rules.passes_opaque("index.corp", 8443), "it is read like any other"
    assert sends(rules, "GET", "mirror.corp") and not sends(rules, "POST", "mirror.corp")


def test_the_indexes_of_this_machine_are_looked_for_only_for_packages() -> None:
    def read() -> list[str]:
        raise AssertionError("they were looked for")

    assert network_of(["git-hosts", "example.com"], indexes=read).outbound
    with pytest.raises(AssertionError):
        network_of(["packages"], indexes=read)


def test_git_hosts_can_be_fetched_from_and_not_pushed_to() -> None:
    rules = network_of(["git-hosts"])
    assert sends(rules, "GET", "github.com", "/a/b.git/info/refs") and sends(rules, "POST", "github.com", "/a/b.git/git-upload-pack")
    assert not sends(rules, "POST", "github.com", "/a/b.git/git-receive-pack") and not sends(
        rules, "POST", "gitlab.com", "/api/v4/snippets"
    )


def test_a_host_that_is_named_beside_its_preset_may_be_sent_everything() -> None:
    rules = network_of(["git-hosts", "packages", "github.com"])
    assert sends(rules, "POST", "github.com", "/a/b.git/git-receive-pack")
    assert not sends(rules, "POST", "gitlab.com", "/a/b.git/git-receive-pack") and not sends(rules, "PUT", "pypi.org")


def test_the_apis_of_models_may_be_sent_requests() -> None:
    rules = network_of(["llm-apis"])
    assert sends(rules, "POST", "api.openai.com", "/v1/responses") and not opens(rules, "openai.com")


def test_a_host_with_another_port_than_the_webs_may_be_sent_any_bytes_there() -> None:
    rules = network_of(["db.example.com:5432", "web.example.com", "*.example.org:2222", "[2001:db8::1]:6379", "x.example:443"])
    assert opens(rules, "db.example.com", 5432) and rules.passes_opaque("db.example.com", 5432)
    assert rules.passes_opaque("2001:db8::1", 6379) and rules.may_be_private("2001:db8::1")
    for host, port in (("db.example.com", 443), ("web.example.com", 443), ("a.example.org", 2222), ("x.example", 443)):
        assert not rules.passes_opaque(host, port)
    assert rules.listened == (80, 443, 2222, 5432, 6379)
    assert opaque_of(["db.example.com", "*.x.example", "a.example:1"], [443, 5432]) == ("db.example.com:5432", "a.example:1")


def test_marks_lift_what_they_say_for_one_host() -> None:
    rules = network_of(["a.example+private", "b.example+uninspected", "*.c.example:9000+opaque+private", "d.example"])
    assert [rules.may_be_private(each) for each in ("a.example", "x.c.example", "b.example", "d.example")] == [True, True, False, False]
    assert [rules.passes_uninspected(each) for each in ("b.example", "a.example")] == [True, False]
    assert [rules.passes_opaque(each, 9000) for each in ("x.c.example", "d.example")] == [True, False]


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ("", "names no host"),
        ("https://example.com/x", "is an address, not a host"),
        ("localhost", "is the sandbox itself"),
        ("x.localhost:80", "is the sandbox itself"),
        ("127.0.0.1", "is the sandbox itself"),
        ("[::1]:5432", "is the sandbox itself"),
        ("packages+private", "takes no mark"),
        ("packges", "there is no preset 'packges'"),
        ("example.com+all", "has no mark 'all'"),
        ("*+uninspected", "would lift the inspection of every host"),
        ("example.com:0", "not a port"),
        ("example.com:99999", "not a port"),
        ("exa mple.com", "cannot be the name of a host"),
    ],
)
def test_an_entry_that_is_none_is_refused_by_name(entry: str, why: str) -> None:
    with pytest.raises(PolicyError, match=why.replace("*", r"\*")):
        network_of([entry])


def test_a_host_that_is_named_like_a_preset_is_written_with_a_final_dot() -> None:
    assert opens(network_of(["packges."]), "packges") and opens(network_of(["intranet"]), "intranet")


def test_all_public_hosts_can_be_opened_beside_others() -> None:
    assert network_of([], web=True) == network_rules(outbound=True, ports=[80, 443], localhost=True)
    rules = network_of(["db.example.com:5432"], web=True)
    assert opens(rules, "anything.example") and opens(rules, "db.example.com", 5432) and not opens(rules, "anything.example", 5432)
    assert not rules.may_be_private("anything.example")


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("GET example.com", RequestRule("example.com", ("GET",))),
        ("get,Post *.example.com/v1/*", RequestRule("*.example.com", ("GET", "POST"), ("/v1/*",))),
        ("* example.com/**/status", RequestRule("example.com", (), ("/**/status",))),
    ],
)
def test_a_rule_for_requests_is_a_line(text: str, rule: RequestRule) -> None:
    assert read_request(text) == rule


@pytest.mark.parametrize(
    "text",
    ["", "GET", "GET a b", "G3T a.example", "GET,, a.example", "GET a.example/x?y", "GET a.example/*/x", "GET /x", "GET a.example/**/x*"],
)
def test_a_line_that_is_no_rule_is_refused(text: str) -> None:
    with pytest.raises(PolicyError):
        read_request(text)


def test_paths_are_matched_by_their_beginning_their_end_or_as_a_whole() -> None:
    rules = network_rules(
        outbound=True, requests=[read_request("GET a.example/v1/*"), read_request("GET a.example/**/ok"), read_request("GET a.example/is")]
    )
    good = ("/v1/", "/v1/x", "/ok", "/a/b/ok", "/is")
    assert all(sends(rules, "GET", "a.example", path) for path in good)
    assert not any(sends(rules, "GET", "a.example", path) for path in ("/v1", "/v10", "/notok", "/is/", "/"))
    assert not any(sends(rules, "POST", "a.example", path) for path in good)


@given(st.lists(NAMES | NAMES.map("*.{}".format), max_size=4), NAMES)
def test_a_host_is_open_if_a_pattern_of_the_list_is_it_or_lies_above_it(patterns: list[str], host: str) -> None:
    """Against a second implementation, by labels."""
    labels = host.split(".")

    def fits(pattern: str) -> bool:
        wanted = pattern.removeprefix("*.").split(".")
        if pattern.startswith("*."):
            return len(labels) > len(wanted) and labels[-len(wanted) :] == wanted
        return labels == wanted

    assert opens(network_of(patterns), host) == any(map(fits, patterns))
