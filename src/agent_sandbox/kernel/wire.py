"""The messages between the supervisor, the keeper, init and the guest: single bytes, and marshalled values behind a length.

A stream has no message boundaries, so every read here is of an exact number of bytes.
"""

from __future__ import annotations

import array
import fcntl
import marshal
import os
import socket
import struct
from collections.abc import Collection, Sequence

from agent_sandbox._fast.values import TYPE_CHECKING

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


# From the supervisor to the keeper: an order and the number of the run.
START, WATCH, DONE = "start", "watch", "done"

# From the supervisor to init, once there is a guest: GO with the wall time in seconds, SIGNAL with its number.
ORDER = struct.Struct("!cd")
GO, SIGNAL = b"g", b"s"

HERE = b"h"  # init's first byte, and again when it wants its ids
MAPPED = b"m"  # the supervisor's answer when it has moved init into its cgroup and written its id map
# The guest's first byte on the payload socket: everything is in force. In its place, or later and instead of running the program, comes a
# refusal: an exit code, a space and the reason, up to the end of the stream. A refusal begins with a digit, so one byte tells which it is.
READY = b"R"
REFUSAL_BYTES = 4096  # of a refusal that are kept
# From a guest that is observed, before that, and the number of its listener in four bytes; HEARD when the supervisor has a copy of it.
LISTENING, HEARD = b"\x01", b"h"

# From a guest that is our own code to its end, to init: the program in it has ended. Its status, as `wait` would tell, processor time, peak
# of memory in bytes, and the fuel it used, or NOT_COUNTED.
FAREWELL = struct.Struct("!HdQq")
NOT_COUNTED = -1
FAREWELL_FD = 4  # in the guest: after its three streams and the payload
# From a guest that is watched, on the socket where it got its program, before it ends: this, and a line for each.
INPUTS = b"inputs\n"
REPORT_BYTES = 2 << 20  # of such a report that are kept

# Where code lies in a view while it runs.
SCRIPTS = "/run/sandbox"
PYTHON, JAVASCRIPT = "main.py", "main.js"
SCRIPT = f"{SCRIPTS}/{PYTHON}"

# Between the supervisor and a program it talks with while that runs: the length of what follows, and the number of the question.
TALK = struct.Struct("!IQ")
HELLO = TALK.pack(0, 0)  # the guest's first, when it has what it needs and the program is about to start
