"""The processes of a run with checkpoints, as its init sees them: the main program, sleeping checkpoints, and all others.

Init carries out the supervisor's orders about them. A checkpoint is a copy of the main program that sleeps with all signals blocked but
one, with which init wakes it. A woken checkpoint makes a copy of itself and sleeps again; the copy becomes the main program.

A checkpoint that is split makes a fork instead: a copy in namespaces of its own, the first of its pid namespace. While there are forks, the
processes of the run itself are stopped, and the checkpoints, too: a program may have called anything a checkpoint.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import time
from contextlib import suppress

from agent_sandbox._fast.values import TYPE_CHECKING
from agent_sandbox.kernel import wire
from agent_sandbox.kernel.init import Family
from agent_sandbox.kernel.wire import ADOPT, CLEAR, DROP, FREEZE, GO, HALT, KEEP, LOOK, MAIN, ORDER, RESUME, RETIRE, SPLIT, STILL, WAKE

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

WAKING, SPLITTING = signal.SIGRTMAX, signal.SIGRTMAX - 1  # the two signals that a checkpoint waits for
_KILLED = 128 + signal.SIGKILL  # the exit code of a fork whose program was killed


class KeptProcesses(Family):
    """The family of a run with checkpoints. `kept` are these; `main` is 0 while one of them is being woken."""

    def __init__(self, main: int) -> None:
        super().__init__(main)
        self._halted: set[int] = set()
        self._waking = 0  # the checkpoint that is being woken
        self._leaving = 0  # the checkpoint that was dropped, until it is reaped
        self._looking = 0  # the copy of a checkpoint that is only looked at
        self._control: socket.socket | None = None
        self._forks: dict[int, Fork] = {}  # by the pid of their first process

    def patience(self) -> float:
        """Return the seconds until the first fork has used up its time."""
        return min((fork.left for fork in self._forks.values()), default=super().patience())

    def serve(self) -> None:
        """Take the orders for each fork, and end those whose time is over."""
        for fork in self._forks.values():
            fork.serve()

    def ended(self, pid: int, status: int) -> None:
        """Take note of the end of a process. Tell the supervisor if it waits for this one."""
        self.kept.discard(pid)
        if (fork := self._forks.pop(pid, None)) is not None:
            self.poller.unregister(fork.control)
            fork.report(status)
        if pid == self._leaving:
            self._leaving = 0
            self._tell({"kind": "dropped"})
        if pid == self._waking:
            self._tell({"kind": "gone"})
        if pid == self._looking:
            self._looking = 0
            self._tell({"kind": "left", "status": int(status)})

    def give_up_one(self) -> bool:
        """End the copy that is looked at, or else the oldest checkpoint that sleeps, and wait until its memory is free.

        Return whether there was one.
        """
        if looking := self._looking:
            self._retire()
            self.ended(looking, signal.SIGKILL)
            return True
        for pid in sorted(self.kept - {self._waking, self._leaving}):
            if self._sleeps(pid):
                _end([pid])
                self.ended(pid, signal.SIGKILL)
                return True
        return False

    def _tell(self, message: dict[str, Any]) -> None:
        if self._control is not None:
            with suppress(OSError):  # the supervisor may have gone
                wire.send(self._control, message)

    def do(self, order: bytes, pid: int, control: socket.socket) -> None:
        """Carry out an order. DROP, CLEAR, HALT, FREEZE, STILL, LOOK and RETIRE are answered on `control` once done.

        DROP is answered when the checkpoint has been reaped: the kernel takes its memory apart meanwhile, and other orders are carried out.
        The supervisor drops no second one before that. CLEAR, HALT and FREEZE name the checkpoint that is to be woken: if it has ended,
        nothing is done, and the answer says so.
        """
        if order == KEEP:
            self.kept.add(pid)
        elif order == DROP:
            self._control = control
            if self._sleeps(pid):
                self._leaving = pid
                _signal(pid, signal.SIGKILL)
            else:
                self._tell({"kind": "dropped"})
        elif order == WAKE:
            self._waking, self._control = pid, control
            if self._sleeps(pid):
                _signal(pid, WAKING)
            else:
                self.ended(pid, 0)
        elif order == SPLIT:
            self._waking, self._control = pid, control
            if self._sleeps(pid):
                _signal(pid, SPLITTING)
                _signal(pid, signal.SIGCONT)
            else:
                self.ended(pid, 0)
        elif order == STILL:
            self._waking = 0
            self._stop(lambda: [pid] if pid in self.kept else [])
            wire.send(control, {"kind": "still"})
        elif order == ADOPT:
            _, (link,) = wire.receive_descriptors(control, 1)
            fork = self._forks[pid] = Fork(pid, socket.socket(fileno=link))
            self.poller.register(fork.control, select.POLLIN)
        elif order == MAIN:
            self.main, self._waking = pid, 0
        elif order in (CLEAR, HALT, FREEZE) and not self._sleeps(pid):
            wire.send(control, {"kind": "gone"})
        elif order == CLEAR:
            self._clear()
            wire.send(control, {"kind": "cleared"})
        elif order in (HALT, FREEZE):
            self._stop(self._others if order == HALT else lambda: [*self._others(), *(self.kept - {self._leaving})])
            wire.send(control, {"kind": "halted"})
        elif order == LOOK:
            self._control = control
            self._looking = 0 if pid in self.kept | self._halted else pid  # it says itself which one it is
            wire.send(control, {"kind": "looking"})
        elif order == RETIRE:
            self._waking = self._looking = 0
            self._retire()
            wire.send(control, {"kind": "retired"})
        elif order == RESUME:
            for each in self._halted:
                _signal(each, signal.SIGCONT)
            self._halted.clear()

    def _sleeps(self, pid: int) -> bool:
        """Return whether a checkpoint is still there. The kernel ends checkpoints first when memory runs out."""
        if pid == self._leaving:
            return False
        if pid in self.kept:
            try:
                ended = bool(os.waitpid(pid, os.WNOHANG)[0])
            except ChildProcessError:  # reaped before it was called a checkpoint, or never a child of ours
                ended = True
            if ended:
                self.kept.discard(pid)
        return pid in self.kept

    def _clear(self) -> None:
        """End all processes but the checkpoints, and reap them."""
        self.main = 0
        while others := self._others():
            _end(others)

    def _stop(self, processes: Callable[[], list[int]]) -> None:
        """Stop these processes until RESUME. One that was stopped already stays so.

        A process that waits in the kernel, as a shell does for its stopped child before that executes a program, stops when it leaves it.
        """
        while running := [pid for pid in processes() if _state(pid) not in ("TtZXD" if pid in self._halted else "TtZX")]:
            for pid in running:
                _signal(pid, signal.SIGSTOP)
            self._halted |= {*running}

    def _retire(self) -> None:
        """End what was started since HALT, and reap it."""
        while strangers := [pid for pid in self._others() if pid not in self._halted]:
            _end(strangers)

    def _others(self) -> list[int]:
        """Return all processes of the run but init and the checkpoints. Processes that have ended and wait to be reaped count too."""
        return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != 1 and int(name) not in self.kept]


def _end(processes: list[int]) -> None:
    """Kill processes, and wait for those that are children of init. The others are once their parents have ended."""
    for pid in processes:
        _signal(pid, signal.SIGKILL)
    for pid in processes:
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)


class Fork:
    """A fork of a state: its first process, and the socket on which the supervisor gives orders about it and learns of its end."""

    def __init__(self, first: int, control: socket.socket) -> None:
        self.control = control
        control.setblocking(False)
        self._first = first
        self._began = time.monotonic()
        self._deadline = float("inf")
        self._reason = "exited"

    @property
    def left(self) -> float:
        """The seconds that it may still run."""
        return max(0.0, self._deadline - time.monotonic())

    def serve(self) -> None:
        """Take the orders that have come. End it if its time is over, or if there will be no more orders."""
        with suppress(BlockingIOError):
            while order := self.control.recv(ORDER.size):
                kind, value = ORDER.unpack(order)
                if kind == GO:
                    self._began = time.monotonic()
                    self._deadline = self._began + value
            self._end("killed")
        if not self.left:
            self._end("timed-out")

    def _end(self, reason: str) -> None:
        """End it: the kernel ends every process of its pid namespace with the first one. `ended` follows."""
        self._reason = reason if self._reason == "exited" else self._reason
        self._deadline = float("inf")
        _signal(self._first, signal.SIGKILL)

    def report(self, status: int) -> None:
        """Tell the supervisor how it ended: no process of it is left."""
        if os.WIFEXITED(status) and os.WEXITSTATUS(status) == _KILLED:
            status = int(signal.SIGKILL)
        said: dict[str, Any] = {"kind": "exit", "status": status, "reason": self._reason, "hit": [], "cpu": 0.0, "memory": 0, "fuel": None}
        if self._reason == "timed-out":
            said["hit"] = ["wall"]
        with suppress(OSError):  # the supervisor may have gone
            wire.send(self.control, {**said, "wall": time.monotonic() - self._began})
        self.control.close()


def _signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _state(pid: int) -> str:
    """Return the letter of a process's state; X if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read(4096).rpartition(b")")[2].split()[0].decode()
    except (OSError, IndexError):
        return "X"
