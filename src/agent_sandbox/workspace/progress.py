"""Progress of a long action, for a person who waits for it. The command line shows it; everybody else ignores it."""

from __future__ import annotations


class Progress:
    """Receives how far a long action has come. This class ignores it; `cli.render.progress` shows it on a terminal."""

    def begin(self, what: str, files: int = 0, size: int = 0, *, at_once: bool = False) -> None:
        """Begin a part of the action, named `what`, with so many files and bytes to go. Show it `at_once` if it cannot be measured."""

    def advance(self, files: int = 0, size: int = 0) -> None:
        """Record that so many more files and bytes of the present part are done."""

    def end(self) -> None:
        """Stop showing the present part: other output follows."""


NO_PROGRESS = Progress()
