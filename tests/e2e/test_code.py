"""`code`: source in four languages, from a file or from standard input."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.e2e.program import Shell, words

pytestmark = pytest.mark.once

HELLO = {
    "python": ("hello.py", "print('hello')"),
    "javascript": ("hello.js", "console.log('hello')"),
    "ruby": ("hello.rb", "puts 'hello'"),
    "bash": ("hello.sh", "echo hello"),
}
PROGRAMS = {"javascript": "node", "ruby": "ruby", "bash": "bash"}


@pytest.mark.both
@pytest.mark.parametrize("language", HELLO)
def test_each_language_runs_from_a_file_whose_name_tells_it(shell: Shell, project: Path, language: str) -> None:
    if language in PROGRAMS and not shutil.which(PROGRAMS[language]):
        pytest.skip(f"{PROGRAMS[language]} is not installed")
    name, source = HELLO[language]
    (project / name).write_text(source)
    assert shell("code", name).stdout == b"hello\n"


def test_code_from_standard_input_names_its_language(shell: Shell) -> None:
    assert shell("code", "-", "--language", "py", stdin=b"import sys; print(6 * 7, sys.argv[1:])").stdout == b"42 []\n"


def test_a_first_line_tells_the_language_and_arguments_follow_two_dashes(shell: Shell, project: Path) -> None:
    (project / "script").write_text("#!/usr/bin/env python3\nimport sys\nprint(sys.argv[1:])\n")
    assert shell("code", "script", "--", "--fast", "x").stdout == b"['--fast', 'x']\n"


def test_input_given_to_the_program_reaches_the_code(shell: Shell, project: Path) -> None:
    (project / "ask.py").write_text("print(input().upper())")
    assert shell("code", "ask.py", stdin=b"hello\n").stdout == b"HELLO\n"


@pytest.mark.both
def test_code_and_commands_share_the_sandbox_of_the_project(shell: Shell, project: Path) -> None:
    (project / "write.py").write_text("open('made.txt', 'w').write('by python')")
    shell("code", "write.py")
    assert shell("run", "cat made.txt").stdout == b"by python"
    assert not (project / "made.txt").exists()


def test_code_that_fails_shows_its_traceback_and_exits_with_its_own_code(shell: Shell) -> None:
    done = shell("code", "-", "-l", "python", stdin=b"x = 1\nx / 0\n")
    assert done.returncode == 1
    assert "line 2" in words(done) and "ZeroDivisionError" in words(done)


@pytest.mark.parametrize(
    ("line", "stdin", "why"),
    [
        (["code", "-", "--language", "cobol"], b"x", "unknown language 'cobol'"),
        (["code", "-"], b"print(1)", "is unknown"),
        (["code", "no-such-file.py"], b"", "cannot be read: No such file"),
        (["code", "src"], b"", "cannot be read: Is a directory"),
        (["code", "-", "-l", "python"], b"\xff\xfe", "is not UTF-8"),
        (["code", "-", "-l", "python"], b"print('\0')", "NUL character"),
        (["code", "a.py", "b.py"], b"", "too many arguments"),
    ],
)
def test_code_that_cannot_be_run_is_refused_with_the_reason(shell: Shell, line: list[str], stdin: bytes, why: str) -> None:
    done = shell(*line, stdin=stdin)
    assert done.returncode == 2
    assert why in words(done)


@pytest.mark.parametrize(("stdin", "why"), [(b"", "no code to run"), (b"#" * (17 << 20), "at most")])
def test_no_code_and_too_much_code_are_denied(shell: Shell, stdin: bytes, why: str) -> None:
    done = shell("code", "-", "-l", "python", stdin=stdin)
    assert done.returncode == 126
    assert why in words(done)
