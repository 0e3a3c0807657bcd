"""`LiveSandbox` for asyncio. Programs import it from `aio`, which imports this module."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self, Unpack

from agent_sandbox._async_calls import CallLoop, CallThreads
from agent_sandbox._calls import Shell, check_type, work_of
from agent_sandbox.live import LiveSandbox
from agent_sandbox.options import LiveOptions
from agent_sandbox.result import SandboxResult
from agent_sandbox.workspace.changes import ChangeSet

if TYPE_CHECKING:
    from agent_sandbox.aio import AsyncFiles


class AsyncLiveSandbox:
    """`LiveSandbox` for asyncio. Cancelling a task that awaits a command kills that command alone; the task ends after it has ended.

    >>> async def main():
    ...     async with AsyncSandbox(allow_subprocess=True) as sandbox, sandbox.live() as live:
    ...         results = await asyncio.gather(*(live.run(["echo", str(n)]) for n in range(3)))
    ...         return [result.stdout for result in results]
    >>> asyncio.run(main())
    ['0\\n', '1\\n', '2\\n']
    """

    def __init__(self, live: LiveSandbox) -> None:
        """Use `AsyncSandbox.live` or `AsyncWorkspace.live`."""
        check_type("live", live, LiveSandbox, write="AsyncSandbox().live()")
        self._live = live
        self._threads = CallThreads(f"live-{live.id}", live._runs)

    def __repr__(self) -> str:
        return f"<async {repr(self._live)[1:]}"

    @property
    def id(self) -> str:
        """The id of the sandbox or workspace, in results and in the ledger."""
        return self._live.id

    @property
    def working_dir(self) -> str:
        """The directory in which commands start."""
        return self._live.working_dir

    @property
    def ended(self) -> str:
        """Why the live sandbox has ended; empty before that."""
        return self._live.ended

    @property
    def changes(self) -> ChangeSet:
        """The changes on throw-away layers, as for `LiveSandbox`."""
        return self._live.changes

    @property
    def files(self) -> AsyncFiles:
        """The files of the sandbox, as for `LiveSandbox`."""
        from agent_sandbox.aio import AsyncFiles  # it imports this module

        return AsyncFiles(self._live.files, self._threads)

    async def run(self, work: str | Sequence[str] | Shell, **options: Unpack[LiveOptions]) -> SandboxResult:
        """Run a command, as `LiveSandbox.run` does."""
        return await CallLoop().have(self._threads, self._live._perform, work_of(work), {**options})

    async def kill(self) -> None:
        """Kill everything in the sandbox, as `LiveSandbox.kill` does."""
        self._live.kill()

    async def close(self) -> None:
        """End all programs, as `LiveSandbox.close` does."""
        await self._threads.close(self._live.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()
