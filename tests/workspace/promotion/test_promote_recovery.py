"""What was interrupted is brought to an end, whatever people did meanwhile; and what cannot be is said, and tried again."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from agent_sandbox.errors import Unfinished, WorkspaceError
from agent_sandbox.workspace.promotion import exchange
from agent_sandbox.workspace.promotion import promote as promote_module
from agent_sandbox.workspace.promotion.plan import Move
from agent_sandbox.workspace.promotion.promote import Recovery, recover
from agent_sandbox.workspace.promotion.target import TargetTree
from tests.workspace.promotion.trees import ME, Edited, expected_after, shown


def interrupt(edited: Edited, *, committed: bool = False) -> None:
    """Leave a promotion half-way: some of the moves made, or all made and the old not yet put away."""
    made = edited.plan()
    child = os.fork()
    if child == 0:
        moves = iter(range(8))  # up to those in src
        make = exchange.make

        def make_some(move: Move, anchor: TargetTree, staging: int) -> None:
            if next(moves, None) is None:
                os._exit(9)
            make(move, anchor, staging)

        if committed:
            vars(promote_module)["keep_olds"] = lambda *ignored: os._exit(9)
        else:
            exchange.make = make_some
        edited.promote(made)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


def again(edited: Edited) -> Recovery:
    return recover(str(edited.promotions), ME)


def test_half_a_promotion_is_taken_back(mixed: Edited) -> None:
    before = shown(mixed.project)
    interrupt(mixed)
    assert shown(mixed.project) != before and mixed.staging()
    assert again(mixed) == Recovery(rolled_back=(1,))
    assert shown(mixed.project) == before and mixed.staging() == []
    assert again(mixed) == Recovery()


def test_one_that_was_committed_is_finished_and_can_be_undone(mixed: Edited) -> None:
    before, wanted = shown(mixed.project), expected_after(mixed)
    interrupt(mixed, committed=True)
    assert again(mixed) == Recovery(finished=(1,))
    assert shown(mixed.project) == wanted and mixed.staging() == []
    mixed.undo()
    assert shown(mixed.project) == before


def test_a_new_promotion_first_ends_the_one_before(mixed: Edited) -> None:
    wanted = expected_after(mixed)
    made = mixed.plan()
    interrupt(mixed)
    mixed.promote(made)
    assert shown(mixed.project) == wanted


@pytest.mark.parametrize("style", ["in place", "by rename"])
def test_what_somebody_saved_in_between_stays_and_the_old_is_kept(mixed: Edited, style: str) -> None:
    before = shown(mixed.project)
    interrupt(mixed)
    path = mixed.project / "src/app.py"
    assert path.read_text() == "new and longer\n"
    if style == "by rename":
        (mixed.project / "src/.tmp").write_text("somebody's\n")
        (mixed.project / "src/.tmp").rename(path)
    else:
        path.write_text("somebody's\n")
    (mixed.project / "src/added").write_text("also somebody's\n")
    found = again(mixed)
    assert found.rolled_back == (1,) and found.problems == ()
    after = shown(mixed.project)
    assert after.pop("src/app.py").content == b"somebody's\n" and after.pop("src/added").content == b"also somebody's\n"
    assert after == {path: entry for path, entry in before.items() if path != "src/app.py"}
    [kept] = found.kept
    assert [Path(kept, name).read_text() for name in os.listdir(kept)] == ["old src/app.py\n"]


def test_a_directory_that_was_removed_in_between_takes_nothing_along(mixed: Edited) -> None:
    interrupt(mixed)
    shutil.rmtree(mixed.project / "src")
    found = again(mixed)
    assert found.rolled_back == (1,) and found.problems == ()
    kept = {Path(found.kept[0], name).read_text() for name in os.listdir(found.kept[0])}
    assert "old src/app.py\n" in kept


def test_a_project_that_is_gone_leaves_the_journal_and_comes_back(mixed: Edited) -> None:
    before = shown(mixed.project)
    interrupt(mixed)
    away = mixed.project.with_name("away")
    mixed.project.rename(away)
    assert "cannot open the directory" in again(mixed).problems[0]
    mixed.project.mkdir()
    assert "not the directory that was promoted to" in again(mixed).problems[0]
    with pytest.raises(Unfinished, match="cannot be brought to its end"):
        mixed.promote()
    mixed.project.rmdir()
    away.rename(mixed.project)
    assert again(mixed).rolled_back == (1,)
    assert shown(mixed.project) == before


def test_without_the_staging_directory_it_is_said_what_is_missing_and_nothing_is_given_up(mixed: Edited) -> None:
    interrupt(mixed)
    shutil.rmtree(mixed.project / mixed.staging()[0])
    assert "could not be put back" in again(mixed).problems[0]
    assert "could not be put back" in again(mixed).problems[0]
    assert (mixed.promotions / "1/moves").exists()


def test_another_directory_under_the_name_of_the_staging_directory_is_not_believed(mixed: Edited) -> None:
    interrupt(mixed)
    staging = mixed.project / mixed.staging()[0]
    staging.rename(mixed.project.parent / "stolen")
    staging.mkdir()
    assert "replaced by another" in again(mixed).problems[0]
    staging.rmdir()
    (mixed.project.parent / "stolen").rename(staging)
    assert again(mixed).rolled_back == (1,)


def test_a_damaged_journal_is_said_and_nothing_is_done(mixed: Edited) -> None:
    interrupt(mixed)
    tree = shown(mixed.project)
    moves = mixed.promotions / "1/moves"
    content = moves.read_bytes()
    moves.write_bytes(content[:-100])
    assert "is damaged" in again(mixed).problems[0]
    assert shown(mixed.project) == tree
    moves.write_bytes(content)
    assert again(mixed).rolled_back == (1,)


def test_an_undo_without_what_was_kept_is_a_clear_error(mixed: Edited) -> None:
    mixed.promote()
    shutil.rmtree(mixed.promotions / "1/olds")
    (mixed.promotions / "1/olds").mkdir()
    with pytest.raises(WorkspaceError, match="not there any more"):
        mixed.undo()
