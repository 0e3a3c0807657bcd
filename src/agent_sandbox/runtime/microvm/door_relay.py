"""The driver's side of a machine's network: it connects what the program in the machine connects, to the doors of the run.

The driver is a guest of the process runtime, in the network namespace of the run: every address of the world leads to a door there, and
no packet leaves it. So the relay decides nothing. The egress behind the doors sees the address that was wanted, judges, searches and
records as it does for every guest. What the machine asks for is bounded: ports that are doors, a number of connections and of queries.
"""

from __future__ import annotations

import errno
import select
import socket
from collections.abc import Callable, Collection, Mapping

from agent_sandbox.kernel.doors import RESOLVER_PORT, proxy_port
from agent_sandbox.runtime.microvm import frames
from agent_sandbox.runtime.microvm.frames import Garbled
from agent_sandbox.runtime.microvm.streams import MOST, Send, Streams

MOST_QUERIES = 64  # at once; the oldest goes when another comes
LONGEST_DATAGRAM = 4096
_MAPPED = bytes(10) + b"\xff\xff"  # an IPv4 address inside one of IPv6


class DoorRelay:
    """Connects a machine to the doors at these ports. `send` sends a frame to the machine."""

    def __init__(self, ports: Collection[int], send: Send) -> None:
        self._ports = frozenset((*ports, RESOLVER_PORT, proxy_port(ports)))
        self._send = send
        self._streams = Streams(send)
        self._queries: dict[int, socket.socket] = {}

    @property
    def unsent(self) -> bool:
        """Whether a door has not taken everything that the machine sent."""
        return self._streams.unsent

    def wanted(self) -> dict[int, int]:
        """Return the events to wait for, by descriptor."""
        return {**self._streams.wanted(), **{each.fileno(): select.POLLIN for each in self._queries.values()}}

    def serve(self, ready: Mapping[int, int], may_read: Callable[[], bool]) -> None:
        """Pass on what is ready. Nothing is read for the machine once `may_read` returns False."""
        self._streams.serve(ready, may_read=may_read)
        for number, query in list(self._queries.items()):
            if query.fileno() in ready and may_read():
                self._answer(number)

    def obey(self, kind: bytes, content: bytes) -> None:
        """Take a frame of the machine. Raises `Garbled`."""
        if kind == frames.DIAL:
            if len(content) != frames.DIALLED.size:
                raise Garbled("a connection to nowhere")
            self._dial(*frames.DIALLED.unpack(content))
        elif kind == frames.QUERY:
            if not frames.ASKED.size < len(content) <= frames.ASKED.size + LONGEST_DATAGRAM:
                raise Garbled("a query that is none")
            number, address = frames.ASKED.unpack_from(content)
            self._ask(number, address, content[frames.ASKED.size :])
        else:
            self._streams.obey(kind, content)

    def _dial(self, number: int, address: bytes, port: int) -> None:
        self._streams.new_number(number)
        if port not in self._ports:
            raise Garbled(f"a connection to port {port}, which is no door")
        sock = _reaching(socket.SOCK_STREAM, address, port) if len(self._streams) < MOST else None
        if sock is None:
            self._streams.cut(number)
        else:
            self._streams.add(number, sock)

    def _ask(self, number: int, address: bytes, query: bytes) -> None:
        if len(self._queries) >= MOST_QUERIES or number in self._queries:
            self._queries.pop(number if number in self._queries else next(iter(self._queries))).close()
        sock = _reaching(socket.SOCK_DGRAM, address, RESOLVER_PORT)
        if sock is None:
            return
        try:
            sock.send(query)
        except OSError:  # nobody is there, or the door is crowded: a query may be lost
            sock.close()
        else:
            self._queries[number] = sock

    def _answer(self, number: int) -> None:
        with self._queries.pop(number) as query:
            try:
                answer = query.recv(LONGEST_DATAGRAM)
            except OSError:  # the door has been closed
                return
        self._send(frames.ANSWER, frames.NUMBER.pack(number) + answer)


def _reaching(kind: int, address: bytes, port: int) -> socket.socket | None:
    """Return a socket that connects to an address; None if there is no way there. It does not block."""
    try:
        if address.startswith(_MAPPED):
            sock = socket.socket(socket.AF_INET, kind | socket.SOCK_NONBLOCK)
            failure = sock.connect_ex((socket.inet_ntop(socket.AF_INET, address[len(_MAPPED) :]), port))
        else:
            sock = socket.socket(socket.AF_INET6, kind | socket.SOCK_NONBLOCK)
            failure = sock.connect_ex((socket.inet_ntop(socket.AF_INET6, address), port))
    except OSError:  # no descriptor is left, or there is no IPv6
        return None
    if failure in (0, errno.EINPROGRESS):
        return sock
    sock.close()
    return None
