"""The wire protocol between the supervisor, the keeper, init and the guest: single bytes, and marshalled values behind a length.

A stream has no message boundaries, so messages are read by exact byte counts. Values use marshal, not pickle: it creates plain values,
never objects. Malformed bytes can still crash it, so it is used only between our own processes; bytes that a guest may have written are
read raw and bounded.
"""

from __future__ import annotations

import errno
import fcntl
import marshal
import os
import struct
import time

from agent_sandbox._fast.values import TYPE_CHECKING

if TYPE_CHECKING:
    import socket
    from collections.abc import Collection, Sequence
    from typing import Any
else:
    from agent_sandbox._fast import sockets as socket

# Orders from the supervisor to the keeper, each with the number of the run.
START, MOUNT, WATCH, STAGE, REST, DONE = "start", "mount", "watch", "stage", "rest", "done"
FIRST_RUN = 1  # the number of a keeper's first run
LARGEST_ORDER = 16384  # bytes: a path and two numbers

# Orders from the supervisor to init, once the guest exists: GO with the wall time in seconds, SIGNAL with the signal number. The others are
# for a run with checkpoints, each with the pid of a process: KEEP it as a checkpoint, DROP it, WAKE it, make it the MAIN program. CLEAR
# ends every process that is not kept. HALT stops them until RESUME; RETIRE ends those that were started since. FREEZE stops the
# checkpoints, too, because there will be forks. SPLIT lets one of them go on to make a fork, and STILL stops it again. ADOPT names the
# first process of the fork, and is followed by one byte with a socket for the orders about it. LOOK names the copy of a woken
# checkpoint that is only looked at, until RETIRE.
ORDER = struct.Struct("!cd")
GO, SIGNAL = b"g", b"s"
KEEP, DROP, WAKE, MAIN, CLEAR, HALT, RETIRE, RESUME = b"k", b"d", b"w", b"m", b"c", b"h", b"e", b"r"
FREEZE, SPLIT, STILL, ADOPT, LOOK = b"t", b"f", b"q", b"a", b"l"
FAMILY_ORDERS = (KEEP, DROP, WAKE, MAIN, CLEAR, HALT, RETIRE, RESUME, FREEZE, SPLIT, STILL, ADOPT, LOOK)
FORKED = b"f"  # a fork's first byte, to which the kernel adds its pid; and the answer, with its descriptors
STAGED = b"S"  # the supervisor's answer to an init whose view stands: the stagehand has taken its place

RISEN = b"ready"  # the keeper's first message; with a space and a number, it has the setup helper and this ABI of Landlock
HERE = b"h"  # init's first byte, and again when it requests its ids
DECLINED = b"x"  # instead of any message of init: the setup helper cannot perform the script, and nothing has run
MAPPED = b"m"  # the supervisor's answer, after it has moved init into its cgroup and written its id map
# The guest's first byte on the payload socket: all restrictions are in force. Instead of READY, or after READY instead of running the
# program, the guest may send a refusal: an exit code, a space and the reason, up to the end of the stream. A refusal begins with a digit,
# so its first byte tells it from READY.
READY = b"R"
REFUSAL_BYTES = 4096  # the longest refusal
# An observed guest sends LISTENING before READY, with its listener's number in four bytes. The supervisor answers HEARD once it has a copy
# of the listener.
LISTENING, HEARD = b"\x01", b"h"

# A guest that runs our own code to its end sends init this when its program has ended: wait status, processor time, peak memory in bytes,
# the fuel used or NOT_COUNTED, and the limits that this code itself enforced, as the sum of the next three.
FAREWELL = struct.Struct("!HdQqB")
NOT_COUNTED = -1
MEMORY_HIT, PROCESSES_HIT, GARBLED_HIT = 1, 2, 4  # the last: the program sent our code a malformed message
PAYLOAD_FD, FAREWELL_FD = 3, 4  # in the guest: after its three streams
# From a watched guest before it ends, on its payload socket: this header, and a line per input.
INPUTS = b"inputs\n"
REPORT_BYTES = 2 << 20  # kept of such a report

# Where a view holds the code while it runs.
SCRIPTS = "/run/sandbox"
PYTHON, JAVASCRIPT = "main.py", "main.js"
SCRIPT = f"{SCRIPTS}/{PYTHON}"
# Where the view of a run with a network holds the certificates to trust. Private to the run, and gone with it.
TRUST = "/run/agent-sandbox"

# Header of a message between the supervisor and a running program that it serves: the length of the body, and the number of the question.
TALK = struct.Struct("!IQ")
HELLO = TALK.pack(0, 0)  # the guest's first message: it has everything it needs, and the program is about to start

_LENGTH = struct.Struct("!I")
_ANY_LENGTH = (1 << 32) - 1
_CREDENTIALS = struct.Struct("iII")  # struct ucred: pid, uid, gid
_MAX_DESCRIPTORS = 128
_DESCRIPTOR = struct.calcsize("i")


