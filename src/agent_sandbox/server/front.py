"""The process that serves the HTTP interface. To the daemon it is a client like any other: whatever happens here, the daemon goes on."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import stat
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agent_sandbox.errors import PolicyError, RuntimeUnavailable
from agent_sandbox.server.local_ports import is_strong, listening_at, local_address


@dataclass(frozen=True)
class HttpDoor:
    """A socket that the interface is served on, and the token that requests on it have to bear; "" for none."""

    socket: socket.socket
    token: str = ""


def available() -> None:
    """Raises `RuntimeUnavailable` if the packages of the extra `server` are not installed."""
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        hint = "pip install 'entersandbox[server]'"
        raise RuntimeUnavailable("the HTTP interface needs the extra `server`", missing=("server",), hint=hint) from error


def tcp_door(address: str, token_file: str | None) -> HttpDoor:
    """Return a socket on this machine's loopback, with the token in a file of this user; a new one if there is no such file.

    Raises `PolicyError` for another address, a token that others can read, and a port that is taken.
    """
    host, port = local_address(address)
    if token_file is None:
        why = "--listen needs --token-file: every user of this machine can reach the port"
        raise PolicyError(why, hint="name a file; it is made if it does not exist")
    token = _token(Path(token_file))
    return HttpDoor(listening_at(host, port), token)


def _token(path: Path) -> str:
    try:
        new = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with open(new, "w") as file:
            file.write(secrets.token_urlsafe(32) + "\n")
    except FileExistsError:
        pass
    except OSError as error:
        raise PolicyError(f"the token cannot be written to {str(path)!r}: {error.strerror}", hint="name another file") from error
    try:
        with open(path) as file:
            status = os.fstat(file.fileno())
            token = file.read(4096).strip()
    except (OSError, ValueError) as error:
        raise PolicyError(f"the token in {str(path)!r} cannot be read: {error}", hint="name another file") from error
    if status.st_uid != os.geteuid() or status.st_mode & 0o077 or not stat.S_ISREG(status.st_mode):
        raise PolicyError(f"others can read or change the token in {str(path)!r}", hint=f"chmod 600 {path}, or name another file")
    if not is_strong(token):
        raise PolicyError(f"the token in {str(path)!r} is too short, or no single word", hint="remove the file: a new one is made")
    return token


def serve_doors(state: str, place: Path, doors: Sequence[HttpDoor]) -> None:
    """Serve the interface on these sockets until this process is ended. Each has a thread of its own."""
    import uvicorn  # of an extra

    from agent_sandbox.server.http_api import application  # it needs the extra

    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    servers = []
    for door in doors:
        config = uvicorn.Config(application(state, place, door.token), log_level="warning", lifespan="off", access_log=False)
        servers.append(threading.Thread(target=uvicorn.Server(config).run, args=([door.socket],), daemon=True))
    for server in servers:
        server.start()
    for server in servers:
        server.join()
