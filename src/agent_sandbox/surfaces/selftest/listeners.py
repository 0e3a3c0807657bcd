"""Sockets on the machine that count who comes. Without a thread: the kernel lets clients connect, and we count when we are asked."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from agent_sandbox.values import dataclass


@dataclass(frozen=True)
class Listener:
    """One socket, and where an attempt finds it: family and address."""

    made: socket.socket
    target: tuple[int, Any]

    def heard(self) -> int:
        """How many connections or datagrams have come since it was last asked."""
        count = 0
        while True:
            try:
                if self.made.type == socket.SOCK_STREAM:
                    self.made.accept()[0].close()
                else:
                    self.made.recv(65536)
            except BlockingIOError:
                return count
            count += 1


@contextmanager
def listening(kind: int, **addresses: tuple[int, Any]) -> Iterator[dict[str, Listener]]:
    """Listen at each address (a family, and what to bind to) for the length of the block."""
    with ExitStack() as stack:
        yield {way: _listen(stack, kind, family, address) for way, (family, address) in addresses.items()}


def _listen(stack: ExitStack, kind: int, family: int, address: Any) -> Listener:
    made = stack.enter_context(socket.socket(family, kind | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC))
    made.bind(address)
    if kind == socket.SOCK_STREAM:
        made.listen(16)
    return Listener(made, (int(family), made.getsockname()))
