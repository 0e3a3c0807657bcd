"""The supervisor's side of a run with checkpoints: orders to its init about processes, and to its stagehand about layers.

The guest makes a copy of itself and says its pid; init keeps it. The stagehand freezes the layers under it. To go back, init ends all other
processes, the stagehand shows the layers of the checkpoint with a new one on top, and init wakes it. The pids come from the guest: who lies
about them spoils their own timeline.

A fork is a copy of a checkpoint in namespaces of its own. These lie below those of the session, so the session could see its processes:
while there are forks, all its processes are stopped. The state that is to fork goes on for a moment, before the program of a fork begins.
"""

from __future__ import annotations

import marshal
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from agent_sandbox._fast.values import TYPE_CHECKING
from agent_sandbox.errors import LaunchFailed, SandboxError
from agent_sandbox.kernel import stagehand, wire
from agent_sandbox.kernel.wire import ADOPT, CLEAR, DROP, FREEZE, HALT, KEEP, LOOK, MAIN, ORDER, RESUME, RETIRE, SPLIT, STAGED, STILL, WAKE
from agent_sandbox.runtime.base import StateNotKept
from agent_sandbox.runtime.process.checkpoint_guard import CheckpointGuard, guard, process_numbers
from agent_sandbox.runtime.process.fork_handle import ForkedGuest
from agent_sandbox.runtime.process.pump import Poller, Sink

