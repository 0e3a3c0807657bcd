"""A command line that the daemon performs for a client of the HTTP interface: its streams are pipes, and it ends with the request."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from agent_sandbox.cli.errand import ENDED, REFUSED, SOCKET, TAKEN, stamp
from agent_sandbox.errors import SandboxError, WorkspaceError
from agent_sandbox.kernel import wire

MASK = 0o022
CHUNK = 1 << 16


class TooBusy(SandboxError):
    """The daemon has too much to do."""


class Errand:
    """A command line under way. Iterate over its output, then ask for its `exit`. Closing it ends the command line."""

    def __init__(self, link: socket.socket, streams: Mapping[str, int], stdin: int, given: bytes) -> None:
        self.exit = 125
        self._link, self._streams, self._stdin, self._given = link, dict(streams), stdin, given

    @classmethod
    async def start(cls, place: Path, line: Sequence[str], *, directory: str, environment: Mapping[str, str], stdin: bytes) -> Errand:
        """Ask the daemon. Raises `TooBusy` if it has too much to do, and `WorkspaceError` if there is no such directory.

        It may be cancelled while it waits for its turn: then the command line is not performed.
        """
        with ExitStack() as stack:
            link = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK))
            here = _opened(directory)
            stack.callback(os.close, here)
            (theirs_in, ours_in), (ours_out, theirs_out), (ours_err, theirs_err) = (_pipe(stack) for _ in range(3))
            words = [os.fsencode(word) for word in line]
            variables = [(os.fsencode(name), os.fsencode(value)) for name, value in environment.items()]
            await _ask(link, place, wire.pack((stamp(), words, variables, MASK)), (theirs_in, theirs_out, theirs_err, here))
            answer = await asyncio.get_running_loop().sock_recv(link, 1)
            if answer != TAKEN:
                hint = "try again later" if answer == REFUSED else "start it again: agent-sandbox serve"
                raise TooBusy("too many others wait" if answer == REFUSED else "the daemon is stopping, or of another version", hint=hint)
            stack.pop_all()
        wire.close_all((theirs_in, theirs_out, theirs_err, here))
        return cls(link, {"stdout": ours_out, "stderr": ours_err}, ours_in, stdin)

    async def output(self) -> AsyncIterator[tuple[str, bytes]]:
        """Yield what it writes, with the name of the stream, until it has ended."""
        queue: asyncio.Queue[tuple[str, bytes]] = asyncio.Queue(maxsize=16)  # a client that does not read slows the program down
        async with asyncio.TaskGroup() as tasks:
            feeding = tasks.create_task(self._feed())
            readers = [tasks.create_task(self._read(name, queue)) for name in self._streams]
            open_ones = len(readers)
            while open_ones:
                name, data = await queue.get()
                if data:
                    yield name, data
                else:
                    open_ones -= 1
            feeding.cancel()
        with suppress(OSError):
            loop = asyncio.get_running_loop()
            if await loop.sock_recv(self._link, 1) == ENDED and (code := await loop.sock_recv(self._link, 1)):
                self.exit = code[0]

    async def _read(self, name: str, queue: asyncio.Queue[tuple[str, bytes]]) -> None:
        reader = asyncio.StreamReader()
        pipe = os.fdopen(self._streams[name], "rb", buffering=0)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
        self._streams[name] = -1
        try:
            while data := await reader.read(CHUNK):
                await queue.put((name, data))
        finally:
            transport.close()
        await queue.put((name, b""))

    async def _feed(self) -> None:
        pipe, self._stdin = os.fdopen(self._stdin, "wb", buffering=0), -1
        loop = asyncio.get_running_loop()
        transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, pipe)
        writer = asyncio.StreamWriter(transport, protocol, None, loop)
        try:
            with suppress(OSError):  # it reads no more
                writer.write(self._given)
                await writer.drain()
        finally:
            transport.close() if not transport.is_closing() else None

    def close(self) -> None:
        """End the command line, if it has not ended, and close what belongs to it. Idempotent."""
        self._link.close()
        wire.close_all([fd for fd in (*self._streams.values(), self._stdin) if fd >= 0])
        self._streams, self._stdin = {}, -1


def _opened(directory: str) -> int:
    try:
        return os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        why = error.strerror if isinstance(error, OSError) else "it is no path"
        raise WorkspaceError(f"the directory {directory!r} cannot be used: {why}", hint="name one that exists") from error


def _pipe(stack: ExitStack) -> tuple[int, int]:
    ends = os.pipe2(os.O_CLOEXEC)
    stack.callback(wire.close_all, ends)
    return ends


async def _ask(link: socket.socket, place: Path, message: bytes, descriptors: Sequence[int]) -> None:
    """Send a request. A long one is taken by a worker only, so this may last as long as others are performed."""
    directory = os.open(place, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        link.connect(f"/proc/self/fd/{directory}/{SOCKET}")  # at once, or not at all: BlockingIOError if too many others connect
    finally:
        os.close(directory)
    sent = socket.send_fds(link, [message], list(descriptors))
    if sent < len(message):  # sending nothing fails, too, if all of it was performed meanwhile
        await asyncio.get_running_loop().sock_sendall(link, memoryview(message)[sent:])
