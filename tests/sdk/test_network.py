"""There is no network yet. Who asks for one is told so, in every way there is, and has none."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_sandbox import NetworkPermission, PermissionSet, Sandbox, SandboxConfig, SandboxWarning, Workspace
from agent_sandbox.policy.hosts import NO_NETWORK
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


def test_who_asks_for_a_network_is_warned_and_has_none(port: int, capfd: pytest.CaptureFixture[str]) -> None:
    exec(reaching(port))
    assert json.loads(capfd.readouterr().out)["reached"], "without a sandbox it is there to be reached"
    with pytest.warns(SandboxWarning, match="this version has none") as warned:
        sandbox = Sandbox(allow_network=True, validate_code=False)
    assert len(warned) == 1 and warned[0].filename == __file__, "once, and where it was asked for"
    result = sandbox.execute(reaching(port))
    assert json.loads(result.stdout) == {"interfaces": ["lo"], "reached": False}
    assert result.notes.count(NO_NETWORK) == 1
    with sandbox.session() as session:
        assert NO_NETWORK in session.run("1").notes


def test_a_network_permission_is_the_same_wish(port: int) -> None:
    asking = PermissionSet([NetworkPermission(allow_outbound=True, allowed_hosts=["127.0.0.1"], allow_localhost=True)])
    with pytest.warns(SandboxWarning, match="this version has none"):
        sandbox = Sandbox(permissions=asking, validate_code=False)
    result = sandbox.execute(reaching(port))
    assert json.loads(result.stdout)["reached"] is False and NO_NETWORK in result.notes


def test_who_does_not_ask_is_not_warned() -> None:
    """Warnings are errors in these tests."""
    asks_nothing = PermissionSet([NetworkPermission(denied_hosts=["*.example.com"])])
    assert NO_NETWORK not in Sandbox(permissions=asks_nothing).execute("print(1)").notes


def test_code_for_the_network_is_refused_early_because_there_is_none() -> None:
    with pytest.warns(SandboxWarning):
        result = Sandbox(allow_network=True).execute("import requests")
    assert "a later version: this one has no network" in (result.error or "") and NO_NETWORK in result.notes


def test_a_workspace_says_it_too(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENT_SANDBOX_STATE", str(tmp_path / "state"))
    with pytest.warns(SandboxWarning, match="this version has none"):
        work = Workspace.over(project, config=SandboxConfig(allow_file_read=True, allow_file_write=True, allow_network=True))
    assert NO_NETWORK in work.execute("print(1)").notes


def test_the_command_line_says_it_on_standard_error(project: Path, tmp_path: Path, port: int) -> None:
    (project / "agent-sandbox.toml").write_text("[network]\noutbound = true\n")
    (project / "reach.py").write_text(reaching(port))
    done = Shell(project, {"AGENT_SANDBOX_STATE": str(tmp_path / "state")})("code", "reach.py")
    assert json.loads(done.stdout)["reached"] is False
    assert NO_NETWORK.encode() in done.stderr
