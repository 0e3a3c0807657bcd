"""The same sandbox under its second name: `Sandbox` and `AsyncSandbox` here choose the runtime that suits the work (`runtime="auto"`).

box = Sandbox()
print(box.run("print(6 * 7)").stdout)
"""

from __future__ import annotations

from typing import Unpack

from agent_sandbox import aio, sandbox
from agent_sandbox.config import SandboxConfig
from agent_sandbox.errors import ToolError
from agent_sandbox.options import CreateArguments, SandboxArguments
from agent_sandbox.result import SandboxResult, SandboxStatus
from agent_sandbox.sandbox import shell

__all__ = ["AsyncSandbox", "Sandbox", "SandboxConfig", "SandboxResult", "SandboxStatus", "ToolError", "create_sandbox", "shell"]


class Sandbox(sandbox.Sandbox):
    """`agent_sandbox.Sandbox` with `runtime="auto"`, unless the configuration or the settings choose a runtime."""

    def __init__(self, config: SandboxConfig | None = None, **settings: Unpack[SandboxArguments]) -> None:
        super().__init__(config or SandboxConfig(runtime="auto"), **settings)


class AsyncSandbox(aio.AsyncSandbox):
    """`agent_sandbox.AsyncSandbox` with `runtime="auto"`, unless the configuration or the settings choose a runtime."""

    def __init__(self, config: SandboxConfig | None = None, **settings: Unpack[SandboxArguments]) -> None:
        super().__init__(config or SandboxConfig(runtime="auto"), **settings)


def create_sandbox(timeout: float | None = 30.0, **settings: Unpack[CreateArguments]) -> Sandbox:
    """Create a sandbox as `agent_sandbox.create_sandbox` does, with `runtime="auto"`."""
    return Sandbox(timeout_seconds=timeout, **settings)
