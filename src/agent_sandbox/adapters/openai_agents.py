"""A sandbox client for openai-agents: its shell, patch and file tools work in one live sandbox.

client = AgentSandboxClient("/home/me/project")
agent = SandboxAgent(name="Coder", model=..., instructions=...)
await Runner.run(agent, "Fix the test.", run_config=RunConfig(sandbox=SandboxRunConfig(client=client)))
client.close()
print(client.workspace.diff())
"""

from __future__ import annotations

import io
import os
import tarfile
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Unpack

from agent_sandbox.adapters.environment import EnvironmentOptions, SandboxEnvironment, needing
from agent_sandbox.errors import SandboxError
from agent_sandbox.options import PathLike
from agent_sandbox.result import SandboxResult, SandboxStatus
from agent_sandbox.workspaces import Workspace

with needing("openai-agents"):
    from agents.sandbox import Manifest
    from agents.sandbox.errors import (
        ExecTimeoutError,
        ExecTransportError,
        WorkspaceArchiveReadError,
        WorkspaceArchiveWriteError,
        WorkspaceReadNotFoundError,
    )
    from agents.sandbox.session import (
        BaseSandboxClient,
        BaseSandboxClientOptions,
        BaseSandboxSession,
        Instrumentation,
        SandboxSessionState,
    )
    from agents.sandbox.session.runtime_helpers import RESOLVE_WORKSPACE_PATH_HELPER
    from agents.sandbox.session.workspace_payloads import coerce_write_payload
    from agents.sandbox.snapshot import resolve_snapshot
    from agents.sandbox.types import ExecResult
    from agents.sandbox.util.tar_utils import UnsafeTarMemberError, validate_tarfile

__all__ = ["AgentSandboxClient", "AgentSandboxClientOptions", "AgentSandboxSession", "AgentSandboxSessionState"]

LARGEST = 1 << 30  # bytes of a file that is read


class AgentSandboxClientOptions(BaseSandboxClientOptions):
    """No options beside those of the client."""

    type: Literal["agent_sandbox"] = "agent_sandbox"


class AgentSandboxSessionState(SandboxSessionState):
    """The serialisable state of a session. A sandbox lives as long as its process: a session is resumed from its snapshot."""

    type: Literal["agent_sandbox"] = "agent_sandbox"


class AgentSandboxSession(BaseSandboxSession):
    """One session: commands and files of an agent in a live sandbox. The root of its manifest is the project."""

    state: AgentSandboxSessionState

    def __init__(self, state: AgentSandboxSessionState, environment: SandboxEnvironment) -> None:
        self.state = state
        self._environment = environment

    def _runtime_helpers(self) -> tuple[Any, ...]:
        return (RESOLVE_WORKSPACE_PATH_HELPER,)

    async def _validate_path_access(self, path: Path | str, *, for_write: bool = False) -> Path:
        resolved: Path = await self._validate_remote_path_access(path, for_write=for_write)  # links are followed inside, never here
        return resolved

    async def _exec_internal(self, *command: str | Path, timeout: float | None = None) -> Any:
        result = await self._run([str(word) for word in command], timeout=timeout)
        if result.status is SandboxStatus.TIMEOUT:
            raise ExecTimeoutError(command=command, timeout_s=timeout)
        if result.exit_code is None:
            raise ExecTransportError(command=command, message=result.error or "refused", retryable=False)
        stderr = result.stderr_bytes
        if result.exit_code in (126, 127) and not stderr:
            stderr = (result.error or "").encode()
        return ExecResult(stdout=result.stdout_bytes, stderr=stderr, exit_code=result.exit_code)

    async def _run(self, words: Sequence[str], **options: Any) -> SandboxResult:
        variables = await self.state.manifest.environment.resolve()
        try:
            return await self._environment.run_async(words, env_vars=variables, **options)
        except SandboxError as error:
            raise ExecTransportError(command=words, cause=error, message=str(error), retryable=False) from error

    async def read(self, path: Path, *, user: Any = None) -> io.IOBase:
        """Read a file of the workspace."""
        _check_user(user)
        place = await self._validate_path_access(path)
        try:
            return io.BytesIO(await (await self._environment.files_async()).read_bytes(place, max_bytes=LARGEST))
        except FileNotFoundError as error:
            raise WorkspaceReadNotFoundError(path=path, cause=error) from error
        except (OSError, SandboxError) as error:
            raise WorkspaceArchiveReadError(path=path, cause=error) from error

    async def write(self, path: Path, data: io.IOBase, *, user: Any = None) -> None:
        """Write a file of the workspace."""
        _check_user(user)
        payload = coerce_write_payload(path=path, data=data)
        place = await self._validate_path_access(path, for_write=True)
        try:
            await (await self._environment.files_async()).write(place, payload.stream.read())
        except (OSError, SandboxError) as error:
            raise WorkspaceArchiveWriteError(path=place, cause=error) from error

    async def running(self) -> bool:
        """Return whether the sandbox takes commands. It starts with the first of them."""
        return self._environment.alive

    async def persist_workspace(self) -> io.IOBase:
        """Return an archive of the workspace, packed inside the sandbox."""
        root = self.state.manifest.root
        skipped = [f"--exclude=./{path.as_posix()}" for path in sorted(self._persist_workspace_skip_relpaths())]
        result = await self._run(["tar", "-C", root, *skipped, "-cf", "-", "."])
        if result.exit_code != 0 or result.truncated:
            raise WorkspaceArchiveReadError(path=Path(root), context={"reason": result.error or "the archive is too large"})
        return io.BytesIO(result.stdout_bytes)

    async def hydrate_workspace(self, data: io.IOBase) -> None:
        """Unpack an archive into the workspace, inside the sandbox. Raises for a member that leads out of it."""
        root = self.state.manifest.root
        archive = data.read()
        try:
            with tarfile.open(fileobj=io.BytesIO(archive), mode="r:*") as tar:
                validate_tarfile(tar, allow_external_symlink_targets=False)
        except UnsafeTarMemberError as error:
            raise WorkspaceArchiveWriteError(path=Path(root), context={"reason": error.reason, "member": error.member}) from error
        except (tarfile.TarError, OSError) as error:
            raise WorkspaceArchiveWriteError(path=Path(root), cause=error) from error
        result = await self._run(["tar", "-C", root, "--no-same-owner", "-xf", "-"], stdin=archive)
        if result.exit_code != 0:
            raise WorkspaceArchiveWriteError(path=Path(root), context={"reason": result.error or "tar failed"})


