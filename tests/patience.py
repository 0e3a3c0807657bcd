"""How long tests wait: as long as this machine needs, but not for ever.

A deadline in a test is a guard against hanging and measures nothing. It is given in seconds of an idle machine and counted in those: a
second in which everybody waits for a processor counts as a fraction of one.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

import pytest

T = TypeVar("T")

HANGING_SECONDS = 180.0  # that one phase of a test may take, unless its mark `timeout` says otherwise
RING_SECONDS = 10.0
PAUSE_SECONDS = 0.01
LONGEST_LIMIT = 32.0  # seconds: when a program gets nowhere with so much time, time is not what it lacks
_WORK_SECONDS = 0.01


def slowness() -> float:
    """How many times slower than an idle machine this one is just now, and at least 1.

    The load tells how many want each processor, also of those that wait for a disk; a little work tells what is left of one for us.
    """
    began, used = time.monotonic(), time.thread_time()
    while time.thread_time() - used < _WORK_SECONDS:
        continue
    waited = (time.monotonic() - began) / _WORK_SECONDS
    return max(1.0, waited, os.getloadavg()[0] / len(os.sched_getaffinity(0)))


def stretched(seconds: float) -> float:
    """So many seconds of an idle machine, in seconds of this one now."""
    return seconds * slowness()


class Patience:
    """Seconds of an idle machine that are used up while somebody waits."""

    def __init__(self, seconds: float) -> None:
        self._left = seconds
        self._looked = time.monotonic()
        self._slowness = 1.0
        self._measure_at = self._looked + 1.0

    @property
    def over(self) -> bool:
        """Whether they are used up. The machine is looked at once a second, and first when a second has passed."""
        now = time.monotonic()
        if now >= self._measure_at:
            self._slowness, self._measure_at = slowness(), now + 1.0
        self._left -= (now - self._looked) / self._slowness
        self._looked = now
        return self._left <= 0


def until(condition: Callable[[], object], *, seconds: float = 60.0) -> bool:
    """Wait for something that is about to happen elsewhere. False when it has not happened after very long."""
    patience = Patience(seconds)
    while not condition():
        if patience.over:
            return bool(condition())
        time.sleep(PAUSE_SECONDS)
    return True


def given_time(attempt: Callable[[float], T], enough: Callable[[T], object], *, seconds: float) -> T:
    """Repeat an attempt under a growing time limit until its result is `enough`, and return the last result.

    On a busy machine a program may not have got anywhere when its time is over: it is then given twice as much, up to a minute.
    """
    made = attempt(seconds)
    while not enough(made) and (seconds := seconds * 2) <= LONGEST_LIMIT:
        made = attempt(seconds)
    return made


class Hung(Exception):
    """A phase of a test took far longer than it should on a machine as slow as this one is."""


@contextmanager
def guarded(seconds: float) -> Iterator[None]:
    """Raise `Hung` in the block when so many seconds of an idle machine have passed. In the main thread only."""
    patience = Patience(seconds)

    def ring(number: int, frame: FrameType | None) -> None:
        if patience.over:
            faulthandler.dump_traceback(file=sys.__stderr__ or 2)
            raise Hung(f"it has taken {seconds:g} seconds of an idle machine, and more of this one")

    before = signal.signal(signal.SIGALRM, ring)
    interval = min(RING_SECONDS, seconds)
    signal.setitimer(signal.ITIMER_REAL, interval, interval)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def seconds_for(item: pytest.Item) -> float:
    """Return the seconds that a phase of this test may take: its mark `timeout`, or the default."""
    mark = item.get_closest_marker("timeout")
    scale = float(os.environ.get("AGENT_SANDBOX_TEST_PATIENCE", "1"))
    return scale * (float(mark.args[0]) if mark is not None else HANGING_SECONDS)


# Each phase is guarded by itself, and only what the test does in it: an exception in one of pytest's own hooks would end the whole part.
@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    with guarded(seconds_for(item)):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    with guarded(seconds_for(item)):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    with guarded(seconds_for(item)):
        return (yield)


@contextmanager
def machine_wide() -> Iterator[None]:
    """Nobody else is in here, in this suite or another on this machine: for what the kernel has only one of, for all or for each user.

    The lock is on a directory that anybody can open, whatever their namespaces, and nothing has to be made or left behind. It is not the
    root directory: whoever promotes to the whole machine locks that one.
    """
    root = os.open("/usr", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(root, fcntl.LOCK_EX)
        yield
    finally:
        os.close(root)
