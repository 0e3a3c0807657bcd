"""`Sandbox`, its sessions and `Workspace` for asyncio: the same methods, to be awaited. Each call runs the synchronous code in a thread.

If a task that awaits a call is cancelled, the call is over when the task is. A run, a turn, a simulation or an operation on files is
killed. A promotion, a snapshot or anything else that is all or nothing is brought to its end.

This is a module of its own, so that programs without an event loop do not import asyncio.
"""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, Unpack

from agent_sandbox._aio_live import AsyncLiveSandbox
from agent_sandbox._async_calls import CallLoop, CallThreads, to_its_end
from agent_sandbox._calls import Shell, TextListener, check_type, code_of, work_of
from agent_sandbox.config import SandboxConfig
from agent_sandbox.engine.file_access import LARGEST
from agent_sandbox.engine.timeline.tree import LOOK_SECONDS
from agent_sandbox.files import FileEntry, SandboxFiles, entry_of, listed, one_entry, settled
from agent_sandbox.options import (
    OnOutput,
    PathLike,
    ResumeOptions,
    RunOptions,
    SandboxArguments,
    SessionOptions,
    SimulationOptions,
    TurnOptions,
    WorkspaceOptions,
    WorkspaceSimulationOptions,
)
from agent_sandbox.result import SandboxResult, SandboxStatus
from agent_sandbox.sandbox import Sandbox
from agent_sandbox.session import SandboxSession
from agent_sandbox.workspace.changes import ChangeSet

if TYPE_CHECKING:
    from agent_sandbox.audit import AuditLog
    from agent_sandbox.checkpoints import SessionCheckpoint
    from agent_sandbox.engine.file_access import FileAnswer, FileRequest
    from agent_sandbox.engine.gate import Approver
    from agent_sandbox.engine.promote import CarriedOver, PromotionProposal
    from agent_sandbox.engine.records import Record
    from agent_sandbox.engine.simulation.plan import EffectPlan
    from agent_sandbox.policy.action import Action
    from agent_sandbox.policy.decide import Ask
    from agent_sandbox.policy.tokens import Token
    from agent_sandbox.replays import Replay
    from agent_sandbox.timelines import PastFrame, PastState, PastVariable, Rewound, StateDiff, Step, Timeline
    from agent_sandbox.workspace.drift import DriftReport
    from agent_sandbox.workspace.layers.history import Snapshot
    from agent_sandbox.workspace.stored_sandbox import Rollback
    from agent_sandbox.workspaces import Resolve, Workspace, WorkspaceDiff

__all__ = ["AsyncFiles", "AsyncLiveSandbox", "AsyncPastState", "AsyncSandbox", "AsyncSession", "AsyncWorkspace"]

T = TypeVar("T")


