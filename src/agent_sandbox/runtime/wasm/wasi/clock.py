"""The clock and the random numbers of a deterministic run: time advances by being read or slept on, the same way in every run."""

from __future__ import annotations

import hashlib

START_NS = 1_767_225_600 * 10**9  # every run begins at 2026-01-01T00:00:00Z

READING_NS = 100_000  # what one reading takes: small beside what programs wait for, large enough that waiting by reading ends soon

RESOLUTION_NS = 1000


class Clock:
    """The four clocks of WASI. Sleeping takes no real time; what the program spends on computing is not counted."""

    def __init__(self) -> None:
        self._elapsed = 0
        self._worked = 0

    def read(self, which: int) -> int | None:
        """The time on a clock, which has moved on by that; None for one that is not there."""
        self._elapsed += READING_NS
        self._worked += READING_NS
        return self._shows(which)

    def stamp(self) -> int:
        """The time of day for a file that was written: it takes as long as a reading, so that what was written later is newer."""
        self._elapsed += READING_NS
        return START_NS + self._elapsed

    def sleep(self, which: int, when: int, *, absolute: bool) -> int | None:
        """How long a sleep until then takes, in nanoseconds; None on a clock that is not there."""
        shows = self._shows(which)
        if shows is None:
            return None
        return max(0, when - shows) if absolute else when

    def pass_by(self, nanoseconds: int) -> None:
        """Let time pass, in which the program does nothing."""
        self._elapsed = min(self._elapsed + nanoseconds, (1 << 63) - START_NS)

    def _shows(self, which: int) -> int | None:
        match which:
            case 0:
                return START_NS + self._elapsed
            case 1:
                return self._elapsed
            case 2 | 3:
                return self._worked
            case _:
                return None


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
