"""The real client of the package `mcp`, connected to a real server."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import mcp_types as types
from mcp.client.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client

from tests.e2e.program import PROGRAM

TOKEN = "a-token-of-the-tests-0123456789"
HANDSHAKE, MODERN = "legacy", "2026-07-28"
Asked = Callable[[types.ElicitRequestFormParams], types.ElicitResult]


@dataclass(frozen=True)
class Place:
    """A project, and the state directory of its sandboxes."""

    project: Path
    state: Path
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "AGENT_SANDBOX_STATE": str(self.state), **self.env}

    def program(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Type `agent-sandbox` and these words, as a person does in another terminal."""
        return subprocess.run([*PROGRAM, *words], cwd=self.project, env=self.environment, capture_output=True, text=True, check=False)


@dataclass
class Model:
    """What a model can do: call tools and read resources. `asked` are the questions that the client showed to its user."""

    client: Client
    asked: list[types.ElicitRequestFormParams]
    progress: list[str] = field(default_factory=list)

    async def __call__(self, tool: str, /, **arguments: Any) -> types.CallToolResult:
        async def tell(progress: float, total: float | None, message: str | None) -> None:
            self.progress.append(message or "")

        result = await self.client.call_tool(tool, arguments, progress_callback=tell)
        assert isinstance(result, types.CallToolResult)
        return result

    async def done(self, tool: str, /, **arguments: Any) -> dict[str, Any]:
        """Call a tool that must not fail, and return its document."""
        result = await self(tool, **arguments)
        assert not result.is_error, text_of(result)
        document: dict[str, Any] = result.structured_content
        return document

    async def resource(self, name: str) -> str:
        found = await self.client.read_resource(f"agent-sandbox://{name}")
        [content] = found.contents
        assert isinstance(content, types.TextResourceContents)
        return content.text


def text_of(result: types.CallToolResult) -> str:
    [content] = result.content
    assert isinstance(content, types.TextContent)
    return content.text


def yes(asked: types.ElicitRequestFormParams) -> types.ElicitResult:
    """A person who ticks everything."""
    return types.ElicitResult(action="accept", content=dict.fromkeys(asked.requested_schema["properties"], True))


@asynccontextmanager
async def connected(transport: Any, mode: str, user: Asked | None) -> AsyncIterator[Model]:
    asked: list[types.ElicitRequestFormParams] = []

    async def elicit(context: object, params: types.ElicitRequestParams) -> types.ElicitResult:
        assert isinstance(params, types.ElicitRequestFormParams) and user is not None
        asked.append(params)
        return user(params)

    async with Client(transport, mode=mode, elicitation_callback=elicit if user is not None else None) as client:
        yield Model(client, asked)


def converse(
    place: Place, talk: Callable[[Model], Awaitable[None]], *options: str, mode: str = HANDSHAKE, user: Asked | None = None
) -> None:
    """Start a server on standard input and output, let a model use it, and end it."""
    parameters = StdioServerParameters(command=PROGRAM[0], args=[*PROGRAM[1:], "mcp", *options], env=place.environment, cwd=place.project)

    async def main() -> None:
        async with connected(stdio_client(parameters), mode, user) as model:
            await talk(model)

    run(main)


def run(main: Callable[[], Awaitable[None]]) -> None:
    """Run it, and raise what failed in it alone: the client wraps that in groups of groups."""
    try:
        anyio.run(main)
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
            error = error.exceptions[0]
        raise error from None


@contextmanager
def port(place: Place, *options: str) -> Iterator[str]:
    """A server on a free local port; its address."""
    line = [*PROGRAM, "mcp", "--listen", "127.0.0.1:0", *options]
    env = {**place.environment, "AGENT_SANDBOX_MCP_TOKEN": TOKEN}
    with subprocess.Popen(line, cwd=place.project, env=env, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        try:
            found = re.search(r"http://\S+/mcp", server.stderr.readline())
            assert found is not None
            yield found[0]
        finally:
            server.terminate()
            assert server.wait() == 0
            assert server.stderr.read() == ""


class Wire:
    """A client that writes what it likes on the standard input of a server."""

    def __init__(self, place: Place, *options: str) -> None:
        pipe = subprocess.PIPE
        self.server = subprocess.Popen(
            [*PROGRAM, "mcp", *options], cwd=place.project, env=place.environment, stdin=pipe, stdout=pipe, stderr=pipe
        )

    def write(self, line: bytes) -> None:
        assert self.server.stdin is not None
        self.server.stdin.write(line + b"\n")
        self.server.stdin.flush()

    def send(self, method: str, params: object = None, number: int | None = None) -> None:
        numbered = {} if number is None else {"id": number}
        self.write(json.dumps({"jsonrpc": "2.0", **numbered, "method": method, "params": params or {}}).encode())

    def answer(self) -> dict[str, Any]:
        """The next message of the server that is no notification."""
        assert self.server.stdout is not None
        while True:
            message: dict[str, Any] = json.loads(self.server.stdout.readline())
            if "method" not in message:
                return message

    def shake_hands(self, version: str = "2025-11-25") -> dict[str, Any]:
        about = {"name": "tests", "version": "1"}
        self.send("initialize", {"protocolVersion": version, "capabilities": {}, "clientInfo": about}, 0)
        answer = self.answer()
        self.send("notifications/initialized")
        return answer

    def close(self) -> str:
        """Close standard input, wait for the server's end, and return what it said."""
        assert self.server.stdin is not None and self.server.stdout is not None and self.server.stderr is not None
        self.server.stdin.close()
        said = self.server.stderr.read().decode()
        self.server.stdout.close()
        self.server.stderr.close()
        assert self.server.wait() == 0
        return said
