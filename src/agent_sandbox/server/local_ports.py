"""Ports of the loopback, for the HTTP interface and for the MCP server: their address, their socket, and the token of requests."""

from __future__ import annotations

import hmac
import socket
from collections.abc import Iterable

from agent_sandbox.errors import PolicyError

LOCAL_HOSTS = ("127.0.0.1", "localhost", "[::1]")  # as a Host header has them
SHORTEST_TOKEN = 16  # characters


def local_address(text: str) -> tuple[str, int]:
    """Read the value of --listen. Raises `PolicyError` for what is no address of the loopback with a port."""
    host, colon, port = text.rpartition(":")
    if not colon or host not in LOCAL_HOSTS or not (port.isascii() and port.isdigit()) or int(port) >= 1 << 16:
        why = f"--listen takes a local address with a port; {text!r} is no address of this machine's own"
        raise PolicyError(why, hint="--listen 127.0.0.1:8765; to serve others, put a proxy with TLS in front of it")
    return host.strip("[]"), int(port)


def listening_at(host: str, port: int) -> socket.socket:
    """Return a socket that listens at this address. Port 0 takes a free one. Raises `PolicyError` if it cannot be used."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise PolicyError(f"{host}:{port} cannot be used: {error.strerror}", hint="choose another port: --listen 127.0.0.1:0") from None
    return listener


def is_strong(token: str) -> bool:
    """Whether a token is one word that nobody guesses."""
    return len(token) >= SHORTEST_TOKEN and token.isascii() and token.isprintable() and " " not in token


def bears(headers: Iterable[tuple[bytes, bytes]], token: str) -> bool:
    """Whether the headers of a request bear the token, once."""
    given = [value for name, value in headers if name == b"authorization"]
    return len(given) == 1 and hmac.compare_digest(given[0], f"Bearer {token}".encode())
