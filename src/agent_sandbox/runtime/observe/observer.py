"""The observer of a guest: a thread outside it that is notified of its system calls, decodes them, and lets every call continue.

Learning, simulation and a verbose log use it; it is not a wall. It reads the arguments of a call at one moment, and another thread of the
guest may change them afterwards. So a program can hide from it, but gains nothing: the view, the seccomp filter and the empty network hold
anyway.

A guest waits while its call is decoded, so nothing queues up here: a flood of calls slows only the guest. The number of observations is
limited; further calls continue undecoded, and a note says so. When the supervisor dies, the calls fail, and init ends the run as always.
When decoding fails, the call continues, and the failure is counted. The same thread answers the guest's DNS queries with `fake_dns`.

The guest can notice differences. A call takes some hundred microseconds longer, and milliseconds while the application keeps Python busy. A
signal before the notification is received interrupts the call; a program without SA_RESTART gets EINTR, and nothing was done then. The
guest cannot have a listener of its own (EBUSY). Its own filters otherwise work as usual, and calls that they refuse are not observed.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress

from agent_sandbox.kernel import wire
from agent_sandbox.kernel.notify import NotifyListener
from agent_sandbox.kernel.wire import SCRIPTS
from agent_sandbox.runtime.notified_thread import NotifiedThread, begin, receive_listener
from agent_sandbox.runtime.observe import FAILED, RESOLVE, TOO_MANY, SeenAttempt
from agent_sandbox.runtime.observe.decoder import Found, SyscallDecoder
from agent_sandbox.runtime.observe.fake_dns import LARGEST_QUESTION, FakeDns

MOST, MOST_CHARACTERS = 10_000, 4 << 20  # limits on distinct observations, and on the characters of their names
_QUESTIONS_AT_ONCE = 16


def observe(payload: socket.socket, sockets: Sequence[int], search: Sequence[str]) -> Observer | None:
    """Observe a guest from now on, and answer DNS queries on `sockets`. This function takes ownership of `sockets`.

    Return None if the guest sends an error message instead of its listener; the message stays unread. Raises OSError if the host does not
    permit observation.
    """
    try:
        listener = receive_listener(payload)
        if listener is None:
            return None
        taken, sockets = sockets, ()
        observer = Observer(listener, taken, search, python=os.path.realpath(sys.executable))
        begin(payload)
        return observer
    finally:
        wire.close_all(sockets)


class Observer(NotifiedThread):
    """The observer of one run, from the start of observation until `close`."""

    def __init__(self, listener: int, sockets: Sequence[int], search: Sequence[str], *, python: str) -> None:
        """Take ownership of `listener` and `sockets`. `python` is the path to report for the interpreter that runs code."""
        self._sockets = {fd: socket.socket(fileno=fd) for fd in sockets}
        self._names = FakeDns(search)
        servers = frozenset(sock.getsockname()[0] for sock in self._sockets.values())
        self._interpreter = SyscallDecoder(python, self._names, servers)
        self._seen: dict[Found, int] = {}
        self._characters = 0
        self._unseen = self._failed = 0
        self._begun = False
        self._lock = threading.Lock()
        super().__init__(NotifyListener(listener), "agent-sandbox-observer", purpose="observe the run", others=sockets)

    def begin(self) -> None:
        """Start recording: the guest gets its program now. Earlier calls were our own."""
        self._begun = True

    def taken(self) -> tuple[tuple[tuple[SeenAttempt, int], ...], tuple[str, ...]]:
        """Return the attempts since the last call, with counts, in order of first appearance; and notes about attempts not observed."""
        with self._lock:
            seen, self._seen, self._characters = self._seen, {}, 0
            unseen, failed, self._unseen, self._failed = self._unseen, self._failed, 0, 0
        notes = []
        if unseen:
            notes.append(f"{TOO_MANY}: {unseen} calls after {len(seen)} of them were not looked at")
        if failed:
            notes.append(f"{failed} {FAILED}")
        return tuple((SeenAttempt(*found), times) for found, times in seen.items()), tuple(notes)

    def _hear_other(self, fd: int) -> None:
        self._answer(self._sockets[fd])

    def _let_go(self) -> None:
        super()._let_go()
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
            except Exception:  # on any error: the guest must not wait for ever
                self._failed += 1
        elif self._begun:
            self._unseen += 1
        with self._lock:  # so that `taken` never misses a call that has continued
            if self._listener.go_on(call):  # the call was still waiting, so the memory read was its own
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
                with suppress(OSError):  # the client has gone or does not read; resolvers retry
                    sock.sendto(answer, address)

    def _keep(self, found: Found) -> None:
        _, target, program, _ = found
        if target.startswith(SCRIPTS) and target[len(SCRIPTS) :][:1] in ("", "/"):  # the directory of the program's own source
            return
        times = self._seen.get(found, 0)
        if not times:
            self._characters += len(target) + len(program)
        self._seen[found] = times + 1
