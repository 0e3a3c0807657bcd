"""`Sandbox` and its sessions for asyncio: the same methods, to be awaited. Each execution runs the synchronous code in a thread.

This is a module of its own, so that programs without an event loop do not import asyncio.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from inspect import iscoroutinefunction
from types import TracebackType
from typing import Any, Literal, Self, Unpack

from agent_sandbox.config import SandboxConfig
from agent_sandbox.engine.tools import named
from agent_sandbox.engine.work import Code, Command
from agent_sandbox.result import SandboxResult, SandboxStatus
from agent_sandbox.sandbox import OnOutput, Run, RunOptions, Sandbox, SessionOptions, Shell, TurnOptions, code_of, work_of
from agent_sandbox.session import SandboxSession
from agent_sandbox.workspace.changes import ChangeSet

# Threads of our own. The event loop has few threads, which also resolve host names, and a long run must not occupy them.
MOST_AT_ONCE = 64


class AsyncSandbox:
    """`Sandbox` for asyncio. Cancelling a task that awaits an execution kills the run; the task ends after the run has ended.

    `on_output` is called in the event loop's thread, in order, before the result is returned. Tools may be coroutines: they are awaited in
    that loop; other tools are called in the thread of their run. Up to 64 executions run at once; others wait.
    """

    def __init__(self, config: SandboxConfig | None = None, **settings: Any) -> None:
        """Take the arguments of `Sandbox`."""
        self._sandbox = Sandbox(config, **settings)
        self._threads = ThreadPoolExecutor(MOST_AT_ONCE, thread_name_prefix=f"sandbox-{self.id}")

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
    def status(self) -> SandboxStatus:
        """The status, as for `Sandbox`."""
        return self._sandbox.status

    async def execute(self, code: str, language: str = "python", **options: Unpack[RunOptions]) -> SandboxResult:
        """Run code, as `Sandbox.execute` does."""
        return await self._perform(code_of(code, language), options)

    async def run(self, work: str | Sequence[str] | Shell, **options: Unpack[RunOptions]) -> SandboxResult:
        """Run code or a command, as `Sandbox.run` does."""
        return await self._perform(work_of(work), options)

    async def _perform(self, what: Code | Command, options: RunOptions) -> SandboxResult:
        self._sandbox.check_open()
        loop = _Loop()
        return await loop.have(self._threads, self._sandbox.perform, what, {**options, **loop.tools(self.config, options)})

    def session(self, **options: Unpack[SessionOptions]) -> AsyncSession:
        """Open a session, as `Sandbox.session` does. It belongs to the event loop that is running now."""
        loop = _Loop()
        given: dict[str, Any] = {**options, **loop.tools(self.config, options)}
        on_output = given.pop("on_output", None)
        return AsyncSession(self._sandbox.session(**given), loop, self._threads, on_output)

    async def kill(self) -> None:
        """Kill all runs, as `Sandbox.kill` does."""
        self._sandbox.kill()

    async def close(self) -> None:
        """Close the sandbox, as `Sandbox.close` does."""
        # In a thread outside the pool: all threads of the pool may be busy with the runs to be ended.
        await asyncio.to_thread(self._sandbox.close)
        self._threads.shutdown(wait=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()


class AsyncSession:
    """`SandboxSession` for asyncio. Cancelling a task that awaits a turn ends the session."""

    def __init__(self, session: SandboxSession, loop: _Loop, threads: ThreadPoolExecutor, on_output: OnOutput | None) -> None:
        self._session = session
        self._loop = loop
        self._threads = threads
        self._on_output = on_output

    @property
    def ended(self) -> str:
        """Why the session has ended; empty before that."""
        return self._session.ended

    @property
    def changes(self) -> ChangeSet:
        """The changes of all turns, as for `SandboxSession`."""
        return self._session.changes

    async def run(self, code: str, **options: Unpack[TurnOptions]) -> SandboxResult:
        """Run one turn, as `SandboxSession.run` does."""
        if self._on_output is not None:
            options.setdefault("on_output", self._on_output)
        return await self._loop.have(self._threads, self._session.perform, code, {**options})

    async def close(self) -> None:
        """End the session, as `SandboxSession.close` does."""
        await asyncio.to_thread(self._session.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()


class _Loop:
    """An event loop that awaits runs in other threads, and executes the coroutine tools that these runs call."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._awaited: set[Future[object]] = set()
        self._over = False

    async def have(
        self, threads: ThreadPoolExecutor, perform: Callable[..., SandboxResult], what: object, options: dict[str, Any]
    ) -> SandboxResult:
        """Call `perform` in a thread and return its result. If the awaiting task is cancelled, the run is killed."""
        run = Run()
        listener = _Relay(options["on_output"], self._loop, run.cancel) if options.get("on_output") is not None else None
        job = threads.submit(perform, run, what, **{**options, "on_output": listener})
        working = asyncio.wrap_future(job, loop=self._loop)
        try:
            outcome = await asyncio.shield(working)
        except asyncio.CancelledError:
            if not job.cancel():  # the run has begun
                run.cancel()
                self._over = True  # before the loop: `_called` reads it after adding its future, so one of the two cancels
                for future in list(self._awaited):
                    future.cancel()
                with suppress(Exception):  # the task is cancelled, so the result of the run does not matter
                    await working
            raise
        if listener is not None and listener.raised is not None:
            raise listener.raised
        return outcome

    def tools(self, config: SandboxConfig, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the option `tools`, in which each coroutine function is wrapped in a function that the thread of a run can call."""
        every = {**config.toolbox, **named(options.get("tools", ()))}
        return {"tools": {name: self._called(tool) if iscoroutinefunction(tool) else tool for name, tool in every.items()}} if every else {}

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
