"""The sandbox for asyncio: the same names, awaited. A thread for each running execution, over the very same code.

Kept apart so that programs without an event loop do not pay for importing one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import TracebackType
from typing import Any, Literal, Self, Unpack

from agent_sandbox.config import SandboxConfig
from agent_sandbox.engine.session import Code, Command
from agent_sandbox.result import SandboxResult, SandboxStatus
from agent_sandbox.sandbox import Run, Sandbox
from agent_sandbox.work import OnOutput, RunOptions, Shell, code_of, work_of

# Threads of our own: those of the event loop are few and resolve host names, and a run that takes its time must not keep them.
MOST_AT_ONCE = 64


class AsyncSandbox:
    """`Sandbox` for asyncio. Cancelling a task that awaits an execution kills what it runs, and the task ends when that is gone.

    `on_output` is called in the event loop's thread, in order, before the result is returned. Up to 64 executions run at once; others wait.
    """

    def __init__(self, config: SandboxConfig | None = None, **settings: Any) -> None:
        """As for `Sandbox`."""
        self._sandbox = Sandbox(config, **settings)
        self._threads = ThreadPoolExecutor(MOST_AT_ONCE, thread_name_prefix=f"sandbox-{self.id}")

    def __repr__(self) -> str:
        return f"Async{self._sandbox!r}"

    @property
    def id(self) -> str:
        """Names this sandbox in its results."""
        return self._sandbox.id

    @property
    def config(self) -> SandboxConfig:
        """Its settings."""
        return self._sandbox.config

    @property
    def status(self) -> SandboxStatus:
        """As for `Sandbox`."""
        return self._sandbox.status

    async def execute(self, code: str, language: str = "python", **options: Unpack[RunOptions]) -> SandboxResult:
        """As for `Sandbox`."""
        return await self._perform(code_of(code, language), options)

    async def run(self, work: str | Sequence[str] | Shell, **options: Unpack[RunOptions]) -> SandboxResult:
        """As for `Sandbox`."""
        return await self._perform(work_of(work), options)

    async def _perform(self, what: Code | Command, options: RunOptions) -> SandboxResult:
        loop, run = asyncio.get_running_loop(), Run()
        listener = _Relay(options["on_output"], loop, run.cancel) if options.get("on_output") is not None else None
        if listener is not None:
            options = {**options, "on_output": listener}
        self._sandbox.check_open()
        job = self._threads.submit(self._sandbox.perform, run, what, **options)
        working = asyncio.wrap_future(job, loop=loop)
        try:
            made = await asyncio.shield(working)
        except asyncio.CancelledError:
            if not job.cancel():  # it has begun
                run.cancel()
                with suppress(Exception):  # the task is over; how the run took its end no longer matters
                    await working
            raise
        if listener is not None and listener.raised is not None:
            raise listener.raised
        return made

    async def kill(self) -> None:
        """As for `Sandbox`."""
        self._sandbox.kill()

    async def close(self) -> None:
        """As for `Sandbox`."""
        # In a thread outside the pool, whose threads may all be busy with what is to be ended.
        await asyncio.to_thread(self._sandbox.close)
        self._threads.shutdown(wait=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()


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
