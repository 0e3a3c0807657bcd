"""The caller's side of a run: bytes passed on exactly as they come, signals passed on to the guest."""

from __future__ import annotations

import errno
import os
import select
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from agent_sandbox.runtime.base import Guest

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)

HANG_UP_SECONDS = 1.0  # for a program to save what it has, once the terminal that it was started from has gone


def interactive() -> bool:
    """Whether somebody sits at both ends of the run, and it is in the foreground: one in the background must not change the terminal."""
    try:
        return os.isatty(0) and os.isatty(1) and os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False


def pass_on(name: str, data: bytes) -> None:
    """Write all of it to our own standard output or error. Raises BrokenPipeError when nobody reads any more, which ends the run."""
    write_all(1 if name == "stdout" else 2, data)


def write_all(fd: int, data: bytes) -> None:
    """Write every byte, also to a descriptor that somebody else has made non-blocking."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:
            select.select([], [fd], [])


class Forwarding:
    """Passes signals on to one guest. The second one, of whichever kind, ends the run: the first may have been ignored."""

    def __init__(self, woken: int) -> None:
        self.received: list[int] = []
        self._woken = woken
        self._guest: Guest | None = None

    def begin(self, guest: Guest) -> None:
        """From now on there is somebody to pass them to."""
        guest.wake_on(self._woken)
        self._guest = guest

    def take(self, number: int, frame: FrameType | None) -> None:
        """A signal handler."""
        if self._guest is None:
            raise KeyboardInterrupt  # nothing of the guest has run: unwind, and leave nothing behind
        self.received.append(number)
        if len(self.received) == 1:
            self._guest.interrupt(number)
            if number == signal.SIGHUP and _hung_up():  # nobody is there to press Ctrl-C a second time: a timer does it for them
                signal.signal(signal.SIGALRM, self._time_is_up)
                signal.setitimer(signal.ITIMER_REAL, HANG_UP_SECONDS)
        else:
            self._guest.kill()

    def _time_is_up(self, number: int, frame: FrameType | None) -> None:
        if self._guest is not None:
            self._guest.kill()


def _hung_up() -> bool:
    """Whether one of our streams is a terminal that has gone. Somebody may also just send the signal, which is then like any other."""
    for fd in (0, 1, 2):
        try:
            os.tcgetpgrp(fd)
        except OSError as error:
            if error.errno == errno.EIO:
                return True
    return False


@contextmanager
def forwarding() -> Iterator[Forwarding]:
    """Forward signals for the length of the block, then handle them as before. Ignored ones (nohup) stay ignored."""
    woken, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    forward = Forwarding(woken)
    waker_before = signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    before = {number: signal.getsignal(number) for number in FORWARDED}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, forward.take)
    try:
        yield forward
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        signal.set_wakeup_fd(waker_before)
        os.close(waker)
        os.close(woken)
