"""`agent-sandbox mcp`: start the server for one client on standard input and output, or for several on a local port."""

from __future__ import annotations

import os
import secrets
from importlib.util import find_spec
from typing import TYPE_CHECKING

from agent_sandbox._fast.values import dataclass, replace
from agent_sandbox.assembly import here
from agent_sandbox.cli.caller import CAPABILITY, guest_environment
from agent_sandbox.cli.context import opened_hosts, project_of
from agent_sandbox.cli.execute import variables_of
from agent_sandbox.cli.options import JSON_OUTPUT_BYTES, CommandOptions
from agent_sandbox.cli.parser import Request, UsageError
from agent_sandbox.cli.render.messages import Console, remark
from agent_sandbox.cli.results import VerbResult
from agent_sandbox.errors import RuntimeUnavailable, install_extra
from agent_sandbox.server.local_ports import SHORTEST_TOKEN, is_strong, local_address

if TYPE_CHECKING:
    from agent_sandbox.policy.tokens import Token

TOKEN = "AGENT_SANDBOX_MCP_TOKEN"


@dataclass(frozen=True)
class McpOptions:
    """Options of `mcp`. Without an `address` it serves standard input and output."""

    run: CommandOptions
    address: tuple[str, int] | None = None

    @classmethod
    def read(cls, request: Request) -> McpOptions:
        """Read the options of a request. Raises `UsageError`."""
        run = CommandOptions.read(request)
        if run.collect:
            raise UsageError("mcp has no --json: its standard output is the client's", hint="leave it out")
        address = request.value("--listen")
        limits = (*run.policy.limits, ("output_bytes", JSON_OUTPUT_BYTES))
        return cls(replace(run, policy=replace(run.policy, limits=limits)), local_address(address) if address is not None else None)


@dataclass(frozen=True)
class McpResult(VerbResult):
    """A server that has ended. It has no document: its standard output was the client's."""

    kind = ""

    exit: int = 0

    def text(self, console: Console) -> None:
        """Print nothing: the client has gone."""


def serve_mcp(request: Request, console: Console) -> VerbResult:
    """Serve until the client or the user ends it. Raises `RuntimeUnavailable` without the extra `mcp`."""
    if find_spec("mcp") is None or find_spec("mcp_types") is None:
        raise RuntimeUnavailable(
            "the MCP server needs the package mcp, which is not installed",
            missing=("mcp",),
            hint=install_extra("mcp"),
        )
    options = McpOptions.read(request)
    token = os.environ.pop(TOKEN, "")  # what runs in the sandbox never has it
    run = options.run
    tokens: tuple[Token, ...] = ()
    if run.capabilities or CAPABILITY in os.environ:
        from agent_sandbox.cli.approval_prompt import tokens_of  # few servers are given one

        tokens = tokens_of((*run.capabilities, os.environ.get(CAPABILITY, "")))
        run = replace(run, policy=replace(run.policy, capable=opened_hosts(run, project_of(run.project), console)))
    from agent_sandbox.mcp import transports  # the package mcp takes half a second to load
    from agent_sandbox.mcp.tools import Toolbox

    toolbox = Toolbox(run, guest_environment(os.environ, variables_of(run), home=here().host.home), tokens)
    try:
        for note in toolbox.workspace.notes:
            console.note(note)
        if options.address is None:
            transports.serve_streams(toolbox)
        else:
            host, port = options.address
            transports.serve_port(toolbox, host, port, _checked(token) or _new_token(), remark)
    finally:
        toolbox.close()
    return McpResult()


def _checked(token: str) -> str:
    """Return the token of the environment. Raises `UsageError` if it can be guessed."""
    if token and not is_strong(token):
        raise UsageError(f"{TOKEN} must have at least {SHORTEST_TOKEN} printable characters", hint="openssl rand -hex 32")
    return token


def _new_token() -> str:
    """Make a token, and tell it to the person who starts the server."""
    token = secrets.token_urlsafe(32)
    remark(f"clients send the header: Authorization: Bearer {token}")
    return token
