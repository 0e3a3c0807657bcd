"""The guest's end of a conversation: ask, and wait for the answer. One question at a time, whichever thread or process of the guest asks.

Nothing of it is trusted by who answers. It is here so that an honest program does not get the answers of its own other thread.
"""

from __future__ import annotations

import _thread
import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from agent_sandbox.kernel.wire import HELLO, TALK

_CHUNK = 1 << 18
_LARGEST_ANSWER = 1 << 25  # a longer one is none of ours: somebody else has read a part of it


class Speaker:
    """Questions over a socket that threads and forks of this process share."""

    def __init__(self, line: socket.socket) -> None:
        line.settimeout(None)
        self._line = line
        self._count = 0
        self._unread = bytearray()
        self._turnstile = os.memfd_create("conversation", os.MFD_CLOEXEC)  # a file to lock; the kernel frees the lock of who dies
        self._start_afresh()
        os.register_at_fork(after_in_child=self._start_afresh)

    def begin(self) -> None:
        """Say that the program starts now: whatever comes from here on may be the program's own words."""
        self._line.sendall(HELLO)

    def _start_afresh(self) -> None:
        """Also in a fork: a thread that is not there any more may have held the lock, and what it had read of its answer is its own."""
        self._lock = _thread.allocate_lock()
        self._asking = 0  # the thread that is
        self._unread.clear()

    def ask(self, question: bytes) -> bytes:
        """The answer. Raises ConnectionError when there will be none, RuntimeError in a handler that interrupted a question."""
        if self._asking == _thread.get_ident():
            raise RuntimeError("this thread is waiting for an answer of the host already")
        with self._lock, self._alone():
            self._asking = _thread.get_ident()
            try:
                self._count += 1
                number = os.getpid() << 32 | self._count & 0xFFFFFFFF
                self._line.sendall(TALK.pack(len(question), number) + question)
                return self._answer_to(number)
            finally:
                self._asking = 0

    @contextmanager
    def _alone(self) -> Iterator[None]:
        fcntl.lockf(self._turnstile, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._turnstile, fcntl.LOCK_UN)

    def _answer_to(self, number: int) -> bytes:
        """Answers to other questions are nobody's any more: an exception or a signal ended whoever had asked."""
        while True:
            length, answered = TALK.unpack(self._read(TALK.size))
            if length > _LARGEST_ANSWER:
                raise ConnectionError("the conversation with the host has been broken")
            answer = self._read(length)
            if answered == number:
                return answer

    def _read(self, count: int) -> bytes:
        while len(self._unread) < count:
            part = self._line.recv(_CHUNK)
            if not part:
                raise ConnectionError("the host listens no longer")
            self._unread += part
        taken = bytes(self._unread[:count])
        del self._unread[:count]
        return taken
