"""The trees that are cloned, changed and listed. Made once, kept in the benchmark's own directory."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from bench import edits
from bench.edits import FILES_PER_FOLDER, file_of

# Nobody's settings: as it comes out of the box, and without a watcher that would have to be started first.
GIT = ("git", "-c", "safe.directory=*", "-c", "core.fsmonitor=false", "-c", "core.untrackedCache=false")
GIT_ENVIRONMENT = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
HOME = Path(os.environ.get("AGENT_SANDBOX_BENCH") or Path(__file__).resolve().parent.parent / ".bench")  # as run.sh has chosen it
FEW_FILES, MANY_FILES = 10, 200_000


def tree(files: int) -> Path:
    """The project with this many files."""
    return HOME / "trees" / str(files)


def make(top: Path, files: int) -> None:
    """A tree with this many small files. One that was left half-made is completed."""
    finished = top / "agent-sandbox.toml"  # what makes it a project; written last
    if finished.exists():
        return
    for number in range(files - 1):
        if number % FILES_PER_FOLDER == 0:
            file_of(top, number).parent.mkdir(parents=True, exist_ok=True)
        file_of(top, number).write_text("x\n", encoding="ascii")
    finished.touch()


def make_changed(top: Path, files: int, changes: int) -> None:
    """The same tree in git: all of it committed, then so many changes made to the files themselves."""
    finished = top / ".git" / "changed"
    if finished.exists():
        return
    shutil.rmtree(top, ignore_errors=True)
    make(top, files)
    identity = ("-c", "user.name=bench", "-c", "user.email=bench@localhost", "-c", "gc.auto=0")
    for words in (("init", "--quiet"), ("add", "--all"), ("commit", "--quiet", "--message", "all")):
        subprocess.run([*GIT, *identity, *words], cwd=top, env={**os.environ, **GIT_ENVIRONMENT}, check=True, capture_output=True)
    edits.mix(top, changes)
    # What it learns by looking it writes to its index, so that whoever looks next need not read a file again.
    subprocess.run([*GIT, "status", "--porcelain"], cwd=top, env={**os.environ, **GIT_ENVIRONMENT}, check=True, capture_output=True)
    finished.touch()


if __name__ == "__main__":
    for count in (FEW_FILES, MANY_FILES):
        make(tree(count), count)
