"""The workspace for asyncio: the same results, awaited; cancelling a task leaves nothing running and nothing half done."""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from agent_sandbox import (
    AsyncFiles,
    AsyncLiveSandbox,
    AsyncSandbox,
    AsyncSession,
    AsyncWorkspace,
    LiveSandbox,
    Sandbox,
    SandboxError,
    SandboxFiles,
    SandboxSession,
    SandboxStatus,
    Workspace,
    shell,
)
from agent_sandbox.runtime.base import ExitReason

ENDLESS = "print('up', flush=True)\nimport time\ntime.sleep(600)"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AGENT_SANDBOX_STATE", str(tmp_path / "state"))
    made = tmp_path / "project"
    made.mkdir()
    (made / "notes.txt").write_text("one\n")
    return made


async def up(work: AsyncWorkspace, **options: Any) -> asyncio.Task[Any]:
    """Start an endless run, and return when it has said that it is up."""
    said = asyncio.Event()
    task = asyncio.create_task(work.run(ENDLESS, on_output=lambda *_: said.set(), **options))
    await said.wait()
    return task


async def cancelled(task: asyncio.Task[Any], times: int = 1) -> None:
    for _ in range(times):
        task.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize(
    ("plain", "awaited"),
    [
        (Workspace, AsyncWorkspace),
        (Sandbox, AsyncSandbox),
        (SandboxSession, AsyncSession),
        (LiveSandbox, AsyncLiveSandbox),
        (SandboxFiles, AsyncFiles),
    ],
)
def test_each_method_is_there_for_asyncio_with_the_same_arguments(plain: type, awaited: type) -> None:
    def public(made: type) -> dict[str, Any]:
        return {name: value for name, value in inspect.getmembers_static(made) if not name.startswith("_")}

    theirs = public(awaited) | ({"config": 0, "audit": 0, "id": 0} if plain is Sandbox else {})
    assert {*public(plain)} <= {*theirs}
    for name, method in public(plain).items():
        if not inspect.isfunction(method):
            continue
        ours, other = inspect.signature(method), inspect.signature(public(awaited)[name])
        assert ours.parameters == other.parameters, name
        assert inspect.iscoroutinefunction(public(awaited)[name]) or name in ("session", "live"), name


def test_a_project_is_worked_on_reviewed_and_promoted(project: Path) -> None:
    async def main() -> None:
        async with AsyncWorkspace.over(project) as work:
            done = await work.run(shell("echo two >> notes.txt; echo x > new.txt"))
            assert done.status is SandboxStatus.COMPLETED and done.sandbox_id == work.id
            assert (await work.execute("print(open('notes.txt').read())")).stdout == "one\ntwo\n\n"
            assert "+two" in await work.diff() and len(await work.changes()) == 2
            assert await work.files.read("notes.txt") == "one\ntwo\n"
            assert [each.name for each in await work.files.list()] == ["new.txt", "notes.txt"]
            taken = await work.snapshot("two")
            await work.files.write("notes.txt", "three\n")
            assert (await work.rollback("two")).to.id == taken.id and await work.files.read("notes.txt") == "one\ntwo\n"
            assert len(await work.snapshots()) == 2 and (await work.forget("two")).id == taken.id
            plan = await work.simulate(["rm", "notes.txt"])
            assert plan.digest and (project / "notes.txt").exists()
            assert (await work.drift()).entries == Workspace.over(project).drift().entries == ()
            assert (project / "notes.txt").read_text() == "one\n"
            await work.promote()
            assert (project / "notes.txt").read_text() == "one\ntwo\n"
            await work.undo()
            assert (project / "notes.txt").read_text() == "one\n"
            await work.reset()
            assert len(await work.changes()) == 0

    asyncio.run(main())


def test_leaving_the_block_ends_runs_and_keeps_changes(project: Path) -> None:
    async def main() -> AsyncWorkspace:
        async with AsyncWorkspace.over(project) as work:
            await work.files.write("notes.txt", "kept\n")
            task = await up(work)
        ended = await task
        assert ended.exit is not None and ended.exit.reason is ExitReason.KILLED
        return work

    work = asyncio.run(main())
    assert "+kept" in Workspace.over(project).diff(), "for the next one, and for the command line"
    Workspace.over(project).reset()

    async def late() -> None:
        calls: list[Coroutine[Any, Any, object]] = [work.run("1"), work.diff(), work.promote(), work.files.read("x"), work.snapshot()]
        for call in calls:
            with pytest.raises(SandboxError, match="this workspace has been closed"):
                await call
        await work.close()

    asyncio.run(late())


