"""The mark of a review: what happened to a sandbox between two of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_sandbox.workspace.originals.runs import begin
from agent_sandbox.workspace.review_mark import NAME, ReviewMark
from agent_sandbox.workspace.store import Store


@pytest.mark.parametrize(
    ("shown", "now", "words"),
    [
        (ReviewMark((1,), (2,)), ReviewMark((1,), (2,)), ""),
        (ReviewMark((1,), (2,)), ReviewMark((1,), (3,)), "1 run used the sandbox"),
        (ReviewMark((1,), (2,)), ReviewMark((2, 1), (0, 2)), ""),  # a snapshot
        (ReviewMark((1,), (2,)), ReviewMark((3, 2, 1), (1, 1, 2)), "2 runs used the sandbox"),
        (ReviewMark((3, 2, 1), (1, 1, 2)), ReviewMark((3, 4), (2, 0)), "1 run used the sandbox"),  # a chain that was shortened
        (ReviewMark((2, 1), (0, 2)), ReviewMark((3, 1), (0, 2)), "the sandbox was restored to another state"),
        (ReviewMark((2,), (0,)), ReviewMark((1,), (2,)), "the sandbox was restored to another state"),
    ],
)
def test_a_mark_tells_runs_from_snapshots_and_restores(shown: ReviewMark, now: ReviewMark, words: str) -> None:
    assert now.since(shown) == words


def test_a_mark_is_stored_and_whatever_else_is_there_is_none(tmp_path: Path) -> None:
    state = Store.open(str(tmp_path / "state")).sandbox_for(str(tmp_path))
    mark = ReviewMark.of(state)
    mark.remember(state)
    assert ReviewMark.recall(state) is None and not Path(state.path).exists(), "nothing is made for a sandbox that is not there"
    Path(state.layers).mkdir(parents=True)
    mark.remember(state)
    assert ReviewMark.recall(state) == mark
    file = Path(state.path, NAME)
    for damaged in (b"", b"[[1], [1]", b"[[1], []]", b"[1, 2]", b"{}", b"null", b'[["x"], [1]]', b"\xff"):
        file.write_bytes(damaged)
        assert ReviewMark.recall(state) is None, damaged


def test_every_run_changes_the_mark(tmp_path: Path) -> None:
    state = Store.open(str(tmp_path / "state")).sandbox_for(str(tmp_path))
    Path(state.path).mkdir(parents=True)
    before = ReviewMark.of(state)
    begin(state.bases, (1,), now_ns=7)
    begin(state.bases, (1,), now_ns=8)  # also one after another that was killed
    assert ReviewMark.of(state).since(before) == "2 runs used the sandbox"
