"""The two projects whose clones are compared: ten files, and two hundred thousand. Made once, kept in the benchmark's own directory."""

from __future__ import annotations

from pathlib import Path

from bench.subjects import FEW_FILES, MANY_FILES, tree

FILES_PER_FOLDER = 200


def make(top: Path, files: int) -> None:
    """A tree with this many small files. One that was left half-made is completed."""
    finished = top / "agent-sandbox.toml"  # what makes it a project; written last
    if finished.exists():
        return
    for number in range(files - 1):
        folder = top / f"folder{number // FILES_PER_FOLDER:04d}"
        if number % FILES_PER_FOLDER == 0:
            folder.mkdir(parents=True, exist_ok=True)
        (folder / f"file{number:06d}.txt").write_text("x\n", encoding="ascii")
    finished.touch()


if __name__ == "__main__":
    for count in (FEW_FILES, MANY_FILES):
        make(tree(count), count)
