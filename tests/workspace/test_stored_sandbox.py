"""A stored sandbox: what runs leave in it, what snapshots keep of that, and what is removed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agent_sandbox._fast.values import replace
from agent_sandbox.engine.gate import Gate
from agent_sandbox.engine.run import Session
from agent_sandbox.engine.runtimes import only
from agent_sandbox.engine.work import Command, Outcome, Work
from agent_sandbox.errors import Busy, WorkspaceError
from agent_sandbox.kernel import loop
from agent_sandbox.ledger.writer import Ledger
from agent_sandbox.policy.model import CLONED_LIMITS, MIB, cloned
from agent_sandbox.runtime.process.runtime import ProcessRuntime
from agent_sandbox.workspace import stored_sandbox as module
from agent_sandbox.workspace.layers import history, image
from agent_sandbox.workspace.originals.runs import TICK_NS
from agent_sandbox.workspace.store import SandboxState, Store
from agent_sandbox.workspace.stored_sandbox import Stored
from tests.patience import until

pytestmark = pytest.mark.needs_root
ENV = {"PATH": "/usr/local/bin:/usr/bin:/bin"}
Run = Callable[..., Outcome]


@pytest.fixture(scope="module")
def runtime() -> Iterator[ProcessRuntime]:
    shared = ProcessRuntime()
    yield shared
    shared.close()


@pytest.fixture
def state(project: Path, tmp_path: Path) -> SandboxState:
    return Store.open(str(tmp_path / "state")).sandbox_for(str(project))


def runner(state: SandboxState, runtime: ProcessRuntime, beside: Callable[[Callable[[], None]], None] | None = None) -> Run:
    ledger = Ledger(Path(state.store.path, "ledger.jsonl"), clock=lambda: 0.0)

    def run(script: str, disk: int | None = 64 * MIB) -> Outcome:
        policy = cloned(masks=(), limits=replace(CLONED_LIMITS, disk_bytes=disk, wall_seconds=600.0))
        session = Session(Gate(policy, ledger, clock=lambda: 0.0), only(runtime), project=state.project, state=state, beside=beside)
        return session.run(Work(Command(("sh", "-c", script)), ENV, cwd=state.project))

    return run


@pytest.fixture
def run(state: SandboxState, runtime: ProcessRuntime) -> Run:
    return runner(state, runtime)


def blocks_in(directory: str) -> int:
    """How many blocks of 512 bytes the files below it take of the disk."""
    return sum(os.lstat(os.path.join(folder, name)).st_blocks for folder, _, names in os.walk(directory) for name in names)


def generations(state: SandboxState) -> list[str]:
    with image.opened(state.image) as (_, top):
        return sorted(name for name in os.listdir(top) if name.isdecimal())


def changed(state: SandboxState) -> dict[str, str]:
    found = Stored(state).changes(cloned(masks=()))
    return {os.path.relpath(change.path, state.project): change.kind.value for change in found.within(state.project)}


def test_snapshot_and_rollback_do_not_open_the_image(state: SandboxState, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their cost cannot depend on what is in it."""
    run("echo one > file")
    with monkeypatch.context() as patch:
        patch.setattr(loop, "CONTROL", "/nowhere")
        patch.setattr(module, "attach", pytest.fail)
        Stored(state).snapshot("first")
        Stored(state).rollback("first")
    assert run("cat file").stdout == b"one\n"


def test_changes_are_read_over_frozen_generations(state: SandboxState, run: Run) -> None:
    run("echo one > added; rm greeting.txt; echo '# x' >> src/app.py")
    Stored(state).snapshot()
    run("rm added; echo back > greeting.txt; mkdir new")
    Stored(state).snapshot()
    run("rm -r src; mkdir src; echo y > src/other")
    assert changed(state) == {"greeting.txt": "modified", "new": "added", "src/app.py": "deleted", "src/other": "added"}
    with Stored(state).opened() as stack:
        found = {change.path: change for change in Stored(state).changes(cloned(masks=()))}
        fd = stack.open_file(found[f"{state.project}/greeting.txt"])
        assert os.read(fd, 100) == b"back\n"
        os.close(fd)


