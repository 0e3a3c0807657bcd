"""The processes of a run with checkpoints, as its init sees them: the main program, sleeping checkpoints, and all others.

Init carries out the supervisor's orders about them. A checkpoint is a copy of the main program that sleeps with all signals blocked but
one, with which init wakes it. A woken checkpoint makes a copy of itself and sleeps again; the copy becomes the main program.
"""

from __future__ import annotations

import os
import signal
import socket
from contextlib import suppress

from agent_sandbox.kernel import wire
from agent_sandbox.kernel.init import Family
from agent_sandbox.kernel.wire import CLEAR, DROP, HALT, KEEP, MAIN, RESUME, RETIRE, WAKE

WAKING = signal.SIGRTMAX  # the one signal that a checkpoint waits for


class KeptProcesses(Family):
    """The family of a run with checkpoints. `kept` are these; `main` is 0 while one of them is being woken."""

    def __init__(self, main: int) -> None:
        super().__init__(main)
        self._halted: set[int] = set()
        self._waking = 0  # the checkpoint that is being woken
        self._control: socket.socket | None = None

    def ended(self, pid: int) -> None:
        """Take note of the end of a process. Tell the supervisor if it waits for this one."""
        self.kept.discard(pid)
        if pid == self._waking and self._control is not None:
            wire.send(self._control, {"kind": "gone"})

    def do(self, order: bytes, pid: int, control: socket.socket) -> None:
        """Carry out an order. DROP, CLEAR, HALT and RETIRE are answered on `control` once they are done.

        CLEAR and HALT name the checkpoint that is to be woken: if it has ended, nothing is done, and the answer says so.
        """
        if order == KEEP:
            self.kept.add(pid)
        elif order == DROP:
            if self._sleeps(pid):
                self.kept.discard(pid)
                _signal(pid, signal.SIGKILL)
                with suppress(ChildProcessError):
                    os.waitpid(pid, 0)
            wire.send(control, {"kind": "dropped"})
        elif order == WAKE:
            self._waking, self._control = pid, control
            if self._sleeps(pid):
                _signal(pid, WAKING)
            else:
                self.ended(pid)
        elif order == MAIN:
            self.main, self._waking = pid, 0
        elif order in (CLEAR, HALT) and not self._sleeps(pid):
            wire.send(control, {"kind": "gone"})
        elif order == CLEAR:
            self._clear()
            wire.send(control, {"kind": "cleared"})
        elif order == HALT:
            self._halt()
            wire.send(control, {"kind": "halted"})
        elif order == RETIRE:
            self._waking = 0
            self._retire()
            wire.send(control, {"kind": "retired"})
        elif order == RESUME:
            for each in self._halted:
                _signal(each, signal.SIGCONT)
            self._halted.clear()

    def _sleeps(self, pid: int) -> bool:
        """Return whether a checkpoint is still there. The kernel ends checkpoints first when memory runs out."""
        with suppress(ChildProcessError):
            if pid in self.kept and os.waitpid(pid, os.WNOHANG)[0]:
                self.kept.discard(pid)
        return pid in self.kept

    def _clear(self) -> None:
        """End all processes but the checkpoints, and reap them."""
        self.main = 0
        while others := self._others():
            for pid in others:
                _signal(pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    continue

    def _halt(self) -> None:
        """Stop all processes but the checkpoints, until RESUME. One that was stopped already stays so.

        A process that waits in the kernel, as a shell does for its stopped child before that executes a program, stops when it leaves it.
        """
        while running := [pid for pid in self._others() if _state(pid) not in ("TtZXD" if pid in self._halted else "TtZX")]:
            for pid in running:
                _signal(pid, signal.SIGSTOP)
            self._halted |= {*running}

    def _retire(self) -> None:
        """End what was started since `_halt`, and reap it."""
        while strangers := [pid for pid in self._others() if pid not in self._halted]:
            for pid in strangers:
                _signal(pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                while (ended := os.waitpid(-1, os.WNOHANG)[0]) and ended != self.main:
                    continue

    def _others(self) -> list[int]:
        """Return all processes of the run but init and the checkpoints. Processes that have ended and wait to be reaped count too."""
        return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != 1 and int(name) not in self.kept]


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
