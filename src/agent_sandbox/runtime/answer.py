"""The guest's side of the payload socket: ready, or a refusal; later a refusal, or a report of what the program looked into.

All of it in the guest's own words, which one that has broken out of its engine can choose: bounded, and parsed by hand.
"""

from __future__ import annotations

import socket

from agent_sandbox.kernel.wire import INPUTS, READY, REFUSAL_BYTES, REPORT_BYTES
from agent_sandbox.values import dataclass


@dataclass(frozen=True)
class Said:
    """What it came to. `refused` is the exit code for a program that was not started, for the reason in `why`; else None."""

    inputs: bytes = b""
    refused: int | None = None
    why: str = ""


class Answer:
    """Taken as it comes, or at the end."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._kept = b""

    def refusal(self) -> str | None:
        """Wait for the first byte. None when the guest is ready, otherwise its reason. Raises TimeoutError as the socket's timeout says.

        No byte beyond that one is taken from a guest that is ready: it may already have sent a refusal of the program behind it.
        """
        first = self._socket.recv(1)
        if first == READY:
            return None
        words = first
        while len(words) < REFUSAL_BYTES and (more := self._socket.recv(REFUSAL_BYTES - len(words))):
            words += more
        return parsed(words).why or "it ended before it was ready"

    def take(self) -> bool:
        """Take what there is. False when the other side has gone."""
        self._socket.settimeout(0)
        try:
            said = self._socket.recv(65536)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self._kept += said[: REPORT_BYTES - len(self._kept)]
        return bool(said)

    def said(self) -> Said:
        """All of it, once nobody can say more. Nothing may have come: it was ended before it could answer."""
        before = -1
        while len(self._kept) != before and self.take():
            before = len(self._kept)
        return parsed(self._kept)


def parsed(words: bytes) -> Said:
    """What a guest's last words mean."""
    if words.startswith(INPUTS):
        return Said(words.removeprefix(INPUTS))
    if not words:
        return Said()
    code, _, why = words[:REFUSAL_BYTES].decode(errors="replace").partition(" ")
    return Said(b"", int(code) if code.isascii() and code.isdigit() and len(code) < 4 else 126, why or "it could not be started")
