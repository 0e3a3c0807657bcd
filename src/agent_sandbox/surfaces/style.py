"""Colours: only on a terminal, and never where NO_COLOR or a dumb terminal asks for none."""

from __future__ import annotations

import os
import sys

from agent_sandbox.values import dataclass

_RESET, _BOLD, _RED, _GREEN, _YELLOW = "\x1b[0m", "\x1b[1m", "\x1b[31m", "\x1b[32m", "\x1b[33m"
_OF_STATUS = {"ok": _GREEN, "weaker": _YELLOW, "missing": _RED, "pass": _GREEN, "inconclusive": _YELLOW, "fail": _RED}


@dataclass(frozen=True)
class Style:
    """Whether to colour."""

    colours: bool

    @classmethod
    def of_stdout(cls) -> Style:
        """As standard output and the environment want it."""
        return cls(sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb")

    def status(self, word: str, width: int) -> str:
        """The status of a capability, padded."""
        return self._in(_OF_STATUS.get(word, ""), f"{word:<{width}}")

    def heading(self, text: str) -> str:
        """A title."""
        return self._in(_BOLD, text)

    def _in(self, colour: str, text: str) -> str:
        return f"{colour}{text}{_RESET}" if self.colours and colour else text
