"""What the trees are made of: the same changes have to be there for everybody who lists them."""

from __future__ import annotations

import subprocess
from pathlib import Path

from bench import edits, trees
from bench.edits import file_of


def test_as_many_paths_change_as_are_asked_for(tmp_path: Path) -> None:
    trees.make(tmp_path, 40)
    before = {path: path.read_text() for path in tmp_path.rglob("*.txt")}
    edits.mix(tmp_path, 20)
    after = {path: path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
    gone, new = before.keys() - after.keys(), {path for path in after.keys() - before.keys() if path.suffix == ".new"}
    longer = {path for path in before.keys() & after.keys() if before[path] != after[path]}
    assert (len(gone), len(new), len(longer)) == (5, 5, 10)


def test_git_sees_the_same_number_of_changes(tmp_path: Path) -> None:
    top = tmp_path / "tree"
    trees.make_changed(top, 40, 20)
    trees.make_changed(top, 40, 20)  # made once
    told = subprocess.run([*trees.GIT, "status", "--porcelain"], cwd=top, capture_output=True, text=True, check=True).stdout
    assert sorted(line.split()[0] for line in told.splitlines()) == [*["??"] * 5, *["D"] * 5, *["M"] * 10]


def test_a_tree_that_was_left_half_changed_is_made_anew(tmp_path: Path) -> None:
    top = tmp_path / "tree"
    trees.make_changed(top, 40, 20)
    (top / ".git/changed").unlink()
    trees.make_changed(top, 40, 20)
    assert not file_of(top, 0).exists()
    assert file_of(top, 2).with_suffix(".new").exists()


def test_small_files_are_written_new_and_over_old_ones(tmp_path: Path) -> None:
    for text in ("old", "new"):
        edits.write(tmp_path, 3, text)
        assert all(file_of(tmp_path, number).read_text().startswith(text) for number in range(3))
    assert file_of(tmp_path, 0).stat().st_size == edits.SMALL_BYTES
