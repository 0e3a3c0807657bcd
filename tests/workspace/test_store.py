from __future__ import annotations

import json
import os
import signal
import stat
from pathlib import Path

import pytest

from agent_sandbox.errors import Busy, ForeignStore, PolicyError, WorkspaceError
from agent_sandbox.kernel import syscalls
from agent_sandbox.workspace.store import SandboxState, Store, sandbox_id
from tests.workspace.layers.overlays import in_namespace


@pytest.fixture
def state(tmp_path: Path) -> SandboxState:
    return Store.open(str(tmp_path / "state"), clock=lambda: 1_000_000.0).sandbox_for("/srv/my project")


def meta(state: SandboxState) -> Path:
    return Path(state.path, "meta.json")


def test_a_new_store_is_private_and_opens_again(tmp_path: Path) -> None:
    path = tmp_path / "deep/state"
    Store.open(str(path))
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert Store.open(str(path)).leftovers == ()


def test_a_store_of_another_version_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    Store.open(str(tmp_path / "state"))
    (tmp_path / "state/format").write_text("agent-sandbox store 99\n")
    with pytest.raises(ForeignStore, match="store 99"):
        Store.open(str(tmp_path / "state"))
    assert (tmp_path / "state/format").read_text() == "agent-sandbox store 99\n"


def test_a_directory_with_other_things_in_it_is_not_taken_over(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir(mode=0o700)
    (tmp_path / "photos/cat.jpg").touch()
    with pytest.raises(ForeignStore):
        Store.open(str(tmp_path / "photos"))
    assert os.listdir(tmp_path / "photos") == ["cat.jpg"]


def test_a_store_that_others_can_write_is_refused(tmp_path: Path) -> None:
    Store.open(str(tmp_path / "state"))
    (tmp_path / "state").chmod(0o770)
    with pytest.raises(WorkspaceError, match="other users"):
        Store.open(str(tmp_path / "state"))
    (tmp_path / "state").chmod(0o700)
    Store.open(str(tmp_path / "state"))


@pytest.mark.needs_root
def test_a_store_of_another_user_is_refused(tmp_path: Path) -> None:
    Store.open(str(tmp_path / "state"))
    os.chown(tmp_path / "state", 12345, 12345)
    with pytest.raises(ForeignStore, match="12345"):
        Store.open(str(tmp_path / "state"))


def test_each_project_has_its_own_sandbox_with_a_name_one_recognises() -> None:
    assert sandbox_id("/a/my project").startswith("my-project-")
    assert sandbox_id("/a/x") != sandbox_id("/b/x")
    assert "/" not in sandbox_id("/") and len(sandbox_id("/" + "x" * 255)) < 100
    assert sandbox_id(os.fsdecode(b"/\xff")) != sandbox_id(os.fsdecode(b"/\xfe"))


def test_a_project_inside_the_store_is_refused(tmp_path: Path) -> None:
    store = Store.open(str(tmp_path / "state"))
    with pytest.raises(PolicyError):
        store.sandbox_for(os.path.realpath(tmp_path / "state/sandboxes/x"))
    store.sandbox_for(os.path.realpath(tmp_path))  # around it is allowed


def test_a_sandbox_is_made_when_it_is_prepared_and_remembers_what_it_belongs_to(state: SandboxState) -> None:
    assert not state.exists and state.created() is None
    assert state.prepare().notes == () == state.prepare().notes
    assert state.exists and state.created() == 1_000_000.0
    assert json.loads(meta(state).read_text())["project"] == "/srv/my project"


@pytest.mark.parametrize("damage", ["", '{"format": 1', "[]", "null"])
def test_a_torn_description_is_repaired_and_said_and_the_layers_stay(state: SandboxState, damage: str) -> None:
    state.prepare()
    layers = Path(state.image if state.stacking else state.layers).stat().st_ino
    meta(state).write_text(damage)
    (said,) = state.prepare().notes
    assert "written anew" in said
    assert Path(state.image if state.stacking else state.layers).stat().st_ino == layers
    assert state.prepare().notes == ()


def test_a_description_of_another_project_is_refused(state: SandboxState) -> None:
    state.prepare()
    found = json.loads(meta(state).read_text())
    meta(state).write_text(json.dumps(found | {"project_hex": b"/other".hex()}))
    with pytest.raises(ForeignStore):
        state.prepare()


def test_the_second_run_is_told_who_has_the_sandbox(state: SandboxState) -> None:
    with state.lock(command="run make"), pytest.raises(Busy) as refused, state.lock(command="diff"):
        pass
    assert f"process {os.getpid()} (run make)" in str(refused.value)
    with state.lock():
        pass


def test_a_holder_that_was_killed_blocks_nobody_and_is_not_named(state: SandboxState) -> None:
    ready, tell = os.pipe()
    child = os.fork()
    if child == 0:
        with state.lock(command="the dead one"):
            os.write(tell, b"x")
            signal.pause()
        os._exit(0)
    os.read(ready, 1)
    with pytest.raises(Busy, match=f"process {child}"), state.lock():
        pass
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(ready)
    os.close(tell)
    left = Path(state.store.path, "locks", state.id)
    assert "the dead one" in left.read_text()
    with state.lock(wait=True):
        assert "the dead one" not in left.read_text()


def test_a_child_that_has_a_copy_of_the_lock_does_not_keep_it(state: SandboxState) -> None:
    """It closes its copy late, as a child does on a busy machine."""
    with state.lock(command="first"):
        child = os.fork()
        if not child:
            signal.pause()
        try:
            with pytest.raises(Busy), state.lock(command="second"):
                pass
        except BaseException:
            os.kill(child, signal.SIGKILL)
            raise
    try:
        with state.lock(command="third"):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_lock_whose_text_is_nonsense_still_locks(state: SandboxState) -> None:
    with state.lock():
        Path(state.store.path, "locks", state.id).write_text('{"pid": "many"')
        with pytest.raises(Busy, match="another run"), state.lock():
            pass


def test_a_reset_forgets_everything_of_this_sandbox_only(state: SandboxState) -> None:
    other = state.store.sandbox_for("/srv/other")
    for each in (state, other):
        each.prepare()
    state.reset()
    state.reset()
    assert not state.exists and other.exists
    assert os.listdir(os.path.join(state.store.path, "trash")) == []


def test_a_reset_while_a_run_has_the_sandbox_is_refused(state: SandboxState) -> None:
    state.prepare()
    with state.lock(command="run"), pytest.raises(Busy):
        state.reset()
    assert state.exists


def test_what_a_crash_left_in_the_trash_is_swept_at_the_next_start(state: SandboxState) -> None:
    state.prepare()
    os.rename(state.path, os.path.join(state.store.path, "trash", f"{state.id}.0"))
    assert Store.open(state.store.path).leftovers == ()
    assert os.listdir(os.path.join(state.store.path, "trash")) == []


@pytest.mark.parametrize(("options", "flags", "words"), [("size=4k,nr_inodes=1", 0, "full"), ("", syscalls.MS_RDONLY, "read-only")])
def test_a_disk_that_cannot_be_written_is_said_with_the_remedy(tmp_path: Path, options: str, flags: int, words: str) -> None:
    def body() -> None:
        syscalls.mount("tmpfs", str(tmp_path), "tmpfs", flags, options)
        with pytest.raises(WorkspaceError) as refused:
            Store.open(str(tmp_path / "state"))
        assert words in refused.value.hint, refused.value

    in_namespace(body)
