"""All sandboxes of a store: which project they are of, whether it is gone, and how one is removed while others use it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from agent_sandbox.errors import Busy
from agent_sandbox.kernel import syscalls as sc
from agent_sandbox.workspace import sandbox_inventory
from agent_sandbox.workspace.layers import history, image
from agent_sandbox.workspace.sandbox_inventory import KnownSandbox, Whereabouts, look_at, remove, remove_unused_locks, sandboxes
from agent_sandbox.workspace.store import SandboxState, Store
from tests.patience import until
from tests.workspace.layers.overlays import in_namespace


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(str(tmp_path / "state"))


def made(store: Store, project: Path) -> SandboxState:
    """A sandbox in a directory, as one without root is; where it is kept makes no difference here."""
    project.mkdir(parents=True, exist_ok=True)
    state = store.sandbox_for(str(project))
    os.makedirs(state.layers)
    history.save(state.path, history.History(used=True))
    with state.lock():
        state.prepare()
    return state


def seen(state: SandboxState) -> KnownSandbox:
    known = look_at(state.store, state.id)
    assert known is not None
    return known


def test_every_sandbox_is_listed_with_its_project_and_size(store: Store, tmp_path: Path) -> None:
    odd = os.fsdecode(b"odd\xff\n name")
    states = [made(store, tmp_path / name) for name in ("one", odd)]
    Path(states[0].layers, "file").write_bytes(bytes(1 << 20))
    found = {known.state.project: known for known in sandboxes(store)}
    assert set(found) == {str(tmp_path / "one"), str(tmp_path / odd)}
    assert found[str(tmp_path / "one")].size >= 1 << 20
    assert all(known.project is Whereabouts.THERE and known.finished and not known.in_use for known in found.values())


def test_a_project_that_was_removed_or_moved_is_gone_and_one_that_is_there_is_not(store: Store, tmp_path: Path) -> None:
    state = made(store, tmp_path / "deep" / "project")
    assert seen(state).project is Whereabouts.THERE, "the control arm"
    (tmp_path / "deep").rename(tmp_path / "elsewhere")
    assert seen(state).project is Whereabouts.GONE
    (tmp_path / "elsewhere").rename(tmp_path / "deep")
    assert seen(state).project is Whereabouts.THERE


def test_a_project_on_a_disk_that_is_not_mounted_is_not_gone(tmp_path: Path) -> None:
    def body() -> None:
        disk = tmp_path / "disk"
        disk.mkdir()
        store = Store.open(str(tmp_path / "state"))
        sc.mount("tmpfs", str(disk), "tmpfs", 0, "")
        state = made(store, disk / "project")
        inside = made(store, tmp_path / "project")
        sc.umount2(str(disk), 0)
        assert seen(state).project is Whereabouts.UNREACHABLE
        (tmp_path / "project").rmdir()
        assert seen(inside).project is Whereabouts.GONE, "the control arm: on the disk that is still there"

    in_namespace(body)


def test_a_project_on_a_directory_that_was_mounted_from_the_same_disk_is_not_gone(tmp_path: Path) -> None:
    def body() -> None:
        place, source = tmp_path / "place", tmp_path / "source"
        place.mkdir()
        source.mkdir()
        store = Store.open(str(tmp_path / "state"))
        sc.mount(str(source), str(place), None, sc.MS_BIND)
        state = made(store, place / "project")
        sc.umount2(str(place), 0)
        assert os.statvfs(place).f_fsid == os.statvfs(source).f_fsid, "the same filesystem"
        assert seen(state).project is Whereabouts.UNREACHABLE
        sc.mount(str(source), str(place), None, sc.MS_BIND)
        assert seen(state).project is Whereabouts.THERE
        (source / "project").rmdir()
        assert seen(state).project is Whereabouts.GONE, "the control arm: mounted again, and not in it"

    in_namespace(body)


def test_a_project_of_which_nothing_was_recorded_is_not_gone(store: Store, tmp_path: Path) -> None:
    state = made(store, tmp_path / "project")
    (tmp_path / "project").rmdir()
    assert seen(state).project is Whereabouts.GONE
    text = Path(state.place).read_text()
    for damage in (None, "", text[:5], "0 " + text.split()[1], "not hexadecimal"):
        Path(state.place).unlink(missing_ok=True)
        if damage is not None:
            Path(state.place).write_text(damage)
        assert seen(state).project is Whereabouts.UNREACHABLE, damage


def test_a_project_that_became_something_else_is_not_gone(store: Store, tmp_path: Path) -> None:
    state = made(store, tmp_path / "project")
    (tmp_path / "project").rmdir()
    (tmp_path / "project").symlink_to("nowhere")
    assert seen(state).project is Whereabouts.UNREACHABLE
    (tmp_path / "project").unlink()
    (tmp_path / "project").write_text("a file")
    assert seen(state).project is Whereabouts.UNREACHABLE


def test_a_sandbox_without_a_valid_description_is_of_no_known_project(store: Store, tmp_path: Path) -> None:
    state = made(store, tmp_path / "project")
    for text in ('{"form', "[]", '{"project_hex":7}', '{"project_hex":"zz"}', '{"project_hex":"2e2e"}'):
        Path(state.path, "meta.json").write_text(text)
        assert seen(state).project is Whereabouts.UNKNOWN, text


def test_removing_takes_everything_of_that_sandbox_and_nothing_else(store: Store, tmp_path: Path) -> None:
    state, other = made(store, tmp_path / "project"), made(store, tmp_path / "other")
    os.makedirs(os.path.join(state.promotions, "1"))
    (tmp_path / "project").rmdir()
    assert remove(seen(state))
    assert not os.path.exists(state.path) and not os.path.exists(state.promotions)
    assert os.listdir(os.path.join(store.path, "trash")) == [] and os.listdir(os.path.join(store.path, "locks")) == [other.id]
    assert seen(other).finished


def test_promotions_of_a_project_that_exists_stay_for_an_undo(store: Store, tmp_path: Path) -> None:
    state = made(store, tmp_path / "project")
    os.makedirs(os.path.join(state.promotions, "1"))
    assert remove(seen(state))
    assert not os.path.exists(state.path) and os.path.exists(os.path.join(state.promotions, "1"))


def test_a_sandbox_in_use_is_not_removed(store: Store, tmp_path: Path) -> None:
    state = made(store, tmp_path / "project")
    known = seen(state)
    with state.lock(command="somebody"):
        assert "somebody" in seen(state).in_use
        with pytest.raises(Busy, match="somebody"):
            remove(known)
    assert seen(state).finished and remove(known), "the control arm: afterwards it is"


def test_a_sandbox_that_was_used_since_it_was_looked_at_is_not_removed(store: Store, tmp_path: Path) -> None:
    state = made(store, tmp_path / "project")
    (tmp_path / "project").rmdir()
    before = seen(state)
    (tmp_path / "project").mkdir()
    assert not remove(before), "its project is back"
    (tmp_path / "project").rmdir()
    os.utime(os.path.join(state.path, "history.json"))
    assert not remove(before) and seen(state).finished, "something used it"
    assert remove(seen(state)), "the control arm"


def test_whoever_waits_for_a_lock_that_is_removed_gets_the_new_one(store: Store, tmp_path: Path) -> None:
    """Two must never hold it at once: one the old file, one the new."""
    state = made(store, tmp_path / "project")
    code = "import sys; from agent_sandbox.workspace.store import Store; s = Store.open(sys.argv[1]).sandbox_for(sys.argv[2])\n"
    code += "with s.lock(wait=True): print('held', flush=True); sys.stdin.read()\n"
    line = [sys.executable, "-c", code, store.path, state.project]
    known = seen(state)
    with state.lock():
        waiting = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert until(lambda: _waits_for_a_lock(waiting.pid))
        os.unlink(os.path.join(store.path, "locks", state.id))
    with waiting:
        assert waiting.stdout is not None and waiting.stdout.readline() == b"held\n"
        with pytest.raises(Busy):
            remove(known)
        waiting.communicate()
    assert remove(known), "the control arm: once it has let go"


def _waits_for_a_lock(pid: int) -> bool:
    return any(f" {pid} " in line for line in Path("/proc/locks").read_text().splitlines() if "->" in line)


def test_lock_files_of_sandboxes_that_are_gone_are_removed_and_others_not(store: Store, tmp_path: Path) -> None:
    state = made(store, tmp_path / "project")
    gone, held = store.sandbox_for("/gone"), store.sandbox_for("/held")
    with gone.lock():
        pass
    with held.lock():
        assert remove_unused_locks(store) == 1
    assert sorted(os.listdir(os.path.join(store.path, "locks"))) == sorted([state.id, held.id])


@pytest.mark.parametrize("calls", range(1, 5))
def test_a_kill_at_any_step_of_a_removal_is_finished_by_the_next(store: Store, tmp_path: Path, calls: int) -> None:
    state = made(store, tmp_path / "project")
    os.makedirs(os.path.join(state.promotions, "1"))
    Path(state.layers, "file").write_text("x")
    (tmp_path / "project").rmdir()
    known, child = seen(state), os.fork()
    if child == 0:
        _die_at(calls)
        remove(known)
        os._exit(0)
    killed = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert killed == -signal.SIGKILL
    again = Store.open(store.path)  # as every command does
    for left in sandboxes(again):
        assert left.project is Whereabouts.GONE and remove(left)
    remove_unused_locks(again)
    assert [os.listdir(os.path.join(store.path, name)) for name in ("sandboxes", "promotions", "trash", "locks")] == [[], [], [], []]


def _die_at(calls: int) -> None:
    """Be killed before the step of this number: two renames, the lock file, the first removal."""
    left = [calls]

    def counted(do: Callable[..., object]) -> Callable[..., object]:
        def step(*arguments: object, **named: object) -> object:
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            return do(*arguments, **named)

        return step

    os.rename = counted(os.rename)  # type: ignore[assignment]
    os.unlink = counted(os.unlink)  # type: ignore[assignment]
    Store.remove_from_trash = counted(Store.remove_from_trash)  # type: ignore[method-assign,assignment]


def test_a_sandbox_whose_creation_was_cut_off_is_not_finished_and_one_that_lost_its_layers_is(store: Store, tmp_path: Path) -> None:
    state = made(store, tmp_path / "project")
    os.rename(state.layers, state.layers + ".away")
    assert seen(state).finished, "its history says that something ran: the layers may come back"
    history.save(state.path, history.History())
    assert not seen(state).finished
    os.unlink(os.path.join(state.path, "history.json"))
    assert not seen(state).finished


@pytest.mark.needs_root
def test_what_a_killed_run_left_reserved_is_returned(store: Store, tmp_path: Path) -> None:
    (tmp_path / "project").mkdir()
    state = store.sandbox_for(str(tmp_path / "project"))
    with state.lock():
        state.prepare()
    before = os.stat(state.image).st_blocks
    image.attach(state.image).close()  # as a run that was killed leaves it
    with state.lock():
        assert sandbox_inventory.return_unused_blocks(store) == 0, "the control arm: not while it is in use"
    assert sandbox_inventory.return_unused_blocks(store) > 50 << 20
    assert os.stat(state.image).st_blocks <= before + 2048
