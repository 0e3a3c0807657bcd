"""Reality moves on under a sandbox: what is found, what is not called moved, and what could not be told."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Collection
from pathlib import Path

import pytest

from agent_sandbox._fast.values import replace
from agent_sandbox.kernel import syscalls
from agent_sandbox.workspace import clone_inventory
from agent_sandbox.workspace.changes import Change, ChangeSet, Kind
from agent_sandbox.workspace.drift import Drifted, DriftKind, DriftReport, LookBudget, MovedOn, NotMoved, Verdict, judge, look_for_drift
from agent_sandbox.workspace.nodes import EntryType, Node
from agent_sandbox.workspace.originals.runs import TICK_NS
from agent_sandbox.workspace.read_tracking import Reads
from agent_sandbox.workspace.reality import Base, Fingerprint, look
from tests.workspace.layers.overlays import in_namespace

FILE = Node(EntryType.FILE, 0o644, 0, 0)
DIRECTORY = Node(EntryType.DIRECTORY, 0o755, 0, 0)


class Clone:
    """A project, and a sandbox that was cloned from it a moment ago."""

    def __init__(self, project: Path, place: Path) -> None:
        self.project = project
        self.file = str(place / "names")
        for path in ("src/a.py", "src/b.py", "docs/index", "top"):
            (project / path).parent.mkdir(parents=True, exist_ok=True)
            (project / path).write_text(f"{path}\n")
        self.changes: list[Change] = []
        self.bases: dict[str, Base] = {}
        self.clone()

    def clone(self) -> None:
        clone_inventory.remember(str(self.project), self.file)
        start = time.time_ns()
        while time.time_ns() < start + 2 * TICK_NS:
            pass  # the clock of the filesystem has ticked, too
        self.cloned = time.time_ns()
        while time.time_ns() < self.cloned + TICK_NS:
            pass

    def path(self, name: str) -> str:
        return str(self.project / name)

    def seen(self, name: str, *, content: bool = True) -> Fingerprint | None:
        directory = os.open((self.project / name).parent, os.O_PATH)
        try:
            return look(directory, os.path.basename(name), now_ns=time.time_ns(), content=content)
        finally:
            os.close(directory)

    def change(self, name: str, kind: Kind = Kind.MODIFIED) -> None:
        """The sandbox changes a path, and its base is what is real now."""
        before, after = (None if kind is Kind.ADDED else FILE), (None if kind is Kind.DELETED else FILE)
        if (self.project / name).is_dir():
            before = DIRECTORY
        self.changes.append(Change(self.path(name), kind, before, after))
        self.bases[self.path(name)] = Base(self.path(name), self.seen(name))

    def delete_tree(self, name: str) -> None:
        self.change(name, Kind.DELETED)
        self.bases[self.path(name)] = replace(self.bases[self.path(name)], listed=True)
        for path in (self.project / name).rglob("*"):
            self.bases[str(path)] = Base(str(path), self.seen(str(path.relative_to(self.project))))

    def drift(self, *, masks: Collection[str] = (), reads: Reads | None = None, budget: LookBudget | None = None) -> DriftReport:
        return look_for_drift(
            str(self.project),
            self.cloned,
            clone_inventory.recall(self.file),
            ChangeSet(tuple(self.changes)),
            self.bases,
            masks=masks,
            reads=reads,
            budget=budget,
        )

    def moved(self, *, masks: Collection[str] = ()) -> dict[str, str]:
        found = self.drift(masks=masks).entries
        return {entry.path.removeprefix(f"{self.project}/"): entry.kind.value + (", yours" if entry.yours else "") for entry in found}

    def judge(self) -> dict[str, Verdict]:
        expected: dict[str, Fingerprint | None] = {}
        for change in self.changes:
            name = change.path.removeprefix(f"{self.project}/")
            expected[change.path] = self.seen(name, content=False)
            if change.kind is Kind.DELETED:
                below = (self.project / name).rglob("*")
                expected |= {str(path): self.seen(str(path.relative_to(self.project)), content=False) for path in below}
        found = judge(ChangeSet(tuple(self.changes)), self.bases, expected)
        return {path.removeprefix(f"{self.project}/"): verdict for path, verdict in found.items()}


@pytest.fixture
def clone(project: Path, tmp_path: Path) -> Clone:
    return Clone(project, tmp_path)


def test_nothing_has_moved_on_when_nothing_happened(clone: Clone) -> None:
    assert clone.moved() == {}
    assert clone.drift().sentence().endswith("old; nothing has moved on")


def test_what_changed_appeared_or_went_is_found_and_whether_the_sandbox_changed_it_too(clone: Clone) -> None:
    clone.change("src/a.py")
    clone.change("top", Kind.DELETED)
    (clone.project / "src/a.py").write_text("theirs")
    (clone.project / "src/b.py").chmod(0o600)
    (clone.project / "top").unlink()
    (clone.project / "docs/index").rename(clone.project / "docs/moved")
    assert clone.moved() == {
        "src/a.py": "changed, yours",
        "src/b.py": "changed",
        "top": "gone, yours",
        "docs/index": "gone",
        "docs/moved": "appeared",
    }


def test_times_that_were_set_back_hide_nothing(clone: Clone) -> None:
    file = clone.project / "src/a.py"
    before = file.stat()
    file.write_text("src/x.py\n")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert clone.moved() == {"src/a.py": "changed"}


def test_what_is_again_what_it_was_has_not_moved_where_there_is_a_base(clone: Clone) -> None:
    for name in ("src/a.py", "src/b.py", "top"):
        clone.change(name)
    file = clone.project / "src/a.py"
    file.write_text("meanwhile")
    file.write_text("src/a.py\n")
    (clone.project / "new").write_text("src/b.py\n")
    (clone.project / "new").chmod(0o644)
    (clone.project / "src/b.py").chmod(0o644)
    (clone.project / "new").replace(clone.project / "src/b.py")  # as a checkout does it
    os.utime(clone.project / "top")
    os.utime(clone.project / "docs/index")
    assert clone.moved() == {"docs/index": "changed"}, "without a base a newer time counts"
    assert all(isinstance(verdict, NotMoved) for verdict in clone.judge().values())


def test_what_lies_below_a_directory_that_the_sandbox_removed_is_yours_too(clone: Clone) -> None:
    clone.delete_tree("src")
    (clone.project / "src/a.py").write_text("still needed")
    (clone.project / "src/new.py").touch()
    assert clone.moved() == {"src/a.py": "changed, yours", "src/new.py": "appeared, yours"}
    verdict = clone.judge()["src"]
    assert isinstance(verdict, MovedOn) and sorted(verdict.below) == [clone.path("src/a.py"), clone.path("src/new.py")]
    assert "2 entries below it moved on" in verdict.why()


def test_a_directory_that_appeared_or_went_is_one_entry(clone: Clone) -> None:
    (clone.project / "node_modules/x").mkdir(parents=True)
    for number in range(10):
        (clone.project / f"node_modules/x/{number}").touch()
    shutil.rmtree(clone.project / "docs")
    assert clone.moved() == {"node_modules": "appeared", "docs": "gone"}
    assert clone.drift().files == 11


def test_an_old_directory_that_was_moved_here_has_appeared(clone: Clone, tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old/file").touch()
    clone.clone()
    (tmp_path / "old").rename(clone.project / "moved")
    assert clone.moved() == {"moved": "appeared"}


def test_what_moves_inside_git_is_summed_up(clone: Clone) -> None:
    (clone.project / ".git/objects/ab").mkdir(parents=True)
    for path in ("HEAD", "index", "objects/ab/cd"):
        (clone.project / ".git" / path).write_text("x")
    (entry,) = clone.drift().entries
    assert entry == Drifted(clone.path(".git"), DriftKind.GIT, files=3)


def test_masks_and_our_own_staging_directories_are_not_looked_at(clone: Clone) -> None:
    (clone.project / ".env").write_text("secret")
    (clone.project / ".agent-sandbox-promotion-1").mkdir()
    (clone.project / ".agent-sandbox-promotion-1/file").touch()
    assert clone.moved(masks=[clone.path(".env")]) == {}
    assert clone.moved() == {".env": "appeared"}


def test_without_names_what_has_gone_cannot_be_told_and_that_is_said(clone: Clone) -> None:
    os.unlink(clone.file)
    (clone.project / "top").unlink()
    (clone.project / "fresh").touch()
    drift = clone.drift()
    assert [(entry.path, entry.kind) for entry in drift.entries] == [(clone.path("fresh"), DriftKind.CHANGED)]
    assert "gone cannot be told" in drift.untold[0]


def test_what_was_not_looked_at_is_said(clone: Clone) -> None:
    assert "more entries" in clone.drift(budget=LookBudget(entries=3)).untold[0]
    clone.change("src/a.py")
    os.utime(clone.project / "src/a.py")
    drift = clone.drift(budget=LookBudget(bytes=0))
    assert [entry.path for entry in drift.entries] == [clone.path("src/a.py")] and "was not read" in drift.untold[0]

    def body() -> None:
        syscalls.mount("tmpfs", clone.path("docs"), "tmpfs")
        assert any("docs' was not looked into" in sentence for sentence in clone.drift().untold)

    in_namespace(body)


def test_no_link_is_followed(clone: Clone, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (clone.project / "link").symlink_to(tmp_path / "outside")
    clone.clone()
    (tmp_path / "outside/new").touch()
    shutil.rmtree(clone.project / "docs")
    (clone.project / "docs").symlink_to(tmp_path / "outside")
    assert clone.moved() == {"docs": "changed"}


def test_what_a_run_read_is_told_where_somebody_watched(clone: Clone) -> None:
    for name in ("src/a.py", "top"):
        (clone.project / name).write_text("theirs")
    watched = clone.drift(reads=Reads(frozenset({clone.path("top")})))
    assert [(entry.path, entry.read) for entry in watched.entries] == [(clone.path("src/a.py"), False), (clone.path("top"), True)]
    assert watched.sentence().endswith("2 files moved on, none of them you changed and 1 of them you read")
    missed = clone.drift(reads=Reads(frozenset(), complete=False))
    assert all(entry.read for entry in missed.entries)


@pytest.mark.parametrize(
    ("seconds", "yours", "said"),
    [
        (900, (True, False, False), "15 minutes behind; 3 files moved on, 1 of them you changed"),
        (60, (False, False), "1 minute behind; 2 files moved on, none of them you changed"),
        (7200, (True,), "2 hours behind; 1 file moved on, which you changed"),
        (86_400, (False,), "1 day behind; 1 file moved on, which you have not changed"),
        (1, (), "1 second old; nothing has moved on"),
    ],
)
def test_drift_in_one_line(seconds: int, yours: tuple[bool, ...], said: str) -> None:
    entries = tuple(Drifted(f"/{number}", DriftKind.CHANGED, own) for number, own in enumerate(yours))
    assert DriftReport(0, seconds * 10**9, entries).sentence() == said


def test_a_promotion_is_told_exactly_what_moved(clone: Clone) -> None:
    for name in ("src/a.py", "src/b.py", "top"):
        clone.change(name)
    for name in ("appeared", "absent"):
        clone.change(name, Kind.ADDED)
    (clone.project / "src/a.py").write_text("theirs")
    (clone.project / "top").unlink()
    (clone.project / "appeared").touch()
    verdicts = clone.judge()
    assert {path: type(verdict).__name__ for path, verdict in verdicts.items()} == {
        "src/a.py": "MovedOn",
        "src/b.py": "NotMoved",
        "top": "MovedOn",
        "appeared": "MovedOn",
        "absent": "NotMoved",
    }
    reasons = [verdict.why() for path, verdict in sorted(verdicts.items()) if isinstance(verdict, MovedOn)]
    assert reasons == ["it has appeared in reality", "it has changed in reality", "it has gone in reality"]


def test_without_a_base_what_is_there_has_moved_and_nothing_there_has_not(clone: Clone) -> None:
    clone.change("top")
    clone.change("absent", Kind.ADDED)
    clone.bases = {clone.path("absent"): Base(clone.path("absent"), None, known=False)}
    verdicts = clone.judge()
    assert isinstance(verdicts["top"], MovedOn) and "not known" in verdicts["top"].why()
    assert verdicts["absent"] == NotMoved(None)


def test_a_directory_that_would_go_without_a_list_of_what_was_in_it_has_moved(clone: Clone) -> None:
    clone.change("src", Kind.DELETED)
    verdict = clone.judge()["src"]
    assert isinstance(verdict, MovedOn)
    clone.changes, clone.bases = [], {}
    clone.delete_tree("src")
    assert isinstance(clone.judge()["src"], NotMoved)
    (clone.project / "src/a.py").unlink()
    verdict = clone.judge()["src"]
    assert isinstance(verdict, MovedOn) and verdict.below == (clone.path("src/a.py"),)
