"""The way of a session's state between its guest and a durable checkpoint. An attachment of every session of turns.

The guest alone reads and writes the state; see `runtime.wasm.turn_loop`. Here its pieces pass as opaque bytes, bounded, and the facts about
it are checked: a guest that has broken out of its engine may say anything.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from agent_sandbox._fast.values import TYPE_CHECKING, dataclass, replace
from agent_sandbox.engine.attachments import Attachment
from agent_sandbox.errors import CheckpointError
from agent_sandbox.kernel.mount_plan import Tmpfs
from agent_sandbox.runtime.base import Nonsense
from agent_sandbox.runtime.guest_rpc.transfer import FACTS, GO_ON, LARGEST_PIECE, PIECE, READ, REFUSED

if TYPE_CHECKING:
    from typing import Any

    from agent_sandbox.runtime.base import Launch

STOP = b"stop"
_NO_SCRATCH = "/sys"  # a tmpfs that nobody can write to
_LONGEST_FACTS = 1000


@dataclass(frozen=True)
class Resumption:
    """A saved session that shall go on. `content` returns the next piece of its state, and nothing at its end.

    `env` are the variables that are set in addition to those it had.
    """

    image: str
    memory_bytes: int
    content: Callable[[], bytes]
    env: Mapping[str, str]


class StateSink:
    """Receives the state of a session that is saved. An error does not end the session: the guest is told to stop."""

    def __init__(self, begin: Callable[[str, int], None], add: Callable[[bytes], None]) -> None:
        """`begin` gets the image and the size of memory that the guest names, `add` each piece. Both may raise."""
        self.error: Exception | None = None
        self.most_bytes = 0  # more than that cannot be the state of the session
        self._begin, self._add = begin, add
        self._begun = False

    def take(self, words: bytes) -> bytes:
        """Take a message of the guest, and return the answer. Raises `Nonsense` if it is malformed."""
        if len(words) > len(PIECE) + LARGEST_PIECE:
            raise Nonsense("a piece of its state is too long")
        try:
            if words.startswith(PIECE) and self._begun:
                self.most_bytes -= len(words)
                if self.most_bytes < 0:
                    raise Nonsense("it sent more than its limits let it have")
                self._add(words[len(PIECE) :])
            elif words.startswith(FACTS) and not self._begun:
                self._begun = True
                self._begin(*_facts(words[len(FACTS) :]))
            else:
                raise Nonsense("it sent its state out of order")
        except Nonsense:
            raise
        except Exception as error:
            self.error = error
            return STOP
        return GO_ON


class StateTransfer(Attachment):
    """Passes the state of one session: from `resumption` when it starts, and to a `StateSink` whenever it is saved."""

    def __init__(self, resumption: Resumption | None = None) -> None:
        self.scratch: tuple[str, ...] = ()  # directories of the view that are private to the session
        self._resumption = resumption
        self._sink: StateSink | None = None
        self._inner: Callable[[bytes], bytes] | None = None

    def before(self, launch: Launch) -> Launch:
        """Return the launch with this attachment in its conversation, before the tools."""
        self.scratch = tuple(step.target for step in launch.root.steps if isinstance(step, Tmpfs) and step.target != _NO_SCRATCH)
        if launch.talk is None:
            return launch
        self._inner = launch.talk.hear
        offer, resumed = launch.talk.offer, self._resumption
        if resumed is not None:
            about = {"image": resumed.image, "memory_bytes": resumed.memory_bytes, "env": dict(resumed.env)}
            offer = {**offer, "resume": about}
        return replace(launch, talk=replace(launch.talk, hear=self.hear, offer=offer))

    def end_resumption(self) -> None:
        """Answer no more questions for the state that the session was resumed from."""
        self._resumption = None

    def receive(self, sink: StateSink | None) -> None:
        """Let `sink` take the state of the session from now on; None ends that."""
        self._sink = sink

    def hear(self, words: bytes) -> bytes:
        """Answer a message of the guest. Raises `CheckpointError` if it cannot go on from the state, `Nonsense` for a malformed message."""
        if not words.startswith(b"\0"):
            assert self._inner is not None
            return self._inner(words)
        if self._sink is not None:
            return self._sink.take(words)
        if self._resumption is not None and words == READ:
            return self._resumption.content()
        if self._resumption is not None and words.startswith(REFUSED):
            why = words[len(REFUSED) :][:1000].decode("utf-8", "replace")
            why = "".join(each if each.isprintable() else "?" for each in why)
            raise CheckpointError(f"the checkpoint cannot be resumed: {why}", hint="resume it under the rules it was saved under")
        raise Nonsense("it sent its state unasked")


def _facts(text: bytes) -> tuple[str, int]:
    try:
        value: Any = json.loads(text) if len(text) <= _LONGEST_FACTS else None
        match value:
            case {"image": str(image), "memory_bytes": int(size), **rest} if not rest:
                return image, size
    except (ValueError, RecursionError):
        pass
    raise Nonsense("it described its state in another way")