if TYPE_CHECKING:
    from typing import Any

    from agent_sandbox.runtime.base import Launch
    from agent_sandbox.runtime.guest_rpc.server import Conversation
    from agent_sandbox.runtime.process.guest_handle import ProcessGuest

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
        self._leaving = 0  # the state that was dropped last, until init says that it is gone
        self._forks: dict[ForkedGuest, str] = {}  # each with the generation of its layers
        self._asking = threading.Lock()  # a fork may be closed by any thread
        self._forking = threading.Lock()
        self._waiting: tuple[int | None, bytes] = (None, b"")  # the question of the session that waits meanwhile
        self._close_after: Callable[[], None] | None = None  # what to do when the last fork has ended
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
        self._guard = guard(self._guest._payload, self._guest.init, self._kept.__contains__)

    def close(self) -> None:
        """End the stagehand, and the guard: no process of the guest is left."""
        self._link.close()
        if self._guard is not None:
            self._guard.close()

    @property
    def rests(self) -> bool:
        """Whether the processes of the session are stopped, because there are forks."""
        return bool(self._forks)

    @property
    def forks(self) -> int:
        """How many forks there are."""
        return len(self._forks)

    @property
    def shares_memory(self) -> bool:
        """Whether a page that several processes share counts once against the memory limit."""
        return "memory" in self._guest._cgroup.enforces

    def close_after_forks(self, close: Callable[[], None]) -> bool:
        """If there are forks, return True, and call `close` when the last one has ended."""
        with self._forking:
            self._close_after = close if self._forks else None
            return bool(self._forks)

    def fork(self, pid: int, generation: str, chain: Sequence[str], launch: Launch) -> ForkedGuest:
        """Make a fork of a state: a guest that goes on from there, with its files, at the same time as others. Raises `SandboxError`.

        Its new files go to `generation`. From now on, and until the last fork is closed, the session itself rests. The fork
        waits for `let_begin`.
        """
        with self._forking:
            if not self._forks:
                self._rest(pid)
            fork = ForkedGuest(self._guest, launch, self._release)
            self._forks[fork] = generation
        try:
            self._split(pid, generation, chain, fork)
        except BaseException:
            fork.close()
            raise
        return fork

    def _split(self, pid: int, generation: str, chain: Sequence[str], fork: ForkedGuest) -> None:
        guest, line = self._guest, self._guest._payload
        assert self._guard is not None
        line.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)  # the kernel then adds the pid of the first process of the fork
        self._guard.has_forks, self._guard.splitting = True, pid
        first: list[int] = []
        poller = Poller()

        def hear() -> bool:
            first.append(wire.credentials(line))
            return False

        poller.add(line.fileno(), hear)
        self._order(SPLIT, pid)
        try:
            self._wait_until(lambda: bool(first), poller, "it did not fork")
        finally:
            self._guard.splitting = 0
            line.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 0)
            self._order(STILL, pid)
            self._await("still")
        numbers = process_numbers(first[0])
        if len(numbers) != len(process_numbers(guest.init)) + 1 or numbers[-1] != 1:
            why = "a fork of this state could not be made: the kernel refused it, or a limit on processes"
            raise SandboxError(why, hint="close other forks, or allow more processes: max_processes=…")
        self._order(ADOPT, numbers[-2])
        fork.hand_control_to(guest._control)
        try:
            self._ask(stagehand.FORK, first[0], generation, list(chain))
            fork.hand_streams_to(line)
            self._ask(stagehand.VERIFY, first[0], fork.streams)
        except StateNotKept as error:  # it is still kept: only forks of it are refused
            raise SandboxError(f"a fork of this state could not be made: {error.__cause__}", hint="choose another state") from None

    def _rest(self, pid: int) -> None:
        self._order(FREEZE, pid)
        self._await("halted")
        said = self._talk.said
        self._waiting = self._talk.set_aside(), said or b""

    def _release(self, fork: ForkedGuest) -> None:
        """Forget a fork that is closed. After the last one, the session goes on, or is closed if it was to be."""
        with self._forking:
            with suppress(SandboxError, OSError):  # the run has ended, and its layers with it
                self._ask(stagehand.DISCARD, self._forks.pop(fork))
            if self._forks:
                return
            close, self._close_after = self._close_after, None
            if self._guard is not None:
                self._guard.has_forks = False
            if close is None:
                self._talk.return_to(*self._waiting)
                self._order(RESUME)
        if close is not None:
            close()

    @property
    def memory_bytes(self) -> int:
        """The memory that the run uses now, as its limit counts it. Without a cgroup, a page that states share counts for each of them."""
        if self.shares_memory:
            return self._guest._cgroup.memory_bytes()
        return self.measure()[0]

    def measure(self) -> tuple[int, int]:
        """Return the memory of all processes and that of the largest one, as they count without a cgroup."""
        total, largest = self._ask(stagehand.MEASURE)
        return int(total), int(largest)

    def keep(self, pid: int) -> None:
        """Protect a sleeping copy of the guest."""
        if pid == self._leaving:  # it has been reaped, or its number could not be used again
            self.await_dropped()
        self._kept.add(pid)
        self._order(KEEP, pid)

    def drop(self, pid: int) -> None:
        """End a sleeping copy. Only one ends at a time.

        Return at once where a cgroup counts what the kernel still takes apart. Elsewhere nobody sees that, so wait until it is gone.
        """
        self.await_dropped()
        self._leaving = pid
        self._order(DROP, pid)
        if not self.shares_memory:
            self.await_dropped()

    def await_dropped(self) -> None:
        """Wait until the copy that was dropped last is gone, and its memory free."""
        if self._leaving:
            self._await("dropped")
            self._kept.discard(self._leaving)
            self._leaving = 0

    def advance(self, generation: str, chain: Sequence[str], program: int) -> bool:
        """Freeze the layers of `chain` and begin another generation, unless nothing has changed. Return whether it was begun.

        Raises `StateNotKept`, and changes nothing, if another process than `program`, which waits, may still write to them: what it writes
        from then on would be lost to the program.
        """
        said = self._ask(stagehand.ADVANCE, generation, list(chain), [*self._kept, program])
        if isinstance(said, list):
            raise StateNotKept("; ".join(map(str, said)), hint="choose another state")
        return bool(said)

    def writers(self) -> list[str]:
        """Return what still writes to frozen layers."""
        return list(self._ask(stagehand.SETTLE, list(self._kept)))

    def merge(self, newer: str, older: str, merged: str) -> None:
        """Make one generation of two frozen ones."""
        self._ask(stagehand.MERGE, newer, older, merged)

    def compare(self, old: Sequence[str], new: Sequence[str]) -> dict[str, str]:
        """Return the files that differ between two chains, by path, each with "new", "changed" or "gone". Raises `SandboxError`."""
        try:
            return dict(self._ask(stagehand.COMPARE, list(old), list(new)))
        except StateNotKept as error:
            raise SandboxError(f"the files of two states were not compared: {error.__cause__}", hint="compare nearer states") from None

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

        Yield a function that gives it a turn, and returns what it says at its end; it raises `SandboxError` after so many seconds, or when
        the process that takes the turn ends.
        """
        self._order(HALT, pid)
        self._await("halted")
        said = self._talk.said
        number = self._talk.set_aside()
        try:
            self._ask(stagehand.COVER, generation, list(chain))
            self._stand_alone(True)
            self._order(WAKE, pid)
            self._order(LOOK, self._await_woken())
            self._await("looking")  # it has no turn yet, so its end cannot be missed
            yield self._take_turn
        finally:
            self._talk.set_aside()
            self._order(RETIRE)
            self._await("retired")
            self._guest._messages.pop("left", None)
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
        with self._asking:
            self._link.send(marshal.dumps((order, *words)))
            return self._answer()

    def _answer(self) -> Any:
        try:
            kind, value = stagehand.receive_answer(self._link)
        except (OSError, EOFError, ValueError) as error:
            kind, value = "broken", f"its stagehand has gone: {error}"
        if kind == "broken":
            self._guest.kill()
            raise SandboxError(f"this session has ended: {value}", hint="open another session")
        if kind == "failed":
            raise StateNotKept(f"its files could not be kept: {value}", hint="choose another state") from OSError(value)
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
        messages = self._guest._messages
        self._wait_until(lambda: self._talk.said is not None or "left" in messages, poller, why, seconds=seconds, hint=hint)
        if self._talk.said is None:
            why = _ended_by(int(messages["left"]["status"]))
            raise SandboxError(f"a state of this session could not be looked at: {why}", hint="ask for something else; the state is kept")
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


def _ended_by(status: int) -> str:
    """Say how a copy of a state ended that was to answer a question."""
    if os.WIFEXITED(status):
        return f"the process that was to answer ended with exit code {os.WEXITSTATUS(status)}"
    number = os.WTERMSIG(status)
    perhaps = ", as when memory runs out" if number == signal.SIGKILL else ""
    return f"the process that was to answer was ended by signal {number}{perhaps}"
