"""`--allow` and `--deny-command`: which tools a command line may start."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.e2e.program import Shell, words


def test_a_tool_that_is_not_allowed_is_denied_with_the_line_that_would_allow_it(shell: Shell) -> None:
    done = shell("--allow", "git,curl", "run", "--", "npm", "install")
    assert done.returncode == 126
    assert "does not allow the program 'npm'" in words(done) and "--allow git,curl,npm" in words(done)


def test_what_a_line_is_seen_to_start_is_denied_and_what_is_not_seen_is_not_there(shell: Shell) -> None:
    seen = shell("--allow", "git,curl", "run", "npm install")
    assert seen.returncode == 126 and "--allow git,curl,npm" in words(seen)
    line = ("run", "--throw-away", "source /dev/stdin")  # nobody reads its input beforehand
    unseen = b'git --version; id; echo "=$?"; /usr/bin/id; echo "=$?"'
    done = shell("--allow=git", *line, stdin=unseen)
    assert done.stdout.startswith(b"git version") and done.stdout.decode().split()[3:] == ["=127", "=127"], done
    assert b"uid=" in shell(*line, stdin=unseen).stdout, "the control arm"


def test_no_shell_is_there_unless_a_line_is_run_or_it_is_named(shell: Shell) -> None:
    subprocess.run(["git", "init", "-q", shell.cwd], check=True)
    alias = ("git", "-c", "alias.x=!echo shell", "x")
    assert shell("run", "--throw-away", "--allow", "git", "--", *alias).stdout == b""
    assert shell("run", "--throw-away", "--allow", "git,sh", "--", *alias).stdout == b"shell\n"
    assert shell("run", "--throw-away", "--allow", "git", "--", "bash", "script.sh").returncode == 126


@pytest.mark.once
def test_what_ends_for_want_of_a_tool_says_which_there_are(shell: Shell) -> None:
    (shell.cwd / "script.sh").write_text("#!/bin/sh\n")
    (shell.cwd / "script.sh").chmod(0o755)
    for line, code in ((b"npm install", 127), (b"./script.sh", 126)):
        done = shell("run", "--throw-away", "--allow", "git,ls", "source /dev/stdin", stdin=line)
        assert done.returncode == code and "only these programs can be started: git, ls" in words(done)


@pytest.mark.once
def test_an_interpreter_is_named_with_what_it_opens(shell: Shell) -> None:
    done = shell("run", "--throw-away", "--allow", "perl", "--", "perl", "-e", "print 6 * 7")
    assert done.stdout == b"42" and "perl: runs what it is given" in words(done)


def test_code_runs_with_the_tools_that_are_allowed(shell: Shell) -> None:
    code = "import shutil, sqlite3, subprocess\nsaid = subprocess.run(['git', '--version'], capture_output=True, text=True).stdout\n"
    (shell.cwd / "a.py").write_text(code + "print(said.split()[0], shutil.which('ls'), shutil.which('sh'))\n")
    done = shell("code", "--throw-away", "--allow", "git", "a.py")
    assert done.stdout == b"git None None\n", words(done)


@pytest.mark.once
def test_explain_names_what_can_be_executed(shell: Shell) -> None:
    lines = shell("run", "--explain", "--allow", "git", "--", "git", "log").stdout.decode().splitlines()
    assert any(line.startswith("nothing can be executed but ") and os.path.realpath("/usr/bin/git") in line for line in lines)


def test_a_denied_tool_is_not_there(shell: Shell) -> None:
    done = shell("run", "--throw-away", "--deny-command", "basename,mkfs*", "source /dev/stdin", stdin=b"basename a/b; dirname a/b")
    assert done.stdout == b"a\n" and b"basename: command not found" in done.stderr
    assert shell("run", "--deny-command", "ls", "--", "ls").returncode == 126


@pytest.mark.once
def test_what_is_no_name_of_a_tool_is_refused(shell: Shell) -> None:
    for line in (["--allow", "/usr/bin/git"], ["--deny-command", "./x"]):
        done = shell("run", *line, "true")
        assert done.returncode != 0 and "not the name of a command" in words(done)
