"""Messages between the supervisor and what it starts: plain values, marshalled, behind a length, over a stream socket.

marshal and not pickle: it makes values only, never objects. It may still be crashed by malformed bytes, so it is used solely between our
own processes; what a guest could have written is never read through this module, but as bounded raw bytes.
"""

from __future__ import annotations

import array
import fcntl
import marshal
import os
import socket
import struct
from collections.abc import Collection, Sequence

from agent_sandbox.values import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any

_LENGTH = struct.Struct("!I")
_CREDENTIALS = struct.Struct("iII")  # struct ucred: pid, uid, gid
_MAX_DESCRIPTORS = 16


def send(sock: socket.socket, value: Any, descriptors: Sequence[int] = ()) -> None:
    """Send one value, and descriptors along with it."""
    message = memoryview(pack(value))
    if descriptors:
        message = message[socket.send_fds(sock, [message], list(descriptors)) :]
    sock.sendall(message)


def pack(value: Any) -> bytes:
    """One value as it is sent."""
    body = marshal.dumps(value)
    return _LENGTH.pack(len(body)) + body


def receive(sock: socket.socket) -> tuple[Any, list[int]]:
    """Receive one value and the descriptors that came with it. Raises EOFError when the other side has gone."""
    head, descriptors = receive_descriptors(sock, _LENGTH.size)
    if len(head) < _LENGTH.size:
        head += exactly(sock, _LENGTH.size - len(head)) if head else b""
    if not head:
        close_all(descriptors)
        raise EOFError("the other side has gone")
    return marshal.loads(exactly(sock, _LENGTH.unpack(head)[0])), descriptors


def receive_descriptors(sock: socket.socket, size: int) -> tuple[bytes, list[int]]:
    """Bytes and descriptors, which no program executed later inherits. Not socket.recv_fds: it drops the flag that says so."""
    received = array.array("i")
    room = socket.CMSG_SPACE(_MAX_DESCRIPTORS * received.itemsize)
    data, ancillary, _, _ = sock.recvmsg(size, room, socket.MSG_CMSG_CLOEXEC)
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            received.frombytes(content[: len(content) - len(content) % received.itemsize])
    return data, list(received)


def credentials(sock: socket.socket) -> int:
    """Receive one byte and return the pid of who sent it, as the kernel says and as it is numbered here. Raises EOFError when it has gone.

    The socket must have SO_PASSCRED set before the byte is sent; it is taken off again.
    """
    data, ancillary, _, _ = sock.recvmsg(1, socket.CMSG_SPACE(_CREDENTIALS.size), socket.MSG_CMSG_CLOEXEC)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 0)
    for level, kind, content in ancillary:
        if data and level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
            return int(_CREDENTIALS.unpack(content)[0])
    raise EOFError("the other side has gone")


def close_all(descriptors: Sequence[int]) -> None:
    """Close descriptors; those that are closed already are no error."""
    for fd in descriptors:
        try:
            os.close(fd)
        except OSError:
            continue


def seal(memfd: int) -> None:
    """What is in it stays as it is, whoever else gets hold of it."""
    fcntl.fcntl(memfd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE)


def exactly(sock: socket.socket, count: int) -> bytes:
    """Receive just this many bytes: neither fewer, nor any of the next message. Raises EOFError when the other side has gone."""
    parts = []
    while count:
        part = sock.recv(min(count, 1 << 20))
        if not part:
            raise EOFError("the other side has gone in the middle of a message")
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def close_others(descriptors: Collection[int]) -> None:
    """Close every descriptor from 3 up that is not among these."""
    from agent_sandbox.kernel import syscalls as sc  # and ctypes: only what was forked needs it

    lowest = 3
    for fd in sorted(descriptors):
        if fd > lowest:
            sc.close_range(lowest, fd - 1)
        lowest = max(lowest, fd + 1)
    sc.close_range(lowest, 0xFFFFFFFF)
