"""Renames are found by content, on real overlays; what is deleted and what is added stays in the change set."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agent_sandbox.workspace.changes import ChangeSet
from agent_sandbox.workspace.layers.renames import find_renames
from tests.workspace.machine import Machine


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    made = Machine(tmp_path)
    yield made
    made.remove()


def changes_of(machine: Machine, body: Callable[[Path], None]) -> ChangeSet:
    machine.edit(body)
    with machine.stack() as stack:
        return find_renames(machine.changes(), stack, machine_root=str(machine.root))


def renames(machine: Machine, body: Callable[[Path], None]) -> dict[str, str]:
    found = {change.path: change.renamed_from for change in changes_of(machine, body) if change.renamed_from}
    return {new.removeprefix("/data/"): old.removeprefix("/data/") for new, old in found.items()}


def test_a_moved_file_is_told_and_both_ends_stay_in_the_set(machine: Machine) -> None:
    (machine.data / "old").write_text("the same")
    changes = changes_of(machine, lambda view: os.rename(view / "old", view / "new"))
    assert [(change.path, change.kind.value, change.renamed_from) for change in changes] == [
        ("/data/new", "added", "/data/old"),
        ("/data/old", "deleted", ""),
    ]


def test_of_equal_files_the_one_with_the_likest_path_is_taken_and_each_only_once(machine: Machine) -> None:
    for path in ("a/__init__.py", "b/__init__.py", "b/other.py"):
        (machine.data / path).parent.mkdir(exist_ok=True)
        (machine.data / path).write_text("licence\n")

    def body(view: Path) -> None:
        (view / "new/b").mkdir(parents=True)
        (view / "b/__init__.py").rename(view / "new/b/__init__.py")
        (view / "b/other.py").rename(view / "new/b/third.py")
        (view / "new/b/copy.py").write_text("licence\n")
        (view / "a/__init__.py").rename(view / "new/__init__.py")

    assert renames(machine, body) == {
        "new/b/__init__.py": "b/__init__.py",
        "new/__init__.py": "a/__init__.py",
        "new/b/copy.py": "b/other.py",  # it and third.py are alike: the first one gets it, and the old path is used up
    }


def test_a_directory_of_which_everything_moved_is_moved_itself(machine: Machine) -> None:
    (machine.data / "lib/deep/empty").mkdir(parents=True)
    (machine.data / "lib/one").write_text("1")
    (machine.data / "lib/nothing").touch()
    (machine.data / "lib/link").symlink_to("one")
    (machine.data / "lib/deep/two").write_text("22")

    def body(view: Path) -> None:
        shutil.copytree(view / "lib", view / "vendor", symlinks=True)
        shutil.rmtree(view / "lib")

    assert renames(machine, body) == {
        "vendor": "lib",
        "vendor/one": "lib/one",
        "vendor/deep": "lib/deep",
        "vendor/deep/two": "lib/deep/two",
    }


def test_a_directory_that_left_something_behind_or_has_more_is_not_moved(machine: Machine) -> None:
    for name in ("less", "more"):
        (machine.data / name).mkdir()
        (machine.data / name / "one").write_text(f"1 {name}")
        (machine.data / name / "two").write_text(f"2 {name}")

    def body(view: Path) -> None:
        for name in ("less", "more"):
            shutil.copytree(view / name, view / f"new {name}")
            shutil.rmtree(view / name)
        (view / "new less/one").unlink()
        (view / "new more/three").write_text("3")

    assert renames(machine, body) == {
        "new less/two": "less/two",
        "new more/one": "more/one",
        "new more/two": "more/two",
    }


def test_a_text_that_was_moved_and_edited_is_told_while_half_of_it_stays(machine: Machine) -> None:
    lines = [f"line {number}\n" for number in range(40)]
    (machine.data / "little").write_text("".join(lines))
    (machine.data / "much").write_text("".join(f"other {line}" for line in lines))

    def body(view: Path) -> None:
        (view / "little").unlink()
        (view / "much").unlink()
        (view / "edited").write_text("".join(lines[:30]) + "new\n" * 10)
        (view / "rewritten").write_text("".join(f"other {line}" for line in lines[:10]) + "".join(f"{n} else\n" for n in range(40)))

    assert renames(machine, body) == {"edited": "little"}


def test_empty_files_and_files_of_another_content_are_not_renames(machine: Machine) -> None:
    (machine.data / "empty").touch()
    (machine.data / "old").write_bytes(b"\0abc")

    def body(view: Path) -> None:
        (view / "empty").rename(view / "void")
        (view / "old").unlink()
        (view / "new").write_bytes(b"\0abd")

    assert renames(machine, body) == {}


def test_what_was_deleted_can_be_read_where_the_caller_has_kept_it(machine: Machine, tmp_path: Path) -> None:
    (machine.data / "old").write_text("the same")
    changes = changes_of(machine, lambda view: os.rename(view / "old", view / "new"))
    (machine.data / "old").write_text("moved on")  # of the same size
    (tmp_path / "kept").write_text("the same")
    with machine.stack() as stack:
        plain, root = machine.changes(), str(machine.root)
        assert not any(change.renamed_from for change in find_renames(plain, stack, machine_root=root))
        kept = find_renames(plain, stack, machine_root=root, open_old=lambda _: os.open(tmp_path / "kept", os.O_RDONLY))
    assert [change.renamed_from for change in kept] == [change.renamed_from for change in changes] == ["/data/old", ""]
