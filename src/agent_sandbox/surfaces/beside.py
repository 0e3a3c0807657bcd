"""Do something beside the program, in a fork of it that nobody waits for: the command line has one thread and ends soon."""

from __future__ import annotations

import os
from collections.abc import Callable

from agent_sandbox.kernel import wire

_NICE = 10


def in_a_child(do: Callable[[], None]) -> None:
    """Do it in a child that has nothing of ours but memory: its copy of a lock would hold the lock, of a pipe keep the reader waiting."""
    if os.fork():
        return
    try:
        os.setsid()
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for standard in (0, 1, 2):
            os.dup2(nothing, standard)
        wire.close_others(())
        os.nice(_NICE)
        do()
    finally:
        os._exit(0)
