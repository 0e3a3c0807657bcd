"""What goes in and comes out: exact bytes, exact words, exactly the environment that was given."""

from __future__ import annotations

import os
import random

import pytest

from agent_sandbox.errors import SandboxError
from tests.security.harness import ENVIRONMENT, Box

pytestmark = pytest.mark.once

TEN_MEGABYTES = random.Random(1).randbytes(10 << 20)


def test_ten_megabytes_of_any_bytes_pass_through_unchanged(box: Box) -> None:
    assert box.run("cat", stdin=TEN_MEGABYTES).stdout == TEN_MEGABYTES


def test_both_streams_can_be_flooded_at_once(box: Box) -> None:
    outcome = box.shell("head -c 3000000 /dev/zero & head -c 3000000 /dev/zero >&2; wait")
    assert (len(outcome.stdout), len(outcome.stderr)) == (3_000_000, 3_000_000)


def test_a_program_that_reads_none_of_its_input_is_no_error(box: Box) -> None:
    outcome = box.run("true", stdin=TEN_MEGABYTES)
    assert outcome.exit.code == 0


def test_input_can_come_from_a_descriptor(box: Box) -> None:
    reading, writing = os.pipe()
    os.write(writing, b"from a pipe")
    os.close(writing)
    try:
        assert box.run("cat", stdin=reading).stdout == b"from a pipe"
    finally:
        os.close(reading)


def test_arguments_arrive_byte_for_byte(box: Box) -> None:
    words = ["", " ", "a b", "*", "$HOME", "'", '"', "\n", "-e", os.fsdecode(b"\xff\xfe"), "é", "\x01"]
    ran = box.run("bash", "-c", "printf '%s\\0' \"$@\"", "name", *words)
    assert ran.stdout == b"".join(os.fsencode(word) + b"\0" for word in words)


@pytest.mark.both
def test_variables_arrive_byte_for_byte_and_there_are_no_others(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_THE_CALLER", "canary")
    given = {**ENVIRONMENT, "ODD": os.fsdecode(b"\xff\n=x"), "EMPTY": ""}
    seen = box.run("env", "-0", env=given).stdout.split(b"\0")[:-1]
    assert set(seen) == {os.fsencode(f"{name}={value}") for name, value in given.items()}
    python = box.python("import os; print(sorted(os.environ))", env=given).stdout.decode()
    assert python.strip() == repr(sorted(given))


@pytest.mark.both
def test_work_begins_where_it_was_told_to(box: Box) -> None:
    assert box.run("pwd", cwd=str(box.project / "src")).stdout == f"{box.project}/src\n".encode()
    assert box.python("import os; print(os.getcwd())", cwd=str(box.project)).stdout == f"{box.project}\n".encode()


def test_a_directory_that_is_not_there_is_said_and_nothing_runs(box: Box) -> None:
    outcome = box.run("touch", "/tmp/ran", cwd=str(box.project / "nowhere"))
    assert outcome.exit.code == 125
    assert "No such file" in outcome.refused


@pytest.mark.both
def test_a_command_line_too_long_for_the_kernel_is_refused_as_the_kernel_does(box: Box) -> None:
    """Case 144 of the attack list: two megabytes of one argument, and of the environment."""
    for outcome in (box.run("true", "x" * (2 << 20)), box.run("true", env={**ENVIRONMENT, "BIG": "x" * (2 << 20)})):
        assert (outcome.exit.code, outcome.refused) == (126, "Argument list too long")
    assert box.run("true", *["file"] * 100_000).exit.code == 0


@pytest.mark.parametrize("code", ["print('a\0b')", "print('\ud800')"], ids=["NUL", "lone surrogate"])
def test_code_that_is_no_text_is_an_error_of_the_callers(box: Box, code: str) -> None:
    with pytest.raises(SandboxError):
        box.python(code)
