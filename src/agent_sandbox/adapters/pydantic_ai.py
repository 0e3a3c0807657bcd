"""A workspace backend for pydantic-ai: commands and files of an agent run in one live sandbox.

backend = SandboxWorkspaceBackend("/home/me/project")
agent.run_sync("Fix the failing test.", workspace=Workspace(backend))
backend.close()
print(backend.workspace.diff())
"""

from __future__ import annotations

import asyncio
import errno
import os
import posixpath
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack

from agent_sandbox._calls import shell as command_line
from agent_sandbox.adapters.environment import EnvironmentOptions, SandboxEnvironment, needing
from agent_sandbox.errors import Denied, SandboxError
from agent_sandbox.files import FileEntry as SandboxEntry
from agent_sandbox.options import PathLike
from agent_sandbox.result import SandboxStatus
from agent_sandbox.workspaces import Workspace as SandboxWorkspace

with needing("pydantic-ai"):
    from pydantic_ai.workspaces import (
        CommandResult,
        FileEntry,
        WorkspaceError,
        WorkspaceOutputLimitError,
        WorkspaceRef,
        WorkspaceTimeoutError,
        WorkspaceUnavailableError,
    )
    from pydantic_ai.workspaces.protocol import validate_timeout

__all__ = ["SandboxWorkspaceBackend"]

PROVIDER = "agent-sandbox"
LARGEST = 1 << 30  # bytes of a file that is read

# The environments of this process by their reference: a backend never ends one, only whoever holds the reference does.
_environments: dict[str, SandboxEnvironment] = {}
_lock = threading.Lock()


