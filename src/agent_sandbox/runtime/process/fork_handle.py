"""The supervisor's handle of a fork: a guest that was not started, but copied from a sleeping state of a session.

It has streams and a line of its own to the supervisor, and a socket to the init of the session, which ends it and reports its end. It
counts against the limits of the session, in the same cgroup. `checkpoints` makes it.
"""

from __future__ import annotations

import os
import socket
import time

from agent_sandbox._fast.values import TYPE_CHECKING
from agent_sandbox.errors import SandboxError
from agent_sandbox.kernel import wire
from agent_sandbox.kernel.wire import FORKED, READY
from agent_sandbox.runtime.guest_rpc.server import Conversation
from agent_sandbox.runtime.process.guest_handle import ProcessGuest
from agent_sandbox.runtime.process.pump import Poller, make_pipes
from agent_sandbox.runtime.process.zygote import GuestLine

if TYPE_CHECKING:
    from collections.abc import Callable

    from agent_sandbox.runtime.base import Launch
    from agent_sandbox.runtime.process.zygote import Zygote


class ForkedGuest(ProcessGuest):
    """A fork of a session's state. It takes turns as its session did, and ends without it."""

    def __init__(self, session: ProcessGuest, launch: Launch, released: Callable[[ForkedGuest], None]) -> None:
        """Make its sockets and pipes. `released` is called once, when it has ended and is closed. Raises OSError."""
        self._theirs: list[int] = []  # the line and the three streams, until they are handed over
        self._their_control = -1
        super().__init__(launch, session._keeper)
        self._released = released
        self._cgroup = session._cgroup
        self._used_before = session._used_before
        self.notes = session.notes
        self.layers = None if session.layers is None else os.dup(session.layers)

    def _begin_at(self, keeper: Zygote) -> GuestLine:
        control, their_control = socket.socketpair()
        payload, their_payload = socket.socketpair()
        self._their_control = their_control.detach()
        self._theirs.append(their_payload.detach())
        make_pipes(self.launch.stdin, self._outputs, self._theirs)
        self._stdin = self._outputs.pop("stdin", None)
        return GuestLine(0, control, payload)

    @property
    def streams(self) -> list[tuple[int, int]]:
        """Device and inode of what it gets as descriptors 0 to 3."""
        line, *streams = ((status.st_dev, status.st_ino) for status in map(os.fstat, self._theirs))
        return [*streams, line]

    def hand_control_to(self, init: socket.socket) -> None:
        """Send init the socket for orders about this fork."""
        socket.send_fds(init, [FORKED], [self._their_control])
        os.close(self._their_control)
        self._their_control = -1

    def hand_streams_to(self, state: socket.socket) -> None:
        """Send the first process of the fork its line and its streams, and wait until it has them. Raises `SandboxError`."""
        socket.send_fds(state, [FORKED], self._theirs)
        self._await(lambda: bool(self._payload.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)))
        if self._payload.recv(1) != READY:
            raise SandboxError("a fork could not be made: it gave no valid answer", hint="the program may have changed how it answers")

    def let_begin(self) -> None:
        """Let its program begin."""
        wire.close_all(self._theirs)
        self._theirs = []
        self._payload.sendall(READY)
        talk = self.launch.talk
        assert talk is not None  # of a session
        talk.clock.stop, talk.clock.resume = self._stop_clock, self._resume_clock
        self._talk = Conversation(self._payload, talk, self._start_clock)

    def await_begin(self) -> None:
        """Wait until its program asks for its first turn. Raises `SandboxError`."""
        poller, talk = Poller(), self._talk
        assert talk is not None
        talk.join(poller)
        self._await(lambda: talk.said is not None, poller)

    def _await(self, reached: Callable[[], bool], poller: Poller | None = None) -> None:
        poller, until = poller or Poller(), time.monotonic() + 60.0
        if self._payload.fileno() not in poller:
            poller.add(self._payload.fileno(), lambda: False)
        poller.add(self._control.fileno(), self._take_message)
        while not _is(reached):
            if "exit" in self._messages or self._control.fileno() not in poller or time.monotonic() > until:
                raise SandboxError("a fork could not be made: it ended", hint="it may lack memory or processes: see the session's limits")
            poller.wait(0.5)

    def close(self) -> None:
        """End the fork if it runs, wait until it has ended, and free its resources. The session and other forks go on. Idempotent."""
        if self._control.fileno() < 0:
            return
        if self._their_control < 0:  # else init knows nothing of it, and there is nothing to end
            self.settle()
        self._line.close()
        left = (self.layers, self._stdin, *self._outputs.values(), *self._theirs)
        self.layers, self._stdin, self._outputs, self._theirs = None, None, {}, []
        wire.close_all([fd for fd in (*left, self._their_control) if fd is not None and fd >= 0])
        self._their_control = -1
        self._released(self)


def _is(reached: Callable[[], bool]) -> bool:
    try:
        return reached()
    except BlockingIOError:
        return False
