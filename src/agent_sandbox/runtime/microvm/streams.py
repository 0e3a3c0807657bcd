"""Connections that share the serial port of a machine, on either side: the driver's sockets lead to doors, the agent's to the program.

Each connection has a number that is never used again, and a window in each direction: a side sends no more than the other has room for, and
holds no more than `WINDOW` bytes that its socket does not take. The driver's other side is hostile: a frame that an honest side would never
send raises `Garbled`.
"""

from __future__ import annotations

import select
import socket
import struct
from collections.abc import Callable, Mapping
from contextlib import suppress

from agent_sandbox.runtime.microvm import frames
from agent_sandbox.runtime.microvm.frames import Garbled

WINDOW = 1 << 16  # bytes
MOST = 128  # connections at once
_CHUNK = 32768
_TROUBLE = select.POLLIN | select.POLLHUP | select.POLLERR
_AT_ONCE = struct.pack("ii", 1, 0)  # for SO_LINGER: the other end learns of a connection that was cut

Send = Callable[[bytes, bytes], None]  # a frame's kind and content


class RelayedConnection:
    """One connection on this side of the port."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.credit = WINDOW  # bytes that the other side has room for
        self.pending = bytearray()  # that the socket has not taken yet
        self.reads = self.writes = True  # until the end of what our socket says, and of what it is told
        self.ends = False  # the other side has said its last byte

    @property
    def wanted(self) -> int:
        """The events to wait for. A socket of which nothing is wanted must not be polled: it would report a hang-up again and again."""
        reading = select.POLLIN if self.reads and self.credit else 0
        return reading | (select.POLLOUT if self.pending or (self.ends and self.writes) else 0)


class Streams:
    """The open connections by number. `send` sends a frame to the other side of the port."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._open: dict[int, RelayedConnection] = {}
        self._last = 0

    def __len__(self) -> int:
        return len(self._open)

    @property
    def unsent(self) -> bool:
        """Whether a socket has not taken everything that it was told."""
        return any(each.pending or (each.ends and each.writes) for each in self._open.values())

    @property
    def unread(self) -> bool:
        """Whether the end of what a socket says has not come."""
        return any(each.reads for each in self._open.values())

    def new_number(self, number: int) -> None:
        """Note the number of a new connection. Raises `Garbled` if one that is as high was used before."""
        if number <= self._last:
            raise Garbled("the number of a connection twice")
        self._last = number

    def add(self, number: int, sock: socket.socket) -> None:
        """Serve a connection. Its socket does not block; it may still be connecting."""
        self._open[number] = RelayedConnection(sock)

    def wanted(self) -> dict[int, int]:
        """Return the events to wait for, by descriptor."""
        return {each.socket.fileno(): wanted for each in self._open.values() if (wanted := each.wanted)}

    def serve(self, ready: Mapping[int, int], *, may_read: Callable[[], bool] = lambda: True) -> None:
        """Pass on what is ready. Nothing is read from a socket once `may_read` returns False."""
        for number, stream in list(self._open.items()):
            events = ready.get(stream.socket.fileno(), 0)
            if events & select.POLLOUT:
                self._write(number, stream, ending=True)
            if events & _TROUBLE and stream.wanted & select.POLLIN and number in self._open and may_read():
                self._read(number, stream)

    def obey(self, kind: bytes, content: bytes) -> None:
        """Take a frame about a connection. One that has ended on this side is passed over. Raises `Garbled`."""
        if len(content) < frames.NUMBER.size:
            raise Garbled("a frame about no connection")
        (number,), rest = frames.NUMBER.unpack_from(content), content[frames.NUMBER.size :]
        if number > self._last:
            raise Garbled("a frame about a connection that nobody opened")
        stream = self._open.get(number)
        if stream is None:
            return
        if kind == frames.BYTES:
            if stream.ends or len(stream.pending) + len(rest) > WINDOW:
                raise Garbled("bytes of a connection that there is no room for")
            stream.pending += rest
            self._write(number, stream)
        elif kind == frames.BYTES_END:
            stream.ends = True
        elif kind == frames.PASSED:
            if len(content) != frames.NUMBER_PASSED.size:
                raise Garbled("an account of bytes that is none")
            stream.credit += frames.NUMBER_PASSED.unpack(content)[1]
            if stream.credit > WINDOW:
                raise Garbled("an account of bytes that were never sent")
        else:
            self._forget(number, stream)

    def _write(self, number: int, stream: RelayedConnection, *, ending: bool = False) -> None:
        """Give the socket what it takes. With `ending`, it is connected, and also learns of the end."""
        passed = 0
        try:
            while stream.pending:
                taken = stream.socket.send(stream.pending)
                del stream.pending[:taken]
                passed += taken
            if ending and stream.ends:
                stream.writes = False
                stream.socket.shutdown(socket.SHUT_WR)
        except BlockingIOError:
            pass
        except OSError:
            self.cut(number)
            return
        if passed:
            self._send(frames.PASSED, frames.NUMBER_PASSED.pack(number, passed))
        self._retire(number, stream)

    def _read(self, number: int, stream: RelayedConnection) -> None:
        try:
            data = stream.socket.recv(min(_CHUNK, stream.credit))
        except BlockingIOError:
            return
        except OSError:
            self.cut(number)
            return
        stream.credit -= len(data)
        stream.reads = bool(data)
        self._send(frames.BYTES if data else frames.BYTES_END, frames.NUMBER.pack(number) + data)
        self._retire(number, stream)

    def _retire(self, number: int, stream: RelayedConnection) -> None:
        if not stream.reads and not stream.writes:
            del self._open[number]
            stream.socket.close()

    def cut(self, number: int) -> None:
        """End a connection, here and on the other side."""
        self._send(frames.CUT, frames.NUMBER.pack(number))
        if (stream := self._open.get(number)) is not None:
            self._forget(number, stream)

    def _forget(self, number: int, stream: RelayedConnection) -> None:
        del self._open[number]
        with suppress(OSError):
            stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
        stream.socket.close()
