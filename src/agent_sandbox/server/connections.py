"""HTTP connections of the daemon: only so many at once, and each has only so long to send the head of a request.

Everybody on the machine can connect to a port of the loopback, also without a token. Without these bounds, connections that say nothing
would take all descriptors of the process, and its own user would not be served either.
"""

from __future__ import annotations

import asyncio
import resource
import time

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 10.0  # for the head of a request, from the connection on or from its first byte on
_LATER = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


def most_connections() -> int:
    """How many connections one door has at most: a quarter of the descriptors, so that requests can be performed, and another door used."""
    return max(16, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)


class BoundedProtocol(H11Protocol):
    """One connection. If there are too many, the one that has waited longest for the head of its request has to go."""

    _waits_since: float | None = None  # for the head of a request
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait()
        if len(self.connections) > most_connections():
            others = [each for each in self.connections if isinstance(each, BoundedProtocol) and each is not self]
            idle = [(since, each) for each in others if (since := each._waits_since) is not None]
            (min(idle, key=lambda each: each[0])[1] if idle else self).refuse()

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait_no_more()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if bool(self.cycle) and not self.cycle.response_complete:
            self._wait_no_more()
        elif self._waits_since is None and not self.transport.is_closing():  # the begin of the next request
            self._wait()

    def refuse(self) -> None:
        """Tell the client to come later, and close the connection."""
        self.connections.discard(self)
        self.transport.write(_LATER)
        self.transport.close()

    def _wait(self) -> None:
        self._waits_since = time.monotonic()
        self._deadline = self.loop.call_later(HEAD_SECONDS, self._give_up)

    def _wait_no_more(self) -> None:
        self._waits_since = None
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _give_up(self) -> None:
        if self._waits_since is not None:
            self.transport.close()
