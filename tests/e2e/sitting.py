"""A person at a terminal, played by a pseudo-terminal of our own."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tests.e2e.program import PROGRAM, Shell
from tests.patience import Patience

PATIENCE_SECONDS = 60.0


@dataclass
class Sitting:
    """Somebody typing at a terminal in which the program runs."""

    pid: int
    master: int
    seen: bytes = b""
    before: bytes = b""  # the text that was expected last
    status: int | None = None

    def type(self, text: bytes) -> None:
        os.write(self.master, text)

    def expect(self, text: bytes) -> None:
        """Read until the text has been seen."""
        patience = Patience(PATIENCE_SECONDS)
        while text not in self.seen:
            if not select.select([self.master], [], [], 1.0)[0]:
                assert not patience.over, f"no {text!r} in {self.seen!r}"
                continue
            try:
                self.seen += os.read(self.master, 65536)
            except OSError:  # the last program on it has ended
                break
        assert text in self.seen, self.seen
        self.before, _, self.seen = self.seen.partition(text)

    def end(self) -> int:
        """Read what is left and return the exit code."""
        while True:
            try:
                if not (more := os.read(self.master, 65536)):
                    break
                self.seen += more
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
def sitting(shell: Shell, *line: str, before: str = "", after: str = "") -> Iterator[Sitting]:
    """The program on a terminal of 30 by 100; `before` and `after` are what the shell does before it starts and once it has ended."""
    pid, master = pty.fork()
    if pid == 0:
        os.chdir(shell.cwd)
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
        command = ["/bin/sh", "-c", f'{before} "$@"; {after or "exit $?"}', "sh", *PROGRAM, *line]
        os.execve("/bin/sh", command, {**shell.environment, "TERM": "xterm"})
    person = Sitting(pid, master)
    try:
        yield person
    finally:
        os.close(master)  # which hangs up: whatever still runs there ends
        person.wait()
