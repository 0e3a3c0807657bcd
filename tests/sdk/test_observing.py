"""At the level DEBUG a sandbox's own log has what its runs tried."""

from __future__ import annotations

from agent_sandbox import AuditLevel, Sandbox, SandboxConfig

READS = "for path in ('/etc/shadow', '/tmp/none'):\n    try: open(path)\n    except OSError: pass\n"


def test_at_the_level_debug_files_are_in_the_log_before_the_run_is_said_to_have_ended() -> None:
    with Sandbox(SandboxConfig(audit_level=AuditLevel.DEBUG, validate_code=False)) as sandbox:
        assert sandbox.execute(READS).success
        assert sandbox.audit is not None
        tried = {entry.target: entry for entry in sandbox.audit.get_entries(category="file")}
        assert (tried["/etc/shadow"].action, tried["/etc/shadow"].allowed, tried["/etc/shadow"].level) == (
            "read",
            False,
            AuditLevel.WARNING,
        )
        assert (tried["/tmp/none"].allowed, tried["/tmp/none"].level) == (True, AuditLevel.DEBUG)
        assert "/etc/shadow" in {entry.target for entry in sandbox.audit.get_denied_actions()}
        assert sandbox.audit.get_entries()[-1].action == "run_code_completed"


def test_at_any_other_level_nobody_looks() -> None:
    with Sandbox(validate_code=False) as sandbox:
        assert sandbox.execute(READS).success
        assert sandbox.audit is not None and sandbox.audit.get_entries(category="file") == []


def test_a_session_is_observed_turn_by_turn() -> None:
    with Sandbox(SandboxConfig(audit_level=AuditLevel.DEBUG, validate_code=False)) as sandbox, sandbox.session() as session:
        assert sandbox.audit is not None
        for number in (1, 2):
            assert session.run(f"open('/tmp/turn-{number}', 'w').close()").success
            written = [entry.target for entry in sandbox.audit.get_entries(category="file") if entry.action == "write"]
            assert written[-1] == f"/tmp/turn-{number}"
