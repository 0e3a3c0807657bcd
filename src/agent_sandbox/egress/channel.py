"""A channel: one connection, read in pieces with bounded memory and time, which can go over to TLS after bytes have been read.

The first bytes of a client tell what it speaks and whom it asks for. They are read before TLS begins, so TLS runs over buffers in memory
here, not over the socket; the bytes that were looked at are its first.
"""

from __future__ import annotations

import asyncio
import ssl
from contextlib import suppress

PIECE = 64 << 10
_HIGH = 2 * PIECE  # bytes that wait to be read, after which the socket is not read from


class SocketChannel(asyncio.Protocol):
    """One connection. Only one task reads from it at a time."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._ended = False
        self._error: Exception | None = None
        self._reader: asyncio.Future[None] | None = None
        self._deadline = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._room = asyncio.Event()
        self._room.set()
        self._tls: ssl.SSLObject | None = None
        self._begun = False  # the handshake is over
        self._inward, self._outward = ssl.MemoryBIO(), ssl.MemoryBIO()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._tls is None:
            self._received += data
        else:
            self._inward.write(data)
            if self._begun:
                self._decrypt()
        if len(self._received) > _HIGH and self._transport is not None:
            self._transport.pause_reading()
        self._wake()

    def eof_received(self) -> bool:
        self._ended = True
        self._wake()
        return True  # the other side may still read

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended, self._error = True, self._error or exc
        self._transport = None
        self._room.set()
        self._wake()

    def pause_writing(self) -> None:
        self._room.clear()

    def resume_writing(self) -> None:
        self._room.set()

    @property
    def open(self) -> bool:
        """Whether both sides still hold the connection, and nothing waits to be read."""
        return self.alive and not self._received

    @property
    def alive(self) -> bool:
        """Whether both sides still hold the connection."""
        return not (self._ended or self._error) and self._transport is not None and not self._transport.is_closing()

    @property
    def spoken(self) -> str | None:
        """The protocol that both sides of TLS agreed on."""
        return self._tls.selected_alpn_protocol() if self._tls else None

    @property
    def address(self) -> str:
        """The address that a client opened the connection to, an IPv4 one in its own form."""
        assert self._transport is not None
        address: str = self._transport.get_extra_info("sockname")[0]
        return address.removeprefix("::ffff:")

    async def read(self, seconds: float) -> bytes:
        """Return what has arrived; nothing at the end. Raises TimeoutError after these seconds, and OSError if the connection broke."""
        if not self._received:
            await self._arrival(seconds)
        data = bytes(self._received)
        self._received.clear()
        if self._transport is not None:
            self._transport.resume_reading()
        return data

    def put_back(self, data: bytes) -> None:
        """Let these bytes be read again, before all others."""
        self._received[:0] = data

    async def _arrival(self, seconds: float) -> None:
        """Wait until there is something to read, or the end."""
        self._deadline = self._loop.time() + seconds
        while not (self._received or self._ended or self._error):
            await self._wait()
        if self._error is not None and not self._received:
            raise self._error

    async def _wait(self) -> None:
        if self._timer is None or self._timer.when() > self._deadline:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_at(self._deadline, self._expire)
        self._reader = self._loop.create_future()
        try:
            await self._reader
        finally:
            self._reader = None

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _expire(self) -> None:
        """End a wait that took too long. The timer is not moved at every read: one that fires early is set again."""
        self._timer = None
        if self._reader is None or self._reader.done():
            return
        if self._loop.time() >= self._deadline:
            self._reader.set_exception(TimeoutError())
        else:
            self._timer = self._loop.call_at(self._deadline, self._expire)

    def write(self, data: bytes) -> None:
        """Send bytes. Raises OSError if the connection is closed."""
        if self._transport is None or self._transport.is_closing():
            raise self._error or ConnectionResetError("the connection is closed")
        if self._tls is None:
            self._transport.write(data)
            return
        view = memoryview(data)
        while view:
            view = view[self._tls.write(view) :]
        self._transport.write(self._outward.read())

    async def drain(self, seconds: float) -> None:
        """Wait until most of what was written has been taken. Raises TimeoutError and OSError."""
        if not self._room.is_set():
            async with asyncio.timeout(seconds):
                await self._room.wait()
            if self._transport is None:
                raise self._error or ConnectionResetError("the connection is closed")

    def write_end(self) -> None:
        """Say that nothing more will be sent. Not over TLS, where `close_gently` does so."""
        if self._transport is not None and not self._transport.is_closing() and self._transport.can_write_eof():
            self._transport.write_eof()

    async def close_gently(self, seconds: float, most: int) -> None:
        """Close the connection, and read for a while what still arrives: closing at once would destroy an answer on its way."""
        if self._transport is None or self._transport.is_closing():
            return
        if self._tls is not None and self._begun:
            with suppress(ssl.SSLError):
                self._tls.unwrap()
            self._flush()
            self._tls = None  # what arrives is thrown away unread
        until = self._loop.time() + seconds
        with suppress(OSError, TimeoutError):
            self.write_end()
            while most > 0 and (piece := await self.read(max(0.0, until - self._loop.time()))):
                most -= len(piece)
        self.close()

    def close(self) -> None:
        """Close the connection after everything that was written has been sent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._transport is None or self._transport.is_closing():
            return
        if self._tls is not None and self._begun:
            with suppress(ssl.SSLError):
                self._tls.unwrap()
            if data := self._outward.read():
                self._transport.write(data)
        self._transport.close()

    def abort(self) -> None:
        """Close the connection at once, so that the other side sees it break."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._transport is not None:
            self._transport.abort()

    async def start_tls(self, context: ssl.SSLContext, seconds: float, *, hostname: str | None = None) -> None:
        """Go over to TLS, as the server or as the client of `hostname`. Raises ssl.SSLError, TimeoutError and OSError."""
        self._inward, self._outward = ssl.MemoryBIO(), ssl.MemoryBIO()
        tls = context.wrap_bio(self._inward, self._outward, server_side=hostname is None, server_hostname=hostname)
        self._inward.write(bytes(self._received))
        self._received.clear()
        self._tls = tls
        self._deadline = self._loop.time() + seconds
        while True:
            try:
                tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                self._flush()
                if self._ended or self._error is not None:
                    raise self._error or ConnectionResetError("it was closed in the middle of the handshake") from None
                if not self._inward.pending:
                    await self._wait()
            except ssl.SSLError:
                self._flush()  # the alert, which tells the other side why
                raise
        self._flush()
        self._begun = True
        self._decrypt()

    def _flush(self) -> None:
        if self._transport is not None and (data := self._outward.read()):
            self._transport.write(data)

    def _decrypt(self) -> None:
        assert self._tls is not None
        try:
            while piece := self._tls.read(PIECE):
                self._received += piece
            self._ended = True
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLZeroReturnError:
            self._ended = True
        except ssl.SSLError as error:
            self._error = error
        self._flush()
