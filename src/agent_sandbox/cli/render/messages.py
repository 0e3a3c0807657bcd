"""What the program itself says to people: on standard error, and never with raw bytes of a guest's in it."""

from __future__ import annotations

import codecs
import os
import sys

from agent_sandbox.cli.terminal import write_all
from agent_sandbox.workspace.escape import visible

PROGRAM = "agent-sandbox"


def shown(text: str) -> str:
    """The text as one line that is safe to print: what cannot be seen is escaped."""
    if text.isascii() and text.isprintable():
        return text
    from agent_sandbox.workspace.escape import visible

    return visible(text)


def say(text: str) -> None:
    """One line on standard error. Nobody reading it is no reason to fail."""
    try:
        os.write(2, f"{text}\n".encode(errors="replace"))
    except OSError:
        return


def remark(text: str) -> None:
    """A remark of ours."""
    say(f"{PROGRAM}: {shown(text)}")


def complain(message: str, hint: str) -> None:
    """An error: what and why, then what to do."""
    say(f"{PROGRAM}: error: {shown(message)}")
    if hint:
        say(f"  hint: {shown(hint)}")


def at_a_terminal() -> bool:
    """Whether there is somebody to ask."""
    return os.isatty(0) and sys.stderr.isatty()


def says_yes(question: str) -> bool:
    """Ask, and wait for the answer. Anything but a yes is a no."""
    sys.stderr.write(f"{question} [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


class Escaped:
    """Both streams of one run."""

    def __init__(self) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")
        self._streams = {"stdout": (1, decoder("surrogateescape")), "stderr": (2, decoder("surrogateescape"))}

    def pass_on(self, name: str, data: bytes, *, last: bool = False) -> None:
        """Write it to our own standard output or error; a character in two pieces when it is whole. Raises as `write_all` does."""
        fd, decoder = self._streams[name]
        if not os.isatty(fd):
            write_all(fd, data)
            return
        lines = decoder.decode(data, last).split("\n")
        write_all(fd, "\n".join("\t".join(map(visible, line.split("\t"))) for line in lines).encode())

    def finish(self) -> None:
        """Nothing more comes: show what was left unfinished."""
        for name in self._streams:
            self.pass_on(name, b"", last=True)
