"""Secrets for runs of the SDK: where their values come from, and that nothing shows them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agent_sandbox import PolicyError, Sandbox, SandboxConfig, Secret, Workspace, secret_values
from agent_sandbox.assembly import registry

VALUE = "tok-4f9a8b7c6d5e4f3a2b1c"
HOST = ["api.example.com"]


def _value(secret: Secret, environment: dict[str, str], home: Path, project: Path | None = None) -> str:
    (bound,) = secret_values.bound([secret], environment, home=str(home), project=str(project) if project else None)
    assert bound.placeholder.startswith("agent-sandbox-secret-t-") and VALUE not in repr(bound)
    return bound.value


def test_values_come_from_variables_files_programs_and_the_keyring(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(f"{VALUE}\n")
    (tmp_path / "bin").mkdir()
    tool = tmp_path / "bin/secret-tool"
    tool.write_text(f'#!/bin/sh\n[ "$*" = "lookup service git/hub username me" ] && echo {VALUE}\n')
    tool.chmod(0o755)
    environment = {"T": VALUE, "OTHER": VALUE[::-1], "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    wanted = {"env": VALUE, "env:OTHER": VALUE[::-1], "file:~/token": VALUE, f"file:{tmp_path}/token": VALUE}
    wanted |= {f"command:cat '{tmp_path}/token'": VALUE, "keyring:git/hub/me": VALUE}
    assert {source: _value(Secret("T", HOST, source=source), environment, tmp_path) for source in wanted} == wanted
    assert _value(Secret("T", HOST, value=VALUE), {}, tmp_path) == VALUE


@pytest.mark.parametrize("source", ["file:{0}/token", "file:{0}/link", "command:{0}/tool", "command:tool"])
def test_no_value_comes_from_the_project(tmp_path: Path, source: str) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "token").write_text(VALUE)
    (project / "link").symlink_to(project / "token")
    (project / "tool").write_text(f"#!/bin/sh\necho {VALUE}\n")
    (project / "tool").chmod(0o755)
    environment = {"PATH": f"{project}:{os.environ['PATH']}"}
    secret = Secret("T", HOST, source=source.format(project))
    with pytest.raises(PolicyError, match="lies in the project"):
        _value(secret, environment, tmp_path, project)
    assert _value(secret, environment, tmp_path) == VALUE, "the control: it could be read"


@pytest.mark.parametrize("source, why", [("env", "not set"), ("file:/none/x", "cannot be read"), ("command:exit-not-there", "no program")])
def test_a_missing_value_is_an_error_that_names_the_secret(tmp_path: Path, source: str, why: str) -> None:
    with pytest.raises(PolicyError, match=f"the secret T: .*{why}"):
        _value(Secret("T", HOST, source=source), {"PATH": "/bin"}, tmp_path)


def test_own_values_are_those_of_variables_that_name_a_secret_and_are_no_words() -> None:
    environment = {
        "API_TOKEN": VALUE,
        "DB_PASSWORD": "postgres",
        "AUTH_FILE": "/etc/some/long/path1",
        "EDITOR": VALUE,
        "MY_SECRET": "x9" * 8,
    }
    assert dict(secret_values.own_values(environment, ["x9" * 8])) == {"API_TOKEN": VALUE}
    assert "MY_SECRET" in dict(secret_values.own_values(environment, []))


def test_settings_show_no_value_and_their_digest_does_not_depend_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("T", VALUE)
    made = [SandboxConfig(network=HOST, secrets=[Secret("T", HOST, value=value)]) for value in (VALUE, VALUE[::-1])]
    assert VALUE not in repr(made[0]) and "Secret(name='T'" in repr(made[0])
    assert made[0].policy().digest() == made[1].policy().digest() == SandboxConfig(network=HOST).policy().digest()
    sandbox = Sandbox(made[0])
    assert VALUE not in repr(sandbox) + repr(sandbox._session) + repr(sandbox._provisions)
    assert sandbox._provisions.secrets[0].value == VALUE


def test_a_secret_that_cannot_be_used_is_refused_at_once(tmp_path: Path) -> None:
    for settings, why in (
        ({"network": ["other.example"]}, "--network api.example.com"),
        ({}, "has none"),
        ({"network": HOST, "env_vars": {"T": "x"}}, "would show the run"),
    ):
        with pytest.raises(PolicyError, match=why):
            Sandbox(secrets=[Secret("T", HOST, value=VALUE)], **settings)
    with pytest.raises(PolicyError, match="no Secret"):
        SandboxConfig(network=HOST, secrets=["T@api.example.com"])  # type: ignore[list-item]
    (tmp_path / "token").write_text(VALUE)
    config = SandboxConfig(
        allow_file_read=True,
        allow_file_write=True,
        allowed_paths=[tmp_path],
        network=HOST,
        secrets=[Secret("T", HOST, source=f"file:{tmp_path}/token")],
    )
    with pytest.raises(PolicyError, match="lies in the project"):
        Workspace.over(tmp_path, config=config)


def test_the_run_has_the_placeholder_in_its_variable() -> None:
    try:
        with Sandbox(network=HOST, secrets=[Secret("T", HOST, value=VALUE)]) as sandbox:
            result = sandbox.execute("import os; print(os.environ['T'])")
            assert result.stdout.startswith("agent-sandbox-secret-t-"), result
    finally:
        registry().close()  # as the end of this process would: the egress of all sandboxes is one
