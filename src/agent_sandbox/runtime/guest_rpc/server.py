"""The supervisor's end of a conversation with a running program: one question, one answer, the next question.

Any process of the guest may write anything at any time. So nothing here waits for the guest, and no buffer grows with its data: one
question is held, and the next is read only after its answer is sent. A malformed question ends the run.
"""

from __future__ import annotations

import select
import time

from agent_sandbox._fast.contexts import suppress
from agent_sandbox._fast.values import TYPE_CHECKING
from agent_sandbox.kernel.wire import HELLO, TALK
from agent_sandbox.runtime.base import Nonsense, Talk
from agent_sandbox.runtime.process.pump import CHUNK, Poller

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

TURN = b'{"turn":'  # prefix of the message at the end of a turn
LARGEST = (16 << 20) + 4096  # bytes of a question: the largest data, and the JSON around it
HANGING_UP_SECONDS = 1.0  # allowed between the end of a conversation and the end of its guest
_REFUSAL = 8192  # largest error message of a guest whose program did not start


class Conversation:
    """The host's end of one conversation with a program, over the supervisor's end of a socket."""

    def __init__(self, line: socket.socket, talk: Talk, before: Callable[[], None]) -> None:
        """Answer questions on the socket `line` as `talk` says. `before` is called before each answer, which may take long."""
        line.setblocking(False)
        self.broken = ""  # why the conversation was ended
        self.hung_up = False  # whether the guest has closed its end
        self.answered = False  # whether a question was answered
        self.said: bytes | None = None  # the request for the next turn, once the current one is over
        self._line = line
        self._hear, self._clock = talk.hear, talk.clock
        self._before = before
        self._turns = bool(talk.offer["turns"])
        self._hung_up_at = 0.0
        self._poller: Poller | None = None
        self._begun = False
        self._unread = bytearray()
        self._unsent = memoryview(b"")
        self._asked: int | None = None  # number of the question that the next turn answers
        self._turn: bytes | None = None  # a turn that waits for the guest's request

    @property
    def lost(self) -> str:
        """The reason why the run must end, such as a malformed question or a closed socket; empty if it may go on."""
        if self.hung_up and self._turns and time.monotonic() - self._hung_up_at > HANGING_UP_SECONDS:
            return "it closed its line to its host"
        return self.broken

    def join(self, poller: Poller) -> None:
        """Serve the conversation from this poller, whenever the socket is readable or writable."""
        self._poller = poller
        self._arrange()
        self._listen()

    def give(self, turn: bytes) -> None:
        """Give the guest its next turn, as the answer to its request for a turn. If no request waits, the next request gets this answer."""
        self.said = None
        if self._asked is None:
            self._turn = turn
        else:
            number, self._asked = self._asked, None
            self._send(number, turn)

    @property
    def asker(self) -> int:
        """The pid, in the guest's namespace, of the process that asked for the next turn, as it says itself; 0 if nobody asks."""
        return 0 if self._asked is None else self._asked >> 32

    def set_aside(self) -> int | None:
        """Stop waiting for the process that asks for the next turn, which is stopped or has ended. Returns the number of its question.

        What it has sent is dropped. Afterwards another process of the guest may take its place.
        """
        number, self._asked, self._turn, self.said = self._asked, None, None, None
        self._unread.clear()
        with suppress(BlockingIOError):
            while self._line.recv(CHUNK):
                continue
        return number

    def return_to(self, number: int | None, said: bytes) -> None:
        """Wait again for the turn of a process that was set aside."""
        self._asked, self.said = number, said

    def last_words(self) -> bytes:
        """Return the error message of a guest that sent no greeting: why its program did not start."""
        if self._begun:
            return b""
        with suppress(OSError):  # nothing more to read
            while len(self._unread) <= _REFUSAL and (more := self._line.recv(CHUNK)):
                self._unread += more
        return b"" if self._unread.startswith(HELLO) else bytes(self._unread)

    def _arrange(self) -> None:
        if self._poller is None or self.hung_up or self.broken:
            return
        if self._unsent:
            self._poller.add(self._line.fileno(), self._send_on, event=select.POLLOUT)
        else:
            self._poller.add(self._line.fileno(), self._take)

    def _take(self) -> bool:
        try:
            data = self._line.recv(CHUNK)
        except BlockingIOError:
            return True
        except OSError:
            data = b""
        if not data:
            self._hang_up()
            return False
        self._unread += data
        self._listen()
        return not self.broken

    def _listen(self) -> None:
        """Answer the received questions one by one, until more bytes, or the next turn, must be waited for."""
        while not (self._unsent or self.broken or self.said is not None):
            question = self._next()
            if question is None:
                return
            number, words = question
            if not (self._turns and words.startswith(TURN)):
                self._answer(number, words)
            elif self._turn is not None:
                turn, self._turn = self._turn, None
                self._send(number, turn)
            else:
                self._asked, self.said = number, words

    def _answer(self, number: int, words: bytes) -> None:
        self._before()
        self._clock.stop()
        try:
            answer = self._hear(words)
        except Nonsense as error:
            self.broken = str(error)
        else:
            self.answered = True
            self._send(number, answer)
        finally:
            self._clock.resume()

    def _next(self) -> tuple[int, bytes] | None:
        """Return the number and content of the next question; None if it has not arrived completely. Sets `broken` if it is malformed."""
        if not self._begun:
            if not self._unread.startswith(HELLO):
                if len(self._unread) > _REFUSAL:
                    self.broken = "it did not begin as a conversation begins"
                return None
            del self._unread[: len(HELLO)]
            self._begun = True
        if len(self._unread) < TALK.size:
            return None
        length, number = TALK.unpack_from(self._unread)
        if length > LARGEST:
            self.broken = f"it announced {length} bytes, and no more than {LARGEST} are taken"
            return None
        end = TALK.size + length
        if len(self._unread) < end:
            return None
        words = bytes(self._unread[TALK.size : end])
        del self._unread[:end]
        return number, words

    def _send(self, number: int, answer: bytes) -> None:
        self._unsent = memoryview(TALK.pack(len(answer), number) + answer)
        self._flush()
        if self._unsent:
            self._arrange()

    def _send_on(self) -> bool:
        self._flush()
        if not self._unsent:
            self._arrange()
            self._listen()
        return not (self.hung_up or self.broken)

    def _flush(self) -> None:
        try:
            while self._unsent:
                self._unsent = self._unsent[self._line.send(self._unsent) :]
        except BlockingIOError:
            return
        except OSError:  # the guest has closed its end; its exit shows why
            self._unsent = memoryview(b"")
            self._hang_up()

    def _hang_up(self) -> None:
        self.hung_up, self._hung_up_at = True, self._hung_up_at or time.monotonic()
