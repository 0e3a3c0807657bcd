"""The clock and the random numbers of a deterministic run. Time advances only by reading and sleeping, the same way in every run."""

from __future__ import annotations

import hashlib

START_NS = 1_767_225_600 * 10**9  # every run begins at 2026-01-01T00:00:00Z

READING_NS = 100_000  # cost of one reading: small against usual waits, large enough that a busy wait ends soon

RESOLUTION_NS = 1000

_FOR = b"agent-sandbox deterministic run 1\0"


class VirtualClock:
    """The four clocks of WASI in a deterministic run. Sleeping takes no real time, and computing takes no time."""

    def __init__(self) -> None:
        self._elapsed = 0
        self._worked = 0

    def read(self, which: int) -> int | None:
        """Advance time by one reading and return the clock's time; None for an unknown clock."""
        self._elapsed += READING_NS
        self._worked += READING_NS
        return self._shows(which)

    def stamp(self) -> int:
        """Return the time of day for a file that is written now. Time advances a little, so that a later write is newer."""
        self._elapsed += READING_NS
        return START_NS + self._elapsed

    def sleep(self, which: int, when: int, *, absolute: bool) -> int | None:
        """Return the nanoseconds that a sleep will last; None for an unknown clock. Does not advance time."""
        shows = self._shows(which)
        if shows is None:
            return None
        return max(0, when - shows) if absolute else when

    def pass_by(self, nanoseconds: int) -> None:
        """Advance time by the duration of a sleep."""
        self._elapsed = min(self._elapsed + nanoseconds, (1 << 63) - START_NS)

    def save(self) -> list[int]:
        """Return the state as JSON data."""
        return [self._elapsed, self._worked]

    def restore(self, saved: list[int]) -> None:
        """Go on from a saved state. Raises ValueError or TypeError for anything else."""
        self._elapsed, self._worked = (_checked(each, (1 << 63) - START_NS) for each in saved)

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


class Stream:
    """The random bytes of a deterministic run: the same requests in the same order give the same bytes. Not for secrets."""

    def __init__(self, seed: int) -> None:
        self._key = _FOR + seed.to_bytes(8, "little")
        self._taken = 0

    def take(self, length: int) -> bytes:
        """Return the next `length` random bytes."""
        self._taken += 1
        return hashlib.shake_256(self._key + self._taken.to_bytes(8, "little")).digest(length)

    def save(self) -> int:
        """Return the number of requests so far."""
        return self._taken

    def restore(self, saved: int) -> None:
        """Go on after this number of requests. Raises ValueError or TypeError for anything else."""
        self._taken = _checked(saved, (1 << 64) - 1)


def _checked(number: object, most: int) -> int:
    if not isinstance(number, int) or not 0 <= number <= most:
        raise ValueError("a number of its clock is out of range")
    return number
