"""The link between a supervisor and its egress process: JSON in frames, with descriptors.

JSON in both directions, not marshal: the egress reads bytes of a guest, so the supervisor takes its messages as hostile. Every frame is
bounded. `orders` lists the messages.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Sequence

from agent_sandbox._fast.values import TYPE_CHECKING
from agent_sandbox.kernel import wire

if TYPE_CHECKING:
    from typing import Any

FRAME = struct.Struct("!I")
FORK, EQUIP = b"+", b"="  # from the supervisor to the zygote, each with descriptors: fork a process for this link; load from these
MOST_BYTES = 64 << 10  # of a frame from the egress


def frame(message: dict[str, Any]) -> bytes:
    """Return a message as the bytes to send."""
    body = json.dumps(message, separators=(",", ":")).encode("ascii")
    return FRAME.pack(len(body)) + body


def send(link: socket.socket, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
    """Send a message, with descriptors. Raises OSError."""
    data = memoryview(frame(message))
    if descriptors:
        data = data[socket.send_fds(link, [data], list(descriptors)) :]
    if data:  # sending nothing fails, too, if the receiver has read all of it and gone
        link.sendall(data)


def receive(link: socket.socket, *, most: int = MOST_BYTES) -> tuple[dict[str, Any], list[int]]:
    """Receive a message and its descriptors. Raises EOFError if the other side has gone, ValueError if it is malformed or too long."""
    head, descriptors = wire.receive_descriptors(link, FRAME.size)
    try:
        if not head:
            raise EOFError("the other side has gone")
        head += wire.exactly(link, FRAME.size - len(head))
        (length,) = FRAME.unpack(head)
        if length > most:
            raise ValueError(f"a message of {length} bytes")
        message = json.loads(wire.exactly(link, length))
        if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
            raise ValueError("a message without a kind")
        return message, descriptors
    except BaseException:
        wire.close_all(descriptors)
        raise
