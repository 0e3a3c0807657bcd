"""How a program inside WebAssembly ends: the process around it is its own, and ends with it. Before that it says how, and how much it used.

The kernel takes longer to take the engine's memory apart than most programs take, so init does not wait for that.
"""

from __future__ import annotations

import os
import resource
import socket
from contextlib import suppress

from agent_sandbox.kernel.wire import FAREWELL, FAREWELL_FD, INPUTS, NOT_COUNTED
from agent_sandbox.runtime.wasm.inputs import Inputs
from agent_sandbox.runtime.wasm.machine import Inside
from agent_sandbox.values import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import NoReturn


class Ending:
    """Of a program that nobody counts."""

    def begin(self, fuel: int | None) -> None:
        """The program starts now, with so much fuel at most."""

    def leave(self, code: int) -> NoReturn:
        """End with this exit code, or by this signal if it is below 0."""
        used = resource.getrusage(resource.RUSAGE_SELF)
        status = -code if code < 0 else (code & 0xFF) << 8
        with suppress(OSError):  # nobody is there any more
            os.write(FAREWELL_FD, FAREWELL.pack(status, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024, self._fuel()))
        if code < 0:
            os.kill(os.getpid(), -code)
        os._exit(code & 0xFF)

    def _fuel(self) -> int:
        return NOT_COUNTED


class Counted(Ending):
    """Of a program that is counted and, with `inputs`, watched. The socket is one that nothing inside WebAssembly can reach."""

    def __init__(self, instance: Inside, socket: socket.socket, inputs: Inputs | None) -> None:
        self._instance, self._socket, self._inputs = instance, socket, inputs

    def begin(self, fuel: int | None) -> None:
        """What was used before, by us, does not count."""
        self._instance.give_fuel(fuel)

    def leave(self, code: int) -> NoReturn:
        """Say what it looked into, and end."""
        if self._inputs is not None:
            with suppress(OSError):
                self._socket.sendall(INPUTS + self._inputs.report())
        super().leave(code)

    def _fuel(self) -> int:
        return self._instance.fuel_used()