@pytest.mark.parametrize("times", [1, 3])
def test_cancelling_kills_the_run_and_frees_the_sandbox_for_the_next(project: Path, times: int) -> None:
    async def main() -> None:
        async with AsyncWorkspace.over(project) as work:
            task = await up(work)
            await cancelled(task, times)
            assert not work._workspace._runs.any, "the run is over when the task is"
            assert (await work.run("print(1)")).stdout == "1\n"
            await work.reset()

    asyncio.run(main())


def test_cancelling_what_waits_for_another_run_ends_at_once(project: Path) -> None:
    """The lock is held by a run that goes on: a task that could not leave it would wait for that run."""

    async def main() -> None:
        async with AsyncWorkspace.over(project) as work, AsyncWorkspace.over(project) as other:
            task = await up(work)
            waiting = [asyncio.create_task(each) for each in (other.run("print(2)"), other.files.read("notes.txt"), other.simulate("1"))]
            await asyncio.sleep(0)
            while not other._workspace._runs.any:
                await asyncio.sleep(0.01)
            for each in waiting:
                await cancelled(each)
            assert not task.done() and not other._workspace._runs.any
            await cancelled(task)
            assert (await other.run("print(2)")).stdout == "2\n", "the control arm: it was the other run"
            await other.reset()

    asyncio.run(main())


def test_cancelling_an_operation_on_files_or_a_simulation_ends_it(project: Path) -> None:
    async def main() -> None:
        async with AsyncWorkspace.over(project) as work:
            for call in (work.files.write("large", b"x" * (32 << 20)), work.simulate(ENDLESS)):
                task = asyncio.create_task(call)
                while not work._workspace._runs.any and not task.done():
                    await asyncio.sleep(0)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                assert not work._workspace._runs.any
            assert (await work.run("print(1)")).success
            await work.reset()

    asyncio.run(main())


def test_a_promotion_that_is_cancelled_is_done_or_not_begun(project: Path) -> None:
    async def main() -> None:
        async with AsyncWorkspace.over(project) as work:
            await work.run(shell("for n in 1 2 3 4 5 6 7 8 9; do echo x > new-$n; done"))
            reviewing = asyncio.Event()
            loop = asyncio.get_running_loop()

            def review(proposal: object) -> bool:
                loop.call_soon_threadsafe(reviewing.set)
                return True

            task = asyncio.create_task(work.promote(review=review))
            await reviewing.wait()
            await cancelled(task, 2)
            assert sorted(os.listdir(project)) == [
                "new-1",
                "new-2",
                "new-3",
                "new-4",
                "new-5",
                "new-6",
                "new-7",
                "new-8",
                "new-9",
                "notes.txt",
            ]
            await work.undo()
            assert sorted(os.listdir(project)) == ["notes.txt"]
            await work.reset()

    asyncio.run(main())


def test_runs_of_one_workspace_take_turns_while_the_loop_goes_on(project: Path) -> None:
    async def main() -> None:
        async with AsyncWorkspace.over(project) as work:
            results = await asyncio.gather(*(work.run(shell(f"echo {n} >> list.txt")) for n in range(4)))
            assert all(result.success for result in results)
            assert sorted((await work.files.read("list.txt")).split()) == ["0", "1", "2", "3"]
            await work.reset()

    asyncio.run(main())


def test_the_files_of_a_session_are_awaited_too() -> None:
    async def main() -> None:
        async with AsyncSandbox(validate_code=False) as sandbox, sandbox.session() as session:
            await session.files.write("x", "1")
            assert (await session.run("open('x').read()")).value == "1"
            assert await session.files.exists("x") and (await session.files.stat("x")).size == 1
            await session.files.mkdir("d")
            await session.files.remove("d")
            with pytest.raises(SandboxError, match="keeps no files"):
                await sandbox.files.write("x", "1")
            assert session.id and "async session" in repr(session)
            await session.kill()
            with pytest.raises(SandboxError, match="has ended"):
                await session.files.read("x")

    asyncio.run(main())
