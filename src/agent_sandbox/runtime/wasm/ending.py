"""How a program inside WebAssembly ends: the process around it is its own, and ends with it. Before that, who counted says how much."""

from __future__ import annotations

import os
import socket
from contextlib import suppress

from agent_sandbox.kernel.protocol import FUEL
from agent_sandbox.runtime.wasm.inputs import Inputs
from agent_sandbox.runtime.wasm.machine import Instance
from agent_sandbox.values import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import NoReturn


class Ending:
    """Of a program that nobody counts."""

    def begin(self, fuel: int | None) -> None:
        """The program starts now, with so much fuel at most."""

    def leave(self, code: int) -> NoReturn:
        """End with this exit code, or by this signal if it is below 0."""
        if code < 0:
            os.kill(os.getpid(), -code)
        os._exit(code & 0xFF)


class Counted(Ending):
    """Of a program that is counted, and perhaps watched. The socket is one that nothing inside WebAssembly can reach."""

    def __init__(self, socket: socket.socket, instance: Instance, inputs: Inputs) -> None:
        self._socket, self._instance, self._inputs = socket, instance, inputs

    def begin(self, fuel: int | None) -> None:
        """What was used before, by us, does not count."""
        self._instance.give_fuel(fuel)

    def leave(self, code: int) -> NoReturn:
        """Report, and end."""
        with suppress(OSError):  # nobody is there any more
            self._socket.sendall(FUEL + b"%d\n" % self._instance.fuel_used() + self._inputs.report())
        super().leave(code)
