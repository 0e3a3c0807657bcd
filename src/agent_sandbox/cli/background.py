"""The command line's own process: fork work that nobody waits for, and hide arguments from `ps`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

from agent_sandbox.errors import RuntimeUnavailable
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


_ARGUMENTS_START = 48 - 3  # of the fields of /proc/self/stat, counted from the one after the name, which is the third


def conceal(words: Iterable[str]) -> None:
    """Overwrite these words. Raises `RuntimeUnavailable` when that cannot be done: then nothing may be started with them."""
    try:
        with open("/proc/self/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        start, end = (int(field) for field in fields[_ARGUMENTS_START : _ARGUMENTS_START + 2])
        with open("/proc/self/mem", "r+b", buffering=0) as memory:
            memory.seek(start)
            line = memory.read(end - start)
            for word in sorted({word.encode("utf-8", "surrogateescape") for word in words if word}, key=len, reverse=True):
                line = line.replace(word, b"*" * len(word))
            memory.seek(start)
            memory.write(line)
    except (OSError, ValueError) as error:
        why = f"a secret on the command line cannot be kept from the guest: {error}"
        raise RuntimeUnavailable(why, missing=("/proc/self/mem",), hint="hand it over in AGENT_SANDBOX_CAPABILITY") from None
