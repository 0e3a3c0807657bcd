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
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from inspect import iscoroutinefunction
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, Unpack

from agent_sandbox._calls import Run, Runs, Shell, TextListener, check_type, code_of, work_of
from agent_sandbox.config import SandboxConfig
from agent_sandbox.engine.file_access import LARGEST
from agent_sandbox.engine.timeline.tree import LOOK_SECONDS
from agent_sandbox.engine.tools import named
from agent_sandbox.files import FileEntry, SandboxFiles, entry_of, listed, one_entry, settled
from agent_sandbox.options import (
    OnOutput,
    PathLike,
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

__all__ = ["AsyncFiles", "AsyncPastState", "AsyncSandbox", "AsyncSession", "AsyncWorkspace"]

# Threads of our own. The event loop has few threads, which also resolve host names, and a long run must not occupy them.
MOST_AT_ONCE = 64
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
        self._threads = _Threads(f"sandbox-{self.id}", self._sandbox._runs)

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
        loop = _Loop()
        return await loop.have(self._threads, self._sandbox._perform, code_of(code, language), loop.told(self.config, options))

    async def run(self, work: str | Sequence[str] | Shell, **options: Unpack[RunOptions]) -> SandboxResult:
        """Run code or a command, as `Sandbox.run` does."""
        loop = _Loop()
        return await loop.have(self._threads, self._sandbox._perform, work_of(work), loop.told(self.config, options))

    async def simulate(self, work: str | Sequence[str] | Shell, **options: Unpack[SimulationOptions]) -> EffectPlan:
        """Run work and return its effects, as `Sandbox.simulate` does."""
        return await _Loop().have(self._threads, self._sandbox._simulated, work_of(work), {**options})

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
        return await _Loop().have(self._threads, self._sandbox._replayed, record, given)

    def session(self, **options: Unpack[SessionOptions]) -> AsyncSession:
        """Open a session, as `Sandbox.session` does. It belongs to the event loop that is running now."""
        loop = _Loop()
        given = loop.told(self.config, options)
        on_output = given.pop("on_output", None)
        TextListener.of(on_output)  # raises TypeError
        return AsyncSession(self._sandbox.session(**given), loop, self._threads, on_output)

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

    def __init__(self, session: SandboxSession, loop: _Loop, threads: _Threads, on_output: OnOutput | None) -> None:
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

    async def inspect(self, step: Step | int | None = None) -> AsyncPastState:
        """Return the state before a step, to look at, as `SandboxSession.inspect` does."""
        return AsyncPastState(await self._threads.finish(lambda: self._session.inspect(step)), self._threads)

    async def kill(self) -> None:
        """Kill the interpreter, as `SandboxSession.kill` does."""
        self._session.kill()

    async def close(self) -> None:
        """End the session, as `SandboxSession.close` does."""
        await _to_its_end(asyncio.ensure_future(asyncio.to_thread(self._session.close)))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()


class AsyncPastState:
    """`PastState` for asyncio."""

    def __init__(self, state: PastState, threads: _Threads) -> None:
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
        self._threads = _Threads(f"workspace-{workspace.id}", workspace._runs)

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
        return await _Loop().have(self._threads, self._workspace._perform, code_of(code, language), {**options})

    async def run(self, work: str | Sequence[str] | Shell, **options: Unpack[WorkspaceOptions]) -> SandboxResult:
        """Run code or a command, as `Workspace.run` does."""
        return await _Loop().have(self._threads, self._workspace._perform, work_of(work), {**options})

    async def simulate(self, work: str | Sequence[str] | Shell, **options: Unpack[WorkspaceSimulationOptions]) -> EffectPlan:
        """Run work on a clone of the sandbox and return its effects, as `Workspace.simulate` does."""
        return await _Loop().have(self._threads, self._workspace._simulated, work_of(work), {**options})

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

    def __init__(self, files: SandboxFiles, threads: _Threads) -> None:
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

    async def stat(self, path: PathLike) -> FileEntry:
        """Return one entry, as `SandboxFiles.stat` does."""
        request = self._requests.plain("stat", path)
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
        return settled(request, await _Loop().have(self._threads, self._operate, request, {}))


class _Threads:
    """The threads that do the calls of one sandbox or workspace."""

    def __init__(self, name: str, runs: Runs) -> None:
        self._pool = ThreadPoolExecutor(MOST_AT_ONCE, thread_name_prefix=name)
        self._runs = runs

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Do a call in a thread. Raises `SandboxError` if the sandbox or workspace is closed."""
        self._runs.check_open()
        return self._pool.submit(call)

    async def finish(self, call: Callable[[], T]) -> T:
        """Do a call in a thread and return its result. If the awaiting task is cancelled, the call is brought to its end first."""
        job = self.submit(call)
        return await _to_its_end(asyncio.wrap_future(job), job)

    async def close(self, close: Callable[[], None]) -> None:
        """Close the sandbox or workspace, and then the threads."""
        # In a thread outside the pool: all threads of the pool may be busy with the runs to be ended.
        await _to_its_end(asyncio.ensure_future(asyncio.to_thread(close)))
        self._pool.shutdown(wait=False)


async def _to_its_end(working: asyncio.Future[T], job: Future[T] | None = None, on_cancel: Callable[[], None] = lambda: None) -> T:
    """Await something that is done in a thread. If the awaiting task is cancelled, also twice, it ends only when the thread is done.

    `job` is the thread's side, if it may be taken back as long as it waits for a thread. `on_cancel` is called to end it sooner.
    """
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        if job is None or not job.cancel():
            on_cancel()
            while not working.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait({working})
            if not working.cancelled():
                working.exception()  # the task is cancelled, so it does not matter how this ended; but somebody has looked
        raise


class _Loop:
    """An event loop that awaits runs in other threads, and executes the coroutine tools that these runs call."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._awaited: set[Future[object]] = set()
        self._over = False

    async def have(self, threads: _Threads, perform: Callable[..., T], what: object, options: Mapping[str, Any]) -> T:
        """Call `perform` in a thread and return its result. If the awaiting task is cancelled, the run is killed."""
        run, given = Run(), dict(options)
        listener = None
        if given.get("on_output") is not None:
            TextListener.of(given["on_output"])  # raises TypeError
            listener = given["on_output"] = _Relay(given["on_output"], self._loop, run.cancel)
        job = threads.submit(functools.partial(perform, run, what, **given))

        def end() -> None:
            run.cancel()
            self._over = True  # before the loop: `_called` reads it after adding its future, so one of the two cancels
            for future in list(self._awaited):
                future.cancel()

        outcome = await _to_its_end(asyncio.wrap_future(job, loop=self._loop), job, end)
        if listener is not None and listener.raised is not None:
            raise listener.raised
        return outcome

    def told(self, config: SandboxConfig, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options, with each coroutine function among the tools wrapped in a function that the thread of a run can call."""
        every = {**config._toolbox, **named(options.get("tools", ()))}
        tools = {name: self._called(tool) if iscoroutinefunction(tool) else tool for name, tool in every.items()}
        return {**options, "tools": tools} if tools else {**options}

    def _called(self, tool: Callable[..., Any]) -> Callable[..., object]:
        @functools.wraps(tool)
        def call(*args: Any, **kwargs: Any) -> object:
            future = asyncio.run_coroutine_threadsafe(tool(*args, **kwargs), self._loop)
            self._awaited.add(future)
            if self._over:
                future.cancel()
            try:
                return future.result()
            finally:
                self._awaited.discard(future)

        return call


class _Relay:
    """Carries output from the thread of a run to the event loop. The first exception of the callback ends the run."""

    def __init__(self, call: OnOutput, loop: asyncio.AbstractEventLoop, cancel: Callable[[], None]) -> None:
        self._call = call
        self._loop = loop
        self._cancel = cancel
        self.raised: Exception | None = None

    def __call__(self, stream: Literal["stdout", "stderr"], text: str) -> None:
        self._loop.call_soon_threadsafe(self._pass_on, stream, text)

    def _pass_on(self, stream: Literal["stdout", "stderr"], text: str) -> None:
        if self.raised is not None:
            return
        try:
            self._call(stream, text)
        except Exception as error:
            self.raised = error
            self._cancel()
