"""A sandbox backend for deepagents: its shell and file tools work in one live sandbox.

backend = AgentSandboxBackend("/home/me/project")
agent = create_deep_agent(model=..., backend=backend)
...
backend.close()
print(backend.workspace.diff())
"""

from __future__ import annotations

import errno
import os
from typing import Any, Unpack

from agent_sandbox._calls import shell
from agent_sandbox.adapters.environment import EnvironmentOptions, SandboxEnvironment, needing
from agent_sandbox.errors import Denied, PolicyError
from agent_sandbox.options import PathLike
from agent_sandbox.result import SandboxResult
from agent_sandbox.workspaces import Workspace

with needing("deepagents"):
    from deepagents.backends.protocol import ExecuteResponse, FileDownloadResponse, FileUploadResponse
    from deepagents.backends.sandbox import BaseSandbox

__all__ = ["AgentSandboxBackend"]

LARGEST = 1 << 30  # bytes of a file that is downloaded
_CODES = {
    errno.ENOENT: "file_not_found",
    errno.EACCES: "permission_denied",
    errno.EPERM: "permission_denied",
    errno.EROFS: "permission_denied",
    errno.EISDIR: "is_directory",
    errno.ENOTDIR: "invalid_path",
    errno.EINVAL: "invalid_path",
    errno.ENAMETOOLONG: "invalid_path",
}


class AgentSandboxBackend(BaseSandbox):
    """A `SandboxBackendProtocol`. Without a project, it works in an empty directory of its own; everything is gone after `close`.

    With a project, `workspace` has the changes, for review and promotion, once it is closed.
    """

    def __init__(self, project: PathLike | None = None, *, timeout: float | None = 1800.0, **options: Unpack[EnvironmentOptions]) -> None:
        """`timeout` is for a command that sets none. `options` are `config`, `env_vars`, `approver` and `capabilities`, as elsewhere."""
        self._environment = SandboxEnvironment(project, **options)
        self._timeout = timeout

    @property
    def id(self) -> str:
        """The id of the sandbox in the ledger."""
        return self._environment.live.id

    @property
    def workspace(self) -> Workspace:
        """The workspace of the project, whose changes a person reviews and promotes after `close`."""
        return self._environment.workspace

    def execute(self, command: str, *, timeout: int | None = None) -> Any:
        """Run a bash command line. Standard error follows standard output."""
        result = self._environment.run(shell(command), timeout=self._timeout if timeout is None else timeout or None)
        return ExecuteResponse(output=_text(result), exit_code=result.exit_code, truncated=result.truncated)

    def upload_files(self, files: list[tuple[str, bytes]]) -> list[Any]:
        """Write files. The answer to each says whether that was possible."""
        return [FileUploadResponse(path=path, error=self._uploaded(path, content)) for path, content in files]

    def _uploaded(self, path: str, content: bytes) -> str | None:
        if not path.startswith("/"):
            return "invalid_path"
        try:
            self._environment.files.write(path, content)
        except (OSError, PolicyError, Denied) as error:
            return _code(error)
        return None

    def download_files(self, paths: list[str]) -> list[Any]:
        """Read files. The answer to each has its content, or says why not."""
        return [self._downloaded(path) for path in paths]

    def _downloaded(self, path: str) -> Any:
        if not path.startswith("/"):
            return FileDownloadResponse(path=path, error="invalid_path")
        try:
            return FileDownloadResponse(path=path, content=self._environment.files.read_bytes(path, max_bytes=LARGEST))
        except (OSError, PolicyError, Denied) as error:
            return FileDownloadResponse(path=path, error=_code(error))

    def close(self) -> None:
        """End the sandbox and all programs in it."""
        self._environment.close()


def _text(result: SandboxResult) -> str:
    """Return the output of a command as one text, with our own words if it did not run or was ended."""
    parts = [result.stdout, result.stderr]
    if result.exit_code is None or result.limits_hit or (result.exit_code in (126, 127) and not result.stderr):
        parts.append(result.error or "")
    return "\n".join(part.rstrip("\n") if index else part for index, part in enumerate(parts) if part)


def _code(error: OSError | PolicyError | Denied) -> str:
    if isinstance(error, Denied):
        return "permission_denied"
    if isinstance(error, PolicyError):
        return "invalid_path"
    return _CODES.get(error.errno or 0, os.strerror(error.errno) if error.errno else str(error))
