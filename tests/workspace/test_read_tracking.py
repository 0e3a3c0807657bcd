"""What a run opens is told, by the kernel, from its first program on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_sandbox.engine.plan_launch import tools
from agent_sandbox.errors import WorkspaceError
from agent_sandbox.kernel import notify
from agent_sandbox.kernel.mount_plan import ThrowAway
from agent_sandbox.policy.model import Limits, cloned
from agent_sandbox.runtime.base import Argv, Launch
from agent_sandbox.runtime.process.runtime import ProcessRuntime
from agent_sandbox.workspace import read_tracking
from agent_sandbox.workspace.read_tracking import Reads, ReadWatch
from agent_sandbox.workspace.view.plan import MachineFacts, plan_view


@pytest.fixture(scope="module")
def runtime() -> Iterator[ProcessRuntime]:
    made = ProcessRuntime()
    yield made
    made.close()


def watched(runtime: ProcessRuntime, project: Path, script: str) -> set[str]:
    """What of the project bash opens for this script, relative to it."""
    watches: list[ReadWatch] = []
    plan = plan_view(cloned(masks=()).files, tools(), ThrowAway(64 << 20), host=MachineFacts.look(), project=str(project))
    launch = Launch(
        Argv(("bash", "-c", script)),
        plan,
        str(project),
        {"PATH": "/usr/bin:/bin"},
        Limits(),
        frozenset(),
        inspect=True,
        on_ready=(lambda guest: watches.append(ReadWatch(guest.process or 0, str(project))),),
    )
    guest = runtime.launch(launch)
    try:
        done = guest.wait()
    finally:
        guest.close()
    assert done.exit.code == 0, done.stderr
    (watch,) = watches
    found = watch.end()
    assert found.complete and watch.end() == found
    return {os.path.relpath(path, project) for path in found.paths}


@pytest.mark.needs_root
def test_files_that_a_run_opens_are_told_and_others_are_not(runtime: ProcessRuntime, project: Path) -> None:
    odd = os.fsdecode(b"\xff\n")
    for name in ("run.sh", "untouched", odd, "removed"):
        (project / name).write_text("echo x\n")
    script = (
        "cat greeting.txt src/../*$'\\xff'* >/dev/null; bash run.sh; cat removed; rm removed; cat /etc/hostname; stat untouched; ls src"
    )
    assert watched(runtime, project, script) == {"greeting.txt", odd, "run.sh", "removed"}


@pytest.mark.needs_root
def test_a_watch_hears_nothing_of_what_others_open(runtime: ProcessRuntime, project: Path) -> None:
    with open(project / "greeting.txt") as file:
        assert watched(runtime, project, "true") == set()
        file.read()


@pytest.mark.needs_root
def test_pipes_that_a_guest_makes_do_not_hold_the_watch_up(runtime: ProcessRuntime, project: Path) -> None:
    script = "mkfifo pipe; (echo x > pipe) & cat pipe; wait; cat greeting.txt"
    assert "greeting.txt" in watched(runtime, project, script)


@pytest.mark.needs_root
def test_many_files_are_not_lost(runtime: ProcessRuntime, project: Path) -> None:
    assert len(watched(runtime, project, "mkdir many; cd many; for n in {1..3000}; do : > $n; done; cat * >/dev/null")) == 3000


@pytest.mark.needs_user
def test_without_root_a_watch_is_refused(project: Path) -> None:
    with pytest.raises(WorkspaceError, match="cannot watch"):
        ReadWatch(os.getpid(), str(project))


@pytest.mark.needs_root
def test_what_is_lost_is_noticed(tmp_path: Path) -> None:
    group = notify.watch_opens(f"/proc/self/root{tmp_path}")
    with pytest.raises(notify.Overflow):
        list(notify._paths(notify._EVENT.pack(24, 3, 0, 24, notify.FAN_Q_OVERFLOW, -1, 0)))
    os.close(group)


def test_what_runs_read_is_kept_and_added_up(tmp_path: Path) -> None:
    directory = str(tmp_path / "reads")
    assert read_tracking.recall(directory) is None
    odd = os.fsdecode(b"/\xff\n")
    read_tracking.write(directory, "1", Reads(frozenset({"/a", odd})))
    read_tracking.write(directory, "2", Reads(frozenset({"/b"})))
    found = read_tracking.recall(directory)
    assert found == Reads(frozenset({"/a", "/b", odd}))
    assert found.opened("/a") and not found.opened("/c")
    read_tracking.write(directory, "3", Reads(frozenset(), complete=False))
    missed = read_tracking.recall(directory)
    assert missed is not None and missed.opened("/c")


@pytest.mark.parametrize("damage", [b"", b"agent-sandbox reads 1 whole\0/a", b"something else\0"])
def test_a_damaged_list_of_what_was_read_is_one_with_gaps(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "1").write_bytes(damage)
    found = read_tracking.recall(str(tmp_path))
    assert found is not None and not found.complete
