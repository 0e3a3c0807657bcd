"""Messages of the program itself, on standard error, never with raw bytes of a guest; and the style of its reports.

Nothing here needs Linux.
"""

from __future__ import annotations

import os
import sys

from agent_sandbox._fast.contexts import suppress
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
    colour: str = "auto"  # or "always" or "never"

    @property
    def style(self) -> Style:
        """The style for standard output."""
        return Style(self.colour == "always" or (self.colour == "auto" and _wants_colours()))

    @property
    def asks(self) -> bool:
        """Whether a person can be asked."""
        return self.shows and at_a_terminal()

    def says_yes(self, question: str) -> bool:
        """Ask a question and return whether the answer is "y" or "yes"."""
        return self.answer(f"{question} [y/N] ") in ("y", "yes")

    def answer(self, prompt: str, *, exactly: bool = False) -> str:
        """Print a prompt and return the line typed after it. Earlier output is flushed, earlier typing is discarded.

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
    """Text styles for output other than diffs: colours, or none."""

    colours: bool

    def status(self, word: str, width: int) -> str:
        """Return a status word in its colour, padded to `width`."""
        return self._in(_OF_STATUS.get(word, ""), f"{word:<{width}}")

    def heading(self, text: str) -> str:
        """Return a text in the style of a heading."""
        return self._in(_BOLD, text)

    def _in(self, colour: str, text: str) -> str:
        return f"{colour}{text}{_RESET}" if self.colours and colour else text


def _wants_colours() -> bool:
    """Whether standard output gets colours: as $NO_COLOR, $CLICOLOR_FORCE and $CLICOLOR say, in this order; else on a terminal."""
    ours = os.environ.get
    if ours("NO_COLOR"):
        return False
    if ours("CLICOLOR_FORCE", "0") not in ("", "0"):
        return True
    return sys.stdout.isatty() and ours("TERM") != "dumb" and ours("CLICOLOR") != "0"


def shown(text: str) -> str:
    """Return the text as one line that is safe to print: invisible characters are escaped."""
    if text.isascii() and text.isprintable():
        return text
    from agent_sandbox.workspace.escape import visible  # few texts need it

    return visible(text)


def say(text: str) -> None:
    """Print one line on standard error. If standard error is closed, do nothing."""
    try:
        os.write(2, f"{text}\n".encode(errors="replace"))
    except OSError:
        return


def remark(text: str) -> None:
    """Print a message of the program on standard error."""
    say(f"{PROGRAM}: {shown(text)}")


def complain(message: str, hint: str) -> None:
    """Print an error message, and below it the hint."""
    say(f"{PROGRAM}: error: {shown(message)}")
    if hint:
        say(f"  hint: {shown(hint)}")


RESET = b"\x1b[?1049l\x1b[!p\x1b[0m"


def reset_terminal() -> None:
    """Reset our terminal, so that output of an earlier program cannot disguise what a person is asked to approve.

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
