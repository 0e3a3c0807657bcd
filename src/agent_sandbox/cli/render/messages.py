"""Messages of the program itself: on standard error, and never with raw bytes of a guest in them. And the style of its reports.

Nothing here needs Linux.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress

from agent_sandbox._fast.values import dataclass

PROGRAM = "agent-sandbox"
_RESET, _BOLD, _RED, _GREEN, _YELLOW = "\x1b[0m", "\x1b[1m", "\x1b[31m", "\x1b[32m", "\x1b[33m"
_OF_STATUS = {"ok": _GREEN, "weaker": _YELLOW, "missing": _RED, "pass": _GREEN, "inconclusive": _YELLOW, "fail": _RED}


@dataclass(frozen=True)
class Console:
    """The interface of a verb to the user: it prints messages and asks questions.

    `shows` is false with --json: then no questions are asked, and standard output holds one document. With `everything`, long lists are
    printed in full.
    """

    quiet: bool = False
    shows: bool = True
    everything: bool = False

    @property
    def asks(self) -> bool:
        """Whether there is a person to ask."""
        return self.shows and at_a_terminal()

    def says_yes(self, question: str) -> bool:
        """Ask a question and wait for the answer. Anything but a yes is a no."""
        return self.answer(f"{question} [y/N] ") in ("y", "yes")

    def answer(self, prompt: str, *, exactly: bool = False) -> str:
        """Ask for a line and wait for it. All that was printed is on the terminal by then; what was typed before is no answer.

        The answer is in lower case, unless it is wanted exactly as it was typed.
        """
        import termios  # only at a terminal

        sys.stdout.flush()
        with suppress(termios.error):
            termios.tcflush(0, termios.TCIFLUSH)
        sys.stderr.write(prompt)
        sys.stderr.flush()
        line = sys.stdin.readline().strip()
        return line if exactly else line.lower()

    def note(self, text: str) -> None:
        """Print a message, unless --quiet suppresses it."""
        if not self.quiet:
            remark(text)


@dataclass(frozen=True)
class Style:
    """Colours of text outside diffs, or none."""

    colours: bool

    @classmethod
    def of_stdout(cls) -> Style:
        """Return the style for standard output: colours on a terminal, unless $NO_COLOR or $TERM says otherwise."""
        return cls(sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb")

    def status(self, word: str, width: int) -> str:
        """Return a status in its colour, padded."""
        return self._in(_OF_STATUS.get(word, ""), f"{word:<{width}}")

    def heading(self, text: str) -> str:
        """Return a title."""
        return self._in(_BOLD, text)

    def _in(self, colour: str, text: str) -> str:
        return f"{colour}{text}{_RESET}" if self.colours and colour else text


def shown(text: str) -> str:
    """Return the text as one line that is safe to print: invisible characters are escaped."""
    if text.isascii() and text.isprintable():
        return text
    from agent_sandbox.workspace.escape import visible  # few texts need it

    return visible(text)


def say(text: str) -> None:
    """Print one line on standard error. It is no failure if nobody reads it."""
    try:
        os.write(2, f"{text}\n".encode(errors="replace"))
    except OSError:
        return


def remark(text: str) -> None:
    """Print a message."""
    say(f"{PROGRAM}: {shown(text)}")


def complain(message: str, hint: str) -> None:
    """Print an error: what and why, then what to do."""
    say(f"{PROGRAM}: error: {shown(message)}")
    if hint:
        say(f"  hint: {shown(hint)}")


RESET = b"\x1b[?1049l\x1b[!p\x1b[0m"


def reset_terminal() -> None:
    """Undo what an earlier program did to our terminal, before something is shown on it that a person is asked about.

    Ends the alternate screen, margins, hidden text and other character sets (DECSTR), and colours.
    """
    if os.isatty(1):
        sys.stdout.flush()
        os.write(1, RESET)


def at_a_terminal() -> bool:
    """Whether standard input and standard error are a terminal."""
    return os.isatty(0) and sys.stderr.isatty()


def human_size(amount: int) -> str:
    """Return a number of bytes as people read it.

    >>> human_size(1536), human_size(12)
    ('1.5 KiB', '12 bytes')
    """
    if amount < 1024:
        return f"{amount} bytes"
    power = min((amount.bit_length() - 1) // 10, 4)
    return f"{amount / (1 << 10 * power):.1f} {' KMGT'[power]}iB".replace(".0 ", " ")


def counted(number: int, singular: str, plural: str = "") -> str:
    """Return a number and its noun.

    >>> counted(1, "change"), counted(2, "entry", "entries")
    ('1 change', '2 entries')
    """
    return f"{number:,} {singular if number == 1 else plural or singular + 's'}"
