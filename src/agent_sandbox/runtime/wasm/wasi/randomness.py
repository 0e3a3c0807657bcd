"""Numbers that look like any others, and are the same in every run with the same seed."""

from __future__ import annotations

import hashlib

_FOR = b"agent-sandbox deterministic run 1\0"


class Stream:
    """Whoever asks for the same lengths in the same order gets the same bytes. For a program to run again, not to keep a secret with."""

    def __init__(self, seed: int) -> None:
        self._key = _FOR + seed.to_bytes(8, "little")
        self._taken = 0

    def take(self, length: int) -> bytes:
        """The next bytes."""
        self._taken += 1
        return hashlib.shake_256(self._key + self._taken.to_bytes(8, "little")).digest(length)
