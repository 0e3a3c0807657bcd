"""Output of a run that may have to start again: what has been passed on cannot be taken back, so its beginning is looked at first.

A program that lacks something ends with a traceback, mostly before it has said anything. So what begins as one is held back until the end
of the run, and anything else is passed on at once; from then on the run is the caller's and does not start again.
"""

from __future__ import annotations

from collections.abc import Callable

_BEGINNINGS = (b"Traceback (most recent call last):", b"ReferenceError: ")  # of what `lack_in` looks for
_MOST = 64 << 10  # held back: a traceback is shorter


class Held:
    """Stands in for `on_output` until it is clear what the output is."""

    def __init__(self, pass_on: Callable[[str, bytes], None]) -> None:
        self._pass_on = pass_on
        self._held = b""
        self.passed = False  # whether anything has been

    def __call__(self, stream: str, data: bytes) -> None:
        """Take output as it arrives."""
        if self.passed:
            self._pass_on(stream, data)
        elif stream == "stderr" and self._may_be_an_end(self._held + data):
            self._held += data
        else:
            self.release()
            self.passed = True
            self._pass_on(stream, data)

    @property
    def stderr(self) -> bytes:
        """What is held back."""
        return self._held

    def release(self) -> None:
        """Pass on what was held back: the run stays as it is."""
        held, self._held = self._held, b""
        if held:
            self.passed = True
            self._pass_on("stderr", held)

    def _may_be_an_end(self, text: bytes) -> bool:
        return len(text) <= _MOST and any(text.startswith(each) or each.startswith(text) for each in _BEGINNINGS)
