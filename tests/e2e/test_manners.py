"""The manners of the command line: what a new user stumbles over."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.e2e.program import PROGRAM, Shell, words
from tests.patience import until

pytestmark = pytest.mark.once


@pytest.mark.parametrize("line", [("log",), ("log", "--format", "jsonl"), ("help",), ("capabilities", "--json")])
def test_a_reader_that_goes_away_is_no_complaint(shell: Shell, line: tuple[str, ...]) -> None:
    shell("run", "true")
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run([*PROGRAM, *line], cwd=shell.cwd, env=shell.environment, stdout=writer, stderr=subprocess.PIPE, check=False)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize(("closed", "said"), [("<&-", b"ran\n"), (">&-", b""), ("2>&-", b"ran\n"), ("<&- >&- 2>&-", b"")])
def test_a_closed_stream_is_an_empty_one(shell: Shell, closed: str, said: bytes) -> None:
    line = [*PROGRAM, "run", "--throw-away", "cat; echo ran; echo said >&2"]
    typed = ["sh", "-c", f'"$@" {closed}', "sh", *line]
    done = subprocess.run(typed, cwd=shell.cwd, env=shell.environment, capture_output=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (0, said), done.stderr
    assert done.stderr == (b"" if "2>" in closed else b"said\n")


def test_a_closed_output_is_no_mistake_of_ours(shell: Shell) -> None:
    done = subprocess.run(
        ["sh", "-c", '"$@" >&-', "sh", *PROGRAM, "status"], cwd=shell.cwd, env=shell.environment, capture_output=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("line", [("status",), ("--json", "status"), ("run", "echo said")])
def test_output_that_cannot_be_written_is_named(shell: Shell, line: tuple[str, ...]) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run([*PROGRAM, *line], cwd=shell.cwd, env=shell.environment, stdout=full, stderr=subprocess.PIPE, check=False)
    assert done.returncode == 125 and "standard output cannot be written: No space left on device" in words(done)
    assert "hint: free space where it goes" in words(done) and "AGENT_SANDBOX_DEBUG" not in words(done)


def test_a_run_that_was_killed_has_no_end_in_the_log(shell: Shell) -> None:
    with shell.start("run", "sleep 1000") as process:
        assert until(lambda: shell.json("log")["entries"])
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert [entry["ended"] for entry in shell.json("log")["entries"]] == [False]
    assert b"NO END" in shell("log").stdout
    shell("run", "true")
    assert [entry["ended"] for entry in shell.json("log")["entries"]] == [False, True, None]


def test_the_log_counts_changes_only_where_they_are_known(shell: Shell) -> None:
    shell("run", "echo x > kept")
    shell("run", "--throw-away", "echo x > thrown-away")
    facts = [entry["event"]["facts"] for entry in shell.json("log")["entries"] if entry["kind"] == "outcome"]
    assert ["changes" in each for each in facts] == [False, True] and facts[1]["changes"] == 1


def test_the_log_of_a_project_has_its_throw_away_runs_and_not_those_of_another(shell: Shell) -> None:
    other = Shell(shell.cwd.parent / "other", shell.env)
    other.cwd.mkdir()
    shell("run", "--throw-away", "echo ours")
    other("run", "--throw-away", "echo theirs")
    ours, theirs = shell("log"), other("log")
    assert b"echo ours" in ours.stdout and b"echo theirs" not in ours.stdout
    assert b"echo theirs" in theirs.stdout and b"echo ours" not in theirs.stdout
    assert "2 entries of other projects" in words(ours)
    assert shell("log", "--all").stdout.count(b"echo ") == 2


def test_a_file_of_variables_reaches_the_program_and_not_the_log(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "env").write_text('A=first\nTOKEN="canary value"\n')
    (tmp_path / "more").write_text("A=second\n")
    files = ("--env-file", str(tmp_path / "env"), "--env-file", str(tmp_path / "more"))
    assert shell("run", *files, "echo $A $TOKEN").stdout == b"second canary value\n"
    assert shell("run", *files, "--env", "A=third", "echo $A").stdout == b"third\n"
    assert b"canary" not in (Path(shell.env["AGENT_SANDBOX_STATE"]) / "ledger.jsonl").read_bytes()


@pytest.mark.both
def test_a_file_of_variables_is_the_machines_and_not_the_sandboxs(shell: Shell) -> None:
    (shell.cwd / "settings").write_text("A=real\n")
    shell("run", "echo A=changed > settings")
    assert shell("run", "cat settings").stdout == b"A=changed\n", "the control: the sandbox has another one"
    assert shell("run", "--env-file", "settings", "echo $A").stdout == b"real\n"


@pytest.mark.parametrize("variable", ["1=2", "a b=2", "x-y=2", "A\n=2"])
def test_a_name_that_no_shell_can_use_is_refused(shell: Shell, variable: str) -> None:
    assert shell("run", "--env", variable, "true").returncode == 2
    assert shell("run", "--env", f"_a1{variable[-2:]}", "true").returncode == 0


def test_a_capability_that_nothing_asks_for_is_mentioned_and_an_invalid_one_refused(shell: Shell) -> None:
    token = shell("grant", "run true", "--for", "2d").stdout.decode().strip()
    done = shell("run", "--capability", token, "true")
    assert done.returncode == 0 and "was not needed" in words(done) and token not in words(done)
    assert shell("run", "--capability", "nonsense", "true").returncode == 2


def test_a_path_is_shown_and_never_run(shell: Shell) -> None:
    (shell.cwd / "script").write_text("#!/bin/sh\necho canary > ran\n")
    (shell.cwd / "script").chmod(0o755)
    shell("run", "echo x > new.txt; mkdir made; echo y > made/inside; echo z > 'odd[*] name'")
    assert b"+x" in (done := shell("diff", "new.txt")).stdout and b"+y" not in done.stdout
    assert b"+y" in (done := shell("diff", "made", "odd[*] name")).stdout and b"+z" in done.stdout and b"+x" not in done.stdout
    for word in ("script", "./script"):
        unchanged = shell("diff", word)
        assert (unchanged.returncode, unchanged.stdout) == (0, b"") and "no changes" in words(unchanged)
    assert (missing := shell("diff", "no-such-path")).returncode == 2 and "neither" in words(missing)
    assert b"canary" in shell("diff", "--", "./script").stdout, "the control: after -- it is a command"
    assert b"+c" in shell("diff", "echo c > d").stdout and b"d" in shell("diff", "touch", "d").stdout


@pytest.mark.parametrize(
    ("options", "variables", "coloured"),
    [
        ((), {}, False),
        (("--color", "always"), {"NO_COLOR": "1", "TERM": "dumb"}, True),
        (("--color", "never"), {"CLICOLOR_FORCE": "1"}, False),
        ((), {"CLICOLOR_FORCE": "1"}, True),
        ((), {"CLICOLOR_FORCE": "0"}, False),
        ((), {"CLICOLOR_FORCE": "1", "NO_COLOR": "1"}, False),
    ],
)
def test_colours_are_as_the_option_and_the_environment_say(
    shell: Shell, options: tuple[str, ...], variables: dict[str, str], coloured: bool
) -> None:
    shell("run", "echo x > new.txt")
    clean = dict.fromkeys(("NO_COLOR", "CLICOLOR", "CLICOLOR_FORCE"), "")
    done = Shell(shell.cwd, {**shell.env, **clean, **variables})(*options, "diff")
    assert (b"\x1b[32m+x" in done.stdout) is coloured and b"+x" in done.stdout