class SandboxWorkspaceBackend:
    """A `WorkspaceBackend` with commands, files and links. Use it from asyncio.

    Without a project, it works in an empty directory of its own, and everything is gone after `close`. With one, `workspace` has the
    changes, for review and promotion, once it is closed. `ref` attaches to an environment of this process.
    """

    def __init__(self, project: PathLike | None = None, *, ref: Any = None, **options: Unpack[EnvironmentOptions]) -> None:
        """`options` are `config`, `env_vars`, `approver` and `capabilities`, as for `Workspace.over`. Does no input or output."""
        if ref is not None and (project is not None or options):
            raise TypeError("an environment that is named by its ref has its project and options already")
        self._ref = ref
        self._own = None if ref is not None else SandboxEnvironment(project, **options)

    @property
    def ref(self) -> Any:
        """The identity of the environment; None until the first operation has made it."""
        return self._ref

    @property
    def workspace(self) -> SandboxWorkspace:
        """The workspace of the project, whose changes a person reviews and promotes after `close`."""
        return self._found().workspace

    def close(self) -> None:
        """End the environment and all programs in it. pydantic-ai never does that itself."""
        self._found().close()
        with _lock:
            _environments.pop(self._ref.id if self._ref is not None else "", None)

    def _found(self) -> SandboxEnvironment:
        environment = self._own or _environments.get(self._ref.id)
        if environment is None:
            raise WorkspaceUnavailableError(f"there is no environment {self._ref.id!r} in this process")
        return environment

    async def _environment(self) -> SandboxEnvironment:
        environment = self._found()
        if self._ref is None:
            await asyncio.to_thread(self._begin, environment)
        elif not environment.alive:
            raise WorkspaceUnavailableError(f"the sandbox has ended: {environment.live.ended if environment.started else 'it was closed'}")
        return environment

    def _begin(self, environment: SandboxEnvironment) -> None:
        live = environment.live  # one for all that ask at the same time
        with _lock:
            if self._ref is None:
                self._ref = WorkspaceRef(provider=PROVIDER, id=f"{live.id}-{os.urandom(4).hex()}")
                _environments[self._ref.id] = environment

    async def working_dir(self) -> str:
        """Return the directory in which commands start."""
        return (await self._environment()).working_dir

    async def run(
        self, command: str | Sequence[str], *, shell: bool = False, env: Mapping[str, str] | None = None, timeout: float | None = None
    ) -> Any:
        """Run a command without input, and return its output and exit code."""
        if isinstance(command, str) is not shell:
            raise TypeError("a string is a command line, with shell=True; a sequence of words is a command, without")
        validate_timeout(timeout)
        environment = await self._environment()
        work = command_line(command) if isinstance(command, str) else [*command]
        try:
            result = await environment.run_async(work, env_vars=env, timeout=timeout)
        except SandboxError as error:
            raise _unavailable(environment, error) from error
        if result.exit_code is None:
            raise WorkspaceError(result.error or "refused")
        output = {"stdout": result.stdout, "stderr": result.stderr}
        if result.status is SandboxStatus.TIMEOUT:
            raise WorkspaceTimeoutError(result.error or "timed out", **output)
        if result.truncated:
            most = max(len(result.stdout_bytes), len(result.stderr_bytes))
            raise WorkspaceOutputLimitError(f"the command printed more than {most} bytes", limit=most, **output)
        if not environment.alive:
            raise WorkspaceUnavailableError("the sandbox ended during the command")
        if result.error is not None and result.exit_code in (126, 127) and not result.stderr:
            output["stderr"] = result.error
        return CommandResult(exit_code=result.exit_code, **output)

    async def read_bytes(self, path: str) -> bytes:
        """Return the content of a file."""
        content: bytes = await self._on_files(lambda files: files.read_bytes(path, max_bytes=LARGEST))
        return content

    async def write_bytes(self, path: str, data: bytes) -> None:
        """Write a file, through a link that is there."""
        try:
            await self._on_files(lambda files: files.write(path, data))
        except FileExistsError as error:  # a file stands where a directory above it should be
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path) from error

    async def stat(self, path: str) -> Any:
        """Describe an entry; a link as what it leads to."""
        return _entry(await self._on_files(lambda files: files.stat(path, follow_links=True)))

    async def list_dir(self, path: str) -> Sequence[Any]:
        """Return the entries of a directory."""
        found = await self._on_files(lambda files: files.list(path))
        return [await self._followed(each) if each.kind == "link" else _entry(each) for each in found]

    async def _followed(self, link: SandboxEntry) -> Any:
        try:
            return await self.stat(link.path)
        except OSError:  # it leads nowhere, or in a circle
            return FileEntry(name=link.name, path=link.path, is_dir=False, size=None)

    async def make_dir(self, path: str) -> None:
        """Make a directory and those above it."""
        await self._on_files(lambda files: files.mkdir(path))

    async def remove(self, path: str) -> None:
        """Remove an entry with all it holds. Raises ValueError for the working directory and those above it."""
        root = await self.working_dir()
        target = posixpath.join(await self.realpath(posixpath.dirname(path)), posixpath.basename(path))
        if root == target or root.startswith(target.rstrip("/") + "/"):
            raise ValueError("the working directory, and directories above it, are not removed")
        await self._on_files(lambda files: files.remove(path, recursive=True))

    async def exists(self, path: str) -> bool:
        """Return whether there is an entry at the path."""
        there: bool = await self._on_files(lambda files: files.exists(path))
        return there

    async def realpath(self, path: str) -> str:
        """Follow all links on a path, also one that does not exist. Raises OSError for a circle."""
        environment = await self._environment()
        result = await environment.run_async(["realpath", "-mz", "--", path])
        if result.exit_code != 0:
            raise OSError(errno.ELOOP, result.stderr.strip() or os.strerror(errno.ELOOP), path)
        return os.fsdecode(result.stdout_bytes.rstrip(b"\0"))

    async def _on_files(self, operate: Callable[[Any], Any]) -> Any:
        environment = await self._environment()
        try:
            return await operate(await environment.files_async())
        except Denied as error:
            raise PermissionError(errno.EACCES, str(error)) from error
        except SandboxError as error:
            raise _unavailable(environment, error) from error


def _unavailable(environment: SandboxEnvironment, error: SandboxError) -> Any:
    """Return the error of pydantic-ai for one of ours: the environment is gone, or it refused."""
    return WorkspaceError(str(error)) if environment.alive else WorkspaceUnavailableError(str(error))


def _entry(found: SandboxEntry) -> Any:
    return FileEntry(name=found.name, path=found.path, is_dir=found.is_directory, size=found.size if found.kind == "file" else None)
