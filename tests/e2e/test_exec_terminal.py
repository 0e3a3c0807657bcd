"""`exec -t`: a program beside others in a sandbox that runs on, with the terminal of its caller, as `run` has it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.program import Shell, words
from tests.e2e.sitting import sitting
from tests.e2e.test_detached import detached
from tests.patience import until


@pytest.fixture
def running(shell: Shell) -> Iterator[str]:
    """The name of a sandbox that runs on."""
    yield detached(shell, "--throw-away", "--", "sleep", "1000")
    shell("stop", "--all", "--timeout", "0")


def test_it_has_a_terminal_of_its_own_with_the_size_and_kind_of_ours(shell: Shell, running: str) -> None:
    line = "tty; stty size; echo $TERM; trap 'stty size; exit 4' WINCH; echo ready; while :; do read -t 1 line; done"
    with sitting(shell, "exec", "-t", running, line) as person:
        person.expect(b"/dev/pts/0\r\n30 100\r\nxterm\r\nready")
        person.resize(40, 120)
        person.expect(b"40 120")
        assert person.end() == 4
    plain = shell("exec", running, "tty")
    assert plain.returncode == 1 and plain.stdout == b"not a tty\n", "the control arm: without -t there is none"


def test_a_shell_can_be_typed_to_with_its_line_editing_jobs_and_ctrl_keys(shell: Shell, running: str) -> None:
    with sitting(shell, "exec", "--env", "PS1=prompt> ", "-t", running, "--", "bash", "--norc", "-i") as person:
        person.expect(b"prompt> ")
        person.type(b"echo one$((1 + 1))X\x7f\r")  # the last key takes back the one before
        person.expect(b"one2\r\n")
        person.type(b"sh -c 'echo inside; exec sleep 1000'\r")
        person.expect(b"\rinside\r\n")
        person.type(b"\x1a")
        person.expect(b"Stopped")
        person.type(b"kill -9 %1; wait; sh -c 'echo again; exec sleep 1000'\r")
        person.expect(b"\nagain\r\n")
        person.type(b"\x03")
        person.expect(b"prompt> ")
        person.type(b"sh -c 'echo reads; tr a-z A-Z'\r")
        person.expect(b"\rreads\r\n")
        person.type(b"typed\r\x04")
        person.expect(b"TYPED\r\n")
        person.type(b"exit 9\r")
        assert person.end() == 9
    assert shell("exec", running, "--", "true").returncode == 0, "the sandbox goes on"


def test_a_paste_arrives_whole_and_in_order(shell: Shell, running: str) -> None:
    lines = [f"line {number:06}" for number in range(2000)]
    with sitting(shell, "exec", "-t", running, "stty -echo; echo ready; head -n 2000 | sha256sum; exit 3") as person:
        person.expect(b"ready\r\n")
        for line in lines:
            person.type(f"{line}\r".encode())
        expected = shell("exec", "-i", running, "sha256sum", stdin="".join(f"{line}\n" for line in lines).encode()).stdout
        person.expect(expected.split()[0])
        assert person.end() == 3


def test_the_terminal_is_as_it_was_however_the_program_ends(shell: Shell, running: str) -> None:
    line = "exec", "--timeout", "0.5", "-t", running, "stty raw -echo; echo up; sleep 100"
    with sitting(shell, *line, after="code=$?; stty -a; exit $code") as person:
        person.expect(b"up")
        person.expect(b" icanon")
        person.expect(b" echo ")
        assert person.end() == 124


def test_a_terminal_that_goes_away_ends_the_program_and_not_the_sandbox(shell: Shell, running: str) -> None:
    with sitting(shell, "exec", "-t", running, "echo ready; exec sleep 4321") as person:
        person.expect(b"ready")
        assert shell("exec", running, "--", "pgrep", "-f", "^sleep 4321").returncode == 0, "the control arm"
    assert until(lambda: shell("exec", running, "--", "pgrep", "-f", "^sleep 4321").returncode == 1)


def test_it_is_refused_without_a_terminal_and_beside_other_kinds_of_input(shell: Shell, running: str) -> None:
    without = shell("exec", "-t", running, "--", "true")
    assert without.returncode == 2 and "needs a terminal" in words(without)
    for other in ("-i", "--json"):
        both = shell("exec", "-t", other, running, "--", "true")
        assert both.returncode == 2 and b"does not go with" in both.stdout + both.stderr


def test_what_is_printed_before_and_after_it_is_decided_as_any_command(shell: Shell) -> None:
    name = detached(shell, "--throw-away", "--deny-command", "touch", "--", "sleep", "1000")
    try:
        with sitting(shell, "exec", "-t", name, "--", "touch", "x") as person:
            assert person.end() == 126
            assert b"touch" in person.seen
        with sitting(shell, "exec", "-t", name, "--", "no-such-program") as person:
            assert person.end() == 127
    finally:
        shell("stop", "--all", "--timeout", "0")
