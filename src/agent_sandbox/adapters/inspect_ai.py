"""A sandbox environment for inspect-ai: each sample of an evaluation has a live sandbox of its own.

    Task(dataset=..., solver=..., sandbox="agent_sandbox")
    Task(dataset=..., solver=..., sandbox=SandboxEnvironmentSpec("agent_sandbox", SampleOptions(network=["packages"])))

inspect-ai finds this module by an entry point of the distribution.
"""

from __future__ import annotations

import errno
import os
import pwd
from typing import Any, Literal, overload

from agent_sandbox.adapters.environment import SandboxEnvironment as OwnEnvironment
from agent_sandbox.adapters.environment import needing
from agent_sandbox.config import SandboxConfig
from agent_sandbox.errors import Denied, SandboxError
from agent_sandbox.result import SandboxResult, SandboxStatus
from agent_sandbox.workspaces import Workspace

with needing("inspect-ai"):
    from inspect_ai.util import (
        ExecResult,
        OutputLimitExceededError,
        SandboxEnvironment,
        SandboxEnvironmentLimits,
        sandboxenv,
    )
    from inspect_ai.util._sandbox.environment import SandboxUnavailableError, SandboxUserUnsupportedError
    from pydantic import BaseModel

__all__ = ["AgentSandboxEnvironment", "SampleOptions"]

RETRIES = (60, 30)  # the longest times of a command that is tried again after a timeout


class SampleOptions(BaseModel):
    """The options of a sample's sandbox. Without `network`, nothing can be reached; hosts are written as in `SandboxConfig.network`."""

    project: str | None = None
    network: tuple[str, ...] = ()
    max_memory_mb: float | None = None
    env_vars: dict[str, str] = {}

    def environment(self) -> OwnEnvironment:
        """Return an environment with these options. Nothing is made yet."""
        config = None
        if self.network or self.max_memory_mb is not None:
            config = SandboxConfig(
                allow_file_read=True,
                allow_file_write=True,
                allow_subprocess=True,
                allow_hidden=True,
                validate_code=False,
                network=self.network,
                timeout_seconds=None,
                max_output_bytes=None,
                max_memory_mb=self.max_memory_mb if self.max_memory_mb is not None else 8192,
                max_processes=4096,
                max_disk_mb=8192,
            )
        return OwnEnvironment(self.project, config=config, env_vars=self.env_vars)


@sandboxenv(name="agent_sandbox")
class AgentSandboxEnvironment(SandboxEnvironment):
    """A `SandboxEnvironment`. Commands see the machine except secrets, have no network by default, and change nothing real."""

    def __init__(self, environment: OwnEnvironment) -> None:
        super().__init__()
        self._environment = environment

    @property
    def workspace(self) -> Workspace:
        """The workspace of the sandbox, with its changes, for people who want to review those of a project."""
        return self._environment.workspace

    @classmethod
    async def sample_init(cls, task_name: str, config: Any, metadata: dict[str, str]) -> dict[str, SandboxEnvironment]:
        """Make a sandbox for a sample. Raises TypeError for a configuration of another kind."""
        if config is not None and not isinstance(config, SampleOptions):
            raise TypeError(f"the configuration of this sandbox is a SampleOptions, not {type(config).__name__}")
        return {"default": cls((config or SampleOptions()).environment())}

    @classmethod
    async def sample_cleanup(cls, task_name: str, config: Any, environments: dict[str, SandboxEnvironment], interrupted: bool) -> None:
        """End the sandboxes of a sample."""
        for each in environments.values():
            await each.as_type(cls)._environment.close_async()

    @classmethod
    def config_deserialize(cls, config: dict[str, Any]) -> BaseModel:
        """Return the options that a log holds."""
        return SampleOptions(**config)

    def default_polling_interval(self) -> float:
        """Return how often inspect asks for what a long command has printed."""
        return 0.2

    async def exec(
        self,
        cmd: list[str],
        input: str | bytes | None = None,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        timeout: int | None = None,
        timeout_retry: bool = True,
        concurrency: bool = True,
    ) -> Any:
        """Run a command. Raises TimeoutError, PermissionError for a file that cannot be executed, and OutputLimitExceededError."""
        if user is not None and not _is_ours(user):
            raise SandboxUserUnsupportedError(f"this sandbox has one user, and that is not {user!r}")
        times = [timeout] if timeout is None or not timeout_retry else [timeout, *(min(timeout, each) for each in RETRIES)]
        for seconds in times:
            result = await self._run(cmd, stdin=b"" if input is None else input, cwd=cwd, env_vars=env, timeout=seconds)
            if result.status is not SandboxStatus.TIMEOUT:
                return self._answered(cmd, result)
        raise TimeoutError(f"the command timed out after {timeout} s")

    async def _run(self, cmd: list[str], **options: Any) -> SandboxResult:
        try:
            return await self._environment.run_async(cmd, **options)
        except SandboxError as error:
            raise SandboxUnavailableError(str(error)) from error

    def _answered(self, cmd: list[str], result: SandboxResult) -> Any:
        if result.exit_code is None:
            raise PermissionError(errno.EACCES, result.error or "refused", cmd[0])
        not_started = result.error is not None and result.error.startswith("could not be started")
        if not_started and result.exit_code == 126:
            raise PermissionError(errno.EACCES, result.error, cmd[0])
        limit = SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE
        if result.truncated or max(len(result.stdout_bytes), len(result.stderr_bytes)) > limit:
            raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE_STR, result.stdout[-limit:])
        stderr = result.stderr or (result.error or "" if not_started else "")
        return ExecResult(result.exit_code == 0, result.exit_code, result.stdout, stderr)

    async def write_file(self, file: str, contents: str | bytes) -> None:
        """Write a file, with the directories above it."""
        try:
            await (await self._environment.files_async()).write(file, contents)
        except Denied as error:
            raise PermissionError(errno.EACCES, str(error), file) from error
        except SandboxError as error:
            raise SandboxUnavailableError(str(error)) from error

    @overload
    async def read_file(self, file: str, text: Literal[True] = True) -> str: ...

    @overload
    async def read_file(self, file: str, text: Literal[False]) -> bytes: ...

    async def read_file(self, file: str, text: bool = True) -> str | bytes:
        """Return the content of a file. Raises OutputLimitExceededError for one that is too large."""
        limit = SandboxEnvironmentLimits.MAX_READ_FILE_SIZE
        try:
            content = await (await self._environment.files_async()).read_bytes(file, max_bytes=limit)
        except Denied as error:
            raise PermissionError(errno.EACCES, str(error), file) from error
        except SandboxError as error:
            raise SandboxUnavailableError(str(error)) from error
        except OSError as error:
            if error.errno != errno.EFBIG:
                raise
            raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_READ_FILE_SIZE_STR, None) from error
        return content.decode() if text else content


def _is_ours(user: str) -> bool:
    """Return whether this is the user that programs in the sandbox run as: our own, by name or number."""
    try:
        return (int(user) if user.isdecimal() else pwd.getpwnam(user).pw_uid) == os.geteuid()
    except KeyError:
        return False
