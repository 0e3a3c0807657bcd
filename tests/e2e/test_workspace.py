"""The stored sandbox of a project, as programs use it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_sandbox import (
    Conflicted,
    Denied,
    Drift,
    PolicyError,
    SandboxConfig,
    SandboxError,
    SandboxStatus,
    Workspace,
    WorkspaceError,
    shell,
)
from agent_sandbox._fast.values import replace
from agent_sandbox.assembly import here
from agent_sandbox.engine.promote import PromotionProposal
from agent_sandbox.ledger.event import Intent, OutcomeEvent
from agent_sandbox.workspace.changes import Kind
from agent_sandbox.workspace.merge.tree import Conflict
from tests.ledger.samples import read

pytestmark = pytest.mark.once


@pytest.fixture(scope="module", autouse=True)
def _no_zygote_is_left() -> Iterator[None]:
    yield
    here().process().close()


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AGENT_SANDBOX_STATE", str(tmp_path / "state"))
    made = tmp_path / "project"
    made.mkdir()
    (made / "notes.txt").write_text("one\ntwo\nthree\n")
    (made / "old.txt").write_text("old\n")
    time.sleep(0.05)  # what changed in the very moment a run begins has no base
    return made


@pytest.fixture
def work(project: Path) -> Iterator[Workspace]:
    made = Workspace.over(project)
    yield made
    made.reset()


@pytest.mark.both
def test_changes_wait_until_they_are_promoted_and_can_be_taken_back(work: Workspace, project: Path) -> None:
    done = work.run(shell("echo four >> notes.txt; rm old.txt; echo new > new.txt; cat notes.txt"))
    assert done.status is SandboxStatus.COMPLETED and done.stdout.endswith("four\n")
    assert (project / "notes.txt").read_text() == "one\ntwo\nthree\n" and (project / "old.txt").exists()
    assert {(Path(each.path).name, each.kind) for each in work.changes()} == {
        ("notes.txt", Kind.MODIFIED),
        ("old.txt", Kind.DELETED),
        ("new.txt", Kind.ADDED),
    }
    assert "+four\n" in work.diff() and "-old\n" in work.diff()
    carried = work.promote()
    assert carried is not None and carried.promotion.counts == {"added": 1, "replaced": 1, "removed": 1, "adjusted": 0}
    assert (project / "notes.txt").read_text() == "one\ntwo\nthree\nfour\n" and not (project / "old.txt").exists()
    assert len(work.changes()) == 0
    work.undo()
    assert (project / "notes.txt").read_text() == "one\ntwo\nthree\n" and (project / "old.txt").read_text() == "old\n"
    assert not (project / "new.txt").exists()
    assert len(work.changes()) == 3, "they wait again"


@pytest.mark.both
def test_snapshots_form_a_tree_and_rollback_loses_nothing(work: Workspace) -> None:
    work.run(shell("echo a > a"))
    first = work.snapshot("first")
    work.run(shell("echo b > b"))
    went = work.rollback("first")
    assert went.to == first and went.kept is not None and went.kept.automatic
    assert {Path(each.path).name for each in work.changes()} == {"a"}
    work.run(shell("echo c > c"))
    work.rollback(went.kept)
    assert {Path(each.path).name for each in work.changes()} == {"a", "b"}
    assert {each.parent for each in work.snapshots()} == {None, first.id}, "two branches from the first"
    assert work.run(["cat", "a", "b"]).stdout == "a\nb\n"
    with pytest.raises(PolicyError, match=r"no snapshot 'never'.*first"):
        work.rollback("never")
    work.forget("first")
    assert "first" not in {each.label for each in work.snapshots()}
    assert {Path(each.path).name for each in work.changes()} == {"a", "b"}, "what it is now does not change"


def test_what_moved_on_in_reality_is_refused_merged_or_forced(work: Workspace, project: Path) -> None:
    work.run(shell("echo four >> notes.txt"))
    (project / "notes.txt").write_text("zero\none\ntwo\nthree\n")
    moved = work.drift()
    assert [(Path(each.path).name, each.yours) for each in moved.entries] == [("notes.txt", True)]
    assert "1 file moved on, which you changed" in moved.sentence()
    with pytest.raises(Drift) as refused:
        work.promote()
    assert refused.value.paths == (str(project / "notes.txt"),)
    assert (project / "notes.txt").read_text() == "zero\none\ntwo\nthree\n"
    work.promote(drift="merge")
    assert (project / "notes.txt").read_text() == "zero\none\ntwo\nthree\nfour\n"
    work.undo()
    assert (project / "notes.txt").read_text() == "zero\none\ntwo\nthree\n"
    work.promote(drift="force")
    assert (project / "notes.txt").read_text() == "one\ntwo\nthree\nfour\n"


def test_conflicts_are_values_and_are_answered(work: Workspace, project: Path) -> None:
    work.run(shell("sed -i s/two/TWO/ notes.txt"))
    (project / "notes.txt").write_text("one\n2\nthree\n")
    with pytest.raises(Conflicted) as refused:
        work.promote(drift="merge")
    (conflict,) = refused.value.conflicts
    assert isinstance(conflict, Conflict)
    assert [side.content for side in (conflict.base, conflict.ours, conflict.theirs) if side] == [
        b"one\ntwo\nthree\n",
        b"one\nTWO\nthree\n",
        b"one\n2\nthree\n",
    ]
    assert (project / "notes.txt").read_text() == "one\n2\nthree\n"
    work.promote(drift="merge", resolve=lambda conflict: b"one\nboth\nthree\n")
    assert (project / "notes.txt").read_text() == "one\nboth\nthree\n"


def test_a_directory_that_the_sandbox_removed_and_somebody_works_in(work: Workspace, project: Path) -> None:
    (project / "data").mkdir()
    (project / "data/one").write_text("1")
    work.run(shell("rm -r data"))
    (project / "data/two").write_text("2")
    with pytest.raises(Drift):
        work.promote()
    with pytest.raises(Conflicted):
        work.promote(drift="merge")
    work.promote(drift="merge", resolve="theirs")
    assert (project / "data/two").read_text() == "2" and (project / "data/one").exists()
    assert len(work.changes()) == 0, "reality was chosen, and that settles it"
    time.sleep(0.05)
    work.run(shell("rm -r data"))
    (project / "data/three").write_text("3")
    work.promote(drift="merge", resolve="ours")
    assert not (project / "data").exists()


def test_protected_kinds_need_their_own_yes(work: Workspace, project: Path) -> None:
    work.run(shell("mkdir -p .git/hooks; printf '#!/bin/sh\\n' > .git/hooks/pre-commit; echo x > plain"))
    shown: list[PromotionProposal] = []

    def review(proposal: PromotionProposal) -> bool:
        shown.append(proposal)
        return True

    with pytest.raises(Denied, match="git-config"):
        work.promote(review=review)
    assert str(project / ".git/hooks/pre-commit") in shown[0].protected()["git-config"]
    assert not (project / "plain").exists(), "all or nothing"
    work.promote(only=["plain"])
    assert (project / "plain").exists() and not (project / ".git").exists()
    assert {Path(each.path).name for each in work.changes()} == {".git", "hooks", "pre-commit"}, "what was left out waits"
    work.promote(approve=shown[0].protected())
    assert (project / ".git/hooks/pre-commit").exists()


def test_somebody_who_looks_at_it_may_say_no(work: Workspace, project: Path) -> None:
    work.run(shell("echo x > file"))
    assert work.promote(review=lambda proposal: False) is None
    assert not (project / "file").exists() and len(work.changes()) == 1


def test_a_promotion_is_in_the_ledger_before_and_after(work: Workspace, project: Path, tmp_path: Path) -> None:
    work.run(shell("echo x > file"))
    carried = work.promote()
    assert carried is not None
    events = [entry.event for entry in read(tmp_path / "state/ledger.jsonl")]
    intent, outcome = events[-2:]
    assert isinstance(intent, Intent) and intent.action["kind"] == "Promote" and intent.action["count"] == 1
    assert isinstance(outcome, OutcomeEvent) and outcome.ended == "done"
    assert outcome.facts["content_sha256"] == carried.promotion.digest


def test_runs_of_one_workspace_come_one_after_the_other(work: Workspace) -> None:
    line = "test ! -e busy; touch busy; sleep 0.2; rm busy"
    results: list[int | None] = []
    threads = [threading.Thread(target=lambda: results.append(work.run(["sh", "-ec", line]).exit_code)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [0, 0, 0]


@pytest.mark.both
def test_a_workspace_without_a_right_to_write_or_a_directory_is_refused(project: Path) -> None:
    with pytest.raises(PolicyError, match="allows none"):
        Workspace.over(project, config=SandboxConfig())
    with pytest.raises(PolicyError, match="no directory"):
        Workspace.over(project / "nowhere")


def test_what_was_changed_and_is_the_same_again_is_no_change(work: Workspace, project: Path) -> None:
    work.run(shell("sed -i s/two/2/ notes.txt"))
    work.run(shell("sed -i s/2/two/ notes.txt"))
    assert len(work.changes()) == 0
    (project / "notes.txt").write_text("other\n")
    assert len(work.changes()) == 0, "and what is real now is nothing that the sandbox would take back"


@pytest.mark.needs_root
def test_what_a_run_read_is_told_when_it_moves_on(work: Workspace, project: Path) -> None:
    work.run(shell("grep -c o notes.txt > count.txt"), watch_reads=True)
    for name in ("notes.txt", "old.txt"):
        (project / name).write_text("something else\n")
    assert {Path(each.path).name: each.read for each in work.drift().entries} == {"notes.txt": True, "old.txt": False}


@pytest.mark.both
@pytest.mark.needs_user
def test_without_root_reads_are_not_watched_and_that_is_said(work: Workspace) -> None:
    with pytest.raises(WorkspaceError, match="takes root"):
        work.run(shell("cat notes.txt"), watch_reads=True)


def test_a_directory_that_was_made_anew_does_not_count_as_moved_on(work: Workspace, project: Path) -> None:
    (project / "tree" / "inner").mkdir(parents=True)
    (project / "tree" / "inner" / "file").write_text("x\n")
    time.sleep(0.05)
    work.run(shell("rm -rf tree; mkdir tree; echo new > tree/new"))
    work.promote()
    assert [path.name for path in (project / "tree").rglob("*")] == ["new"]
    work.undo()
    assert (project / "tree" / "inner" / "file").read_text() == "x\n"


def test_what_reality_has_already_is_no_quarrel_and_leaves_the_sandbox(work: Workspace, project: Path) -> None:
    work.run(shell("echo same > notes.txt; rm old.txt; echo more > more.txt; mkdir d; echo x > d/x"))
    (project / "notes.txt").write_text("same\n")
    (project / "old.txt").unlink()
    (project / "d").mkdir()
    carried = work.promote()
    assert carried is not None and carried.promotion.counts == {"added": 2, "replaced": 0, "removed": 0, "adjusted": 0}
    assert len(work.changes()) == 0 and (project / "d" / "x").read_text() == "x\n"
    work.run(shell("echo other > notes.txt"))
    (project / "notes.txt").write_text("mine\n")
    work.promote(drift="merge", resolve="theirs")
    assert len(work.changes()) == 0 and (project / "notes.txt").read_text() == "mine\n", "settled: reality was chosen"
    assert work.run(shell("cat notes.txt")).stdout == "mine\n"


def test_what_is_said_wrongly_is_refused_and_nothing_is_done(work: Workspace, project: Path) -> None:
    work.run(shell("echo four >> notes.txt; mkdir src; echo x > src/x"))
    (project / "notes.txt").write_text("mine\n")
    for wrong in ({"drift": "forced"}, {"resolve": "ours"}, {"drift": "merge", "resolve": "mine"}, {"approve": "everything"}):
        with pytest.raises(PolicyError):
            work.promote(**wrong)  # type: ignore[arg-type]
    assert (project / "notes.txt").read_text() == "mine\n" and not (project / "src").exists()
    work.promote("src")
    assert (project / "src" / "x").exists(), "one word is one pattern"
    kept = work.snapshot()
    with pytest.raises(PolicyError, match="not one of this sandbox"):
        work.rollback(replace(kept, created=kept.created + 1))
    project.rename(project.with_name("away"))
    with pytest.raises(WorkspaceError, match="No such file"):
        work.drift()
    project.with_name("away").rename(project)


def test_leaving_the_block_keeps_the_changes_and_closes(project: Path) -> None:
    up, results = threading.Event(), []
    with Workspace.over(project) as work:
        work.run(shell("echo four >> notes.txt"))
        code = "print('up', flush=True)\nimport time\ntime.sleep(600)"
        thread = threading.Thread(target=lambda: results.append(work.run(code, on_output=lambda *_: up.set())))
        thread.start()
        up.wait()
    thread.join()
    assert results[0].status is SandboxStatus.FAILED and (results[0].error or "").startswith("killed")
    for call in (lambda: work.run("1"), work.diff, work.changes, work.promote, work.undo, work.reset, work.snapshots, work.drift):
        with pytest.raises(SandboxError, match="this workspace has been closed"):
            call()
    work.close()
    again = Workspace.over(project)
    assert "+four\n" in again.diff(), "nothing was thrown away"
    assert (project / "notes.txt").read_text() == "one\ntwo\nthree\n", "and nothing was promoted"
    again.reset()
