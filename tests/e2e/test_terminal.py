"""Interactive use: a person at a terminal, played by a pseudo-terminal of our own."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tests.e2e.program import PROGRAM, Shell

PATIENCE_SECONDS = 20.0


@dataclass
class Sitting:
    """Somebody typing at a terminal in which the program runs."""

    pid: int
    master: int
    seen: bytes = b""
    status: int | None = None

    def type(self, text: bytes) -> None:
        os.write(self.master, text)

    def expect(self, text: bytes) -> None:
        """Read until the text has been seen."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while text not in self.seen:
            assert select.select([self.master], [], [], max(0.0, deadline - time.monotonic()))[0], f"no {text!r} in {self.seen!r}"
            try:
                self.seen += os.read(self.master, 65536)
            except OSError:  # the last program on it has ended
                break
        assert text in self.seen, self.seen
        self.seen = self.seen.partition(text)[2]

    def end(self) -> int:
        """Read what is left and return the exit code."""
        while True:
            try:
                if not select.select([self.master], [], [], PATIENCE_SECONDS)[0] or not os.read(self.master, 65536):
                    break
            except OSError:
                break
        return self.wait()

    def wait(self) -> int:
        """The exit code, however often it is asked for."""
        if self.status is None:
            self.status = os.waitpid(self.pid, 0)[1]
        return os.waitstatus_to_exitcode(self.status)

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


@contextmanager
def sitting(shell: Shell, *line: str, after: str = "") -> Iterator[Sitting]:
    """The program on a terminal of 30 by 100; `after` is what the shell does once it has ended."""
    pid, master = pty.fork()
    if pid == 0:
        os.chdir(shell.cwd)
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
        command = ["/bin/sh", "-c", f'"$@"; {after or "exit $?"}', "sh", *PROGRAM, *line]
        os.execve("/bin/sh", command, {**shell.environment, "TERM": "xterm"})
    person = Sitting(pid, master)
    try:
        yield person
    finally:
        os.close(master)  # which hangs up: whatever still runs there ends
        person.wait()


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
        person.expect(b"nothing was forgotten")
        assert person.end() == 1
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
