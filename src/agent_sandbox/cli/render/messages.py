"""What the program itself says to people: on standard error, and never with raw bytes of a guest's in it."""

from __future__ import annotations

import os
import sys

PROGRAM = "agent-sandbox"


def shown(text: str) -> str:
    """The text as one line that is safe to print: what cannot be seen is escaped."""
    if text.isascii() and text.isprintable():
        return text
    from agent_sandbox.workspace.escape import visible  # most texts need none of it

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
