"""The sandbox for asyncio: the same results, awaited; cancelling kills."""

from __future__ import annotations

import asyncio

import pytest

from agent_sandbox import AsyncSandbox, PolicyError, Sandbox, SandboxError, SandboxStatus, shell

ENDLESS = "print('up', flush=True)\nimport time\ntime.sleep(600)"


def test_execute_is_awaited() -> None:
    async def main() -> None:
        async with AsyncSandbox(allow_subprocess=True) as sandbox:
            assert sandbox.status is SandboxStatus.PENDING
            result = await sandbox.execute("print(input())", stdin="hello")
            assert (result.stdout, result.sandbox_id) == ("hello\n", sandbox.id)
            assert (await sandbox.execute("echo $((1 + 1))", "bash")).stdout == "2\n"
            assert (await sandbox.run(["echo", "argv"])).stdout == "argv\n"
            assert (await sandbox.run(shell("echo line"))).stdout == "line\n"
            assert (await sandbox.execute("1 / 0")).status is SandboxStatus.FAILED

    asyncio.run(main())


def test_many_run_at_once_while_the_loop_goes_on() -> None:
    async def main() -> None:
        async with AsyncSandbox() as sandbox:
            results = await asyncio.gather(*(sandbox.execute(f"print({n})") for n in range(20)))
            assert [result.stdout for result in results] == [f"{n}\n" for n in range(20)]

    asyncio.run(main())


def test_cancelling_a_task_kills_its_guest_and_no_other() -> None:
    async def main() -> None:
        async with AsyncSandbox() as sandbox:
            up = asyncio.Event()
            task = asyncio.create_task(sandbox.execute(ENDLESS, on_output=lambda *_: up.set()))
            other = asyncio.create_task(sandbox.execute("print(input())", stdin="x"))
            await asyncio.wait_for(up.wait(), 30)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (await other).stdout == "x\n"
            assert sandbox.status is not SandboxStatus.RUNNING, "the guest is gone when the task is"

    asyncio.run(main())


def test_a_task_that_is_cancelled_at_once_leaves_nothing_running() -> None:
    async def main() -> None:
        async with AsyncSandbox() as sandbox:
            task = asyncio.create_task(sandbox.execute(ENDLESS))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert sandbox.status is not SandboxStatus.RUNNING

    asyncio.run(main())


def test_a_deadline_of_asyncio_kills_the_guest() -> None:
    async def main() -> None:
        async with AsyncSandbox() as sandbox:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(sandbox.execute(ENDLESS), 0.3)
            assert sandbox.status is not SandboxStatus.RUNNING

    asyncio.run(main())


def test_the_callback_is_called_in_the_loop_and_before_the_result() -> None:
    async def main() -> None:
        loop, told = asyncio.get_running_loop(), []

        def listen(stream: str, text: str) -> None:
            assert asyncio.get_running_loop() is loop
            told.append((stream, text))

        async with AsyncSandbox() as sandbox:
            result = await sandbox.execute("for n in range(100): print(n)", on_output=listen)
        assert "".join(text for _, text in told) == result.stdout

    asyncio.run(main())


def test_an_exception_of_the_callback_ends_the_run_and_is_raised() -> None:
    def stop(stream: str, text: str) -> None:
        raise LookupError(text)

    async def main() -> None:
        async with AsyncSandbox() as sandbox:
            with pytest.raises(LookupError, match="up"):
                await sandbox.execute(ENDLESS, on_output=stop)

    asyncio.run(main())


def test_kill_and_close_end_what_runs() -> None:
    async def main() -> None:
        for end in (AsyncSandbox.kill, AsyncSandbox.close):
            sandbox = AsyncSandbox()
            up = asyncio.Event()
            task = asyncio.create_task(sandbox.execute(ENDLESS, on_output=lambda *_, up=up: up.set()))
            await asyncio.wait_for(up.wait(), 30)
            await end(sandbox)
            assert (await task).status is SandboxStatus.FAILED
            await sandbox.close()
            with pytest.raises(SandboxError, match="closed"):
                await sandbox.execute("print(1)")

    asyncio.run(main())


def test_tools_that_are_coroutines_are_awaited_in_the_loop() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()

        async def fetch(key: str, times: int = 2) -> str:
            assert asyncio.get_running_loop() is loop
            await asyncio.sleep(0)
            return key * times

        async with AsyncSandbox(tools=[fetch]) as sandbox:
            assert (
                await sandbox.execute("print(fetch('a'), fetch.__doc__, plain(1))", tools={"plain": lambda n: n})
            ).stdout == "aa None 1\n"
            async with sandbox.session(tools={"plain": lambda n: n}) as session:
                assert (await session.run("x = fetch('b', times=plain(3))\nx")).value == "bbb"
                assert not session.ended
            assert session.ended
        with Sandbox(tools=[fetch]) as sandbox_of_threads, pytest.raises(PolicyError, match="nobody would await"):
            sandbox_of_threads.execute("fetch('a')")

    asyncio.run(main())


def test_cancelling_ends_a_tool_that_is_awaited_and_the_session() -> None:
    async def main() -> None:
        called = asyncio.Event()

        async def forever() -> None:
            called.set()
            await asyncio.Event().wait()

        async with AsyncSandbox(tools=[forever]) as sandbox, sandbox.session() as session:
            task = asyncio.create_task(session.run("forever()"))
            await asyncio.wait_for(called.wait(), 30)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert session.ended
            with pytest.raises(SandboxError, match="has ended"):
                await session.run("1")

    asyncio.run(main())
