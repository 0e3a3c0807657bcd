"""The agent's side of a machine's network: doors inside the machine, as a guest of `process` has them, behind which the driver connects.

Every address of the world leads here, and nobody listens but at the ports that the policy names (`kernel.doors`). What arrives goes to the
driver with the address that was wanted. Nothing is decided here: a program that has taken over the machine could do the same.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Mapping
from typing import Any

from agent_sandbox.kernel.doors import open_doors
from agent_sandbox.runtime.microvm import frames
from agent_sandbox.runtime.microvm.streams import MOST, Send, Streams

_MOST_QUERIES, _LONGEST_DATAGRAM = 64, 4096  # as in the driver
_ANCILLARY = socket.CMSG_SPACE(64)


class InnerDoors:
    """Doors at these ports of every address. `send` sends a frame to the driver. Raises OSError if they cannot be opened."""

    def __init__(self, ports: tuple[int, ...], send: Send) -> None:
        opened = open_doors(ports)
        self._listeners = [socket.socket(fileno=fd) for fd in opened.listeners]
        self._resolvers = [socket.socket(fileno=fd) for fd in opened.resolvers]
        self._send = send
        self._streams = Streams(send)
        self._number = 0
        self._askers: dict[int, tuple[socket.socket, list[Any], Any]] = {}  # of queries under way: where the answer goes

    def wanted(self) -> dict[int, int]:
        """Return the events to wait for, by descriptor. While there are too many connections, others wait at the door."""
        doors = [*self._resolvers, *(self._listeners if len(self._streams) < MOST else ())]
        return {**self._streams.wanted(), **{each.fileno(): select.POLLIN for each in doors}}

    @property
    def unread(self) -> bool:
        """Whether the program may have said something that has not gone to the driver. It has ended: no more can come."""
        waiting = select.poll()
        for each in (*self._resolvers, *self._listeners):
            waiting.register(each, select.POLLIN)
        return self._streams.unread or bool(waiting.poll(0))

    def serve(self, ready: Mapping[int, int]) -> None:
        """Pass on what is ready."""
        self._streams.serve(ready)
        for listener in self._listeners:
            if listener.fileno() in ready and len(self._streams) < MOST:
                self._accept(listener)
        for resolver in self._resolvers:
            if resolver.fileno() in ready:
                self._ask(resolver)

    def obey(self, kind: bytes, content: bytes) -> None:
        """Take a frame of the driver."""
        if kind != frames.ANSWER:
            self._streams.obey(kind, content)
            return
        (number,), answer = frames.NUMBER.unpack_from(content), content[frames.NUMBER.size :]
        if (asker := self._askers.pop(number, None)) is not None:
            sock, wanted, sender = asker
            try:
                sock.sendmsg([answer], wanted, 0, sender)  # from the address that was asked
            except OSError:  # nobody waits for it any more
                return

    def _next(self) -> int:
        self._number += 1
        return self._number

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
            address, port = sock.getsockname()[:2]
        except OSError:  # the program has gone meanwhile
            return
        sock.setblocking(False)
        number = self._next()
        self._streams.new_number(number)
        self._streams.add(number, sock)
        self._send(frames.DIAL, frames.DIALLED.pack(number, _sixteen(address), port))

    def _ask(self, resolver: socket.socket) -> None:
        try:
            query, wanted, _, sender = resolver.recvmsg(_LONGEST_DATAGRAM, _ANCILLARY)
        except OSError:
            return
        if not query or not wanted:
            return
        number = self._next()
        if len(self._askers) >= _MOST_QUERIES:
            del self._askers[next(iter(self._askers))]
        self._askers[number] = resolver, [tuple(each) for each in wanted], sender
        level, _, info = wanted[0]  # in_pktinfo ends with the address, and in6_pktinfo begins with it
        address = info[:16] if level == socket.IPPROTO_IPV6 else bytes(10) + b"\xff\xff" + info[8:12]
        self._send(frames.QUERY, frames.ASKED.pack(number, address) + query)


def _sixteen(address: str) -> bytes:
    mapped = address if ":" in address else f"::ffff:{address}"
    return socket.inet_pton(socket.AF_INET6, mapped.partition("%")[0])
