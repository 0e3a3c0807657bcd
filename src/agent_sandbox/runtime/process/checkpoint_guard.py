"""The guard of sleeping checkpoints: their guest has the same user, and must neither signal, slow down nor limit them.

A seccomp filter notifies us of each call that names another process. The number is in a register, which nobody can change meanwhile: a call
that names a checkpoint fails as if there were no such process, and every other continues. Their memory, descriptors and settings in /proc
are closed to the guest because they cannot be dumped. `kill(-1)` is refused: it would reach them all.

A fork of a state is in a pid namespace of its own, in which there are no checkpoints: its calls continue. The call that makes a fork is
refused, unless it comes from the very state that the supervisor has just asked for one.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable
from contextlib import suppress

from agent_sandbox.kernel.notify import REACHING, Call, NotifyListener
from agent_sandbox.runtime.notified_thread import NotifiedThread, begin, receive_listener

_INT = 1 << 32
# Where a call has the numbers of processes, among its arguments.
_PLACES = {"tgkill": (0, 1), "rt_tgsigqueueinfo": (0, 1), "setpriority": (1,), "ioprio_set": (1,)}


def guard(payload: socket.socket, init: int, protected: Callable[[int], bool]) -> CheckpointGuard | None:
    """Guard the processes for which `protected` is true, by their pid in the guest's namespace, from now on. `init` is its first process.

    Return None if the guest sends an error message instead of its listener; the message stays unread. Raises OSError.
    """
    listener = receive_listener(payload)
    if listener is None:
        return None
    made = CheckpointGuard(listener, len(process_numbers(init)), protected)
    begin(payload)
    return made


class CheckpointGuard(NotifiedThread):
    """Answers the calls of one guest, until `close`."""

    def __init__(self, listener: int, depth: int, protected: Callable[[int], bool]) -> None:
        """`depth` is how many numbers a process of the guest has, from our pid namespace to its own; one of a fork has more."""
        self._depth = depth
        self._protected = protected
        self.alone = False  # while a woken state is looked at: it reaches no process but itself
        self.splitting = 0  # the state that is to make a fork now
        self.has_forks = False
        super().__init__(NotifyListener(listener, REACHING), "agent-sandbox-checkpoints", purpose="guard the checkpoints")

    def _hear(self) -> None:
        with suppress(OSError):  # its caller has gone
            if (call := self._listener.next()) is not None:
                self._answer(call)

    def _answer(self, call: Call) -> None:
        _, caller, name, arguments = call
        if name == "clone":
            self._answer_split(call)
            return
        if self.has_forks and len(process_numbers(caller)) > self._depth:
            self._listener.go_on(call)
            return
        for place in _PLACES.get(name, (0,)):
            number = arguments[place] % _INT
            number = number - _INT if number >= _INT // 2 else number
            if name == "kill" and number == -1:
                self._listener.refuse(call, errno.EPERM)
                return
            if number and (self._protected(abs(number)) or (self.alone and abs(number) not in _own(caller))):
                self._listener.refuse(call, errno.ESRCH)
                return
        self._listener.go_on(call)

    def _answer_split(self, call: Call) -> None:
        numbers = process_numbers(call[1])
        if self.splitting and len(numbers) == self._depth and numbers[-1] == self.splitting:
            self.splitting = 0
            self._listener.go_on(call)
        else:
            self._listener.refuse(call, errno.EPERM)


def process_numbers(process: int) -> list[int]:
    """Return the numbers of a process in our pid namespace and each one below, to its own; empty if it has gone."""
    try:
        with open(f"/proc/{process}/status", encoding="utf-8", errors="replace") as file:
            return next(([*map(int, line.split()[1:])] for line in file if line.startswith("NSpid:")), [])
    except OSError:
        return []


def _own(caller: int) -> set[int]:
    """Return the numbers of a process and its thread in its own pid namespace, by the number of the thread in ours."""
    try:
        with open(f"/proc/{caller}/status", encoding="utf-8", errors="replace") as file:
            fields = dict(line.split(":", 1) for line in file)
    except OSError:
        return set()
    return {int(fields[name].split()[-1]) for name in ("NSpid", "NStgid") if name in fields}
