"""The log of the daemon: one line of JSON for each event, on standard error, for `journalctl` and whoever collects logs.

It holds no command lines and no environment, which may be secrets: the ledger has what was done, under its key. A reader that does not read
stops nobody, and neither does a flood: lines that do not fit, or are too many in one second, are left out and counted.
"""

from __future__ import annotations

import json
import os
import select
import time
from collections.abc import Callable

FORMS = ("text", "json")
MOST_A_SECOND = 200
LONGEST = 4000  # bytes of a line: a pipe that is ready takes so many at once


class EventLog:
    """Writes events. Call it with the name of an event, and facts."""

    def __init__(self, descriptor: int = 2, *, clock: Callable[[], float] = time.time) -> None:
        self._descriptor, self._clock = descriptor, clock
        self._second, self._count, self._left_out = 0, 0, 0

    def __call__(self, event: str, **facts: object) -> None:
        now = self._clock()
        if int(now) != self._second:
            self._second, self._count = int(now), 0
        self._count += 1
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now % 1 * 1000):03}Z"
        left_out = {"left_out": self._left_out} if self._left_out else {}
        line = json.dumps({"time": stamp, "event": event, "pid": os.getpid(), **facts, **left_out}).encode() + b"\n"
        if self._count > MOST_A_SECOND or len(line) > LONGEST or not self._write(line):
            self._left_out += 1
        else:
            self._left_out = 0

    def _write(self, line: bytes) -> bool:
        """Write a line without waiting. False if nobody reads it."""
        poll = select.poll()
        poll.register(self._descriptor, select.POLLOUT)
        if not any(event & select.POLLOUT for _, event in poll.poll(0)):
            return False
        try:
            return os.write(self._descriptor, line) == len(line)
        except OSError:
            return False


def silent(event: str, **facts: object) -> None:
    """A log that nobody wants."""
