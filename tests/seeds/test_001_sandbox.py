"""The examples of the document "Agent Sandbox" that concern execution, configuration, context manager, languages, errors and isolation."""

from __future__ import annotations

import shutil

import pytest

from agent_sandbox import Sandbox, SandboxConfig, SandboxStatus, create_sandbox
from tests.seeds.conftest import Example
from tests.seeds.examples_001 import CONFIGURATION, CONTEXT_MANAGER, ERROR_HANDLING, PROCESS_ISOLATION, QUICK_START

LANGUAGES = [
    ("python", "print(6 * 7)", "python"),
    ("python3", "print(6 * 7)", "python"),
    ("Python", "print(6 * 7)", "python"),
    ("javascript", "console.log(6 * 7)", "javascript"),
    ("node", "console.log(6 * 7)", "javascript"),
    ("ruby", "puts 6 * 7", "ruby"),
    ("bash", "echo $((6 * 7))", "bash"),
    ("shell", "echo $((6 * 7))", "bash"),
]
PROGRAMS = {"javascript": "node", "ruby": "ruby", "bash": "bash"}


def test_the_quick_start_prints_what_it_says(example: Example, capsys: pytest.CaptureFixture[str]) -> None:
    names = example(QUICK_START)
    assert capsys.readouterr().out == "Hello from sandbox!\n\nSandboxStatus.COMPLETED\n"
    assert names["sandbox"].config.timeout_seconds == 60.0


def test_the_configuration_is_made_as_written_and_code_runs_in_it(example: Example) -> None:
    result = example(CONFIGURATION)["sandbox"].execute("print(6 * 7)")
    assert (result.status, result.stdout) == (SandboxStatus.COMPLETED, "42\n")


def test_the_defaults_are_the_values_that_the_document_shows() -> None:
    config = SandboxConfig()
    assert (config.timeout_seconds, config.max_memory_mb, config.max_output_bytes) == (30.0, 256, 100000)
    assert not (config.allow_file_read or config.allow_file_write or config.allow_network or config.allow_subprocess)


def test_process_isolation_runs_the_code(example: Example) -> None:
    result = example(PROCESS_ISOLATION)["result"]
    assert (result.status, result.stdout) == (SandboxStatus.COMPLETED, "isolated\n")


def test_process_isolation_hands_over_the_environment_it_was_given(example: Example) -> None:
    names = example(PROCESS_ISOLATION)
    told = names["backend"].execute(code='import os; print(os.environ["API_KEY"])', language="python", config=names["config"])
    assert told.stdout == "secret\n"


def test_the_context_manager_runs_and_closes(example: Example, capsys: pytest.CaptureFixture[str]) -> None:
    example(CONTEXT_MANAGER, Sandbox=Sandbox)
    assert capsys.readouterr().out == "managed\n\n"


def test_an_error_is_reported_with_its_line_its_code_and_its_traceback(example: Example, capsys: pytest.CaptureFixture[str]) -> None:
    example(ERROR_HANDLING, sandbox=Sandbox(), SandboxStatus=SandboxStatus)
    error, code, stderr = capsys.readouterr().out.split("\n", 2)
    assert (error, code) == ("Error: ValueError: oops", "Exit code: 1")
    assert stderr.startswith("Stderr: Traceback (most recent call last):\n")


def test_a_program_that_takes_too_long_has_timed_out_and_says_after_how_long() -> None:
    result = create_sandbox(timeout=0.3).execute("while True: pass")
    assert result.status == SandboxStatus.TIMEOUT
    assert 0.3 <= result.execution_time < 20


@pytest.mark.parametrize(("language", "code", "canonical"), LANGUAGES)
def test_each_language_runs_by_name_and_alias(language: str, code: str, canonical: str) -> None:
    program = PROGRAMS.get(canonical)
    if program is not None and shutil.which(program) is None:
        pytest.skip(f"{program} is not installed: run `make setup` as root")
    result = Sandbox().execute(code, language=language)
    assert (result.status, result.stdout, result.language) == (SandboxStatus.COMPLETED, "42\n", canonical), result.error


def test_the_statuses_are_the_five_of_the_document() -> None:
    assert [status.name for status in SandboxStatus] == ["PENDING", "RUNNING", "COMPLETED", "FAILED", "TIMEOUT"]
