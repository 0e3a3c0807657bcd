"""The guest's end of a conversation with the host: send a question, wait for the answer.

All threads and processes of the guest together ask one question at a time, so that no thread reads the answer to another. The supervisor
does not rely on that.
"""

from __future__ import annotations

import _thread
import fcntl
import os

from agent_sandbox._fast.contexts import contextmanager, suppress
from agent_sandbox._fast.values import TYPE_CHECKING
from agent_sandbox.kernel.wire import HELLO, TALK

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator

_CHUNK = 1 << 18
_LARGEST_ANSWER = 1 << 25  # a larger length means that another reader has read a part of the stream

own_descriptors: set[int] = set()  # of the guest's end itself, not of the program


class Speaker:
    """The client of a conversation, over a socket that threads and forks of this process share."""

    def __init__(self, line: socket.socket) -> None:
        line.settimeout(None)
        self._line = line
        self._count = 0
        self._unread = bytearray()
        self._turnstile = _turnstile()
        self._start_afresh()
        os.register_at_fork(after_in_child=self._start_afresh)

    def begin(self) -> None:
        """Send the greeting: the program starts now, and all later bytes may come from it."""
        self._line.sendall(HELLO)

    def _start_afresh(self) -> None:
        """Reset the state at the start and in each fork, where the lock and the bytes read so far may belong to a thread of the parent."""
        self._lock = _thread.allocate_lock()
        self._asking = 0  # id of the thread that waits for an answer
        self._unread.clear()

    def take_over(self) -> None:
        """Take the place of the process that spoke before: a copy of it that was woken while the other waits, stopped, for an answer."""
        own_descriptors.discard(self._turnstile)
        with suppress(OSError):  # a fork has closed it
            os.close(self._turnstile)
        self._turnstile = _turnstile()
        self._start_afresh()

    @property
    def busy(self) -> bool:
        """Whether a thread asks just now."""
        return self._lock.locked()

    def ask(self, question: bytes) -> bytes:
        """Send a question and return the host's answer.

        Raises ConnectionError if no answer can come, RuntimeError if this thread is already waiting for an answer.
        """
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
        """Return the answer to the question with this number. Drops answers to other questions, whose threads no longer wait."""
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


def _turnstile() -> int:
    """Return a descriptor to lock: of a pipe that nobody uses. The kernel releases the lock at exit.

    A file in memory would do, too, but there are none if only named programs may be executed.
    """
    reader, writer = os.pipe()
    os.close(reader)
    own_descriptors.add(writer)
    return writer
