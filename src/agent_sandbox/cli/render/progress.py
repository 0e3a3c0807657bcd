"""The progress of a long action as one line on the terminal, which is gone at the end."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

from agent_sandbox.cli.render.messages import PROGRAM, Console, human_size
from agent_sandbox.workspace.progress import NO_PROGRESS, Progress

_PATIENCE = 0.5  # seconds in which a person expects no sign of life
_EVERY = 0.1  # seconds between two updates
_LEAST_BYTES = 16 << 20  # smaller amounts are not worth a number
_CLEAR = "\r\x1b[K"


class Line(Protocol):
    """A line on the terminal."""

    def end(self) -> None:
        """Remove the line."""


L = TypeVar("L", bound=Line)


class ProgressLine(Progress):
    """Shows progress with `write`, in a line of `columns` columns. A short action shows nothing."""

    def __init__(self, write: Callable[[str], object], columns: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._write, self._columns, self._clock = write, columns, clock
        self._next = clock() + _PATIENCE
        self._shown = False
        self._what = ""
        self._files = self._size = self._all_files = self._all_bytes = 0

    def begin(self, what: str, files: int = 0, size: int = 0, *, at_once: bool = False) -> None:
        """See `Progress`."""
        self._what, self._all_files, self._all_bytes = what, files, size
        self._files = self._size = 0
        if at_once or self._clock() >= self._next:
            self._draw()

    def advance(self, files: int = 0, size: int = 0) -> None:
        """See `Progress`."""
        self._files += files
        self._size += size
        if self._clock() >= self._next:
            self._draw()

    def end(self) -> None:
        """See `Progress`."""
        if self._shown:
            self._write(_CLEAR)
            self._shown = False

    def _draw(self) -> None:
        self._next = self._clock() + _EVERY
        self._write(_CLEAR + self.text()[: self._columns - 1])
        self._shown = True

    def text(self) -> str:
        """Return the line as it stands now."""
        done = []
        if self._all_files > 1:
            done.append(f"{self._files:,} of {self._all_files:,} files")
        if self._all_bytes >= _LEAST_BYTES:
            done.append(f"{human_size(self._size)} of {human_size(self._all_bytes)}")
        return f"{PROGRAM}: {self._what}{': ' if done else ' …'}{', '.join(done)}"


@contextmanager
def progress_of(console: Console) -> Iterator[Progress]:
    """Yield the progress of one verb. It is shown if standard error is a terminal, unless --json or --quiet is given.

    Whatever ends the block, an interrupt too, the line is gone afterwards.
    """
    with line_of(console, ProgressLine) as line:
        yield line or NO_PROGRESS


@contextmanager
def line_of(console: Console, make: Callable[[Callable[[str], None], int], L]) -> Iterator[L | None]:
    """Yield a line on standard error, made with a function that writes and the width of the terminal. `end` removes it after the block.

    Yield None if standard error is no terminal, or if --json or --quiet is given.
    """
    if console.quiet or not console.shows or not os.isatty(2) or os.environ.get("TERM", "dumb") == "dumb":
        yield None
        return
    line = make(_write, os.get_terminal_size(2).columns or 80)
    try:
        yield line
    finally:
        line.end()


def _write(text: str) -> None:
    try:
        sys.stdout.flush()
        os.write(2, text.encode())
    except OSError:  # the terminal has gone; the action goes on
        return
