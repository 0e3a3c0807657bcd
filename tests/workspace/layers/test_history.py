"""The history of a sandbox: pure values, and the file that they are kept in."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_sandbox._fast.values import replace
from agent_sandbox.errors import PolicyError, WorkspaceError
from agent_sandbox.workspace.layers import history
from agent_sandbox.workspace.layers.history import History, Present

STACKING = pytest.mark.parametrize("stacking", [True, False], ids=["stacked", "copied"])


def run(before: History) -> History:
    return replace(before, used=True)


def taken(before: History, label: str = "", *, stacking: bool) -> History:
    return history.take(before, label, now=1.0, stacking=stacking).history


def test_a_stacked_snapshot_freezes_what_was_written_and_copies_nothing() -> None:
    move = history.take(run(History()), "one", now=5.0, stacking=True)
    assert move.copies == () and move.snapshot == history.Snapshot(1, "one", None, (1,), 5.0)
    assert move.history.layers == (2, 1) and not move.history.used


def test_a_copied_snapshot_is_a_copy_and_what_is_now_stays_where_it_is() -> None:
    move = history.take(run(History()), "one", now=5.0, stacking=False)
    assert move.copies == ((1, 2),) and move.snapshot and move.snapshot.chain == (2,)
    assert move.history.layers == (1,)


@STACKING
def test_a_second_snapshot_of_the_same_state_takes_no_room(stacking: bool) -> None:
    first = taken(run(History()), "one", stacking=stacking)
    again = history.take(first, "two", now=2.0, stacking=stacking)
    assert again.copies == () and again.snapshot and again.snapshot.chain == first.snapshots[0].chain
    assert history.referenced(again.history) == history.referenced(first)


@STACKING
def test_going_back_keeps_what_was_unless_nothing_has_run(stacking: bool) -> None:
    first = taken(run(History()), "one", stacking=stacking)
    back = history.go_back(first, first.snapshots[0], now=2.0, stacking=stacking)
    assert back.snapshot is None and back.history.head == 1
    moved = run(first)
    back = history.go_back(moved, first.snapshots[0], now=2.0, stacking=stacking)
    assert back.snapshot and back.snapshot.automatic and back.snapshot.label == "before rollback to one"
    assert set(moved.layers) <= history.referenced(back.history), "what was is still reachable"
    assert back.history.active not in history.referenced(moved), "and what is written now goes elsewhere"
    assert back.copies == (() if stacking else ((first.snapshots[0].chain[0], back.history.active),))


def test_snapshots_are_a_tree_and_forgetting_one_hangs_its_children_higher() -> None:
    one = taken(run(History()), "one", stacking=True)
    two = taken(run(one), "two", stacking=True)
    back = history.go_back(two, two.snapshots[0], now=2.0, stacking=True).history
    branch = taken(run(back), "branch", stacking=True)
    assert [(depth, each.label) for depth, each in history.tree(branch)] == [(0, "one"), (1, "two"), (1, "branch")]
    without = history.forget(branch, branch.snapshots[0])
    assert [(depth, each.label) for depth, each in history.tree(without)] == [(0, "two"), (0, "branch")]
    assert without.layers == branch.layers, "what is now does not change"
    gone = history.forget(without, history.find(without, "two"))
    assert history.garbage(gone, ["1", "2", "3", "4", "5", "trash", "ballast", "x9"]) == ["2", "3"]
    assert history.forget(gone, gone.snapshots[0]).head is None


def test_a_snapshot_is_found_by_number_label_or_as_the_last_and_what_is_not_found_is_said() -> None:
    one = taken(run(History()), "one", stacking=True)
    two = taken(run(taken(run(one), "same", stacking=True)), "same", stacking=True)
    assert history.find(two, 1) == history.find(two, "1") == history.find(two, "one")
    assert history.find(two, None).id == 3 and history.find(replace(two, head=1), None).id == 1
    with pytest.raises(PolicyError, match="no snapshot 'nine'") as unknown:
        history.find(two, "nine")
    assert "1 (one)" in unknown.value.hint
    with pytest.raises(PolicyError, match="2 snapshots are called 'same'"):
        history.find(two, "same")
    with pytest.raises(PolicyError, match="no snapshots"):
        history.find(History(), None)


@pytest.mark.parametrize("label", ["12", "a\nb", "\x1b[2J", "x" * 201, "\udcff"])
def test_a_label_that_is_a_number_or_cannot_be_shown_is_refused(label: str) -> None:
    with pytest.raises(PolicyError):
        history.take(History(), label, now=0.0, stacking=True)


def test_layers_are_replaced_after_a_snapshot_of_them() -> None:
    before = run(taken(run(History()), "one", stacking=True))
    move, made = history.replaced(before, "before promote", now=2.0, stacking=True)
    assert move.snapshot and move.snapshot.chain == before.layers and move.snapshot.automatic
    assert move.history.layers == (made + 1, made)
    flat, made = history.replaced(run(History()), "before promote", now=2.0, stacking=False)
    assert flat.history.layers == (made,) and flat.snapshot and flat.snapshot.chain == (1,)


@given(st.lists(st.sampled_from(["run", "snapshot", "rollback", "forget", "squash"]), max_size=40), st.booleans(), st.randoms())
def test_no_state_that_can_be_gone_back_to_ever_becomes_garbage(steps: list[str], stacking: bool, chance: object) -> None:
    """A model of what is in each generation follows the moves; what a snapshot shows must always be what it was taken of."""
    now, generations = History(), dict[int, tuple[str, ...]]()
    shown: dict[int, tuple[str, ...]] = {}
    for at, step in enumerate(steps):
        if step == "run":
            now = run(now)
            generations[now.active] = (*generations.get(now.active, ()), f"run {at}")
        elif step == "snapshot":
            expected = _seen(now.layers, generations)
            move = history.take(now, f"at {at}", now=float(at), stacking=stacking)
            _copy(move, generations)
            assert move.snapshot
            now, shown[move.snapshot.id] = move.history, expected
        elif step == "rollback" and now.snapshots:
            to = chance.choice(now.snapshots)  # type: ignore[attr-defined]
            expected = _seen(now.layers, generations)
            move = history.go_back(now, to, now=float(at), stacking=stacking)
            _copy(move, generations)
            if move.snapshot:
                shown[move.snapshot.id] = expected
            now = move.history
            assert _seen(now.layers, generations) == shown[to.id]
        elif step == "forget" and now.snapshots:
            gone = chance.choice(now.snapshots)  # type: ignore[attr-defined]
            now = history.forget(now, gone)
            for name in history.garbage(now, map(str, generations)):
                del generations[int(name)]
        elif step == "squash" and stacking and len(now.chain) > 1:
            content = _seen(now.chain, generations)
            now, made = history.squashed(now)
            generations[made] = content
        for each in now.snapshots:
            assert _seen(each.chain, generations) == shown[each.id]
        assert max(generations, default=0) < now.next


def _seen(layers: tuple[int, ...], generations: dict[int, tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(each for number in reversed(layers) for each in generations.get(number, ()))


def _copy(move: history.HistoryStep, generations: dict[int, tuple[str, ...]]) -> None:
    for source, copy in move.copies:
        assert copy not in generations, "a new generation is new"
        generations[copy] = generations.get(source, ())


def test_a_history_comes_back_as_it_was_written_and_a_run_needs_only_a_glance(tmp_path: Path) -> None:
    assert history.load(str(tmp_path)) is None and history.glance(str(tmp_path)) is None
    one = run(taken(run(History()), 'quoted "label" ü', stacking=True))
    now = history.go_back(one, one.snapshots[0], now=3.0, stacking=True).history
    history.save(str(tmp_path), now)
    assert history.load(str(tmp_path)) == now
    assert history.glance(str(tmp_path)) == Present.of(now) == Present(4, (1,), (2,), used=False)


@pytest.mark.parametrize(
    "damage",
    [
        "",
        "{",
        "[]",
        "null",
        '{"active":1}',
        '{"active":0,"chain":[],"others":[],"used":false,"next":2,"head":null,"snapshots":[]}',
        '{"active":1,"chain":[7],"others":[],"used":false,"next":2,"head":null,"snapshots":[]}',
        '{"active":1,"chain":[],"others":[],"used":false,"next":2,"head":4,"snapshots":[]}',
        '{"active":1,"chain":[],"others":[],"used":1,"next":2,"head":null,"snapshots":[]}',
        "[" * 100_000,
    ],
)
def test_a_damaged_history_is_refused_and_left_as_it_is(tmp_path: Path, damage: str) -> None:
    (tmp_path / "history.json").write_text(damage)
    with pytest.raises(WorkspaceError, match="history") as refused:
        history.load(str(tmp_path))
    assert "nothing was deleted" in refused.value.hint
    assert (tmp_path / "history.json").read_text() == damage


def test_a_snapshot_that_descends_from_itself_is_damage(tmp_path: Path) -> None:
    one = taken(run(History()), "one", stacking=True)
    history.save(str(tmp_path), replace(one, snapshots=(replace(one.snapshots[0], parent=1),)))
    with pytest.raises(WorkspaceError):
        history.load(str(tmp_path))


@STACKING
def test_a_step_keeps_the_state_before_a_run_and_the_oldest_are_forgotten(stacking: bool, tmp_path: Path) -> None:
    now = History()
    for number in range(history.MOST_STEPS + 2):
        move = history.begin_step(now, "7" if not number else f"make\x1b {number}" + "x" * 300, now=1.0, stacking=stacking)
        assert move.snapshot is not None and move.snapshot.automatic and move.snapshot.outcome == ""
        now = history.end_step(run(move.history), move.snapshot.id, "exited 1")
    labels = [each.label for each in now.snapshots]
    assert len(labels) == history.MOST_STEPS and labels[0].startswith("make� 2x") and max(map(len, labels)) == history.LONGEST_LABEL
    assert {each.outcome for each in now.snapshots} == {"exited 1"}
    history.save(str(tmp_path), now)
    assert history.load(str(tmp_path)) == now
    first = history.begin_step(History(), "7", now=1.0, stacking=stacking).snapshot
    assert first is not None and first.label == "run 7", "a label is no number"
