"""The transports: standard input and output for one client, streamable HTTP on a local port for several.

A line or a body of more than 4 MiB is refused. On the port, every request needs the token, a Host header of this address, and no foreign
Origin: a web page that a browser shows cannot use it.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import anyio
import anyio.to_thread
import mcp_types as types
import uvicorn
from mcp.server.stdio import stdio_server
from mcp.server.transport_security import DEFAULT_MAX_REQUEST_BODY_SIZE, TransportSecuritySettings
from mcp.shared.message import SessionMessage

from agent_sandbox.mcp.server import GONE, SandboxServer

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from agent_sandbox.mcp.tools import Toolbox
from agent_sandbox.server.connections import BoundedProtocol
from agent_sandbox.server.local_ports import LOCAL_HOSTS, bears, listening_at

LONGEST_LINE = DEFAULT_MAX_REQUEST_BODY_SIZE
TOO_LONG = b"too long\n"
PATH = "/mcp"
_SESSION_SECONDS = 1800.0  # a handshake session without a request


def serve_streams(toolbox: Toolbox) -> None:
    """Serve one client on standard input and output, until it closes them. Nothing else of this process can use them meanwhile."""
    lines = _claimed_input()

    async def serve() -> None:
        server = SandboxServer(toolbox).lowlevel
        async with stdio_server(stdin=cast("Any", lines)) as (reading, writing):
            lines.answer_with(lambda error: writing.send(SessionMessage(error)))
            await server.run(reading, writing, server.create_initialization_options())

    silence()
    anyio.run(_until_terminated, serve)


def silence() -> None:
    """Print no messages of the libraries: they hold text of clients as it came."""
    for name in ("mcp", "uvicorn"):
        logger = logging.getLogger(name)
        logger.propagate = False
        logger.addHandler(logging.NullHandler())


async def _until_terminated(serve: Callable[[], Awaitable[None]], stop: Callable[[], None] | None = None) -> None:
    """Serve until it ends by itself, or SIGTERM or SIGINT arrives. Then `stop` ends it; without that it is cancelled."""
    async with anyio.create_task_group() as tasks:

        async def watch() -> None:
            with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
                async for _ in signals:
                    if stop is None:
                        tasks.cancel_scope.cancel()
                    else:
                        stop()
                    return

        tasks.start_soon(watch)
        await serve()
        tasks.cancel_scope.cancel()


def _claimed_input() -> InputLines:
    """Take standard input for the client alone: programs that this process starts find the null device there."""
    private = os.dup(0)
    os.set_inheritable(private, False)
    nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    os.dup2(nothing, 0)
    os.close(nothing)
    return InputLines(private)


class InputLines:
    """Messages of a client, one a line. A line that is none, or is too long, is answered with an error and left out."""

    def __init__(self, descriptor: int) -> None:
        self._file = os.fdopen(descriptor, "rb", closefd=False)
        self._answer: Callable[[types.JSONRPCError], Awaitable[None]] | None = None
        self._answers = anyio.Event()

    def answer_with(self, answer: Callable[[types.JSONRPCError], Awaitable[None]]) -> None:
        """Send errors this way. Nothing is read before."""
        self._answer = answer
        self._answers.set()

    def __aiter__(self) -> AsyncIterator[str]:
        return self._lines()

    async def _lines(self) -> AsyncIterator[str]:
        await self._answers.wait()
        assert self._answer is not None
        while line := await anyio.to_thread.run_sync(self._next, abandon_on_cancel=True):
            if (error := fault_of(line)) is not None:
                await self._answer(error)
            elif line.strip():
                yield line.decode("utf-8", "replace")

    def _next(self) -> bytes:
        line = self._file.readline(LONGEST_LINE)
        if len(line) < LONGEST_LINE or line.endswith(b"\n"):
            return line
        while (rest := self._file.readline(LONGEST_LINE)) and not rest.endswith(b"\n"):
            pass
        return TOO_LONG


def fault_of(line: bytes) -> types.JSONRPCError | None:
    """Return the error that answers a line which is no message; None for a message, and for an empty line."""
    if line == TOO_LONG:
        return _error(None, types.INVALID_REQUEST, f"a message has more than {LONGEST_LINE:,} bytes")
    if not line.strip():
        return None
    try:
        types.jsonrpc_message_adapter.validate_json(line, by_name=False)
        return None
    except ValueError:
        pass
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return _error(None, types.PARSE_ERROR, "this is no JSON")
    number = message.get("id") if isinstance(message, dict) else None
    known = number if isinstance(number, str | int) and not isinstance(number, bool) else None
    return _error(known, types.INVALID_REQUEST, "this is no message of JSON-RPC 2.0")


def _error(number: str | int | None, code: int, why: str) -> types.JSONRPCError:
    return types.JSONRPCError(jsonrpc="2.0", id=number, error=types.ErrorData(code=code, message=why))


def serve_port(toolbox: Toolbox, host: str, port: int, token: str, note: Callable[[str], None]) -> None:
    """Serve clients that know the token at http://HOST:PORT/mcp. Port 0 takes a free one. Raises `PolicyError` if it is in use."""
    listener = listening_at(host, port)
    port = listener.getsockname()[1]
    app = TokenCheck(application(toolbox, port), token)
    shown = f"[{host}]" if ":" in host else host
    note(f"serving http://{shown}:{port}{PATH}; Ctrl-C ends it")
    serve_app(app, listener)


def application(toolbox: Toolbox, port: int) -> ASGIApp:
    """Return the server as an ASGI application that checks Host and Origin, and no token."""
    names = [f"{each}:{port}" for each in LOCAL_HOSTS]
    local = [f"http://{each}:*" for each in LOCAL_HOSTS]
    return SandboxServer(toolbox).lowlevel.streamable_http_app(
        streamable_http_path=PATH,
        session_idle_timeout=_SESSION_SECONDS,
        transport_security=TransportSecuritySettings(allowed_hosts=names, allowed_origins=local),
    )


def serve_app(app: ASGIApp, listener: socket.socket) -> None:
    """Serve an application until SIGTERM or SIGINT arrives."""
    config = uvicorn.Config(
        app,
        log_level="error",
        access_log=False,
        ws="none",
        lifespan="on",
        http=BoundedProtocol,
        timeout_graceful_shutdown=2,
    )
    serving = _Port(config)

    def stop() -> None:
        serving.should_exit = True

    async def serve() -> None:
        await serving.serve([listener])

    silence()
    with listener:
        anyio.run(_until_terminated, serve, stop)


class _Port(uvicorn.Server):
    """Serves a port, and leaves signals to us: what the sandbox runs is ended before this process is."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _noting_departure(scope: Scope, receive: Receive) -> Receive:
    """Note in the scope when the client has gone. A request of the handshake protocols goes on otherwise, and its answer has no reader."""

    async def noting() -> Message:
        message = await receive()
        if message["type"] == "http.disconnect":
            scope[GONE] = True
        return message

    return noting


class TokenCheck:
    """Refuses every HTTP request that does not carry the token."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app, self._token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] == "http" and bears(scope["headers"], self._token):
            await self._app(scope, _noting_departure(scope, receive), send)
            return
        headers = [(b"www-authenticate", b"Bearer"), (b"content-type", b"text/plain"), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": 401, "headers": headers})
        await send({"type": "http.response.body", "body": b"the token is missing or wrong\n"})
