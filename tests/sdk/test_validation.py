"""Code is looked at before it runs, wherever it is given; what is found is refused, recorded and explained, and nothing of it has run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import agentbox
from agent_sandbox import AsyncSandbox, AuditLog, Sandbox, SandboxConfig, SandboxResult, SandboxStatus, Workspace, shell
from agent_sandbox.assembly import here
from agent_sandbox.ledger.event import RefusalEvent
from agent_sandbox.policy.decide import Allow, Deny
from tests import compiled
from tests.ledger.samples import read

REACHING = "print('ran')\nimport socket\n"


def by_execute(code: str) -> SandboxResult:
    return Sandbox().execute(code)


def by_run(code: str) -> SandboxResult:
    return Sandbox().run(code)


def by_turn(code: str) -> SandboxResult:
    with Sandbox().session() as session:
        return session.run(code)


def by_aio(code: str) -> SandboxResult:
    async def execute() -> SandboxResult:
        async with AsyncSandbox() as sandbox:
            return await sandbox.execute(code)

    return asyncio.run(execute())


def by_agentbox(code: str) -> SandboxResult:
    return agentbox.Sandbox().run(code)


EVERY_WAY = [by_execute, by_run, by_turn, by_aio, by_agentbox]


@pytest.mark.parametrize("way", EVERY_WAY, ids=lambda way: way.__name__)
def test_what_reaches_for_too_much_is_refused_before_it_runs(way: Callable[[str], SandboxResult]) -> None:
    result = way(REACHING)
    assert (result.status, result.stdout, result.exit_code, result.exit) == (SandboxStatus.FAILED, "", None, None)
    assert isinstance(result.verdict, Deny) and result.verdict.because.rule == "code"
    assert result.error is not None and "line 2: socket opens network connections" in result.error
    assert way("print('ran')").stdout == "ran\n", "the same way lets other code run"


def test_a_refused_turn_ends_nothing() -> None:
    with Sandbox().session() as session:
        assert session.run("kept = 6").success
        assert not session.run("import subprocess").success
        assert session.run("kept * 7").value == 42


@pytest.mark.parametrize(
    ("language", "code", "pattern"),
    [
        ("javascript", "require('child_process')", "child_process"),
        ("ruby", "puts `ls`", "`"),
        ("bash", "echo ran; curl http://192.0.2.1/", "network"),
    ],
)
def test_every_language_is_looked_at(language: str, code: str, pattern: str) -> None:
    result = Sandbox().execute(code, language)
    assert isinstance(result.verdict, Deny) and f"line 1: {pattern} " in result.verdict.because.why


def test_a_command_line_is_looked_at_however_it_is_given() -> None:
    sandbox = Sandbox(allow_subprocess=True)
    for work in (shell("echo ran; eval 'echo x'"), ["bash", "-c", "echo ran; eval 'echo x'"]):
        result = sandbox.run(work)
        assert isinstance(result.verdict, Deny) and "line 1: eval " in result.verdict.because.why and result.stdout == ""
    assert sandbox.run(["echo", "eval"]).stdout == "eval\n", "a program with its words is no code"


def test_the_refusal_says_what_would_lift_it() -> None:
    opening = Sandbox().execute("open('/etc/hostname')").error or ""
    assert "open( by allow_file_read=True" in opening and "validate_code=False" in opening
    running = Sandbox().execute("import os; os.system('ls')").error or ""
    assert "os.system by allow_subprocess=True and allow_shell=True" in running
    evaluating = Sandbox().execute("eval('1')").error or ""
    assert "eval( by blocked_patterns without it" in evaluating


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({"allow_file_read": True, "allowed_paths": ["/etc/hostname"]}, "print(len(open('/etc/hostname').read()) > 0)"),
        ({"allow_subprocess": True}, "import subprocess; print(subprocess.run(['true']).returncode == 0)"),
        ({"blocked_patterns": []}, "print(eval('True'))"),
        ({"blocked_patterns": ["json"]}, "print(eval('True'))"),
        ({"validate_code": False}, "print(eval('True'))"),
    ],
    ids=["files", "processes", "no-patterns", "other-patterns", "off"],
)
def test_what_it_names_lifts_it(settings: dict[str, Any], code: str) -> None:
    assert not Sandbox().execute(code).success
    assert Sandbox(**settings).execute(code).stdout == "True\n"


def test_patterns_of_ones_own_stand_in_place_of_the_default_ones() -> None:
    sandbox = Sandbox(blocked_patterns=["json", "eval("])
    for code, pattern in (("import json", "json"), ("f = eval; f('1')", "eval(")):
        result = sandbox.execute(code)
        assert isinstance(result.verdict, Deny) and f": {pattern} " in result.verdict.because.why


def test_turning_the_look_off_leaves_the_wall(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("canary-behind-the-wall")
    result = Sandbox(validate_code=False).execute(f"print(open({str(secret)!r}).read())")
    assert isinstance(result.verdict, Allow) and "canary" not in result.stdout and "FileNotFoundError" in (result.error or "")
    shown = Sandbox(validate_code=False, allow_file_read=True, allowed_paths=[tmp_path]).execute(f"print(open({str(secret)!r}).read())")
    assert "canary" in shown.stdout, "it can be read where it is shown"


def test_what_is_too_large_to_be_looked_at_is_held_and_not_passed_over() -> None:
    large = "#" * (1 << 20) + "\nprint(1)"
    result = Sandbox().execute(large)
    assert isinstance(result.verdict, Deny) and "unreadable" in result.verdict.because.why
    assert Sandbox(validate_code=False).execute(large).stdout == "1\n"


def test_what_the_gate_refuses_anyway_is_left_to_it() -> None:
    for code, language, rule in (
        ("", "python", "code-size"),
        ("import socket", "cobol", "language"),
        ("#" * (17 << 20), "python", "code-size"),
    ):
        result = Sandbox().execute(code, language)
        assert isinstance(result.verdict, Deny) and result.verdict.because.rule == rule


def test_a_refusal_is_in_the_ledger_and_in_the_audit_log_and_holds_no_source() -> None:
    audit = AuditLog()
    with Sandbox(audit=audit) as sandbox:
        sandbox.execute("import socket  # canary-of-the-source")
    entry = [each for each in read(here().ledger().path) if getattr(each.event, "sandbox", "") == sandbox.id]
    assert [type(each.event) for each in entry] == [RefusalEvent], "and no intent: nothing was begun"
    assert isinstance(entry[0].event, RefusalEvent) and entry[0].event.rule == "code" and "line 1: socket" in entry[0].event.why
    assert "canary-of-the-source" not in repr(entry)
    (denied,) = audit.get_denied_actions(sandbox_id=sandbox.id)
    assert denied.action == "run_code" and "socket" in denied.reason


def test_a_workspace_looks_where_its_configuration_says_so(project: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AGENT_SANDBOX_STATE", str(tmp_path / "state"))
    config = SandboxConfig(allow_file_read=True, allow_file_write=True)
    refused = Workspace.over(project, config=config).execute("eval('1')")
    assert isinstance(refused.verdict, Deny) and refused.verdict.because.rule == "code"
    assert Workspace.over(project).execute("print(eval('1'))").stdout == "1\n", "as on the command line, which does not look"


def test_a_replay_runs_what_was_let_run_when_it_was_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled.offer(tmp_path / "cache", tmp_path / "state")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("AGENT_SANDBOX_STATE", str(tmp_path / "state"))
    settings: dict[str, Any] = {"runtime": "wasm", "deterministic": True}
    Sandbox(**settings, validate_code=False).execute("print(eval('6 * 7'))", record=tmp_path / "record")
    with Sandbox(**settings) as sandbox:
        assert not sandbox.replay(tmp_path / "record").departures
        assert not sandbox.execute("print(eval('6 * 7'))").success
    here().wasm().close()
