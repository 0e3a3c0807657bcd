"""A promotion or an undo that is killed between its steps: whoever comes next brings it to its end, and nothing happens twice."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from agent_sandbox.ledger.event import Intent, OutcomeEvent
from tests.e2e.cutting import cut_off
from tests.e2e.program import Shell, words
from tests.ledger.samples import read

# The steps are the same for everybody: as root in `make test`, for others in `make torture`.
pytestmark = pytest.mark.torture if os.geteuid() else pytest.mark.slow

# Where it is cut off: a function of the program that from then on kills it instead of being called (or, with "after", as it returns).
IN_THE_TREE = "agent_sandbox.workspace.promotion.exchange:make"
BEFORE_COMMIT = "agent_sandbox.workspace.promotion.journal:Journal.commit"
BEFORE_OLDS = "agent_sandbox.workspace.promotion.journal:_move"
BEFORE_OUTCOME = "agent_sandbox.engine.gate:Gate._record_success"
BEFORE_LAYERS = "agent_sandbox.engine.promote:let_go"
BEFORE_HISTORY = "agent_sandbox.workspace.stored_sandbox:Stored._save"
BEFORE_END = "agent_sandbox.engine.recover:UnderWay.finish"
OLD = (IN_THE_TREE, BEFORE_COMMIT)
NEW = (BEFORE_OLDS, BEFORE_OUTCOME, BEFORE_LAYERS, BEFORE_HISTORY, BEFORE_END)


def fully(case: object) -> ParameterSet:
    """A case that is tried where time is no matter."""
    return pytest.param(case, marks=pytest.mark.torture)


@pytest.fixture
def changed(shell: Shell) -> Shell:
    (shell.cwd / "greeting.txt").unlink()
    (shell.cwd / "keep.txt").write_text("one\n")
    (shell.cwd / "gone.txt").write_text("gone\n")
    assert shell("run", "echo two >> keep.txt; rm gone.txt; mkdir -p d; echo new > d/new.txt").returncode == 0
    return shell


def tree(shell: Shell) -> dict[str, str]:
    return {str(path.relative_to(shell.cwd)): path.read_text() for path in shell.cwd.rglob("*.txt")}


def unended(shell: Shell) -> list[str]:
    """The kinds of actions in the ledger that have an intent and no outcome, or more than one."""
    entries = list(read(Path(shell.environment["AGENT_SANDBOX_STATE"]) / "ledger.jsonl"))
    ends = [entry.event.intent for entry in entries if isinstance(entry.event, OutcomeEvent)]
    return [str(entry.event.action["kind"]) for entry in entries if isinstance(entry.event, Intent) and ends.count(entry.sequence) != 1]


@pytest.mark.parametrize(
    "who", [("status",), ("run", "cat keep.txt"), fully(("diff", "--stat")), fully(("snapshots",)), fully(("undo", "--yes"))]
)
@pytest.mark.parametrize("at", [fully(IN_THE_TREE), BEFORE_LAYERS])
def test_whoever_comes_next_finds_the_tree_and_the_sandbox_in_agreement(changed: Shell, at: str, who: tuple[str, ...]) -> None:
    before = tree(changed)
    cut_off(changed, at, "promote", "--yes")
    changed(*who)
    if at in OLD or who == ("undo", "--yes"):
        assert tree(changed) == before
        assert changed.json("status")["changes"]["project"] == 4
    else:
        assert tree(changed) == {"keep.txt": "one\ntwo\n", "d/new.txt": "new\n"}
        assert changed.json("status")["changes"]["project"] == 0
    assert unended(changed) == []


@pytest.mark.parametrize(
    "at", [IN_THE_TREE, BEFORE_HISTORY, *map(fully, (BEFORE_COMMIT, BEFORE_OLDS, BEFORE_OUTCOME, BEFORE_LAYERS, BEFORE_END))]
)
def test_a_promotion_that_was_cut_off_is_not_done_twice_and_can_be_taken_back(changed: Shell, at: str) -> None:
    before = tree(changed)
    cut_off(changed, at, "promote", "--yes")
    again = changed("promote", "--yes")
    assert again.returncode == 0, words(again)
    assert ("nothing to promote" in words(again)) is (at in NEW)
    assert tree(changed) == {"keep.txt": "one\ntwo\n", "d/new.txt": "new\n"}
    assert changed.json("status")["changes"]["project"] == 0 and unended(changed) == []
    assert changed("undo", "--yes").returncode == 0
    assert tree(changed) == before
    assert changed.json("status")["changes"]["project"] == 4, "they wait again"


@pytest.mark.parametrize("at", [BEFORE_LAYERS, *map(fully, (*OLD, BEFORE_OLDS, BEFORE_OUTCOME, BEFORE_HISTORY, BEFORE_END))])
def test_an_undo_that_was_cut_off_is_whole_or_has_not_happened(changed: Shell, at: str) -> None:
    before = tree(changed)
    assert changed("promote", "--yes").returncode == 0
    cut_off(changed, at, "undo", "--yes")
    again = changed("undo", "--yes")
    assert again.returncode == (0 if at in OLD else 125), words(again)
    assert tree(changed) == before and unended(changed) == []
    assert changed.json("status")["changes"]["project"] == 4


def test_what_ran_since_is_never_dropped(changed: Shell) -> None:
    """A note that an earlier promotion left is about layers that are not the present any more."""
    cut_off(changed, BEFORE_LAYERS, "promote", "--yes")
    note = next(Path(changed.environment["AGENT_SANDBOX_STATE"]).glob("promotions/*/under-way"))
    left = note.read_bytes()
    note.unlink()
    assert changed("run", "echo three >> keep.txt").returncode == 0
    note.write_bytes(left)
    assert changed("status").returncode == 0
    assert "three" in changed("run", "cat keep.txt").stdout.decode()
