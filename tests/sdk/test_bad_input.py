"""What cannot be run gets a clear answer: a result when the work is at fault, an exception when the settings or the machine are."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from agent_sandbox import LedgerUnavailable, PolicyError, Sandbox, SandboxConfig, SandboxStatus, Workspace, shell
from agent_sandbox.policy.decide import Deny


@pytest.mark.parametrize(
    ("code", "language", "said"),
    [
        ("print(1)", "cobol", "unknown language 'cobol'"),
        ("print(1)", "", "unknown language ''"),
        ("", "python", "no code to run"),
        ("print(1)\0", "python", "NUL"),
        ("print('\ud800')", "python", "surrogate"),
        ("echo '\udcff'", "bash", "surrogate"),
        ("#" * (50 << 20), "python", "at most 16777216"),
    ],
    ids=["unknown language", "no language", "empty", "NUL", "surrogate", "escaped byte", "50 MB"],
)
def test_work_that_cannot_run_is_a_failed_result_that_says_why(sandbox: Sandbox, code: str, language: str, said: str) -> None:
    result = sandbox.execute(code, language)
    assert (result.status, result.exit_code, result.exit, result.stdout) == (SandboxStatus.FAILED, None, None, "")
    assert result.error is not None and said in result.error
    assert sandbox.execute("print(1)").success


def test_large_code_within_the_bound_runs(sandbox: Sandbox) -> None:
    assert sandbox.execute("#" * (2 << 20) + "\nprint(1)").stdout == "1\n"


def test_a_command_is_refused_with_the_verdict_where_processes_are_forbidden(sandbox: Sandbox) -> None:
    result = sandbox.run(["true"])
    assert isinstance(result.verdict, Deny) and result.verdict.because.rule == "processes"
    assert result.error is not None and "allow processes" in result.error
    assert Sandbox(allow_subprocess=True).run(["true"]).success


@pytest.mark.parametrize("words", [[], [""], ["echo", "a\0b"]])
def test_a_command_that_cannot_be_is_a_failed_result(words: list[str]) -> None:
    result = Sandbox(allow_subprocess=True).run(words)
    assert result.status is SandboxStatus.FAILED and result.error


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [(["no-such-program"], 127, "No such file"), (["/etc/passwd"], 126, "Permission denied"), (["/tmp"], 126, "denied")],
)
def test_a_program_that_cannot_be_started_is_a_failed_result(words: list[str], code: int, said: str) -> None:
    result = Sandbox(allow_subprocess=True).run(words)
    assert (result.status, result.exit_code) == (SandboxStatus.FAILED, code)
    assert result.error is not None and said in result.error


@pytest.mark.parametrize("env", [{"A=B": "1"}, {"": "1"}, {"A\0": "1"}, {"A": "\0"}])
def test_an_environment_that_cannot_be_fails_one_run_or_the_configuration(sandbox: Sandbox, env: dict[str, str]) -> None:
    assert sandbox.execute("print(1)", env_vars=env).status is SandboxStatus.FAILED
    with pytest.raises(PolicyError, match="environment variable"):
        SandboxConfig(env_vars=env)


def test_a_missing_interpreter_is_a_failed_result_with_the_remedy(tmp_path: Path) -> None:
    result = Sandbox(env_vars={"PATH": str(tmp_path)}).execute("puts 1", "ruby")
    assert result.status is SandboxStatus.FAILED
    assert result.error is not None and "ruby" in result.error and "apt-get install ruby" in result.error


def test_code_that_is_no_text_is_a_mistake_of_the_caller(sandbox: Sandbox) -> None:
    with pytest.raises(TypeError, match="code is a str, not bytes"):
        sandbox.execute(b"print(1)")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"language": None}, "language is a str, not NoneType"),
        ({"stdin": 7}, "stdin is a bytes or bytearray or memoryview or str, not int"),
        ({"args": 7}, "args is a sequence of str, not int"),
        ({"args": "-v"}, "args is a sequence of str, not str"),
        ({"args": ["-n", 7]}, "each of args is a str, not int"),
        ({"env_vars": 7}, "env_vars is a Mapping, not int"),
        ({"env_vars": {"A": 1}}, "the environment variable 'A' is a str, not int"),
        ({"env_vars": {7: "A"}}, "the name of an environment variable is a str, not int"),
        ({"timeout": "5"}, "timeout is a number of seconds, not str"),
        ({"timeout": True}, "timeout is a number of seconds, not bool"),
        ({"on_output": "print"}, "on_output is a function of a stream's name and text, not str"),
    ],
    ids=lambda each: repr(each) if isinstance(each, dict) else "",
)
def test_an_argument_of_the_wrong_type_is_a_mistake_of_the_caller(sandbox: Sandbox, wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(TypeError) as refused:
        sandbox.execute("print(1)", **wrong)
    assert str(refused.value) == said
    assert sandbox.status is SandboxStatus.PENDING, "nothing ran"
    if "language" not in wrong:
        with pytest.raises(TypeError) as refused:
            sandbox.run("print(1)", **wrong)
        assert str(refused.value) == said
    assert sandbox.execute("print(1)").success


@pytest.mark.parametrize("work", [7, None, b"print(1)", {"a": 1}, [1, 2], ["echo", b"x"], (word for word in ("echo",))])
def test_work_of_the_wrong_type_is_a_mistake_of_the_caller(sandbox: Sandbox, tmp_path: Path, work: Any) -> None:
    workspace = Workspace.over(tmp_path)
    for call in (sandbox.run, sandbox.simulate, workspace.run, workspace.simulate):
        with pytest.raises(TypeError, match="run takes Python code"):
            call(work)
    with pytest.raises(TypeError, match="text is a str"):
        shell(7)  # type: ignore[arg-type]
    with sandbox.session() as session, pytest.raises(TypeError, match="code is a str"):
        session.run(work)
    assert not (tmp_path / "state").exists()


def test_a_workspace_is_made_of_a_path_and_settings(tmp_path: Path) -> None:
    for wrong, said in (((7,), "project is a str or bytes or PathLike, not int"), ((None,), "not NoneType")):
        with pytest.raises(TypeError, match=said):
            Workspace.over(*wrong)
    with pytest.raises(TypeError, match="config is a SandboxConfig, not dict"):
        Workspace.over(tmp_path, config={"allow_file_write": True})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="cwd is a str"):
        Workspace.over(tmp_path).run("1", cwd=7)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="colour"):
        Workspace.over(tmp_path).run("1", colour="red")  # type: ignore[call-arg]


@pytest.mark.parametrize(("text", "arrives"), [("\udcff", "'\\udcff'"), ("\ud800", "'\\udced\\udca0\\udc80'")])
def test_input_that_is_no_proper_text_arrives_as_bytes(sandbox: Sandbox, text: str, arrives: str) -> None:
    assert sandbox.execute("print(ascii(input()))", stdin=text).stdout == f"{arrives}\n"


@pytest.mark.parametrize("given", [{"env_vars": {"A": "\ud800"}}, {"args": ["a\0b"]}, {"env_vars": {"A": "x" * (1 << 20)}}])
def test_what_the_kernel_does_not_take_is_a_failed_result(sandbox: Sandbox, given: dict[str, Any]) -> None:
    result = sandbox.execute("echo 1", "bash", **given)
    assert result.status is SandboxStatus.FAILED
    assert result.error is not None and result.error.startswith("could not be started")


def test_an_option_that_does_not_exist_is_a_mistake_of_the_caller(sandbox: Sandbox) -> None:
    with pytest.raises(TypeError, match="timout"):
        sandbox.execute("print(1)", timout=3)  # type: ignore[call-arg]


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), 1e30])
def test_an_absurd_timeout_of_one_run_is_a_failed_result(sandbox: Sandbox, timeout: float) -> None:
    result = sandbox.execute("print(1)", timeout=timeout)
    assert result.status is SandboxStatus.FAILED and result.error is not None and "timeout" in result.error


@pytest.mark.parametrize(
    "settings",
    [
        {"timeout_seconds": 0},
        {"timeout_seconds": -1},
        {"timeout_seconds": float("nan")},
        {"timeout_seconds": "5"},
        {"timeout_seconds": True},
        {"max_memory_mb": -5},
        {"max_memory_mb": "256"},
        {"max_memory_mb": 10**30},
        {"max_output_bytes": 1.5},
        {"max_cpu_seconds": 0},
        {"max_processes": 0},
        {"max_open_files": -1},
        {"max_disk_mb": float("inf")},
        {"lifetime_seconds": 0},
        {"allow_network": "yes"},
        {"validate_code": None},
        {"blocked_patterns": "eval("},
        {"blocked_patterns": [7]},
        {"blocked_patterns": [""]},
        {"allow_file_read": "yes"},
        {"allow_subprocess": 1},
        {"allow_hidden": None},
        {"allowed_paths": "/data"},
        {"allowed_paths": ["relative/path"]},
        {"allowed_paths": ["/data/../etc"]},
        {"allowed_paths": [""]},
        {"allowed_paths": [7]},
        {"denied_paths": ["/a\0b"]},
        {"denied_paths": ["/a[b"]},
        {"reveal": ["/nothing/is/masked/here"]},
        {"reveal": ["~/.ssh/*"]},
        {"preload": "numpy"},
        {"preload": ["os; import evil"]},
        {"preload": [7]},
        {"working_dir": "relative"},
        {"working_dir": ""},
        {"working_dir": 7},
        {"env_vars": {"A": 1}},
        {"audit_level": "info"},
        {"runtime": "minivm"},
    ],
    ids=lambda settings: "{}={!r}".format(*next(iter(settings.items()))),
)
def test_settings_that_cannot_be_enforced_are_refused_by_name(settings: dict[str, Any]) -> None:
    with pytest.raises(PolicyError) as refusal:
        SandboxConfig(**settings)
    assert refusal.value.hint


def test_a_setting_that_does_not_exist_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(TypeError, match="allow_flight"):
        Sandbox(allow_flight=True)  # type: ignore[call-arg]


def test_a_working_directory_outside_what_is_shown_is_refused() -> None:
    result = Sandbox(working_dir="/var").execute("print(1)")
    assert isinstance(result.verdict, Deny) and result.verdict.because.rule == "cwd"


def test_a_working_directory_that_does_not_exist_is_a_failed_result(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    result = Sandbox(working_dir=missing, allow_file_read=True).execute("print(1)")
    assert result.status is SandboxStatus.FAILED
    assert result.error is not None and "No such file or directory" in result.error and str(missing) in result.error


def test_a_module_to_preload_that_is_not_there_is_raised() -> None:
    with pytest.raises(PolicyError, match="preload no_such_module"):
        Sandbox(preload=["no_such_module"]).execute("print(1)")


def test_what_cannot_be_recorded_is_not_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "a-file").write_text("in the way")
    monkeypatch.setenv("AGENT_SANDBOX_STATE", str(tmp_path / "a-file"))
    with pytest.raises(LedgerUnavailable):
        Sandbox().execute("print(1)")


def test_every_run_is_recorded_before_and_after_also_without_audit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AGENT_SANDBOX_STATE", str(tmp_path / "state"))
    Sandbox(enable_audit=False).execute("print('a secret of the code')")
    record = (tmp_path / "state" / "ledger.jsonl").read_text()
    assert [word for word in ("intent", "outcome") if f'"{word}"' in record] == ["intent", "outcome"]
    assert "a secret of the code" not in record
    assert os.stat(tmp_path / "state" / "ledger.jsonl").st_mode & 0o077 == 0
