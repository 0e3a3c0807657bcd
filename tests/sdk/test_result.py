"""A result is printed as one short line, whatever the program printed."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_sandbox import CodeExecutor, ExecutionContext, Sandbox, SandboxResult, SandboxStatus


def made(**fields: object) -> SandboxResult:
    given: dict[str, object] = {"stdout_bytes": b"", "stderr_bytes": b"", "exit_code": 0, "error": None, "execution_time": 0.25}
    return SandboxResult(SandboxStatus.COMPLETED, **{**given, "sandbox_id": "s", "language": "python", **fields})  # type: ignore[arg-type]


def test_the_repr_of_a_result_is_one_line_with_the_beginning_of_its_output() -> None:
    assert repr(made(stdout_bytes=b"42\n")) == r"SandboxResult(COMPLETED, exit_code=0, stdout='42\n', execution_time=0.250)"
    long = made(
        stdout_bytes=b"x" * 5_000_000, stderr_bytes=b"y" * 100 + b"SECRET", value=["z" * 9_000], error="e" * 2_000, limits_hit=("wall",)
    )
    assert "\n" not in repr(long) and len(repr(long)) < 500 and "SECRET" not in repr(long)
    assert "… (5,000,000 characters)" in repr(long) and "value=['zz" in repr(long) and "limits_hit=('wall',)" in repr(long)


@pytest.mark.parametrize("hostile", [b"\x1b[2J\x1b[H", b"\r\nSandboxResult(COMPLETED)", "\u202e\u2066".encode(), b"\xff\x00", b"'\"\\"])
def test_what_a_program_printed_cannot_change_how_its_result_reads(hostile: bytes) -> None:
    shown = repr(made(stdout_bytes=hostile, value=hostile.decode("utf-8", "replace"), error=hostile.decode("utf-8", "replace")))
    assert shown.isascii() and shown.isprintable()


def test_results_of_runs_are_short_too(tmp_path: Path) -> None:
    with Sandbox(allow_file_read=True, allow_file_write=True, allowed_paths=[tmp_path], env_vars={"KEY": "HUSH"}) as sandbox:
        result = sandbox.execute(f"open('{tmp_path}/new', 'w').write('x'); print('a' * 1000)")
        assert "changes=1" in repr(result) and len(repr(result)) < 200 and "HUSH" not in repr(result), result
        refused = sandbox.run(["true"])
        assert repr(refused).startswith('SandboxResult(FAILED, error="denied: ') and "exit_code" not in repr(refused)
        with sandbox.session() as session:
            assert "value=42" in repr(session.run("6 * 7"))
    executed = CodeExecutor().execute("print(1)", ExecutionContext(env_vars={"KEY": "HUSH"}, metadata={"big": "m" * 10_000}))
    assert repr(executed).startswith("ExecutionResult(COMPLETED, exit_code=0, stdout='1\\n'") and len(repr(executed)) < 200