class AgentSandboxClient(BaseSandboxClient):
    """Makes sessions, each with a live sandbox of its own. All sessions of a client with a project share that project.

    Without a project each session works in an empty directory of its own, and everything is gone when it is deleted. With one, `workspace`
    has the changes, for review and promotion, once the client is closed.
    """

    backend_id = "agent_sandbox"
    supports_default_options = True

    def __init__(self, project: PathLike | None = None, **options: Unpack[EnvironmentOptions]) -> None:
        """`options` are `config`, `env_vars`, `approver` and `capabilities`, as for `Workspace.over`."""
        self._project = None if project is None else os.path.realpath(os.fsdecode(project))
        self._options = options
        self._instrumentation = Instrumentation()
        self._sessions: dict[uuid.UUID, SandboxEnvironment] = {}

    @property
    def workspace(self) -> Workspace:
        """The workspace of the project. Raises `SandboxError` if there is no project."""
        if self._project is None:
            raise SandboxError("this client has no project, so nothing is kept", hint="make it with a project")
        return Workspace.over(self._project, **self._options)

    async def create(self, *, snapshot: Any = None, manifest: Any = None, options: Any = None) -> Any:
        """Make a session. The root of its manifest becomes the directory of the project."""
        environment = SandboxEnvironment(self._project, **self._options)
        given = self._validate_manifest_for_create(manifest if manifest is not None else Manifest())
        root = (await environment.live_async()).working_dir
        session_id = uuid.uuid4()
        state = AgentSandboxSessionState(
            session_id=session_id,
            manifest=given.model_copy(update={"root": root}, deep=True),
            snapshot=resolve_snapshot(snapshot, str(session_id)),
        )
        return self._opened(state, environment)

    async def resume(self, state: Any) -> Any:
        """Continue a session: in its sandbox if that is alive in this process, else in a new one, which gets the files of the snapshot."""
        if not isinstance(state, AgentSandboxSessionState):
            raise TypeError(f"this client resumes sessions of its own, not {type(state).__name__}")
        state.assert_path_grants_rebound()
        environment = self._sessions.get(state.session_id)
        if environment is not None and environment.alive:
            session = AgentSandboxSession(state, environment)
            session._set_start_state_preserved(True)
            return self._wrap_session(session, instrumentation=self._instrumentation)
        environment = SandboxEnvironment(self._project, **self._options)
        root = (await environment.live_async()).working_dir
        moved = state.model_copy(
            update={"manifest": state.manifest.model_copy(update={"root": root}, deep=True), "workspace_root_ready": False}
        )
        return self._opened(moved, environment)

    def _opened(self, state: AgentSandboxSessionState, environment: SandboxEnvironment) -> Any:
        self._sessions[state.session_id] = environment
        return self._wrap_session(AgentSandboxSession(state, environment), instrumentation=self._instrumentation)

    async def delete(self, session: Any) -> Any:
        """End the sandbox of a session."""
        inner = session._inner
        if not isinstance(inner, AgentSandboxSession):
            raise TypeError(f"this client deletes sessions of its own, not {type(inner).__name__}")
        self._sessions.pop(inner.state.session_id, None)
        await inner._environment.close_async()
        return session

    def deserialize_session_state(self, payload: dict[str, object]) -> Any:
        """Return the state of a session from its JSON form."""
        return self._deserialize_session_state_payload(payload, AgentSandboxSessionState)

    def close(self) -> None:
        """End the sandboxes of all sessions."""
        while self._sessions:
            self._sessions.popitem()[1].close()


def _check_user(user: object) -> None:
    if user is not None:
        raise ValueError("a sandbox has one user")
