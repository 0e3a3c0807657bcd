"""The changes that are made to a tree: by a guest in a sandbox, and by the same code in the real tree that others look at.

python -B -m bench.edits mix TOP COUNT
python -B -m bench.edits write TOP COUNT TEXT
"""

from __future__ import annotations

import sys
from pathlib import Path

FILES_PER_FOLDER = 200
SMALL_BYTES = 1_000  # of a file that is promoted


def file_of(top: Path, number: int) -> Path:
    """The path of a file of a tree, by number."""
    return top / f"folder{number // FILES_PER_FOLDER:04d}" / f"file{number:06d}.txt"


def mix(top: Path, count: int) -> None:
    """Change so many paths, at every second file from the first on: a quarter removed, a quarter new beside it, half of them longer."""
    for number in range(count):
        path = file_of(top, 2 * number)
        if number % 4 == 0:
            path.unlink()
        elif number % 4 == 1:
            path.with_suffix(".new").write_text("new\n", encoding="ascii")
        else:
            with path.open("a", encoding="ascii") as file:
                file.write("more\n")


def write(top: Path, count: int, text: str) -> None:
    """Write the first files of a tree, all new or all over those that are there."""
    content = f"{text * SMALL_BYTES}"[: SMALL_BYTES - 1] + "\n"
    for number in range(count):
        path = file_of(top, number)
        if number % FILES_PER_FOLDER == 0:
            path.parent.mkdir(exist_ok=True)
        path.write_text(content, encoding="ascii")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["mix", top, count]:
            mix(Path(top), int(count))
        case ["write", top, count, text]:
            write(Path(top), int(count), text)
        case _:
            sys.exit(__doc__)
