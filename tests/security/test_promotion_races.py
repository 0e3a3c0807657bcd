"""Promotion while others are at work in the same tree: whoever swaps directories and links, and whoever saves files."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from agent_sandbox.errors import SandboxError
from agent_sandbox.kernel.syscalls import AT_FDCWD, RENAME_EXCHANGE, renameat2
from tests.security.conftest import Tell
from tests.security.harness import case
from tests.security.test_promotion_crash import SEED, naive
from tests.workspace.promotion.trees import Edited, expected_after, shown
from tests.workspace.racing import Swapper

NAMES = [f"f{number}" for number in range(4)]


def make_tree(tree: Path) -> None:
    for directory in ("a", "d/sub"):
        (tree / directory).mkdir(parents=True)
        for name in NAMES:
            (tree / directory / name).write_text(f"old {directory}\n")


def edit_tree(tree: Path) -> None:
    for directory in ("a", "d/sub"):
        for name in (*NAMES, "new"):
            (tree / directory / name).write_text(f"new in {directory}\n")
        (tree / directory / "made").mkdir()
        (tree / directory / "made/inner").write_text("new\n")


class Field:
    """A project, what a guest made of it, and a directory outside with files of the same names, which must stay as they are."""

    def __init__(self, scratch: Path) -> None:
        self.edited = Edited(scratch, make_tree, edit_tree)
        self.old, self.new = shown(self.edited.project), expected_after(self.edited)
        self.outside, self.parked = scratch / "outside", scratch / "parked"
        make_tree(self.outside)
        self.parked.mkdir()
        # In the tree a directory becomes a link that leads out, and another is moved out. In the workspace a directory becomes a link.
        self.swapped = {
            self.edited.project / "a": self.edited.project / "decoy",
            self.edited.project / "d/sub": self.parked,
            self.edited.after / "d/sub": self.edited.after / "decoy",
        }
        os.symlink(self.outside / "a", self.edited.project / "decoy")
        os.symlink(self.outside / "d/sub", self.edited.after / "decoy")
        self.canary = self._outside()
        self.chance = random.Random(SEED)

    def racers(self) -> list[Swapper]:
        """One of them, or all."""
        pairs = [Swapper(one, other) for one, other in self.swapped.items()]
        return pairs if self.chance.random() < 0.5 else [self.chance.choice(pairs)]

    def settle(self) -> None:
        """Once the racers are gone: put everything where it belongs."""
        for one, other in self.swapped.items():
            if not (one / "f0").exists() or one.is_symlink():
                renameat2(AT_FDCWD, str(one), AT_FDCWD, str(other), RENAME_EXCHANGE)

    def tree(self) -> str:
        found = {path: entry for path, entry in shown(self.edited.project).items() if path != "decoy"}
        return "old" if found == self.old else "new" if found == self.new else f"torn: {found}"

    def written_outside(self) -> bool:
        return self._outside() != self.canary

    def _outside(self) -> object:
        times = {name: os.stat(self.outside / name).st_mtime_ns for name in ("a", "d/sub")}
        return shown(self.outside), times, shown(self.parked)


def race(field: Field, promoter: Callable[[], Callable[[], object]], swaps: int) -> tuple[int, Counter[str]]:
    """Promote in the middle of it until there were so many tries to swap, and attempts to promote. What became of the tree is counted."""
    tried = attempts = 0
    found: Counter[str] = Counter()
    while tried < swaps or attempts < swaps // 200:
        promote = promoter()
        with ExitStack() as stack:
            racers = [stack.enter_context(racer) for racer in field.racers()]
            for _ in range(10):
                attempts += 1
                with suppress(SandboxError, OSError):
                    promote()
                    break
        tried += sum(racer.swaps for racer in racers)
        field.settle()
        found[field.tree()] += 1
        if field.written_outside():
            found["outside"] += 1
            break
        if field.tree() == "new" and field.edited.promotions.exists():
            field.edited.undo()
    return tried, found


def race_ours(scratch: Path, swaps: int) -> tuple[int, Counter[str]]:
    field = Field(scratch)

    def promoter() -> Callable[[], object]:
        made = field.edited.plan()
        return lambda: field.edited.promote(made)

    tried, found = race(field, promoter, swaps)
    field.edited.close()
    return tried, found


def race_naive(scratch: Path, swaps: int) -> Counter[str]:
    """The control arm: it stops when something was written outside."""
    scratch.mkdir()
    field = Field(scratch)
    found = race(field, lambda: lambda: naive(field.edited), swaps)[1]
    field.edited.close()
    return found


@case(4, 118)
@pytest.mark.slow
def test_nobody_who_swaps_directories_and_links_leads_a_promotion_outside(number: int, tmp_path: Path, tell: Tell) -> None:
    print(f"seed {SEED}")
    tried, found = race_ours(tmp_path, 20_000)
    control = race_naive(tmp_path / "naive", 200_000)
    assert found.keys() <= {"old", "new"}, found
    assert found["old"] and control["outside"]
    tell(f"{tried} swaps: {dict(found)}, nothing outside", control="copied by path: written outside")


@case(4, 118)
@pytest.mark.torture
@pytest.mark.timeout(3000)
def test_nobody_leads_a_promotion_outside_in_a_million_tries(number: int, tmp_path: Path, tell: Tell) -> None:
    print(f"seed {SEED}")
    tried, found = race_ours(tmp_path, 1_000_000)
    assert found.keys() == {"old", "new"}, found
    tell(f"{tried} swaps: {dict(found)}, nothing outside", control="see the sample")
