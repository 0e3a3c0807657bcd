"""The guard of sleeping checkpoints: their guest has the same user, and must neither signal, slow down nor limit them.

A seccomp filter notifies us of each call that names another process. The number is in a register, which nobody can change meanwhile: a call
that names a checkpoint fails as if there were no such process, and every other continues. Their memory, descriptors and settings in /proc
are closed to the guest because they cannot be dumped. `kill(-1)` is refused: it would reach them all.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from agent_sandbox.kernel import wire
from agent_sandbox.kernel.notify import REACHING, Call, NotifyListener, take_listener
from agent_sandbox.kernel.wire import HEARD, LISTENING

_INT = 1 << 32
# Where a call has the numbers of processes, among its arguments.
_PLACES = {"tgkill": (0, 1), "rt_tgsigqueueinfo": (0, 1), "setpriority": (1,), "ioprio_set": (1,)}


def guard(payload: socket.socket, protected: Callable[[int], bool]) -> CheckpointGuard | None:
    """Guard the processes for which `protected` is true, by their pid in the guest's namespace, from now on.

    Return None if the guest sends an error message instead of its listener; the message stays unread. Raises OSError.
    """
    if payload.recv(1, socket.MSG_PEEK) != LISTENING:
        return None
    guest = wire.credentials(payload)
    listener = take_listener(guest, int.from_bytes(wire.exactly(payload, 4), "big"))
    made = CheckpointGuard(listener, protected)
    payload.send(HEARD)
    return made


class CheckpointGuard:
    """A thread that answers the calls of one guest, until `close`."""

    def __init__(self, listener: int, protected: Callable[[int], bool]) -> None:
        self._listener = NotifyListener(listener, REACHING)
        self._protected = protected
        self.alone = False  # while a woken state is looked at: it reaches no process but itself
        self._stop, self._stopper = os.pipe2(os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._serve, name="agent-sandbox-checkpoints", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # the application may start no more threads
            self._let_go()
            os.close(self._stopper)
            raise OSError(errno.EAGAIN, "no thread could be started to guard the checkpoints") from None

    def close(self) -> None:
        """Stop the thread, once no process of the guest is left. Idempotent."""
        if self._stopper >= 0:
            os.close(self._stopper)
            self._stopper = -1
            self._thread.join()

    def _serve(self) -> None:
        poller = select.poll()
        for fd in (self._listener.fd, self._stop):
            poller.register(fd, select.POLLIN)
        try:
            while True:
                ready = dict(poller.poll())
                if self._stop in ready:
                    return
                heard = ready.get(self._listener.fd, 0)
                if heard & select.POLLIN:
                    with suppress(OSError):  # its caller has gone
                        if (call := self._listener.next()) is not None:
                            self._answer(call)
                elif heard:  # hang-up: no process of the guest is left
                    poller.unregister(self._listener.fd)
        finally:
            self._let_go()

    def _let_go(self) -> None:
        self._listener.close()
        os.close(self._stop)

    def _answer(self, call: Call) -> None:
        _, caller, name, arguments = call
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


def _own(caller: int) -> set[int]:
    """Return the numbers of a process and its thread in its own pid namespace, by the number of the thread in ours."""
    try:
        with open(f"/proc/{caller}/status", encoding="utf-8", errors="replace") as file:
            fields = dict(line.split(":", 1) for line in file)
    except OSError:
        return set()
    return {int(fields[name].split()[-1]) for name in ("NSpid", "NStgid") if name in fields}
