"""Sockets without `socket`, which makes some hundred constants into enumerations when it loads. The names are the same.

Import it as `socket` where type checkers import the real one. Not here: host names, files over sockets, `accept`.
"""

from __future__ import annotations

import _socket
from _socket import *  # noqa: F403
from struct import pack  # and not `array`, which loads `collections`

from agent_sandbox._fast.values import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Any


class socket(_socket.socket):  # type: ignore[no-redef]
    """A socket that is closed at the end of a block."""

    def __enter__(self) -> socket:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()


def send_fds(sock: _socket.socket, buffers: Iterable[bytes], fds: Sequence[int], flags: int = 0, address: Any = None) -> int:
    """Send bytes together with descriptors, and return the number of bytes sent."""
    return sock.sendmsg(buffers, [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, pack(f"{len(fds)}i", *fds))], flags, address)
