"""The sandbox behind an adapter: a live sandbox over a project, or over an empty directory of its own.

A project's changes are kept, for review and promotion. Without a project everything is thrown away at the end. Nothing is made before the
first use, because frameworks build their backends long before they need them, or never.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypedDict, Unpack

from agent_sandbox._calls import Shell
from agent_sandbox.aio import AsyncFiles, AsyncLiveSandbox
from agent_sandbox.errors import SandboxError, install_extra
from agent_sandbox.live import LiveSandbox
from agent_sandbox.options import PathLike
from agent_sandbox.result import SandboxResult
from agent_sandbox.workspaces import Workspace

if TYPE_CHECKING:
    from agent_sandbox.config import SandboxConfig
    from agent_sandbox.engine.gate import Approver
    from agent_sandbox.files import SandboxFiles
    from agent_sandbox.policy.action import Action
    from agent_sandbox.policy.decide import Ask
    from agent_sandbox.policy.tokens import Token

PREFIX = "agent-sandbox-live-"  # of the directories that are made for environments without a project


class EnvironmentOptions(TypedDict, total=False):
    """Options of an environment. They mean the same as for `Workspace.over`."""

    config: SandboxConfig | None
    env_vars: Mapping[str, str] | None
    approver: Approver | Callable[[Action, Ask], bool | str] | None
    capabilities: Iterable[Token | str]


@contextmanager
def needing(extra: str) -> Iterator[None]:
    """Turn the error of a framework that is not installed into one that says how to install it."""
    try:
        yield
    except ModuleNotFoundError as error:
        install = install_extra(extra)
        message = f"this adapter needs a package that is not installed ({error.name}): {install}"
        raise ModuleNotFoundError(message, name=error.name) from error


class SandboxEnvironment:
    """One sandbox for all calls of a framework. Safe to use from many threads, and from an event loop by the methods that are awaited.

    By default commands see the whole machine
    except secrets, have no network, and change nothing real.
    """

    def __init__(
        self,
        project: PathLike | None = None,
        **options: Unpack[EnvironmentOptions],
    ) -> None:
        self._project = None if project is None else os.path.realpath(os.fsdecode(project))
        self._options = options
        self._lock = threading.Lock()
        self._workspace: Workspace | None = None
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        self._live: LiveSandbox | None = None
        self._awaited: AsyncLiveSandbox | None = None
        self._closed = False

    @property
    def kept(self) -> bool:
        """Whether changes are kept when the environment is closed: those of a project are."""
        return self._project is not None

    @property
    def workspace(self) -> Workspace:
        """The workspace of the project. Close the environment first; then review and promote the changes here."""
        with self._lock:
            return self._own_workspace()

    def _own_workspace(self) -> Workspace:
        if self._workspace is None:
            if self._closed:
                raise SandboxError("this environment has been closed", hint="make another")
            if self._project is None:
                self._directory = tempfile.TemporaryDirectory(prefix=PREFIX)
            place = self._project if self._directory is None else os.path.realpath(self._directory.name)
            assert place is not None
            self._workspace = Workspace.over(place, **self._options)
        return self._workspace

    @property
    def live(self) -> LiveSandbox:
        """The live sandbox, made when it is first asked for. Raises `SandboxError` if the environment was closed."""
        with self._lock:
            if self._closed:
                raise SandboxError("this environment has been closed", hint="make another")
            if self._live is None:
                self._live = self._own_workspace().live(kept=self.kept)
                self._awaited = AsyncLiveSandbox(self._live)
            return self._live

    @property
    def started(self) -> bool:
        """Whether there is a sandbox, or was one."""
        return self._live is not None

    @property
    def alive(self) -> bool:
        """Whether there is a sandbox that takes commands."""
        return self._live is not None and not self._closed and not self._live.ended

    @property
    def working_dir(self) -> str:
        """The directory in which commands start: the project."""
        return self.live.working_dir

    def run(self, work: Sequence[str] | Shell, **options: Any) -> SandboxResult:
        """Run a command, as `LiveSandbox.run` does."""
        return self.live.run(work, **options)

    @property
    def files(self) -> SandboxFiles:
        """The files, as `LiveSandbox.files`."""
        return self.live.files

    async def run_async(self, work: Sequence[str] | Shell, **options: Any) -> SandboxResult:
        """Run a command. If the awaiting task is cancelled, the command is killed, and the task ends after that."""
        return await (await self.live_async()).run(work, **options)

    async def files_async(self) -> AsyncFiles:
        """Return the files, to be used from an event loop."""
        return (await self.live_async()).files

    async def live_async(self) -> AsyncLiveSandbox:
        """Return the live sandbox for asyncio, made in a thread when it is first asked for."""
        if self._awaited is None or self._closed:
            await asyncio.to_thread(lambda: self.live)
        assert self._awaited is not None
        return self._awaited

    async def close_async(self) -> None:
        """Close the environment, in a thread."""
        await asyncio.shield(asyncio.to_thread(self.close))

    def close(self) -> None:
        """End all programs. The changes of a project are kept for review; everything else is gone. Idempotent."""
        with self._lock:
            self._closed = True
            if self._live is not None:
                self._live.close()
            if self._awaited is not None:
                self._awaited._threads._pool.shutdown(wait=False)
            if self._directory is not None:
                if self._workspace is not None:
                    self._workspace.close()
                self._directory.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
