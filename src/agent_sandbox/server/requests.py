"""Requests to a process that holds something after the command that began it has ended: connections, answers, and when it is over.

Each connection has a thread of its own. Requests come from processes of the same user, outside every sandbox (`messages.check_peer`).
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from agent_sandbox.errors import SandboxError
from agent_sandbox.server import messages
from agent_sandbox.server.messages import BrokenMessage, Message

MOST_CONNECTIONS = 16
UNHEARD_SECONDS = 2.0  # for a command to end by itself, after the one that began it has gone
_LOOK_SECONDS = 0.2


class RequestServer:
    """Answers requests until it is over. A subclass says what it does with one (`done`), and what it is of use for (`useless`)."""

    def __init__(self, idle_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.idle_seconds = idle_seconds
        self._clock = clock
        self._used = clock()
        self._connections = 0
        self._links: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._ending = False
        self.woken, self._waker = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)  # can be read when `over` may have changed

    def done(self, request: Message, link: socket.socket) -> Message:
        """Do what a request asks for, and return the answer. Raises `SandboxError`."""
        raise NotImplementedError

    @property
    def useless(self) -> bool:
        """Whether there is nothing to hold, whoever is connected no longer."""
        return False

    @property
    def over(self) -> bool:
        """Whether this process has no more to do: it was told to end, holds nothing of use, or was not used for too long."""
        with self._lock:
            if self._ending:
                return True
            unused = self.useless or self._clock() - self._used >= self.idle_seconds
            return unused and not self._connections  # whoever is connected gets an answer first

    @property
    def wait_seconds(self) -> float | None:
        """How long nothing has to be done unless something happens; None while somebody is connected."""
        with self._lock:
            return None if self._connections else max(0.0, self._used + self.idle_seconds - self._clock())

    @property
    def connections(self) -> int:
        """The number of those who are connected."""
        return self._connections

    def dismiss(self) -> None:
        """Let each connection end with the answer that is under way, or at once if there is none."""
        with self._lock:
            for link in self._links:
                with suppress(OSError):
                    link.shutdown(socket.SHUT_RD)

    def end(self) -> None:
        """End soon. For a handler of signals, too."""
        self._ending = True
        self.wake()

    def wake(self) -> None:
        """Let the thread that listens look whether it is over."""
        with suppress(BlockingIOError):  # it is full, and wakes
            os.write(self._waker, b"w")

    def use(self) -> None:
        """Note that it is used."""
        self._used = self._clock()

    def listen(self, listener: socket.socket) -> None:
        """Serve connections until it is over."""
        while not self.over:
            ready = select.select([listener.fileno(), self.woken], [], [], self.wait_seconds)[0]
            if self.woken in ready:
                os.read(self.woken, 1 << 10)
            if listener.fileno() not in ready:
                continue
            if (connection := messages.accepted(listener)) is None:
                continue
            try:
                messages.check_peer(connection)
            except OSError as error:
                with suppress(OSError):
                    messages.send(connection, messages.failure(SandboxError(f"not served: {error}")))
                connection.close()
                continue
            self.accept(connection)

    def accept(self, link: socket.socket) -> None:
        """Serve a connection in a thread of its own. One that may not be served is closed."""
        with self._lock:
            full = self._connections >= MOST_CONNECTIONS
            if not full:
                self._connections += 1
                self._links.add(link)
        if full:
            _refuse(link, f"{MOST_CONNECTIONS} commands use it already, which is the most")
            return
        try:
            threading.Thread(target=self.serve, args=(link,), daemon=True).start()
        except RuntimeError:  # no process is left for a thread: what is held goes on
            _refuse(link, "this machine, or this user, has no room for another thread")
            self._part(link)

    def serve(self, link: socket.socket) -> None:
        """Answer the requests of one connection until it is closed."""
        try:
            with link, suppress(OSError, BrokenMessage):
                while (request := messages.receive(link)) is not None:
                    self.use()
                    if "do" not in request:  # an interrupt, or something typed: it came too late, the turn had ended
                        continue
                    answer = self._answer(request, link)
                    try:
                        messages.send(link, answer)
                    except BrokenMessage as error:
                        messages.send(link, messages.failure(SandboxError(f"the answer cannot be sent: {error}", hint="ask for less")))
        finally:
            self._part(link)

    def _part(self, link: socket.socket) -> None:
        """Note that a connection has ended."""
        with self._lock:
            self._connections -= 1
            self._links.discard(link)
            self.use()
        self.wake()

    def _answer(self, request: Message, link: socket.socket) -> Message:
        try:
            return {"done": self.done(request, link)}
        except SandboxError as error:
            return messages.failure(error)
        except Exception as error:  # a request that nobody of ours sends, or a mistake of ours: others go on
            return messages.failure(SandboxError(f"the request could not be answered: {type(error).__name__}: {error}"))


def _refuse(link: socket.socket, why: str) -> None:
    """Say why a connection is not served, and close it."""
    with link, suppress(OSError):
        messages.send(link, messages.failure(SandboxError(why, hint="wait until one has ended")))


def attended(
    link: socket.socket,
    work: Callable[[], object],
    *,
    interrupt: Callable[[int], object],
    abandon: Callable[[], object],
    hear: Callable[[Message], object] | None = None,
    seconds: float | None = None,
    time_out: Callable[[], object] = lambda: None,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Do some work in a thread of its own, and listen to the command that asked for it meanwhile.

    The command may `interrupt` it with a signal, or go away: then it is interrupted with signal 0, and after some time `abandon` is called
    again and again. `hear` gets other messages, and may raise ValueError for one that it does not understand. After `seconds` `time_out`
    is called.
    """
    ended, ending = os.pipe2(os.O_CLOEXEC)

    def perform() -> None:
        try:
            work()
        finally:
            os.close(ending)

    worker = threading.Thread(target=perform, daemon=True)
    worker.start()
    gone_at: float | None = None
    ends_at = None if seconds is None else clock() + seconds
    while worker.is_alive():
        if gone_at is not None:
            worker.join(_LOOK_SECONDS)
            if clock() - gone_at > UNHEARD_SECONDS:
                abandon()
            continue
        ready = select.select([link.fileno(), ended], [], [], None if ends_at is None else max(0.0, ends_at - clock()))[0]
        if ended in ready:
            worker.join()
        elif ready:
            try:
                said = messages.receive(link)
                if said is not None and "interrupt" not in said and hear is not None:
                    hear(said)
                    continue
                number = None if said is None else int(said.get("interrupt", 0))
            except (OSError, BrokenMessage, TypeError, ValueError, KeyError):
                number = None
            if number is None:
                gone_at = clock()
            interrupt(number or 0)
        else:
            ends_at = None
            time_out()
    os.close(ended)
