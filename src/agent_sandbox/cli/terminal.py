"""The caller's terminal, lent to a guest that has a terminal of its own.

Ours is raw while the guest runs, so that every key, Ctrl-C too, reaches the guest's terminal, which then does with it what terminals
do. It is put back as it was, however the run ends. The guest never holds our terminal: bytes are passed between the two.
"""

from __future__ import annotations

import fcntl
import os
import signal
import struct
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from agent_sandbox.runtime.base import Guest, Terminal


def size() -> Terminal:
    """The size of our terminal; that of a very old one where it has none."""
    rows, columns, _, _ = struct.unpack("HHHH", fcntl.ioctl(0, termios.TIOCGWINSZ, bytes(8)))
    return Terminal(rows or 24, columns or 80)


class Lent:
    """Our terminal while it is lent. `begin` connects it with the guest's, so that a change of size is passed on."""

    def __init__(self) -> None:
        self._theirs: int | None = None

    def begin(self, guest: Guest) -> None:
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
