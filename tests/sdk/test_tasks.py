"""A task a sandbox: tasks see nothing of one another, end without disturbing others, and leave nothing but what they hand over."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from agent_sandbox import (
    Coordinator,
    LiveSandbox,
    PolicyError,
    RuntimeUnavailable,
    Sandbox,
    SandboxConfig,
    SandboxError,
    SandboxResult,
    SandboxSession,
    Secret,
    Task,
    TaskOutcome,
    shell,
)
from agent_sandbox import tasks as module
from agent_sandbox.assembly import here
from tests.leftovers import left_since, traces

CANARY = "canary-of-one"


def outcomes(tasks: Iterable[Task], **options: int) -> dict[str, TaskOutcome]:
    with Coordinator(**options) as coordinator:
        return {outcome.name: outcome for outcome in coordinator.run(tasks)}


def test_two_tasks_never_see_the_files_environment_or_credentials_of_one_another(project: Path) -> None:
    """Both run at once, and the first waits until the second has looked: what it holds is there all the time."""
    (project / "only-for-one.txt").write_text(CANARY)
    looked, held = threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        assert looked.wait(120)

    def look() -> None:
        assert held.wait(120)

    search = f"""
import os
{{call}}()
seen = [*os.environ.values()]
seen += [open(os.path.join(at, name), errors="replace").read() for at, _, names in os.walk("/tmp") for name in names]
for place in ({str(project / "only-for-one.txt")!r}, *(f"/proc/{{{{each}}}}/environ" for each in os.listdir("/proc") if each.isdigit())):
    try:
        seen.append(open(place, errors="replace").read())
    except OSError:
        pass
[{CANARY!r}[::-1] in each[::-1] for each in seen].count(True)
"""
    one = Task(
        "one",
        search.format(call="hold"),
        files=[project],
        env_vars={"KEY": CANARY},
        given={"note.txt": CANARY},
        tools={"hold": hold},
    )
    other = Task("other", search.format(call="look"), env_vars={"KEY": "mine"}, tools={"look": look})
    found: dict[str, TaskOutcome] = {}
    with Coordinator(at_once=2) as coordinator:
        for outcome in coordinator.run([one, other]):
            found[outcome.name] = outcome
            looked.set()
    if not held.is_set() or len(os.sched_getaffinity(0)) < 2:
        pytest.skip("this machine has one processor, so the tasks did not run at once")
    assert found["other"].value == 0, found
    assert found["one"].value >= 3, "the control: the same search finds what the task itself was given, in each of the three places"


def test_each_task_has_its_own_brokered_credentials() -> None:
    host = ["api.example.com"]
    with_one = Task("a", "import os; os.environ.get('TOKEN', '')", hosts=host, secrets=[Secret("TOKEN", host, value=CANARY)])
    without = Task("b", "import os; os.environ.get('TOKEN', '')", hosts=host)
    found = outcomes([with_one, without])
    assert found["a"].value and CANARY not in found["a"].value, "it holds a placeholder, and the egress has the value"
    assert found["b"].value == ""


def test_a_task_that_fails_hangs_or_is_refused_disturbs_no_other(project: Path) -> None:
    def fall(sandbox: Sandbox) -> object:
        raise RuntimeError("a mistake of the caller")

    release = threading.Event()
    tasks = [
        Task("fails", ["sh", "-c", "exit 3"]),
        Task("hangs", shell("trap '' TERM; while :; do sleep 1000; done"), timeout=0.5),
        Task("eats", "x = 'a' * (1 << 30)", config=SandboxConfig(max_memory_mb=100, validate_code=False)),
        Task("refused", "open('/etc/passwd')", config=SandboxConfig()),
        Task("falls", fall),
        Task("never ends".replace(" ", "-"), lambda sandbox: release.wait(), timeout=0.2),
        Task("works", "6 * 7"),
        Task("function", lambda sandbox: sandbox.execute("print('inside')").stdout),
        Task("hands-over", shell("cat in.txt > out.txt; echo more >> out.txt"), given={"in.txt": b"given\n"}, collect=["out.txt"]),
        Task("hands-nothing", "1", collect=["out.txt"]),
    ]
    found = outcomes(tasks)
    release.set()
    states = {name: outcome.state for name, outcome in found.items()}
    assert states == {
        "fails": "failed",
        "hangs": "timed-out",
        "eats": "failed",
        "refused": "refused",
        "falls": "failed",
        "never-ends": "timed-out",
        "works": "completed",
        "function": "completed",
        "hands-over": "completed",
        "hands-nothing": "failed",
    }, found
    assert found["works"].value == 42 and found["function"].value == "inside\n"
    assert found["hands-over"].files == {"out.txt": b"given\nmore\n"} and "no file 'out.txt'" in found["hands-nothing"].why
    assert "RuntimeError: a mistake" in found["falls"].why and "goes on without its sandbox" in found["never-ends"].why


def test_outcomes_come_as_tasks_end_and_leaving_the_loop_ends_the_rest() -> None:
    before = traces()
    with Coordinator(at_once=2) as coordinator:
        stream = coordinator.run(
            [Task("slow", ["sleep", "1000"]), Task("quick", "1"), *(Task(f"n{n}", ["sleep", "1000"]) for n in range(5))]
        )
        first = next(iter(stream))
        assert first.name == "quick" or len(os.sched_getaffinity(0)) == 1, "the outcome of the quick one does not wait for the slow one"
        stream.close()  # type: ignore[attr-defined]  # as a loop that is left does
        assert coordinator._running == {}
    here().process().close()
    assert left_since(before) == []
    with pytest.raises(SandboxError, match="closed"):
        coordinator.run([Task("a", "1")])


def test_a_task_can_be_cancelled_before_and_while_it_runs() -> None:
    with Coordinator(at_once=1) as coordinator:
        started = threading.Event()
        tasks = [
            Task("runs", "report(); __import__('time').sleep(1000)", tools={"report": started.set}),
            Task("waits", "1"),
            Task("last", "2"),
        ]

        def cancel() -> None:
            started.wait(120)
            coordinator.cancel("waits")
            coordinator.cancel("runs")

        thread = threading.Thread(target=cancel)
        thread.start()
        found = {outcome.name: outcome.state for outcome in coordinator.run(tasks)}
        thread.join(60)
    assert found == {"runs": "cancelled", "waits": "cancelled", "last": "completed"}


def test_the_time_of_all_tasks_together_ends_those_that_are_left() -> None:
    with Coordinator(at_once=1, total_timeout=0.5) as coordinator:
        found = {each.name: each.state for each in coordinator.run([Task("a", ["sleep", "1000"]), Task("b", "1")])}
    assert found == {"a": "timed-out", "b": "timed-out"}


@pytest.mark.parametrize("work", [shell("true"), "1"], ids=["command", "code"])
def test_a_task_whose_time_is_over_before_its_work_begins_has_timed_out(work: str | list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The sandbox ends itself; the coordinator, which would have ended it too, looks later."""
    for kind in (LiveSandbox, SandboxSession):
        monkeypatch.setattr(kind, "run", delayed(kind.run, 0.5))
    monkeypatch.setattr(Coordinator, "_cut_late", lambda coordinator: None)
    outcome = outcomes([Task("late", work, timeout=0.3)])["late"]
    assert (outcome.state, outcome.why) == ("timed-out", "its time is over"), outcome


