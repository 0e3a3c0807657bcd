"""The messages between a command and a process that holds sessions: frames of JSON on a Unix socket.

A frame is its length in four bytes, and then a JSON object. A request has `do` and its arguments. The answer to it is any number of pieces
of output, and then one frame with `done` or `failed`. Either side may be wrong or hostile to the other only within one user: see
`check_peer`.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import struct
import time
from base64 import b64decode, b64encode
from collections.abc import Mapping
from typing import Any

from agent_sandbox.errors import LaunchFailed, PolicyError, RuntimeUnavailable, SandboxError

LARGEST = 64 << 20  # bytes of one frame: a file of 16 MiB in base64, and room
SHORT_SECONDS = 0.05  # until another try to accept a connection, where no descriptor is left for it
_LENGTH = struct.Struct("!I")
_CREDENTIALS = struct.Struct("3i")
_KINDS: dict[str, type[SandboxError]] = {
    kind.__name__: kind for kind in (SandboxError, PolicyError, LaunchFailed)
}  # the others carry more than a message

Message = dict[str, Any]


class BrokenMessage(Exception):
    """Raised for bytes that are no message, and for a message that is too large."""


def accepted(listener: socket.socket) -> socket.socket | None:
    """Accept a connection. None if it has gone, or if no descriptor is left for it: then it waits in the kernel's queue."""
    try:
        return listener.accept()[0]
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
            time.sleep(SHORT_SECONDS)  # the listener stays ready to be read: without a pause, this would be tried again at once, for ever
        return None


def send(link: socket.socket, message: Mapping[str, Any]) -> None:
    """Send one message. Raises OSError if the other side has gone, and `BrokenMessage` if it is too large."""
    data = json.dumps(message, separators=(",", ":")).encode()
    if len(data) > LARGEST:
        raise BrokenMessage(f"a message of {len(data):,} bytes is too large")
    link.sendall(_LENGTH.pack(len(data)) + data)


def receive(link: socket.socket) -> Message | None:
    """Receive one message; None if the other side has closed the link between two. Raises OSError and `BrokenMessage`."""
    head = _exactly(link, _LENGTH.size)
    if not head:
        return None
    (length,) = _LENGTH.unpack(head)
    if length > LARGEST:
        raise BrokenMessage(f"a message of {length:,} bytes is too large")
    try:
        message = json.loads(_exactly(link, length, begun=True))
    except (ValueError, RecursionError) as error:
        raise BrokenMessage(f"a message is no JSON: {error}") from None
    if not isinstance(message, dict):
        raise BrokenMessage("a message is no object")
    return message


def _exactly(link: socket.socket, count: int, *, begun: bool = False) -> bytes:
    """Receive so many bytes; none if the link was closed before the first."""
    parts: list[bytes] = []
    left = count
    while left:
        part = link.recv(min(left, 1 << 20))
        if not part:
            if begun or parts:
                raise BrokenMessage("a message was cut off")
            return b""
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def packed(data: bytes) -> str:
    """Return bytes as text of a message."""
    return b64encode(data).decode("ascii")


def unpacked(text: object) -> bytes:
    """Return the bytes of such a text. Raises `BrokenMessage`."""
    try:
        return b64decode(str(text), validate=True)
    except ValueError:
        raise BrokenMessage("a message holds bytes that cannot be read") from None


def failure(error: SandboxError) -> Message:
    """Return an error as a message."""
    missing = list(error.missing) if isinstance(error, RuntimeUnavailable) else []
    return {"failed": {"kind": type(error).__name__, "message": error.message, "hint": error.hint, "missing": missing}}


def raise_failure(told: object) -> None:
    """Raise the error of such a message. A kind that holds more than a message comes as its nearest one."""
    if not isinstance(told, dict):
        raise BrokenMessage("an error is no object")
    message, hint = str(told.get("message", "")), str(told.get("hint", ""))
    if told.get("kind") == RuntimeUnavailable.__name__:
        raise RuntimeUnavailable(message, missing=tuple(map(str, told.get("missing") or ())), hint=hint)
    raise _KINDS.get(str(told.get("kind")), SandboxError)(message, hint=hint)


def check_peer(link: socket.socket) -> None:
    """Raise PermissionError unless the other side is a process of this user, outside every sandbox.

    The socket lies in a directory that is the user's alone, and that no view of a sandbox shows. This is a second wall: the kernel says
    who has connected. A rootless guest has the user's id, but another pid namespace.
    """
    pid, uid, _ = _CREDENTIALS.unpack(link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if uid != os.geteuid():
        raise PermissionError(f"user {uid} may not use sessions of user {os.geteuid()}")
    if os.readlink(f"/proc/{pid}/ns/pid") != os.readlink("/proc/self/ns/pid"):
        raise PermissionError("a process of a sandbox may not use sessions of its user")
