"""The process that serves the HTTP interface. To the daemon it is a client like any other: whatever happens here, the daemon goes on."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import stat
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from agent_sandbox.errors import PolicyError, RuntimeUnavailable, install_extra
from agent_sandbox.policy.paths import contains
from agent_sandbox.server.local_ports import is_strong, listening_at, local_address
from agent_sandbox.server.traces import Traces, start_traces


@dataclass(frozen=True)
class HttpDoor:
    """A socket that the interface is served on, and the token that requests on it have to bear; "" for none."""

    socket: socket.socket
    token: str = ""

    @property
    def address(self) -> str:
        """The address of a port, also if the kernel has chosen it."""
        host, port = self.socket.getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def available() -> None:
    """Raises `RuntimeUnavailable` if the packages of the extra `server` are not installed."""
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        hint = install_extra("server")
        raise RuntimeUnavailable("the HTTP interface needs the extra `server`", missing=("server",), hint=hint) from error


def tcp_door(address: str, token_file: str | None, hidden: Sequence[str]) -> HttpDoor:
    """Return a socket on this machine's loopback, with the token in a file of this user; a new one if there is no such file.

    `hidden` are paths that no sandbox shows. Raises `PolicyError` for another address, a token that others or a sandbox can read, and a
    port that is taken.
    """
    host, port = local_address(address)
    if token_file is None:
        why = "--listen needs --token-file: every user of this machine can reach the port"
        raise PolicyError(why, hint="name a file; it is made if it does not exist")
    path = os.path.realpath(token_file)
    if not any(contains(place, path) for place in hidden):
        why = f"a sandbox could read the token in {token_file!r}"
        raise PolicyError(why, hint="name a file that no sandbox shows: --token-file ~/.local/state/agent-sandbox/token")
    token = _token(Path(path))
    return HttpDoor(listening_at(host, port), token)


def _token(path: Path) -> str:
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
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


def serve_doors(state: str, keys: str, place: Path, doors: Sequence[HttpDoor], log: Callable[..., None]) -> None:
    """Serve the interface on these sockets until this process is ended. Each has a thread of its own."""
    import uvicorn  # of an extra

    from agent_sandbox.server.connections import BoundedProtocol
    from agent_sandbox.server.http_api import application  # it needs the extra

    try:
        traces = start_traces()
    except ImportError as error:
        log("no traces", why=f"OpenTelemetry is asked for by its variables, and {error.name} is not installed")
        traces = Traces()

    def end(*_: object) -> None:
        traces.flush()
        os._exit(0)

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.getLogger("uvicorn").addHandler(logging.NullHandler())  # its messages are text of clients, also of those without a token
    logging.getLogger("uvicorn").propagate = False
    servers = []
    for door in doors:
        config = uvicorn.Config(
            application(state, place, door.token, keys=keys, log=log, traces=traces),
            http=BoundedProtocol,
            ws="none",
            lifespan="off",
            proxy_headers=False,
            server_header=False,
            log_config=None,
            access_log=False,
        )
        servers.append(threading.Thread(target=uvicorn.Server(config).run, args=([door.socket],), daemon=True))
    for server in servers:
        server.start()
    for server in servers:
        server.join()
