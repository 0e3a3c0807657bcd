"""Forks of a process that has handlers for the signals that end a program.

Python calls functions of its modules after a fork, in the child and in the parent. What a handler raises there is printed as ignored and
lost, and the signal with it. Ctrl-C reaches a child as well as its parent, and a child that begins with its parent's handlers unwinds its
parent's work.
"""

from __future__ import annotations

import os

from agent_sandbox._fast.values import TYPE_CHECKING

if TYPE_CHECKING:
    import signal
else:
    import _signal as signal  # without the enumerations of `signal`

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def fork() -> int:
    """os.fork(), with the signals that end a program held until it is done. Raises OSError.

    In the child these signals have their default action, or are ignored as before.
    """
    mask = hold_signals()
    try:
        pid = os.fork()
    except BaseException:
        release_signals(mask)
        raise
    if pid == 0:
        drop_handlers()
    release_signals(mask)
    return pid


def hold_signals() -> set[int]:
    """Block the signals that end a program, and return the mask before."""
    return signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)


def release_signals(mask: set[int]) -> None:
    """Restore the mask before `hold_signals`. Signals that came meanwhile arrive now: their handlers may raise here."""
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def drop_handlers() -> None:
    """In a child: give the signals that end a program their default action, unless they are ignored."""
    for number in _ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
