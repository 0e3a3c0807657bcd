"""The attempts of an experiment while they run, as one line on the terminal; and the end of what a failed one printed."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from agent_sandbox.cli.render.messages import PROGRAM, Console
from agent_sandbox.cli.render.progress import line_of
from agent_sandbox.engine.experiment.conduct import AttemptProgress
from agent_sandbox.engine.experiment.model import AttemptOutcome
from agent_sandbox.workspace.escape import visible

_CLEAR = "\r\x1b[K"
_EVERY = 0.2  # seconds between two updates
_LINES = 5  # of the output of an attempt that did not pass


class AttemptLine:
    """Shows the step of each attempt with `write`, in a line of `columns` columns, and a line for each that ended."""

    def __init__(self, write: Callable[[str], object], columns: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._write, self._columns, self._clock = write, columns, clock
        self._steps: dict[str, tuple[str, float]] = {}
        self._next = 0.0

    def tell(self, progress: AttemptProgress) -> None:
        """Receive a step of an attempt."""
        self._steps[progress.name] = progress.step, self._clock()
        if progress.result is not None:
            after = f" after {progress.result.seconds:.1f} s" if progress.result.seconds else ""
            self._write(f"{_CLEAR}{PROGRAM}: {progress.name}: {progress.step}{after}\n")
        self.draw()

    def tick(self) -> None:
        """Show the time that has passed, from time to time."""
        if self._clock() >= self._next:
            self.draw()

    def draw(self) -> None:
        """Show the line as it stands now."""
        self._next = self._clock() + _EVERY
        self._write(_CLEAR + self.text()[: self._columns - 1])

    def text(self) -> str:
        """Return the line as it stands now."""
        now = self._clock()
        running = [f"{name} {step} {now - since:.0f} s" for name, (step, since) in self._steps.items() if step in ("running", "checking")]
        waiting = sum(step == "waiting" for step, _ in self._steps.values())
        parts = [*running, *([f"{waiting} waiting"] if waiting else [])]
        return f"{PROGRAM}: {' · '.join(parts)}" if parts else ""

    def end(self) -> None:
        """Remove the line."""
        self._write(_CLEAR)


def attempt_line(console: Console) -> AbstractContextManager[AttemptLine | None]:
    """Return the line of one experiment for a block; None if it is not to be shown."""
    return line_of(console, AttemptLine)


def last_lines(result: AttemptOutcome) -> list[str]:
    """Return the last lines that an attempt or its check printed, escaped, if it did not pass."""
    step = result.check or result.run
    if result.passed or step is None:
        return []
    text = (step.errors if step.errors.strip() else step.output).decode("utf-8", "replace")
    lines = [line for line in text.splitlines() if line.strip()]
    return [visible(line[:200]) for line in lines[-_LINES:]]