def test_a_long_chain_is_squashed_before_a_run_and_snapshots_still_show_what_they_were(
    state: SandboxState, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "LONGEST_CHAIN", 3)
    for number in range(5):
        run(f"echo {number} > file; rm -f file-{number - 1}; echo x > file-{number}")
        Stored(state).snapshot(f"s{number}")
    assert run("cat file; ls").stdout.split() == [b"4", b"file", b"file-4", b"greeting.txt", b"src"]
    assert len(state.history().chain) <= 3
    for number in (1, 3, 0):
        Stored(state).rollback(f"s{number}")
        assert run("cat file; ls").stdout.split()[:3] == [b"%d" % number, b"file", b"file-%d" % number]
    assert "file-0" in changed(state)


def test_what_nothing_refers_to_is_removed_by_forget_and_the_rest_by_the_next_run(
    state: SandboxState, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("for n in $(seq 200); do echo $n > file-$n; done")
    Stored(state).snapshot("many")
    Stored(state).rollback("many")
    run("rm file-1")
    assert generations(state) == ["1", "3"]
    stored = Stored(state)
    stored.rollback("many")
    monkeypatch.setattr(module, "TIDYING_SECONDS", -1.0)
    empty = stored.snapshots().snapshots[-1]
    assert empty.automatic
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stored, "_tidy", lambda *_, **__: None)  # as if killed right after the history was written
        stored.forget(empty.id)
    run("true")
    with image.opened(state.image) as (_, top):
        assert os.listdir(f"/proc/self/fd/{top}/trash") == ["3.0"], "no time was left to remove it, so it waits"
    monkeypatch.setattr(module, "TIDYING_SECONDS", 60.0)
    run("true")
    with image.opened(state.image) as (_, top):
        assert os.listdir(f"/proc/self/fd/{top}/trash") == []
    assert run("ls | wc -l").stdout.strip() == b"202", "what is referred to stays"


def test_promoted_paths_leave_the_layers_and_a_snapshot_keeps_them(state: SandboxState, run: Run, project: Path) -> None:
    run("echo one > kept; echo two > promoted; mkdir d; echo x > d/promoted; echo y > d/kept")
    paths = [str(project / name) for name in ("promoted", "d/promoted")]
    (project / "promoted").write_text("two\n")
    with state.lock():
        before = Stored(state).drop(paths, "before promote")
    assert before is not None and before.automatic
    assert changed(state) == {"kept": "added", "d": "added", "d/kept": "added"}
    assert run("cat promoted kept d/kept").stdout == b"two\none\ny\n"


def test_a_guest_that_fills_its_quota_gets_no_space_and_nobody_else_notices(
    state: SandboxState, run: Run, runtime: ProcessRuntime, tmp_path: Path
) -> None:
    other = state.store.sandbox_for(str(tmp_path))
    beside = runner(other, runtime)
    beside("echo mine > file")
    before = blocks_in(state.store.path)
    full = run("head -c 200M /dev/zero > big; echo $?; rm -f big; echo small > small; cat small")
    assert b"No space left" in full.stderr and full.stdout.splitlines()[-1] == b"small", full
    assert "disk" not in full.exit.limits_hit, "it made room again"
    full = run("head -c 200M /dev/zero > big; echo $(($(stat -c %s big) >> 20))")
    assert "disk" in full.exit.limits_hit and 40 <= int(full.stdout) <= 64, full
    assert beside("cat file; head -c 30M /dev/zero > more; echo $?").stdout == b"mine\n0\n", "the other one has its own"
    assert (blocks_in(state.store.path) - before) * 512 < 2 * image.ROOM, "and the disk gave no more than was reserved"
    again = run("ls -s big | wc -l; rm big; head -c 20M /dev/zero > fits; echo $?")
    assert again.stdout == b"1\n0\n", "a full sandbox can be entered, and emptied"


def test_a_sandbox_that_was_full_under_a_lower_limit_has_room_at_once_under_a_higher(state: SandboxState, run: Run) -> None:
    assert "disk" in run("head -c 40M /dev/zero > big", disk=16 * MIB).exit.limits_hit
    outcome = run("head -c 60M /dev/zero > more && echo fits", disk=8 << 30)
    assert outcome.stdout == b"fits\n", outcome


def test_a_larger_limit_is_grown_into_while_the_guest_writes(state: SandboxState, run: Run) -> None:
    run("true")
    size = 3 * image.ROOM >> 20
    outcome = run(f"head -c {size}M /dev/zero > big && stat -c %s big", disk=8 << 30)
    assert int(outcome.stdout) >> 20 == size and outcome.exit.limits_hit == (), outcome