def delayed(call: Callable[..., SandboxResult], seconds: float) -> Callable[..., SandboxResult]:
    """The same call, after a delay that is injected."""

    def later(*arguments: object, **options: object) -> SandboxResult:
        time.sleep(seconds)
        return call(*arguments, **options)

    return later


def test_a_closed_coordinator_ends_its_tasks_from_another_thread() -> None:
    coordinator = Coordinator(at_once=1)
    tasks = [
        Task("a", "close(); __import__('time').sleep(1000)", tools={"close": lambda: threading.Thread(target=coordinator.close).start()})
    ]
    found = {each.name: each.state for each in coordinator.run([*tasks, Task("b", "1")])}
    assert found == {"a": "cancelled", "b": "cancelled"}


@pytest.mark.parametrize("name", ["", "../a", "a/b", "-rf", "a\nb", "a" * 41, "‮a", "a\0b"])
def test_a_hostile_name_is_refused(name: str) -> None:
    with pytest.raises(PolicyError):
        Task(name, "1")
    for field in ({"given": {f"../{name}": "x"}}, {"collect": [f"/etc/{name}"]}, {"given": {f"a/../../{name}": "x"}}):
        with pytest.raises(PolicyError):
            Task("fine", "1", **field)


def test_wrong_settings_are_refused_before_any_task_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    with Coordinator() as coordinator:
        with pytest.raises(PolicyError, match="two tasks are called 'a'"):
            coordinator.run([Task("a", "1"), Task("a", "2")])
        with pytest.raises(TypeError, match="each of tasks"):
            coordinator.run(["1"])  # type: ignore[list-item]
        with pytest.raises(PolicyError):
            Task("a", "1", timeout=-1)
        with pytest.raises(PolicyError, match="function"):
            Task("a", lambda sandbox: 1, collect=["x"])
        for wrong in (0, -1, 1.5, True):
            with pytest.raises(PolicyError):
                Coordinator(at_once=wrong)  # type: ignore[arg-type]
        assert [each.success for each in coordinator.run([Task("a", "1")])] == [True]
        monkeypatch.setattr(module, "available_memory", lambda: 1 << 20)
        with pytest.raises(RuntimeUnavailable, match="each task needs"):
            coordinator.run([Task("a", "1")])


def test_no_more_tasks_run_at_once_than_the_machine_can_bear(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten tasks of 256 MiB, on a machine with room for two."""
    monkeypatch.setattr(module, "processors", lambda: 8)
    monkeypatch.setattr(module, "available_memory", lambda: 700 << 20)
    at_once, most, lock = 0, 0, threading.Lock()

    def count(sandbox: Sandbox) -> None:
        nonlocal at_once, most
        with lock:
            at_once += 1
            most = max(most, at_once)
        time.sleep(0.01)
        with lock:
            at_once -= 1

    assert all(each.success for each in outcomes([Task(f"t{n}", count) for n in range(10)]).values())
    assert 1 <= most <= 2
