"""The first message of TLS: whether a connection begins with one, whether it is complete, and the name it asks for (RFC 8446, 6066)."""

from __future__ import annotations

from dataclasses import dataclass

MOST = 64 << 10  # bytes of a first message that are waited for
_HANDSHAKE, _CLIENT_HELLO, _SERVER_NAME, _HOST_NAME, _ENCRYPTED = 22, 1, 0, 0, 0xFE0D


class NotTls(Exception):
    """The bytes are no beginning of TLS, or a malformed one."""


@dataclass(frozen=True)
class ClientHello:
    """The first message of a client: the name it asks for (None without one), and whether it hides another name (encrypted hello)."""

    name: str | None
    encrypted: bool


def read_hello(data: bytes) -> ClientHello | None:
    """Return the first message of a client; None while more bytes are needed. Raises `NotTls`."""
    message = _handshake(data)
    if message is None:
        return None
    reader = _Reader(message)
    reader.take(2 + 32)  # version, random
    reader.block(1)  # session
    reader.block(2)  # ciphers
    reader.block(1)  # compressions
    name: str | None = None
    encrypted = False
    extensions = _Reader(reader.block(2) if reader.left else b"")
    while extensions.left:
        kind = extensions.number(2)
        body = _Reader(extensions.block(2))
        if kind == _SERVER_NAME:
            if name is not None:
                raise NotTls("two names")
            name = _name(_Reader(body.block(2)))
        encrypted = encrypted or kind == _ENCRYPTED
    return ClientHello(name, encrypted)


def _handshake(data: bytes) -> bytes | None:
    """Return the body of the first handshake message, out of one or more records; None while more bytes are needed."""
    body, place = b"", 0
    while True:
        header = data[place : place + 5]
        if header[:1] not in (b"", bytes((_HANDSHAKE,))) or header[1:2] not in (b"", b"\x03"):
            raise NotTls("no handshake")
        if len(header) < 5:
            return None
        length = int.from_bytes(header[3:5], "big")
        if not 0 < length <= 16384 + 256:
            raise NotTls("a record of a length that is not allowed")
        body += data[place + 5 : place + 5 + length]
        if body[:1] not in (b"", bytes((_CLIENT_HELLO,))):
            raise NotTls("no first message of a client")
        if len(body) >= 4:
            size = int.from_bytes(body[1:4], "big")
            if size > MOST:
                raise NotTls("a first message of more than is read")
            if len(body) >= 4 + size:
                return body[4 : 4 + size]
        if len(data) < place + 5 + length:
            return None
        place += 5 + length


def _name(names: _Reader) -> str:
    kind, name = names.number(1), names.block(2)
    if kind != _HOST_NAME or names.left:
        raise NotTls("more than one name")
    try:
        return name.decode("ascii")
    except UnicodeDecodeError:
        raise NotTls("a name that is not ASCII") from None


class _Reader:
    """Reads numbers and blocks from bytes. Raises `NotTls` where they end too early."""

    def __init__(self, data: bytes) -> None:
        self._data, self._place = data, 0

    @property
    def left(self) -> int:
        return len(self._data) - self._place

    def take(self, length: int) -> bytes:
        if self.left < length:
            raise NotTls("it ends too early")
        self._place += length
        return self._data[self._place - length : self._place]

    def number(self, width: int) -> int:
        return int.from_bytes(self.take(width), "big")

    def block(self, width: int) -> bytes:
        return self.take(self.number(width))
