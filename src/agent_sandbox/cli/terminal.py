"""The caller's terminal, lent to a guest that has a terminal of its own.

Ours is raw while the guest runs, so that every key, Ctrl-C too, reaches the guest's terminal, which then does with it what terminals
do. It is put back as it was, however the run ends. The guest never holds our terminal: bytes are passed between the two.
"""

from __future__ import annotations

import errno
import fcntl
import os
import select
import signal
import struct
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from agent_sandbox.runtime.base import Terminal
from agent_sandbox.runtime.process.guest_handle import ProcessGuest


def size() -> Terminal:
    """The size of our terminal; that of a very old one where it has none."""
    rows, columns, _, _ = struct.unpack("HHHH", fcntl.ioctl(0, termios.TIOCGWINSZ, bytes(8)))
    return Terminal(rows or 24, columns or 80)


class Lent:
    """Our terminal while it is lent. `begin` connects it with the guest's, so that a change of size is passed on."""

    def __init__(self) -> None:
        self._theirs: int | None = None

    def begin(self, guest: ProcessGuest) -> None:
        """Make our terminal raw, now that there is somebody to type to; before, Ctrl-C is for us.

        The descriptor of the guest's terminal is copied, because the guest's own closes with its streams.
        """
        tty.setraw(0, termios.TCSADRAIN)
        if guest.terminal is not None:
            self._theirs = os.dup(guest.terminal)
            self.resize(signal.SIGWINCH, None)  # it may have changed while the guest was being made

    def resize(self, number: int, frame: FrameType | None) -> None:
        """A signal handler: give the guest's terminal the size of ours. The kernel tells the programs in it."""
        if self._theirs is not None:
            with suppress(OSError):
                fcntl.ioctl(self._theirs, termios.TIOCSWINSZ, fcntl.ioctl(0, termios.TIOCGWINSZ, bytes(8)))

    def end(self) -> None:
        """Let go of the guest's terminal."""
        if self._theirs is not None:
            os.close(self._theirs)
            self._theirs = None


@contextmanager
def lent() -> Iterator[Lent]:
    """Lend our terminal for the length of the block, from `Lent.begin` on."""
    before = termios.tcgetattr(0)
    loan = Lent()
    resized = signal.signal(signal.SIGWINCH, loan.resize)
    try:
        yield loan
    finally:
        with suppress(termios.error):  # it has gone: there is nothing to put back
            termios.tcsetattr(0, termios.TCSADRAIN, before)
        signal.signal(signal.SIGWINCH, resized)
        loan.end()


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
        self._guest: ProcessGuest | None = None

    def begin(self, guest: ProcessGuest) -> None:
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
