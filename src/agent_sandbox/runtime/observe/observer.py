"""See what a guest tries, from outside it: a thread that hears of its calls, looks at them, and lets every one go on.

For learning, simulating and a verbose log; never the wall. What it sees is what the call named at the moment of the look, and another
thread of the guest may have put something else there since: a program that wants to can hide from it, and cannot do anything by that
which the view, the filter and the empty network would not have let it do anyway.

A guest waits while its call is looked at, so nothing piles up here: a flood of calls is slow by its own doing. What is kept is bounded;
beyond that calls are let go unseen, and it is said. When the supervisor dies, the calls fail with it, and init ends the run as always. When
something here goes wrong, the call goes on, and it is counted. The made-up names of `fake_dns` are answered for by the same thread.

Not quite the same for the guest: a call takes some hundred microseconds longer, and milliseconds while the application keeps Python busy.
A signal that comes before the call has been heard of interrupts it, which a program without SA_RESTART is told (EINTR); nothing was done
then. And it cannot have a listener of its own (EBUSY). Its own filters otherwise work as ever, and what they refuse is not told.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress

from agent_sandbox.kernel import wire
from agent_sandbox.kernel.notify import Listener, take_listener
from agent_sandbox.kernel.wire import HEARD, LISTENING, SCRIPTS
from agent_sandbox.runtime.observe.decoder import Found, Interpreter
from agent_sandbox.runtime.observe.events import FAILED, RESOLVE, TOO_MANY, Seen
from agent_sandbox.runtime.observe.fake_dns import LARGEST_QUESTION, Names

MOST, MOST_CHARACTERS = 10_000, 4 << 20  # of what is kept: things that differ, and all that they are called
_QUESTIONS_AT_ONCE = 16


def observe(payload: socket.socket, sockets: Sequence[int], search: Sequence[str]) -> Observer | None:
    """Hear of what a guest does from here on, and answer on these sockets, which are taken over. Raises OSError where the host does not
    let us. None when the guest says something else than that it is to be heard: why it cannot be."""
    try:
        if payload.recv(1, socket.MSG_PEEK) != LISTENING:
            return None
        guest = wire.credentials(payload)
        listener = take_listener(guest, int.from_bytes(wire.exactly(payload, 4), "big"))
        taken, sockets = sockets, ()
        observer = Observer(listener, taken, search, python=os.path.realpath(sys.executable))
        payload.send(HEARD)
        return observer
    finally:
        wire.close_all(sockets)


class Observer:
    """Of one run, from when its guest begins to be observed until `close`."""

    def __init__(self, listener: int, sockets: Sequence[int], search: Sequence[str], *, python: str) -> None:
        """Takes both kinds of descriptors over. `python` is what to call the interpreter that code runs in."""
        self._listener = Listener(listener)
        self._sockets = {fd: socket.socket(fileno=fd) for fd in sockets}
        self._names = Names(search)
        servers = frozenset(sock.getsockname()[0] for sock in self._sockets.values())
        self._interpreter = Interpreter(python, self._names, servers)
        self._seen: dict[Found, int] = {}
        self._characters = 0
        self._unseen = self._failed = 0
        self._begun = False
        self._lock = threading.Lock()
        self._stop, self._stopper = os.pipe2(os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._serve, name="agent-sandbox-observer", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # the application may not have another thread
            self._let_go()
            os.close(self._stopper)
            raise OSError(errno.EAGAIN, "no thread could be started to observe the run") from None

    def begin(self) -> None:
        """The guest gets its program: what it did before was our own doing."""
        self._begun = True

    def taken(self) -> tuple[tuple[tuple[Seen, int], ...], tuple[str, ...]]:
        """What was seen since the last time, how often, in the order of first appearance; and what is to be said of it."""
        with self._lock:
            seen, self._seen, self._characters = self._seen, {}, 0
            unseen, failed, self._unseen, self._failed = self._unseen, self._failed, 0, 0
        notes = []
        if unseen:
            notes.append(f"{TOO_MANY}: {unseen} calls after {len(seen)} of them were not looked at")
        if failed:
            notes.append(f"{failed} {FAILED}")
        return tuple((Seen(*found), times) for found, times in seen.items()), tuple(notes)

    def close(self) -> None:
        """When nothing of the guest lives. Idempotent."""
        if self._stopper >= 0:
            os.close(self._stopper)
            self._stopper = -1
            self._thread.join()

    def _serve(self) -> None:
        poller = select.poll()
        for fd in (self._listener.fd, self._stop, *self._sockets):
            poller.register(fd, select.POLLIN)
        try:
            while True:
                ready = dict(poller.poll())
                if self._stop in ready:
                    return
                heard = ready.pop(self._listener.fd, 0)
                if heard & select.POLLIN:
                    self._hear()
                elif heard:  # nobody is left who could call
                    poller.unregister(self._listener.fd)
                for fd in ready:
                    self._answer(self._sockets[fd])
        finally:
            self._let_go()

    def _let_go(self) -> None:
        self._listener.close()
        os.close(self._stop)
        for sock in self._sockets.values():
            sock.close()

    def _hear(self) -> None:
        call = self._listener.next()
        if call is None:
            return
        seen: list[Found] = []
        if self._begun and not self._full:
            try:
                seen = self._interpreter.seen(call)
            except Exception:  # whatever it was, the guest must not wait for ever
                self._failed += 1
        elif self._begun:
            self._unseen += 1
        with self._lock:  # so that what has been done is never asked for before it is kept
            if self._listener.go_on(call):  # it was waiting all the time, so what was read is its own
                for each in seen:
                    self._keep(each)

    @property
    def _full(self) -> bool:
        return len(self._seen) >= MOST or self._characters >= MOST_CHARACTERS

    def _answer(self, sock: socket.socket) -> None:
        for _ in range(_QUESTIONS_AT_ONCE):
            try:
                packet, address = sock.recvfrom(LARGEST_QUESTION + 1)
            except OSError:
                return
            answer, name = self._names.answer(packet)
            with self._lock:
                if name and self._begun and not self._full:
                    self._keep((RESOLVE, name, self._interpreter.asking, True))
            if answer:
                with suppress(OSError):  # it has gone, or reads nothing: names are asked for again
                    sock.sendto(answer, address)

    def _keep(self, found: Found) -> None:
        _, target, program, _ = found
        if target.startswith(SCRIPTS) and target[len(SCRIPTS) :][:1] in ("", "/"):  # where code is put before it runs
            return
        times = self._seen.get(found, 0)
        if not times:
            self._characters += len(target) + len(program)
        self._seen[found] = times + 1