def send(sock: socket.socket, value: Any, descriptors: Sequence[int] = ()) -> None:
    """Send one value together with descriptors."""
    send_packed(sock, pack(value), descriptors)


def send_packed(sock: socket.socket, packed: bytes, descriptors: Sequence[int] = ()) -> None:
    """Send a value that was packed before, together with descriptors."""
    message = memoryview(packed)
    if descriptors:
        message = message[socket.send_fds(sock, [message], list(descriptors)) :]
    if message:  # sending nothing fails, too, if the receiver has read all of it and gone
        sock.sendall(message)


def send_script(sock: socket.socket, script: bytes, descriptors: Sequence[int]) -> None:
    """Send init a setup script instead of a value: the highest bit of its length is set."""
    send_packed(sock, _LENGTH.pack(len(script) | 1 << 31) + script, descriptors)


def pack(value: Any) -> bytes:
    """Return a value as the bytes to send: its length, then its content."""
    body = marshal.dumps(value)
    return _LENGTH.pack(len(body)) + body


def receive(sock: socket.socket, most: int = _ANY_LENGTH) -> tuple[Any, list[int]]:
    """Receive one value and its descriptors. Raises EOFError if the other side has gone, and ValueError for a value of more than `most`
    bytes, before it is read; then no descriptor is kept."""
    head, descriptors = receive_descriptors(sock, _LENGTH.size)
    try:
        if not head:
            raise EOFError("the other side has gone")
        head += exactly(sock, _LENGTH.size - len(head))
        length = _LENGTH.unpack(head)[0]
        if length > most:
            raise ValueError(f"a message of {length:,} bytes is too large")
        return marshal.loads(exactly(sock, length)), descriptors
    except BaseException:
        close_all(descriptors)
        raise


def receive_descriptors(sock: socket.socket, size: int) -> tuple[bytes, list[int]]:
    """Receive bytes and close-on-exec descriptors. Replaces socket.recv_fds, which drops the MSG_CMSG_CLOEXEC flag."""
    received: list[int] = []
    data, ancillary, _, _ = sock.recvmsg(size, socket.CMSG_SPACE(_MAX_DESCRIPTORS * _DESCRIPTOR), socket.MSG_CMSG_CLOEXEC)
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            received += memoryview(content[: len(content) - len(content) % _DESCRIPTOR]).cast("i")
    return data, received


def credentials(sock: socket.socket) -> int:
    """Receive one byte and return its sender's pid, as the kernel reports it for our pid namespace. Raises EOFError if the sender has gone.

    The socket must have SO_PASSCRED set before the byte is sent; this function clears SO_PASSCRED.
    """
    data, ancillary, _, _ = sock.recvmsg(1, socket.CMSG_SPACE(_CREDENTIALS.size), socket.MSG_CMSG_CLOEXEC)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 0)
    for level, kind, content in ancillary:
        if data and level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
            return int(_CREDENTIALS.unpack(content)[0])
    raise EOFError("the other side has gone")


def above_streams(fd: int) -> int:
    """Return a descriptor under a number that is no stream's, and close it under its own if that was one.

    An application that has closed its streams gives their numbers to the next descriptors.
    """
    if fd > 2:
        return fd
    moved: int = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
    os.close(fd)
    return moved


def message_pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected sockets for whole messages, above the streams."""
    one, other = (
        each if each.fileno() > 2 else socket.socket(fileno=above_streams(each.detach()))
        for each in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    )
    return one, other


def close_all(descriptors: Sequence[int]) -> None:
    """Close descriptors. A descriptor that is already closed is no error."""
    for fd in descriptors:
        try:
            os.close(fd)
        except OSError:
            continue


SEAL_SECONDS, _SEAL_PAUSE = 10.0, 0.01


def seal(memfd: int) -> None:
    """Seal a memfd: no holder can change its content or size any more. Raises OSError.

    The kernel refuses it with EBUSY while somebody else holds one of its pages: a mapping for writing, but also the kernel itself, which
    moves or reclaims pages at any time. So it is tried again for a while.
    """
    seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
    give_up_at = time.monotonic() + SEAL_SECONDS
    while True:
        try:
            fcntl.fcntl(memfd, fcntl.F_ADD_SEALS, seals)
            return
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() >= give_up_at:
                raise
        time.sleep(_SEAL_PAUSE)


def exactly(sock: socket.socket, count: int) -> bytes:
    """Receive exactly this many bytes, and none of the next message. Raises EOFError if the other side has gone."""
    parts = []
    while count:
        part = sock.recv(min(count, 1 << 20))
        if not part:
            raise EOFError("the other side has gone in the middle of a message")
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def close_others(descriptors: Collection[int]) -> None:
    """Close every descriptor from 3 upwards except these."""
    from agent_sandbox.kernel import syscalls as sc  # loads ctypes, which only forked processes need

    lowest = 3
    for fd in sorted(descriptors):
        if fd > lowest:
            sc.close_range(lowest, fd - 1)
        lowest = max(lowest, fd + 1)
    sc.close_range(lowest, 0xFFFFFFFF)
