"""Interactive use: a person at a terminal, played by a pseudo-terminal of our own."""

from __future__ import annotations

import pytest

from tests.e2e.program import Shell
from tests.e2e.sitting import sitting

pytestmark = pytest.mark.once


@pytest.mark.both
def test_a_program_on_a_terminal_has_one_of_its_own_with_the_size_of_ours(shell: Shell) -> None:
    with sitting(shell, "run", "tty; stty size; echo $TERM") as person:
        person.expect(b"/dev/pts/0\r\n30 100\r\nxterm\r\n")
        assert person.end() == 0


def test_a_new_size_reaches_the_program(shell: Shell) -> None:
    with sitting(shell, "run", "trap 'stty size; exit' WINCH; echo ready; while :; do read -t 1 line; done") as person:
        person.expect(b"ready")
        person.resize(40, 120)
        person.expect(b"40 120")
        assert person.end() == 0


def test_what_is_typed_reaches_the_program_and_ctrl_d_ends_its_input(shell: Shell) -> None:
    with sitting(shell, "run", "cat; echo end of input") as person:
        person.type(b"hello\r")
        person.expect(b"hello\r\nhello\r\n")
        person.type(b"\x04")
        person.expect(b"end of input")
        assert person.end() == 0


@pytest.mark.both
def test_ctrl_c_reaches_the_program_in_the_foreground(shell: Shell) -> None:
    with sitting(shell, "run", "echo ready; sleep 1000; echo interrupted $?") as person:
        person.expect(b"ready")
        person.type(b"\x03")
        assert person.end() == 130


def test_ctrl_c_is_the_programs_to_answer(shell: Shell) -> None:
    with sitting(shell, "run", "trap 'echo caught; exit 7' INT; echo ready; while :; do read -t 1 line; done") as person:
        person.expect(b"ready")
        person.type(b"\x03")
        person.expect(b"caught")
        assert person.end() == 7


def test_the_terminal_is_as_it_was_even_when_the_program_is_ended_by_a_limit(shell: Shell) -> None:
    with sitting(shell, "run", "--timeout", "0.3", "stty raw -echo; sleep 100", after="stty -a; exit 0") as person:
        person.expect(b" icanon")
        person.expect(b" echo ")
        assert person.end() == 0


def test_after_a_run_that_changed_something_one_quiet_line_points_to_diff(shell: Shell) -> None:
    with sitting(shell, "run", "echo x > new.txt") as person:
        person.expect(b"1 change in the sandbox")
        assert person.end() == 0
    with sitting(shell, "--quiet", "run", "true", after="echo END") as person:
        person.expect(b"END")
        assert b"sandbox" not in person.seen


def test_reset_asks_first_and_no_is_no(shell: Shell) -> None:
    shell("run", "echo x > new.txt")
    with sitting(shell, "reset") as person:
        person.expect(b"[y/N] ")
        person.type(b"n\r")
        person.expect(b"nothing was changed")
        assert person.end() == 3
    assert b"new.txt" in shell("diff").stdout
    with sitting(shell, "reset") as person:
        person.expect(b"[y/N] ")
        person.type(b"y\r")
        person.expect(b"forgot 1 change")
        assert person.end() == 0


def test_a_diff_has_colours_on_a_terminal_and_none_with_no_color(shell: Shell) -> None:
    shell("run", "echo x > new.txt")
    with sitting(shell, "diff") as person:
        person.expect(b"\x1b[32m+x\x1b[0m")
        person.end()
    with sitting(Shell(shell.cwd, {**shell.env, "NO_COLOR": "1"}), "diff") as person:
        person.expect(b"+x\r\n")
        person.end()
