"""The supervisor's side of a run with checkpoints: orders to its init about processes, and to its stagehand about layers.

The guest makes a copy of itself and says its pid; init keeps it. The stagehand freezes the layers under it. To go back, init ends all other
processes, the stagehand shows the layers of the checkpoint with a new one on top, and init wakes it. The pids come from the guest: who lies
about them spoils their own timeline.
"""

from __future__ import annotations

import marshal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from agent_sandbox._fast.values import TYPE_CHECKING
from agent_sandbox.errors import LaunchFailed, SandboxError
from agent_sandbox.kernel import stagehand, wire
from agent_sandbox.kernel.wire import CLEAR, DROP, HALT, KEEP, MAIN, ORDER, RESUME, RETIRE, STAGED, WAKE
from agent_sandbox.runtime.base import StateNotKept
from agent_sandbox.runtime.process.checkpoint_guard import CheckpointGuard, guard
from agent_sandbox.runtime.process.pump import Poller, Sink

if TYPE_CHECKING:
    from typing import Any

    from agent_sandbox.runtime.guest_rpc.server import Conversation
    from agent_sandbox.runtime.process.guest_handle import ProcessGuest

_LARGEST_ANSWER = 1 << 20
_SECONDS = 60.0  # a guard against a process that hangs: an order takes a millisecond


