"""One call of a tool while it is under way: its cancellation, its output so far, and its questions to a person."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from agent_sandbox.engine.approvals.inbox import Waiting

if TYPE_CHECKING:
    from agent_sandbox.policy.files.document import Document

LONGEST_QUESTION = 40_000  # characters that a client is asked to show; a longer question is answered with `agent-sandbox approve`
_LONGEST_LINE = 200


class ServedCall:
    """A call of a tool. Its work runs in another thread than the one that answers the client."""

    def __init__(self, tool: str, arguments: Mapping[str, Any], *, can_elicit: bool = False) -> None:
        """`can_elicit` says that the client can ask its user while the call waits."""
        self.tool, self.arguments = tool, arguments
        self.pending: list[Waiting] = []  # questions that no call waits for
        self.kinds: tuple[str, ...] = ()  # protected kinds of changes that the next question is about
        self.narrow: Document | None = None
        self.questions: deque[tuple[Waiting, tuple[str, ...]]] = deque()  # for the client's user, with their kinds
        self.printed = 0  # bytes
        self.last_line = ""
        self.asked_kinds: tuple[str, ...] = ()  # of the first pending question
        self.cancelled = False
        self._asks = can_elicit
        self._gave_up = False
        self._enders: list[Callable[[], object]] = []
        self._lock = threading.Lock()

    @property
    def asks_at_once(self) -> bool:
        """Whether the client's user can be asked while this call waits."""
        return self._asks and not self._gave_up

    def ask(self, waiting: Waiting) -> None:
        """Hand a waiting question to the client. One that is too long to be shown there is left to the command line."""
        if len(waiting.text) > LONGEST_QUESTION:
            self.give_up()
        else:
            self.questions.append((waiting, self.kinds))

    def give_up(self) -> None:
        """Wait for no more answers: the client cannot ask."""
        self._gave_up = True

    def wants_answer(self) -> bool:
        """Whether the call still waits for an answer."""
        return not (self.cancelled or self._gave_up)

    def output(self, stream: str, data: bytes) -> None:
        """Take note of output of the work, for progress."""
        self.printed += len(data)
        lines = data.decode(errors="replace").split("\n")
        self.last_line = next((line for line in reversed(lines) if line.strip()), self.last_line)[:_LONGEST_LINE]

    def ends_by(self, end: Callable[[], object]) -> None:
        """Register how the work is ended. If the call is cancelled already, end it now."""
        with self._lock:
            self._enders.append(end)
            cancelled = self.cancelled
        if cancelled:
            end()

    def finished(self) -> None:
        """Forget how the work is ended: it has ended."""
        with self._lock:
            self._enders.clear()

    def wait_later(self, waiting: Waiting) -> None:
        """Remember a question that goes on waiting after this call."""
        if not self.pending:
            self.asked_kinds = self.kinds
        self.pending.append(waiting)

    def cancel(self) -> None:
        """End the work."""
        with self._lock:
            self.cancelled = True
            enders = list(self._enders)
        for end in enders:
            end()
