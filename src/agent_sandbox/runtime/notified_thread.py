"""A thread of the supervisor that is notified of system calls of one guest, and answers each: see `kernel.notify`."""

from __future__ import annotations

import errno
import os
import select
import socket
import threading
from collections.abc import Sequence

from agent_sandbox.kernel import wire
from agent_sandbox.kernel.notify import NotifyListener, take_listener
from agent_sandbox.kernel.wire import HEARD, LISTENING


def receive_listener(payload: socket.socket) -> int | None:
    """Return the listener of the guest at the other end, which waits for HEARD.

    Return None if the guest sends an error message instead of its listener; the message stays unread. Raises OSError if the host does not
    permit it.
    """
    if payload.recv(1, socket.MSG_PEEK) != LISTENING:
        return None
    guest = wire.credentials(payload)
    return take_listener(guest, int.from_bytes(wire.exactly(payload, 4), "big"))


def begin(payload: socket.socket) -> None:
    """Let the guest go on: its calls are answered from now on."""
    payload.send(HEARD)


class NotifiedThread:
    """Calls `_hear` for each call that waits, and `_hear_other` for other descriptors that are readable, until `close`."""

    def __init__(self, listener: NotifyListener, name: str, *, purpose: str, others: Sequence[int] = ()) -> None:
        """Take ownership of `listener`. Raises OSError if no thread can be started for this `purpose`."""
        self._listener = listener
        self._others = tuple(others)
        self._stop, self._stopper = os.pipe2(os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # the application may start no more threads
            self._let_go()
            os.close(self._stopper)
            raise OSError(errno.EAGAIN, f"no thread could be started to {purpose}") from None

    def close(self) -> None:
        """Stop the thread, once no process of the guest is left. Idempotent."""
        if self._stopper >= 0:
            os.close(self._stopper)
            self._stopper = -1
            self._thread.join()

    def _hear(self) -> None:
        """Answer a call that waits."""
        raise NotImplementedError

    def _hear_other(self, fd: int) -> None:
        """Serve another descriptor."""

    def _serve(self) -> None:
        poller = select.poll()
        for fd in (self._listener.fd, self._stop, *self._others):
            poller.register(fd, select.POLLIN)
        try:
            while True:
                ready = dict(poller.poll())
                if self._stop in ready:
                    return
                heard = ready.pop(self._listener.fd, 0)
                if heard & select.POLLIN:
                    self._hear()
                elif heard:  # hang-up: no process of the guest is left
                    poller.unregister(self._listener.fd)
                for fd in ready:
                    self._hear_other(fd)
        finally:
            self._let_go()

    def _let_go(self) -> None:
        self._listener.close()
        os.close(self._stop)
