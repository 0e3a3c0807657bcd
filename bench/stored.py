"""A sandbox that outlives a run, and what is asked of one: snapshots, the list of its changes, promotion. And `cp` and `git` beside it."""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path
from typing import Literal

from agent_sandbox import Workspace
from agent_sandbox.assembly import here
from bench import edits, trees
from bench.peers import Call, Missing, Staged, command
from bench.trees import GIT, GIT_ENVIRONMENT

Sort = Literal["new", "replaced"]

ROOT = Path(__file__).resolve().parent.parent
FILLING_SECONDS = 300.0
PROGRAM = str(Path(sys.executable).parent / "agent-sandbox")
_SETTLED_SECONDS = 2.2  # after that long the content of a small file is not read for a promotion


def snapshotting(changed: int) -> Call:
    """A snapshot of a sandbox that has changed so many files, and in which something has run since the last one."""
    work, first = _with_a_past(changed)

    def before() -> None:
        work.rollback(first)
        _tidy(work, first)
        _guest(work, "write", work.project, "1", "z")

    return Staged(before, lambda: _expect_snapshot(work.snapshot().id))


def rolling_back(changed: int) -> Call:
    """Going back to the snapshot with all those files, from a present that is kept in one of its own."""
    work, first = _with_a_past(changed)

    def before() -> None:
        _tidy(work, first)
        _guest(work, "write", work.project, "1", "z")

    return Staged(before, lambda: _expect_snapshot(work.rollback(first).to.id))


def _with_a_past(changed: int) -> tuple[Workspace, int]:
    project = _made("resting")
    work = Workspace.over(project)
    _guest(work, "write", str(project), str(changed), "y")
    return work, work.snapshot("all").id


def _tidy(work: Workspace, first: int) -> None:
    """A chain that only grows would be squashed now and then, and the history would be longer with every call."""
    for each in work.snapshots():
        if each.id != first:
            work.forget(each)


def _expect_snapshot(number: int) -> None:
    if number < 1:
        raise Missing("there is no such snapshot")


def listing(files: int, changes: int) -> Call:
    """The changes of a sandbox, as values."""
    work = _changed(files, changes)

    def call() -> None:
        found = len(work.changes())
        if found != changes:
            raise Missing(f"{found:,} changes were listed, not {changes:,}")

    return call


def told(files: int, changes: int, *words: str, lines: int = 1) -> Call:
    """What the command line says of them."""
    work = _changed(files, changes)
    return command((PROGRAM, *words, "--project", work.project), None, lines=lines)


def told_by_git(files: int, changes: int, *words: str, lines: int = 1) -> Call:
    """What git says of the same changes, made in the tree itself."""
    top = _own(f"git-{files}-{changes}")
    if shutil.which("git") is None:
        raise Missing("git is not installed")
    trees.make_changed(top, files, changes)
    return command((*GIT, *words), None, lines=lines, cwd=top, settings=GIT_ENVIRONMENT)


def _changed(files: int, changes: int) -> Workspace:
    """The sandbox of a tree with so many changes. Workers start one after the other, so one of them makes it and the others find it."""
    top = _own(str(files))
    trees.make(top, files)
    work = Workspace.over(top)
    if not len(work.changes()):
        _guest(work, "mix", str(top), str(changes))
    return work


def promoting(sort: Sort, files: int) -> Call:
    """All changes of a sandbox carried over: judged, journalled, verified, on the disk, and dropped from the sandbox."""
    work = Workspace.over(_made(sort))

    def call() -> None:
        done = work.promote()
        if done is None or len(done.promotion.paths) < files:
            raise Missing(f"not all of {files:,} files were promoted")

    return Staged(lambda: _refill(work, sort, files), call)


def showing_new(files: int) -> Call:
    """Run `diff` of a sandbox with so many new files. It remembers nothing of an earlier look."""
    work = Workspace.over(_made("shown"))
    show = command((PROGRAM, "diff", "--project", work.project), None, lines=files, longest=FILLING_SECONDS)
    return Staged(lambda: _refill(work, "new", files), show)


def promoting_new(files: int) -> Call:
    """The same files promoted by the command line, by who has not looked at them before."""
    work = Workspace.over(_made("promoted"))
    promote = command((PROGRAM, "promote", "--yes", "--project", work.project), None, longest=FILLING_SECONDS)

    def call() -> None:
        promote()
        if not edits.file_of(Path(work.project), files - 1).exists():
            raise Missing(f"not all of {files:,} files were promoted")

    return Staged(lambda: _refill(work, "new", files), call)


def taking_back(sort: Sort, files: int) -> Call:
    """The promotion taken back."""
    work = Workspace.over(_made(sort))

    def before() -> None:
        _refill(work, sort, files)
        work.promote()
        os.sync()

    def call() -> None:
        if len(work.undo().promotion.paths) < files:
            raise Missing(f"not all of {files:,} files were taken back")

    return Staged(before, call)


def copying(sort: Sort, files: int) -> Call:
    """`cp -a` of the same files to the same places, and on the disk."""
    source, target = _made("source"), _made("copy")
    edits.write(source, files, "new")
    copy = command(("sh", "-c", 'cp -a "$1/." "$2" && sync -f "$2"', "sh", str(source), str(target)))
    return Staged(lambda: _empty(target, sort, files), copy)


def _refill(work: Workspace, sort: Sort, files: int) -> None:
    """A new sandbox of a new project. What it replaces has settled: of what was written a moment ago the content would have to be read."""
    work.reset()
    _empty(Path(work.project), sort, files)
    if sort == "replaced":
        time.sleep(_SETTLED_SECONDS)
    _guest(work, "write", work.project, str(files), "new")
    os.sync()


def _empty(project: Path, sort: Sort, files: int) -> None:
    """The project before: with the folders, and with the files or without."""
    shutil.rmtree(project, ignore_errors=True)
    project.mkdir(parents=True)
    edits.write(project, files, "old")
    if sort == "new":
        for number in range(files):
            edits.file_of(project, number).unlink()
    os.sync()


def _guest(work: Workspace, *words: str) -> None:
    done = work.run([sys.executable, "-B", "-m", "bench.edits", *words], cwd=ROOT, timeout=FILLING_SECONDS)
    if not done.success or done.exit_code != 0:
        raise Missing(f"the guest could not make its changes: {(done.error or done.stderr).strip()[-200:]}")


def _made(name: str) -> Path:
    """A directory of this worker's own."""
    made = _scratch() / f"{name}-{os.getpid()}"
    made.mkdir(parents=True)
    return made


def _scratch() -> Path:
    """Where this run may write; on the disk of the state directory, and gone afterwards."""
    return Path(here().host.state).parent


def _own(name: str) -> Path:
    """A tree that we may write to: the one that is kept, or for a user who may not write there one for this run."""
    kept = trees.HOME if os.access(trees.HOME, os.W_OK) else _scratch()
    return kept / "trees" / name
