"""`shell`: a person works in the sandbox, played by a pseudo-terminal of our own."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.e2e.program import Shell, words
from tests.e2e.sitting import sitting


@pytest.fixture
def plain(shell: Shell) -> Shell:
    """A person whose shell has no settings but a prompt."""
    home = shell.cwd.parent / "home"
    home.mkdir()
    (home / ".bashrc").write_text("PS1='mine> '\n")
    return replace(shell, env={**shell.env, "HOME": str(home), "SHELL": "/bin/bash"})


def test_a_shell_is_marked_keeps_its_changes_and_passes_its_exit_code_on(plain: Shell) -> None:
    with sitting(plain, "shell") as person:
        person.expect(b"in the sandbox")
        person.expect(b"(sandbox) mine> ")
        person.type(b"echo made > new.txt; echo $((6*7)) $AGENT_SANDBOX\r")
        person.expect(b"42 1")
        person.expect(b"(sandbox) mine> ")
        person.type(b"exit 7\r")
        person.expect(b"the shell has ended; ")
        person.expect(b"agent-sandbox diff")
        assert person.end() == 7
    assert not (plain.cwd / "new.txt").exists(), "the machine is not changed"
    assert b"+made" in plain("diff", "new.txt").stdout


def test_a_shell_has_job_control_and_follows_the_size_of_the_terminal(plain: Shell) -> None:
    with sitting(plain, "shell", "--throw-away") as person:
        person.expect(b"(sandbox) mine> ")
        person.type(b"sh -c 'echo be\"\"gun; exec sleep 1000'\r")
        person.expect(b"begun")  # by then it is the terminal's foreground
        person.type(b"\x1a")
        person.expect(b"Stopped")
        person.expect(b"(sandbox) mine> ")
        person.type(b'kill -KILL %1; wait; echo go""ne\r')
        person.expect(b"gone")
        person.resize(40, 120)
        person.type(b"stty size\r")
        person.expect(b"40 120")
        person.type(b"exit 5\r")
        assert person.end() == 5


@pytest.mark.once
def test_a_throw_away_shell_says_that_nothing_is_kept(plain: Shell) -> None:
    with sitting(plain, "shell", "--throw-away") as person:
        person.expect(b"(sandbox) mine> ")
        person.type(b"echo x > new.txt; exit 0\r")
        person.expect(b"thrown away with the sandbox")
        assert person.end() == 0
    assert plain("diff").stdout == b""


@pytest.mark.once
def test_the_usual_shells_are_used_where_the_users_own_is_no_program(plain: Shell) -> None:
    odd = replace(plain, env={**plain.env, "SHELL": "/nonexistent/shell"})
    with sitting(odd, "shell", "--throw-away") as person:
        person.expect(b"(sandbox) ")
        person.type(b"exit 3\r")
        assert person.end() == 3
    with sitting(replace(plain, env={**plain.env, "SHELL": "/bin/sh"}), "shell", "--throw-away") as person:
        person.expect(b"(sandbox) ")
        person.type(b"exit 4\r")
        assert person.end() == 4


@pytest.mark.once
def test_without_a_terminal_there_is_no_shell_and_nothing_runs(shell: Shell) -> None:
    done = shell("shell", stdin=b"touch canary\n")
    assert done.returncode == 2 and "shell needs a terminal" in words(done) and "agent-sandbox run" in words(done)
    assert shell.json("log")["entries"] == []
    assert shell.json("shell")["error"]["kind"] == "UsageError"
