"""Calls of the synchronous code in threads, for `aio`: each is awaited, and ends with the task that awaits it."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from inspect import iscoroutinefunction
from typing import Any, Literal, TypeVar

from agent_sandbox._calls import Run, Runs, TextListener
from agent_sandbox.config import SandboxConfig
from agent_sandbox.engine.tools import named
from agent_sandbox.options import OnOutput

T = TypeVar("T")
# Threads of our own. The event loop has few threads, which also resolve host names, and a long run must not occupy them.
MOST_AT_ONCE = 64


class CallThreads:
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
        return await to_its_end(asyncio.wrap_future(job), job)

    async def close(self, close: Callable[[], None]) -> None:
        """Close the sandbox or workspace, and then the threads."""
        # In a thread outside the pool: all threads of the pool may be busy with the runs to be ended.
        await to_its_end(asyncio.ensure_future(asyncio.to_thread(close)))
        self._pool.shutdown(wait=False)


async def to_its_end(working: asyncio.Future[T], job: Future[T] | None = None, on_cancel: Callable[[], None] = lambda: None) -> T:
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


class CallLoop:
    """An event loop that awaits runs in other threads, and executes the coroutine tools that these runs call."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._awaited: set[Future[object]] = set()
        self._over = False

    async def have(self, threads: CallThreads, perform: Callable[..., T], what: object, options: Mapping[str, Any]) -> T:
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

        outcome = await to_its_end(asyncio.wrap_future(job, loop=self._loop), job, end)
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
