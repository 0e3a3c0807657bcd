"""A promotion makes the tree what the plan says, or leaves it as it was; an undo makes it what it was."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

import agent_sandbox.workspace.promotion.promote as promote_module
from agent_sandbox.errors import Busy, Drift, PolicyError, Unfinished, WorkspaceError
from agent_sandbox.workspace.promotion import exchange
from agent_sandbox.workspace.promotion.plan import Move, Plan, Refusal
from agent_sandbox.workspace.promotion.promote import lock, promote
from agent_sandbox.workspace.promotion.target import Surprise, TargetTree
from agent_sandbox.workspace.promotion.undo import last
from tests.workspace.promotion.trees import ME, Edited, expected_after, shown


def test_everything_that_changed_is_there_afterwards_and_nothing_else(mixed: Edited) -> None:
    wanted = expected_after(mixed)
    done = mixed.promote()
    assert shown(mixed.project) == wanted
    assert mixed.staging() == []
    assert done.counts == {"added": 9, "replaced": 7, "removed": 7, "adjusted": 2}


def test_an_undo_brings_back_exactly_what_was_there(mixed: Edited) -> None:
    before = shown(mixed.project)
    mixed.promote()
    undone = mixed.undo()
    assert shown(mixed.project) == before
    assert undone.undoes == 1
    with pytest.raises(WorkspaceError, match="no promotion to take back"):
        mixed.undo()


def test_the_journal_tells_when_a_promotion_was_made_unless_that_is_unknown(mixed: Edited) -> None:
    before = time.time()
    mixed.promote()
    journal = last(str(mixed.promotions))
    assert journal is not None and before <= journal.facts()["started"] <= time.time()
    begun = mixed.promotions / "1/begun"
    begun.write_text(json.dumps({name: value for name, value in json.loads(begun.read_text()).items() if name != "started"}))
    assert "started" not in journal.facts() and journal.facts()["number"] == 1


def test_what_is_put_is_never_the_guests_inode(mixed: Edited) -> None:
    os.link(mixed.after / "src/added", mixed.after.parent / "second-name")
    mixed.promote()
    put = os.stat(mixed.project / "src/added")
    assert put.st_nlink == 1 and put.st_ino != os.stat(mixed.after / "src/added").st_ino


@pytest.mark.parametrize(
    ("name", "disturb"),
    [
        ("src/app.py", lambda path: path.write_text("saved by somebody\n")),
        ("src/added", lambda path: path.write_text("made by somebody\n")),
        ("src/delete-me", lambda path: path.unlink()),
        ("gone/deep/appeared", lambda path: path.write_text("made by somebody\n")),
        ("gone/deep/two", lambda path: path.write_text("saved by somebody\n")),
        ("to-file/inner", lambda path: path.unlink()),
        ("link", lambda path: path.unlink()),
        ("kept", lambda path: path.chmod(0o711)),
        ("script", lambda path: path.chmod(0o600)),
    ],
)
def test_what_is_not_as_expected_is_named_and_nothing_is_changed(mixed: Edited, name: str, disturb: Callable[[Path], object]) -> None:
    made = mixed.plan()
    disturb(mixed.project / name)
    before = shown(mixed.project)
    with pytest.raises(Drift) as drift:
        mixed.promote(made)
    assert shown(mixed.project) == before
    assert mixed.staging() == []
    assert drift.value.paths[0] in f"{mixed.project}/{name}"


def test_a_file_that_somebody_has_open_for_writing_is_drift(mixed: Edited) -> None:
    before = shown(mixed.project)
    with open(mixed.project / "src/app.py", "ab"), pytest.raises(Drift, match="open for writing"):
        mixed.promote()
    assert shown(mixed.project) == before


def test_an_undo_is_refused_when_what_was_promoted_has_changed_since(mixed: Edited) -> None:
    mixed.promote()
    (mixed.project / "new/tree/1").write_text("edited by somebody\n")
    (mixed.project / "src/app.py").write_text("and this\n")
    before = shown(mixed.project)
    with pytest.raises(Drift) as drift:
        mixed.undo()
    assert set(drift.value.paths) == {f"{mixed.project}/src/app.py", f"{mixed.project}/new/tree/1"}
    assert shown(mixed.project) == before


def test_a_plan_with_something_refused_is_not_carried_out(mixed: Edited) -> None:
    made = mixed.plan()
    with pytest.raises(PolicyError, match="a device"):
        mixed.promote(Plan(made.root, made.steps, (Refusal("/x", "a device is never promoted"),)))


def test_two_promotions_do_not_run_at_once_and_the_second_says_who_has_it(mixed: Edited) -> None:
    made = mixed.plan()
    with lock(str(mixed.promotions), ME, wait=False), pytest.raises(Busy, match=str(os.getpid())):
        mixed.promote(made)
    mixed.promote(made)


def test_not_even_with_another_state_directory(mixed: Edited, tmp_path: Path) -> None:
    made = mixed.plan()
    other = os.open(mixed.project, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    with pytest.raises(Busy, match="another process"):
        mixed.promote(made)
    os.close(other)
    (mixed.project / ".agent-sandbox-promotion-0123").mkdir()
    with pytest.raises(Unfinished, match="does not know"):
        promote(made, mixed, str(tmp_path / "other"), holder=ME)
    (mixed.project / ".agent-sandbox-promotion-0123").rmdir()
    mixed.promote(made)


def test_promotions_to_the_whole_machine_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """The root directory is really locked, so others may be asked to wait for us, and we for them."""
    another = os.open("/", os.O_RDONLY)
    fcntl.flock(another, fcntl.LOCK_EX)
    with monkeypatch.context() as patch, TargetTree("/") as anchor:
        patch.setattr(promote_module, "TURN_SECONDS", 0.0)
        with pytest.raises(Busy, match="another process is promoting to '/'"), promote_module._alone(anchor, False):
            pass
    waited: list[float] = []

    def pause(seconds: float) -> None:  # the other one ends as soon as we wait for it
        if not waited:
            os.close(another)
        waited.append(seconds)

    monkeypatch.setattr(promote_module, "time", SimpleNamespace(monotonic=lambda: 0.0, sleep=pause))
    with TargetTree("/") as anchor, promote_module._alone(anchor, False):
        third = os.open("/", os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(third, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(third)
    assert waited


def test_what_a_guest_changed_after_it_was_looked_at_is_not_promoted(mixed: Edited) -> None:
    made, before = mixed.plan(), shown(mixed.project)
    with open(mixed.after / "new/tree/2", "ab") as file:
        file.write(b"more")
    with pytest.raises(Drift, match="in the sandbox has changed"):
        mixed.promote(made)
    assert shown(mixed.project) == before and mixed.staging() == []


def test_a_tree_that_vanished_is_a_clear_error(mixed: Edited) -> None:
    made = mixed.plan()
    mixed.project.rename(mixed.project.with_name("moved"))
    with pytest.raises(WorkspaceError, match="cannot open the directory"):
        mixed.promote(made)
    os.symlink("moved", mixed.project)
    with pytest.raises(WorkspaceError, match="cannot open the directory"):
        mixed.promote(made)


@pytest.mark.parametrize("name", ["src/app.py", "src/delete-me", "script"])
def test_a_file_that_is_saved_between_the_last_look_and_the_exchange_stays_in_the_tree(
    mixed: Edited, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = mixed.project / name
    real = exchange.make

    def make(move: Move, anchor: TargetTree, staging: int) -> None:
        if move.path == name:
            new = path.with_name("swap")
            new.write_text("saved just now\n")
            new.rename(path)
        real(move, anchor, staging)

    before = shown(mixed.project)
    monkeypatch.setattr(exchange, "make", make)
    with pytest.raises(Drift, match="something else is there now"):
        mixed.promote()
    assert path.read_text() == "saved just now\n" and mixed.staging() == []
    assert {path: entry for path, entry in shown(mixed.project).items() if path != name} == {
        path: entry for path, entry in before.items() if path != name
    }


@pytest.mark.parametrize("name", ["src/app.py", "src/added"])
def test_a_file_that_is_saved_over_a_new_one_before_it_is_taken_back_stays_in_the_tree(
    mixed: Edited, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = exchange.make

    def make(move: Move, anchor: TargetTree, staging: int) -> None:
        real(move, anchor, staging)
        if move.path == name:
            (mixed.project / name).write_text("saved just now\n")
            raise Surprise(move.path, "so that it is taken back")

    monkeypatch.setattr(exchange, "make", make)
    with pytest.raises(Drift) as drift:
        mixed.promote()
    assert (mixed.project / name).read_text() == "saved just now\n" and mixed.staging() == []
    kept = [entry.read_text() for entry in Path(drift.value.kept).iterdir()] if drift.value.kept else []
    assert kept == (["old src/app.py\n"] if name == "src/app.py" else [])
