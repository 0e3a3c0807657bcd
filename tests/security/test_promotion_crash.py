"""A promotion, an undo and a recovery killed at every call and at random moments: the tree is then exactly old or exactly new."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agent_sandbox.workspace.changes import Change
from agent_sandbox.workspace.promotion.promote import recover
from tests.leftovers import remove
from tests.security.conftest import Tell
from tests.security.harness import ROOT, case
from tests.workspace.promotion.tracing import FINISHED, killed_after, killed_at_call
from tests.workspace.promotion.trees import ME, Edited, Shown, edit_mixed, expected_after, make_mixed, shown

SEED = int(os.environ.get("AGENT_SANDBOX_SEED", "20240607"))
MEMORY = Path("/dev/shm")  # a filesystem that costs nothing to sync: what is tried is processes that die, not disks


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory, where that has extended attributes."""
    directory = Path(tempfile.mkdtemp(dir=MEMORY if os.access(MEMORY, os.W_OK) else tmp_path))
    try:
        os.setxattr(directory, "user.try", b"")
    except OSError:
        directory.rmdir()
        directory = tmp_path
    yield directory
    if directory != tmp_path:
        remove(directory)


class Trial:
    """A project that is carried from old to new and back by children that are killed."""

    def __init__(self, scratch: Path) -> None:
        self.edited = Edited(scratch, make_mixed, edit_mixed)
        self.old, self.new = shown(self.edited.project), expected_after(self.edited)
        self.found: Counter[str] = Counter()
        self.chance = random.Random(SEED)
        self.state = "old"

    def step(self) -> Callable[[], object]:
        """What is to be done next: promote, if the tree is old, or undo."""
        if self.state == "old":
            made = self.edited.plan()
            return lambda: self.edited.promote(made)
        return self.edited.undo

    def look(self, *, killed_recovery: bool = False) -> str:
        """Recover, killed on the way or not, and see what became of the tree."""
        promotions = str(self.edited.promotions)
        while killed_recovery and killed_at_call(lambda: recover(promotions, ME), self.chance.randint(1, 30)) != FINISHED:
            killed_recovery = self.chance.random() < 0.5
        assert recover(promotions, ME).problems == ()
        tree = shown(self.edited.project)
        assert self.edited.staging() == []
        self.state = "old" if tree == self.old else "new" if tree == self.new else "torn"
        assert self.state != "torn", difference(self.old, self.new, tree)
        self.found[self.state] += 1
        return self.state

    def settle(self, wanted: str) -> None:
        """Bring the tree to one side, unharmed, with few promotions to remember."""
        if self.state != wanted:
            self.step()()
            self.state = wanted
        if wanted == "old":
            shutil.rmtree(self.edited.promotions, ignore_errors=True)


def difference(old: dict[str, Shown], new: dict[str, Shown], tree: dict[str, Shown]) -> str:
    return (
        "\n".join(
            f"{path}: {tree.get(path)} is neither {old.get(path)} nor {new.get(path)}"
            for path in sorted({*old, *new, *tree})
            if old.get(path) != tree.get(path) != new.get(path)
        )
        or "a mixture of old and new"
    )


def kill_at_calls(trial: Trial, start: str, *, stride: int = 1, silent: bool = False) -> int:
    """Kill what leads away from `start` at its first call, at the next, and so on. Returns how many calls it makes."""
    nth = trial.chance.randint(1, stride)
    while True:
        trial.settle("old")
        trial.settle(start)
        if killed_at_call(trial.step(), nth, silent=silent) == FINISHED:
            trial.look()
            return nth - 1
        trial.look(killed_recovery=trial.chance.random() < 0.3)
        nth += stride


def naive(edited: Edited) -> None:
    """What everybody else does: copy by path, one after the other, and remove."""
    for change in edited.changes:
        put_by_path(edited, change)


def put_by_path(edited: Edited, change: Change) -> None:
    source, target = edited.after / os.path.relpath(change.path, edited.project), Path(change.path)
    if target.is_dir() and not target.is_symlink():
        if not source.is_dir():
            shutil.rmtree(target)
    elif target.is_symlink() or target.exists():
        target.unlink()
    if source.is_symlink():
        os.symlink(os.readlink(source), target)
    elif source.is_file():
        shutil.copy2(source, target)
    elif source.is_dir():
        target.mkdir(exist_ok=True)


def torn_by_naive(scratch: Path) -> int:
    """How often a tree is neither old nor new when the control arm is killed at some of its calls."""
    torn = 0
    for nth in range(3, 30, 3):
        place = scratch / f"naive-{nth}"
        place.mkdir()
        trial = Trial(place)
        killed_at_call(lambda trial=trial: naive(trial.edited), nth)  # type: ignore[misc]
        torn += shown(trial.edited.project) not in (trial.old, trial.new)
        trial.edited.close()
    return torn


@case(146)
@pytest.mark.slow
def test_killed_at_each_call_that_changes_anything_it_is_old_or_new(number: int, scratch: Path, tell: Tell) -> None:
    (scratch / "trial").mkdir()
    trial = Trial(scratch / "trial")
    stride = 1 if ROOT else 4  # for an ordinary user the same steps are taken: a sample shows that they may
    calls = [kill_at_calls(trial, start, stride=stride) for start in ("old", "new")]
    torn = torn_by_naive(scratch)
    assert min(calls) > 60 and trial.found["old"] and trial.found["new"] and torn > 0
    what = "each" if stride == 1 else f"every {stride}th"
    tell(f"killed at {what} of {calls[0]} calls, an undo of {calls[1]}: {dict(trial.found)}", control=f"copied by path: {torn} of 9 torn")


@case(146)
@pytest.mark.torture
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("start", ["old", "new"])
def test_killed_at_every_system_call_it_is_old_or_new(number: int, start: str, scratch: Path, tell: Tell) -> None:
    trial = Trial(scratch)
    calls = kill_at_calls(trial, start, silent=True)
    tell(f"killed at each of {calls} calls: {dict(trial.found)}", control="see the sample")


def kill_at_moments(trial: Trial, times: int) -> int:
    """Kill whatever comes next after a random time. Returns how often it was still at it."""
    longest, interrupted = 0.02, 0
    for number in range(times):
        was_killed = killed_after(trial.step(), trial.chance.random() * longest)
        # About half of them should be over already: then the end is tried as often as the beginning.
        longest = longest * 1.02 if was_killed else max(longest * 0.98, 0.002)
        interrupted += was_killed
        if trial.look() == "old" and number % 20 == 0:
            shutil.rmtree(trial.edited.promotions, ignore_errors=True)
    return interrupted


@case(146)
@pytest.mark.slow
def test_killed_at_random_moments_it_is_old_or_new(number: int, scratch: Path, tell: Tell) -> None:
    print(f"seed {SEED}")
    trial = Trial(scratch)
    times = 300 if ROOT else 100
    interrupted = kill_at_moments(trial, times)
    assert interrupted > times // 10 and trial.found["old"] and trial.found["new"]
    tell(f"{times} moments, {interrupted} in the middle: {dict(trial.found)}", control="see the calls")


@case(146)
@pytest.mark.torture
@pytest.mark.timeout(1800)
def test_killed_at_10000_random_moments_it_is_old_or_new(number: int, scratch: Path, tell: Tell) -> None:
    print(f"seed {SEED}")
    trial = Trial(scratch)
    interrupted = kill_at_moments(trial, 10_000)
    assert interrupted > 1000
    tell(f"10,000 moments, {interrupted} in the middle: {dict(trial.found)}", control="see the calls")