class AsyncSandbox:
    """`Sandbox` for asyncio. Cancelling a task that awaits an execution kills the run; the task ends after the run has ended.

    `on_output` is called in the event loop's thread, in order, before the result is returned. Tools may be coroutines: they are awaited in
    that loop; other tools, and an approver, are called in the thread of their run. Up to 64 executions run at once; others wait.

    >>> async def main():
    ...     async with AsyncSandbox() as sandbox:
    ...         results = await asyncio.gather(*(sandbox.execute(f"print({n} * {n})") for n in range(3)))
    ...         return [result.stdout for result in results]
    >>> asyncio.run(main())
    ['0\\n', '1\\n', '4\\n']
    """

    def __init__(self, config: SandboxConfig | None = None, **settings: Unpack[SandboxArguments]) -> None:
        """Take the arguments of `Sandbox`."""
        self._sandbox = Sandbox(config, **settings)
        self._threads = CallThreads(f"sandbox-{self.id}", self._sandbox._runs)

    def __repr__(self) -> str:
        return f"Async{self._sandbox!r}"

    @property
    def id(self) -> str:
        """The id of this sandbox in its results."""
        return self._sandbox.id

    @property
    def config(self) -> SandboxConfig:
        """The settings of this sandbox."""
        return self._sandbox.config

    @property
    def audit(self) -> AuditLog | None:
        """The audit log, as for `Sandbox`."""
        return self._sandbox.audit

    @property
    def status(self) -> SandboxStatus:
        """The status, as for `Sandbox`."""
        return self._sandbox.status

    @property
    def files(self) -> AsyncFiles:
        """The files that a run sees, as for `Sandbox`."""
        return AsyncFiles(self._sandbox.files, self._threads)

    async def execute(self, code: str, language: str = "python", **options: Unpack[RunOptions]) -> SandboxResult:
        """Run code, as `Sandbox.execute` does."""
        loop = CallLoop()
        return await loop.have(self._threads, self._sandbox._perform, code_of(code, language), loop.told(self.config, options))

    async def run(self, work: str | Sequence[str] | Shell, **options: Unpack[RunOptions]) -> SandboxResult:
        """Run code or a command, as `Sandbox.run` does."""
        loop = CallLoop()
        return await loop.have(self._threads, self._sandbox._perform, work_of(work), loop.told(self.config, options))

    async def simulate(self, work: str | Sequence[str] | Shell, **options: Unpack[SimulationOptions]) -> EffectPlan:
        """Run work and return its effects, as `Sandbox.simulate` does."""
        return await CallLoop().have(self._threads, self._sandbox._simulated, work_of(work), {**options})

    async def replay(
        self,
        record: str | os.PathLike[str] | Record,
        *,
        env_vars: Mapping[str, str] | None = None,
        code: str | None = None,
        stdin: bytes | None = None,
    ) -> Replay:
        """Replay a record, as `Sandbox.replay` does."""
        given: dict[str, Any] = {"env_vars": env_vars, "code": code, "stdin": stdin}
        return await CallLoop().have(self._threads, self._sandbox._replayed, record, given)

    def session(self, **options: Unpack[SessionOptions]) -> AsyncSession:
        """Open a session, as `Sandbox.session` does. It belongs to the event loop that is running now."""
        given, session = self._in_loop(options)
        return session(self._sandbox.session(**given))

    async def resume(self, checkpoint: SessionCheckpoint | str, **options: Unpack[ResumeOptions]) -> AsyncSession:
        """Go on from a checkpoint, as `Sandbox.resume` does."""
        given, session = self._in_loop(options)
        return session(await self._threads.finish(lambda: self._sandbox.resume(checkpoint, **given)))

    def _in_loop(self, options: Mapping[str, Any]) -> tuple[dict[str, Any], Callable[[SandboxSession], AsyncSession]]:
        loop = CallLoop()
        given = loop.told(self.config, options)
        on_output = given.pop("on_output", None)
        TextListener.of(on_output)  # raises TypeError
        return given, lambda session: AsyncSession(session, loop, self._threads, on_output)

    def live(self, *, env_vars: Mapping[str, str] | None = None) -> AsyncLiveSandbox:
        """Return a sandbox whose programs go on between commands, as `Sandbox.live` does."""
        return AsyncLiveSandbox(self._sandbox.live(env_vars=env_vars))

    async def grant(self, *patterns: str, seconds: float, times: int | None = None) -> Token:
        """Pre-approve actions, as `Sandbox.grant` does."""
        return await self._threads.finish(lambda: self._sandbox.grant(*patterns, seconds=seconds, times=times))

    async def revoke(self, token: Token | str) -> None:
        """Revoke a token, as `Sandbox.revoke` does."""
        await self._threads.finish(lambda: self._sandbox.revoke(token))

    async def intent(self, name: str | None) -> None:
        """Declare an intent, as `Sandbox.intent` does."""
        await self._threads.finish(lambda: self._sandbox.intent(name))

    async def propose_network(self, *hosts: str, requests: Sequence[str] = (), seconds: float = 600.0, reason: str = "") -> tuple[str, ...]:
        """Propose hosts and wait for the decision, as `Sandbox.propose_network` does."""
        return await self._threads.finish(lambda: self._sandbox.propose_network(*hosts, requests=requests, seconds=seconds, reason=reason))

    async def kill(self) -> None:
        """Kill all runs, as `Sandbox.kill` does."""
        self._sandbox.kill()

    async def close(self) -> None:
        """Close the sandbox, as `Sandbox.close` does."""
        await self._threads.close(self._sandbox.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()


class AsyncSession:
    """`SandboxSession` for asyncio. Cancelling a task that awaits a turn ends the session."""

    def __init__(self, session: SandboxSession, loop: CallLoop, threads: CallThreads, on_output: OnOutput | None) -> None:
        self._session = session
        self._loop = loop
        self._threads = threads
        self._on_output = on_output

    def __repr__(self) -> str:
        return f"<async {repr(self._session)[1:]}"

    @property
    def id(self) -> str:
        """The id of the session in the ledger."""
        return self._session.id

    @property
    def ended(self) -> str:
        """Why the session has ended; empty before that."""
        return self._session.ended

    @property
    def changes(self) -> ChangeSet:
        """The changes of all turns, as for `SandboxSession`."""
        return self._session.changes

    @property
    def files(self) -> AsyncFiles:
        """The files that the turns see, as for `SandboxSession`. Cancelling an operation ends the session."""
        return AsyncFiles(self._session.files, self._threads)

    async def run(self, code: str, **options: Unpack[TurnOptions]) -> SandboxResult:
        """Run one turn, as `SandboxSession.run` does."""
        if self._on_output is not None:
            options.setdefault("on_output", self._on_output)
        return await self._loop.have(self._threads, self._session._perform, code, {**options})

    @property
    def timeline(self) -> Timeline:
        """The steps of the session, as for `SandboxSession`. Its `diff` waits for the interpreter: call `diff` of this class."""
        return self._session.timeline

    async def diff(self, old: Step | int, new: Step | int) -> StateDiff:
        """Compare the states before two steps, as `Timeline.diff` does."""
        return await self._threads.finish(lambda: self._session.timeline.diff(old, new))

    async def rewind(self, step: Step | int) -> Rewound:
        """Return to the state before a step, as `SandboxSession.rewind` does."""
        return await self._threads.finish(lambda: self._session.rewind(step))

    async def checkpoint(self, name: str = "") -> SessionCheckpoint:
        """Save the session to disk, as `SandboxSession.checkpoint` does."""
        return await self._threads.finish(lambda: self._session.checkpoint(name))

    async def fork(self, step: Step | int | None = None, count: int = 1) -> tuple[AsyncSession, ...]:
        """Return sessions that go on from the state before a step, as `SandboxSession.fork` does."""
        made = await self._threads.finish(lambda: self._session.fork(step, count))
        return tuple(AsyncSession(each, self._loop, self._threads, self._on_output) for each in made)

    async def inspect(self, step: Step | int | None = None) -> AsyncPastState:
        """Return the state before a step, to look at, as `SandboxSession.inspect` does."""
        return AsyncPastState(await self._threads.finish(lambda: self._session.inspect(step)), self._threads)

    async def kill(self) -> None:
        """Kill the interpreter, as `SandboxSession.kill` does."""
        self._session.kill()

    async def close(self) -> None:
        """End the session, as `SandboxSession.close` does."""
        await to_its_end(asyncio.ensure_future(asyncio.to_thread(self._session.close)))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()


class AsyncPastState:
    """`PastState` for asyncio."""

    def __init__(self, state: PastState, threads: CallThreads) -> None:
        self._state = state
        self._threads = threads

    async def variables(self) -> tuple[PastVariable, ...]:
        """Return the variables, as for `PastState`."""
        return await self._threads.finish(lambda: self._state.variables)

    async def frames(self) -> tuple[PastFrame, ...]:
        """Return the frames of the last error, as for `PastState`."""
        return await self._threads.finish(lambda: self._state.frames)

    async def evaluate(self, expression: str, *, timeout: float = LOOK_SECONDS) -> PastVariable:
        """Evaluate an expression, as `PastState.evaluate` does."""
        return await self._threads.finish(lambda: self._state.evaluate(expression, timeout=timeout))

    async def read(self, path: str) -> bytes:
        """Read a file, as `PastState.read` does."""
        return await self._threads.finish(lambda: self._state.read(path))

    async def list(self, path: str) -> tuple[str, ...]:
        """List a directory, as `PastState.list` does."""
        return await self._threads.finish(lambda: self._state.list(path))


class AsyncWorkspace:
    """`Workspace` for asyncio. Leaving its block ends its runs and keeps its changes.

    Cancelling a task that awaits `run`, `execute`, `simulate` or an operation on files kills the work; changes that it had made are kept.
    Cancelling any other method lets it finish first, because a promotion is all or nothing. `review`, `resolve` and an approver are called
    in another thread than the event loop's.

    >>> async def main():
    ...     async with AsyncWorkspace.over(project) as work:
    ...         await work.run(shell("echo two >> notes.txt"))
    ...         return await work.files.read("notes.txt")
    >>> asyncio.run(main())
    'one\\ntwo\\n'
    """

    def __init__(self, workspace: Workspace) -> None:
        """Use `over` to make a workspace."""
        from agent_sandbox.workspaces import Workspace  # which works on Linux only

        check_type("workspace", workspace, Workspace)
        self._workspace = workspace
        self._threads = CallThreads(f"workspace-{workspace.id}", workspace._runs)

    @classmethod
    def over(
        cls,
        project: PathLike,
        *,
        config: SandboxConfig | None = None,
        env_vars: Mapping[str, str] | None = None,
        approver: Approver | Callable[[Action, Ask], bool | str] | None = None,
        capabilities: Iterable[Token | str] = (),
    ) -> Self:
        """Return the workspace of this directory, as `Workspace.over` does. It searches the project for secrets before it returns."""
        from agent_sandbox.workspaces import Workspace  # which works on Linux only

        return cls(Workspace.over(project, config=config, env_vars=env_vars, approver=approver, capabilities=capabilities))

    def __repr__(self) -> str:
        return f"Async{self._workspace!r}"

    @property
    def id(self) -> str:
        """The id of the stored sandbox, as for `Workspace`."""
        return self._workspace.id

    @property
    def project(self) -> str:
        """The directory of the project."""
        return self._workspace.project

    @property
    def files(self) -> AsyncFiles:
        """The files of the sandbox, as for `Workspace`."""
        return AsyncFiles(self._workspace.files, self._threads)

    async def execute(self, code: str, language: str = "python", **options: Unpack[WorkspaceOptions]) -> SandboxResult:
        """Run code, as `Workspace.execute` does."""
        return await CallLoop().have(self._threads, self._workspace._perform, code_of(code, language), {**options})

    async def run(self, work: str | Sequence[str] | Shell, **options: Unpack[WorkspaceOptions]) -> SandboxResult:
        """Run code or a command, as `Workspace.run` does."""
        return await CallLoop().have(self._threads, self._workspace._perform, work_of(work), {**options})

    def live(self, *, kept: bool = True, env_vars: Mapping[str, str] | None = None) -> AsyncLiveSandbox:
        """Return a sandbox of this project whose programs go on between commands, as `Workspace.live` does."""
        return AsyncLiveSandbox(self._workspace.live(kept=kept, env_vars=env_vars))

    async def simulate(self, work: str | Sequence[str] | Shell, **options: Unpack[WorkspaceSimulationOptions]) -> EffectPlan:
        """Run work on a clone of the sandbox and return its effects, as `Workspace.simulate` does."""
        return await CallLoop().have(self._threads, self._workspace._simulated, work_of(work), {**options})

    async def carry_out(
        self,
        plan: EffectPlan | str,
        *,
        approve: str | Iterable[str] = (),
        system: bool = False,
        caches: bool = False,
        files_only: bool = False,
    ) -> CarriedOver:
        """Apply a plan, as `Workspace.carry_out` does."""
        work = functools.partial(self._workspace.carry_out, plan, approve=approve, system=system, caches=caches, files_only=files_only)
        return await self._threads.finish(work)

    async def changes(self) -> ChangeSet:
        """Return all changes, as `Workspace.changes` does."""
        return await self._threads.finish(self._workspace.changes)

    async def diff(self, only: str | Iterable[str] = (), *, everything: bool = False) -> WorkspaceDiff:
        """Return the changes as a diff, as `Workspace.diff` does."""
        return await self._threads.finish(lambda: self._workspace.diff(only, everything=everything))

    async def drift(self) -> DriftReport:
        """Return the changes of the real project, as `Workspace.drift` does."""
        return await self._threads.finish(self._workspace.drift)

    async def snapshot(self, label: str = "") -> Snapshot:
        """Take a snapshot, as `Workspace.snapshot` does."""
        return await self._threads.finish(lambda: self._workspace.snapshot(label))

    async def rollback(self, to: str | int | Snapshot | None = None) -> Rollback:
        """Go back to a snapshot, as `Workspace.rollback` does."""
        return await self._threads.finish(lambda: self._workspace.rollback(to))

    async def snapshots(self) -> tuple[Snapshot, ...]:
        """Return all snapshots, as `Workspace.snapshots` does."""
        return await self._threads.finish(self._workspace.snapshots)

    async def forget(self, which: str | int | Snapshot) -> Snapshot:
        """Remove a snapshot, as `Workspace.forget` does."""
        return await self._threads.finish(lambda: self._workspace.forget(which))

    async def promote(
        self,
        only: str | Iterable[str] = (),
        *,
        system: bool = False,
        drift: Literal["refuse", "merge", "force"] = "refuse",
        resolve: Resolve | None = None,
        approve: str | Iterable[str] = (),
        caches: bool = False,
        review: Callable[[PromotionProposal], bool] | None = None,
        expect: str | None = None,
    ) -> CarriedOver | None:
        """Promote changes to the real project, as `Workspace.promote` does."""
        promote = functools.partial(self._workspace.promote, only, system=system, drift=drift, resolve=resolve, approve=approve)
        return await self._threads.finish(functools.partial(promote, caches=caches, review=review, expect=expect))

    async def undo(self) -> CarriedOver:
        """Undo the last promotion, as `Workspace.undo` does."""
        return await self._threads.finish(self._workspace.undo)

    async def intent(self, name: str | None) -> None:
        """Declare an intent, as `Workspace.intent` does."""
        await self._threads.finish(lambda: self._workspace.intent(name))

    async def propose_network(self, *hosts: str, requests: Sequence[str] = (), seconds: float = 600.0, reason: str = "") -> tuple[str, ...]:
        """Propose hosts and wait for the decision, as `Workspace.propose_network` does."""
        return await self._threads.finish(
            lambda: self._workspace.propose_network(*hosts, requests=requests, seconds=seconds, reason=reason)
        )

    async def reset(self) -> None:
        """Drop all changes and snapshots, as `Workspace.reset` does."""
        await self._threads.finish(self._workspace.reset)

    async def kill(self) -> None:
        """Kill all runs, as `Workspace.kill` does."""
        self._workspace.kill()

    async def close(self) -> None:
        """Kill all runs and take no more work, as `Workspace.close` does. Changes and snapshots are kept."""
        await self._threads.close(self._workspace.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()


class AsyncFiles:
    """`SandboxFiles` for asyncio. Cancelling a task that awaits an operation kills the operation; a write may leave a part."""

    def __init__(self, files: SandboxFiles, threads: CallThreads) -> None:
        self._operate, self._requests = files._operate, files._requests
        self._threads = threads

    async def read(self, path: PathLike, *, encoding: str = "utf-8", errors: str = "strict", max_bytes: int = LARGEST) -> str:
        """Return the text of a file, as `SandboxFiles.read` does."""
        return (await self.read_bytes(path, max_bytes=max_bytes)).decode(encoding, errors)

    async def read_bytes(self, path: PathLike, *, max_bytes: int = LARGEST) -> bytes:
        """Return the content of a file, as `SandboxFiles.read_bytes` does."""
        return (await self._ask(self._requests.read(path, max_bytes))).content

    async def write(self, path: PathLike, content: str | bytes) -> None:
        """Write a file, as `SandboxFiles.write` does."""
        await self._ask(self._requests.write(path, content))

    async def list(self, path: PathLike = ".") -> tuple[FileEntry, ...]:
        """Return the entries of a directory, as `SandboxFiles.list` does."""
        request = self._requests.list(path)
        return listed(request, await self._ask(request))

    async def stat(self, path: PathLike, *, follow_links: bool = False) -> FileEntry:
        """Return one entry, as `SandboxFiles.stat` does."""
        request = self._requests.stat(path, follow_links)
        return entry_of(one_entry(await self._ask(request)), request.path)

    async def exists(self, path: PathLike) -> bool:
        """Return whether there is something at the path, as `SandboxFiles.exists` does."""
        return (await self._ask(self._requests.plain("exists", path))).number == 1

    async def mkdir(self, path: PathLike) -> None:
        """Make a directory, as `SandboxFiles.mkdir` does."""
        await self._ask(self._requests.mkdir(path))

    async def remove(self, path: PathLike, *, recursive: bool = False) -> None:
        """Remove an entry, as `SandboxFiles.remove` does."""
        await self._ask(self._requests.remove(path, recursive))

    async def _ask(self, request: FileRequest) -> FileAnswer:
        return settled(request, await CallLoop().have(self._threads, self._operate, request, {}))
