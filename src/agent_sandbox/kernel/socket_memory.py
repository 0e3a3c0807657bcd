"""Memory in the socket buffers of this network namespace, as the kernel tells it: by sock_diag(7), and for netlink in /proc/net/netlink.

The machine counts buffers of TCP and UDP against one number for everybody (tcp_mem, udp_mem). Version 2 of control groups counts them for a
run too; version 1 does so against a limit of their own, which it exceeds a little for each connection; nothing counts those of netlink.
Everything reported here is what the kernel allocated (`truesize`), not what the program sent.
"""

from __future__ import annotations

import os
import struct

from agent_sandbox._fast.values import TYPE_CHECKING

if TYPE_CHECKING:
    import socket
else:
    from agent_sandbox._fast import sockets as socket

_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY, _REQUEST_DUMP = 4, 20, 0x301
_ERROR, _DONE = 2, 3
_HEADER, _ATTRIBUTE = struct.Struct("=IHHII"), struct.Struct("=HH")
_MEMORY = struct.Struct("=7I")  # SK_MEMINFO: rmem_alloc, rcvbuf, wmem_alloc, sndbuf, fwd_alloc, wmem_queued, optmem; more follow
_RECEIVED = 1 << 18  # bytes: more than the kernel puts into one message of a dump
_ALL_STATES = 0xFFFFFFFF

# For each kind: the request, the length of the fixed part of an answer, and the number of the attribute with the memory.
_INET_SKMEMINFO, _UNIX_DIAG_MEMINFO, _UDIAG_SHOW_MEMINFO = 7, 5, 0x20
_INET_PART, _UNIX_PART, _INODE = 72, 16, 68
_CLOSING = (4, 5, 9, 11)  # FIN_WAIT1, FIN_WAIT2, LAST_ACK, CLOSING; the second byte of an answer
_KINDS: dict[tuple[int, int], tuple[bytes, int, int]] = {
    **{
        (int(family), protocol): (
            struct.pack("=BBBxI48x", family, protocol, 1 << _INET_SKMEMINFO - 1, _ALL_STATES),
            _INET_PART,
            _INET_SKMEMINFO,
        )
        for family in (socket.AF_INET, socket.AF_INET6)
        for protocol in (socket.IPPROTO_TCP, socket.IPPROTO_UDP)
    },
    (int(socket.AF_UNIX), 0): (
        struct.pack("=BBHIIIII", socket.AF_UNIX, 0, 0, _ALL_STATES, 0, _UDIAG_SHOW_MEMINFO, 0, 0),
        _UNIX_PART,
        _UNIX_DIAG_MEMINFO,
    ),
}
INTERNET = tuple(kind for kind in _KINDS if kind[0] != socket.AF_UNIX)
ALL = tuple(_KINDS)


class SocketMeter:
    """Measures the socket buffers of the network namespace in which it first measures. A kind that this kernel cannot tell counts as 0."""

    def __init__(self, kinds: tuple[tuple[int, int], ...]) -> None:
        self._kinds = kinds
        self._link: socket.socket | None = None

    def close(self) -> None:
        """Close the socket on which the kernel is asked."""
        if self._link is not None:
            self._link.close()
            self._link = None

    def unseen(self) -> list[str]:
        """Return the names of the kinds that this kernel does not tell about."""
        return [
            f"{socket.AddressFamily(family).name} {protocol}" for family, protocol in self._kinds if self._ask((family, protocol)) is None
        ]

    def measure(self) -> int:
        """Return the bytes in buffers of these kinds."""
        return sum((self._ask(kind) or (0, 0))[0] for kind in self._kinds)

    def orphans(self) -> int:
        """Return the number of TCP connections that are closed and still have data to send."""
        return sum((self._ask((family, socket.IPPROTO_TCP)) or (0, 0))[1] for family in (socket.AF_INET, socket.AF_INET6))

    def _ask(self, kind: tuple[int, int]) -> tuple[int, int] | None:
        """Return the bytes in buffers of one kind, and the number of sockets that no process holds; None if the kernel does not tell."""
        request, part, attribute = _KINDS[kind]
        total = orphans = 0
        try:
            if self._link is None:
                self._link = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _SOCK_DIAG)
            self._link.send(_HEADER.pack(_HEADER.size + len(request), _SOCK_DIAG_BY_FAMILY, _REQUEST_DUMP, 0, 0) + request)
            while True:
                data, at = self._link.recv(_RECEIVED), 0
                while at + _HEADER.size <= len(data):
                    length, answer, *_ = _HEADER.unpack_from(data, at)
                    if answer == _ERROR:
                        return None
                    if answer == _DONE:
                        return total, orphans
                    body = at + _HEADER.size
                    total += _memory_in(data, body + part, at + length, attribute)
                    orphans += part == _INET_PART and data[body + 1] in _CLOSING and data[body + _INODE : body + part] == bytes(4)
                    at += length + 3 & ~3
        except (OSError, struct.error):
            return None


def netlink_bytes(proc: str = "/proc") -> int:
    """Return the bytes in messages that netlink sockets of this network namespace have not read. The fifth column has them."""
    try:
        fd = os.open(f"{proc}/net/netlink", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return 0
    parts = []
    try:
        while part := os.read(fd, 1 << 16):
            parts.append(part)
    except OSError:
        return 0
    finally:
        os.close(fd)
    rows = (line.split() for line in b"".join(parts).splitlines()[1:])
    return sum(int(row[4]) for row in rows if len(row) > 4)


def _memory_in(data: bytes, at: int, end: int, attribute: int) -> int:
    while at + _ATTRIBUTE.size <= end:
        length, number = _ATTRIBUTE.unpack_from(data, at)
        if number == attribute:
            received, _, sent, _, spare, queued, options = _MEMORY.unpack_from(data, at + _ATTRIBUTE.size)
            # What TCP has queued is in part also counted as sent, while it is on its way.
            return int(received + max(sent, queued) + spare + options)
        at += max(length + 3 & ~3, _ATTRIBUTE.size)
    return 0