def test_after_a_run_the_disk_has_back_what_the_run_does_not_need(state: SandboxState, run: Run) -> None:
    """The keeper does it, beside whoever ran."""
    for disk in (8 << 30, 64 * MIB):
        outcome = run("echo one > file; head -c 100M /dev/zero > big; rm big", disk=disk)
        assert until(lambda: blocks_in(state.path) * 512 <= 16 * MIB), outcome
    assert run("cat file").stdout == b"one\n"


def test_a_guest_that_writes_at_once_and_fast_in_an_empty_sandbox_has_room(state: SandboxState, run: Run) -> None:
    """Nothing grows before its first write: what a run may need is reserved before it starts."""
    run("true")
    assert until(lambda: blocks_in(state.path) * 512 <= 16 * MIB)
    outcome = run("head -c 100M /dev/zero > big && stat -c %s big", disk=8 << 30)
    assert int(outcome.stdout) >> 20 == 100, outcome


def test_a_sandbox_that_says_it_has_layers_and_has_none_is_refused(state: SandboxState, run: Run) -> None:
    run("echo precious > file")
    os.rename(state.image, state.image + ".away")
    with pytest.raises(WorkspaceError, match="gone"):
        run("true")
    os.rename(state.image + ".away", state.image)
    assert run("cat file").stdout == b"precious\n"


def test_a_history_that_is_lost_is_not_made_up(state: SandboxState, run: Run) -> None:
    run("echo precious > file")
    path = Path(state.path, "history.json")
    text = path.read_text()
    path.unlink()
    for use in (lambda: run("true"), lambda: Stored(state).snapshot(), lambda: changed(state)):
        with pytest.raises(WorkspaceError, match="history"):
            use()
    path.write_text(text)
    assert run("cat file").stdout == b"precious\n"


def test_where_no_image_can_be_had_a_directory_does_and_every_run_says_so(
    state: SandboxState, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "CONTROL", "/nowhere")
    for _ in range(2):
        assert any("only watched" in note for note in run("echo one > file").notes)
    monkeypatch.undo()
    assert any("only watched" in note for note in run("true").notes), "also where one could be had by now"
    Stored(state).snapshot("first")
    run("echo two > file; mkdir -p d; ln file d/twin")
    Stored(state).snapshot("second")
    run("rm -r d")
    Stored(state).rollback("first")
    assert run("cat file").stdout == b"one\n"
    Stored(state).rollback("second")
    assert run("cat file; stat -c %h d/twin").stdout == b"two\n2\n"
    Stored(state).forget("first")
    assert "2" not in os.listdir(state.layers) and run("cat file").stdout == b"two\n"


def test_a_power_cut_is_said_by_the_next_run(state: SandboxState, run: Run) -> None:
    run("echo one > file")
    Path(state.image + ".lost").touch()  # as `image.attach` does when it finds an image that was not unmounted
    assert module.LOST in run("cat file").notes
    assert module.LOST not in run("cat file").notes


def test_what_is_written_right_before_a_run_has_a_base(state: SandboxState, run: Run, project: Path) -> None:
    """A program writes a file and runs something at once: what was there before is known all the same."""
    for number in range(10):
        (project / "file").write_text(f"before {number}")
        run("echo after > file")
        base = Stored(state).bases()[str(project / "file")]
        assert base.known and base.kept, number
        state.reset()


def let_the_clock_tick() -> None:
    start = time.time_ns()
    while time.time_ns() < start + 2 * TICK_NS:
        pass


def test_what_moved_on_before_the_names_were_listed_is_drift_too(state: SandboxState, runtime: ProcessRuntime, project: Path) -> None:
    """The names are listed beside the run, on a busy machine long after it has ended."""
    (project / "file").write_text("before")
    (project / "other").write_text("before")
    later: list[Callable[[], None]] = []
    let_the_clock_tick()  # what is written just before a clone may count as moved
    runner(state, runtime, later.append)("true")
    (project / "file").write_text("moved on")
    let_the_clock_tick()
    for listing in later:
        listing()
    assert later and Stored(state).names_are_known
    moved = Stored(state).drift(Stored(state).changes(cloned(masks=())))
    assert [(entry.path, entry.kind.value) for entry in moved.entries] == [(str(project / "file"), "changed")]


def test_a_run_holds_the_sandbox(state: SandboxState, run: Run) -> None:
    run("true")
    with state.lock(command="somebody else"), pytest.raises(Busy, match="somebody else"):
        Stored(state).snapshot()