class Checkpoints:
    """Keeps states of one guest, and returns to them. Used by one thread at a time, while no turn is under way or the guest waits.

    A state is the pid of a sleeping copy, and the generations of layers that hold its files, newest first.
    """

    def __init__(self, guest: ProcessGuest, link: socket.socket) -> None:
        """Receive the scenes of the view from init, which waits, and start the stagehand with them. Raises `LaunchFailed`."""
        self._guest = guest
        self._link = link
        self._guard: CheckpointGuard | None = None
        self._kept: set[int] = set()
        link.settimeout(_SECONDS)
        try:
            message, _ = wire.receive(guest._control)
            if message["kind"] != "staged":
                raise LaunchFailed(f"the sandbox could not be built: {message['why']}", hint="run: agent-sandbox doctor")
            link.send(marshal.dumps(message["scenes"]))
            self._answer()
            guest._control.send(STAGED)
        except BaseException:
            self.close()
            raise

    def guard(self) -> None:
        """Guard the checkpoints of the guest, before it has its program. Raises OSError."""
        self._guard = guard(self._guest._payload, self._kept.__contains__)

    def close(self) -> None:
        """End the stagehand, and the guard: no process of the guest is left."""
        self._link.close()
        if self._guard is not None:
            self._guard.close()

    @property
    def memory_bytes(self) -> int:
        """The memory that the run uses now, as its limit counts it. Without a cgroup, a page that states share counts for each of them."""
        cgroup = self._guest._cgroup
        return cgroup.memory_bytes() if "memory" in cgroup.enforces else int(self._ask(stagehand.MEASURE))

    def keep(self, pid: int) -> None:
        """Protect a sleeping copy of the guest."""
        self._kept.add(pid)
        self._order(KEEP, pid)

    def drop(self, pid: int) -> None:
        """End a sleeping copy."""
        self._order(DROP, pid)
        self._await("dropped")
        self._kept.discard(pid)

    def advance(self, generation: str, chain: Sequence[str]) -> bool:
        """Freeze the layers of `chain` and begin another generation, unless nothing has changed. Return whether it was begun."""
        return bool(self._ask(stagehand.ADVANCE, generation, list(chain)))

    def writers(self) -> list[str]:
        """Return what still writes to frozen layers."""
        return list(self._ask(stagehand.SETTLE, list(self._kept)))

    def merge(self, newer: str, older: str, merged: str) -> None:
        """Make one generation of two frozen ones."""
        self._ask(stagehand.MERGE, newer, older, merged)

    def compare(self, old: Sequence[str], new: Sequence[str]) -> dict[str, str]:
        """Return the files that differ between two chains, by path, each with "new", "changed" or "gone"."""
        return dict(self._ask(stagehand.COMPARE, list(old), list(new)))

    def rewind(self, pid: int, generation: str, chain: Sequence[str]) -> None:
        """Go back to a state: end every process but the checkpoints, show its files, and wake it. Its new files go to `generation`."""
        self._order(CLEAR, pid)
        self._await("cleared")
        self._talk.set_aside()
        try:
            self._ask(stagehand.SHOW, generation, list(chain))
            self._order(WAKE, pid)
            self._order(MAIN, self._await_woken())
        except StateNotKept as error:  # nothing is left to go on with
            self._guest.kill()
            raise SandboxError(f"this session has ended: {error.message}", hint="open another session") from error

    @contextmanager
    def woken(self, pid: int, generation: str, chain: Sequence[str]) -> Iterator[Callable[[bytes, float], bytes]]:
        """Wake a state for the length of a block, with its files; all else stops meanwhile, and goes on afterwards as if nothing had been.

        Yield a function that gives it a turn, and returns what it says at its end; it raises `SandboxError` after so many seconds.
        """
        self._order(HALT, pid)
        self._await("halted")
        said = self._talk.said
        number = self._talk.set_aside()
        try:
            self._ask(stagehand.COVER, generation, list(chain))
            self._stand_alone(True)
            self._order(WAKE, pid)
            self._await_woken()
            yield self._take_turn
        finally:
            self._talk.set_aside()
            self._order(RETIRE)
            self._await("retired")
            self._stand_alone(False)
            self._ask(stagehand.UNCOVER)
            self._order(RESUME)
            self._talk.return_to(number, said or b"")

    def _stand_alone(self, alone: bool) -> None:
        if self._guard is not None:
            self._guard.alone = alone

    @property
    def _talk(self) -> Conversation:
        assert self._guest._talk is not None  # the program has begun
        return self._guest._talk

    def _order(self, kind: bytes, pid: int = 0) -> None:
        with suppress(OSError):  # init has ended, and its report follows
            self._guest._control.sendall(ORDER.pack(kind, pid))

    def _ask(self, order: str, *words: Any) -> Any:
        self._link.send(marshal.dumps((order, *words)))
        return self._answer()

    def _answer(self) -> Any:
        try:
            kind, value = marshal.loads(self._link.recv(_LARGEST_ANSWER))
        except (OSError, EOFError, ValueError) as error:
            kind, value = "broken", f"its stagehand has gone: {error}"
        if kind == "broken":
            self._guest.kill()
            raise SandboxError(f"this session has ended: {value}", hint="open another session")
        if kind == "failed":
            raise StateNotKept(f"its files could not be kept: {value}", hint="choose another state")
        return value

    def _await(self, kind: str) -> None:
        """Wait for a message of init. Raises `SandboxError` if the run ends or nothing comes."""
        messages = self._guest._messages
        self._wait_until(lambda: kind in messages, Poller(), f"nothing was {kind}")
        del messages[kind]

    def _await_woken(self) -> int:
        """Wait until a woken state asks for a turn. Return the pid that it says it has."""
        self._wait_until(lambda: self._talk.said is not None, self._listening(), "it did not wake")
        return self._talk.asker

    def _take_turn(self, work: bytes, seconds: float) -> bytes:
        self._talk.give(work)
        poller = self._listening()
        for name, fd in self._guest._outputs.items():
            poller.add(fd, Sink(name, fd, 0, self._guest.launch).take)
        why, hint = f"it gave no answer within {seconds:g} seconds", "ask for less, or give it more time: timeout=60"
        self._wait_until(lambda: self._talk.said is not None, poller, why, seconds=seconds, hint=hint)
        assert self._talk.said is not None
        return self._talk.said

    def _listening(self) -> Poller:
        poller = Poller()
        self._talk.join(poller)
        return poller

    def _wait_until(
        self,
        reached: Callable[[], bool],
        poller: Poller,
        otherwise: str,
        *,
        seconds: float = _SECONDS,
        hint: str = "choose another, or open another session",
    ) -> None:
        guest, until = self._guest, time.monotonic() + seconds
        control = guest._control.fileno()
        poller.add(control, guest._take_message)
        while not reached():
            if guest._messages.pop("gone", None):
                raise StateNotKept("the state is gone: states are given up first when memory runs out", hint="choose another state")
            if control not in poller or "exit" in guest._messages or self._talk.lost or time.monotonic() > until:
                raise SandboxError(f"a state of this session could not be used: {otherwise}", hint=hint)
            poller.wait(max(0.0, min(0.5, until - time.monotonic())))
