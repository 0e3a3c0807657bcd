"""Which files of a project a run opened: a decision of an agent may rest on what it read, and that may have moved on since.

`kernel.fanotify` reports them, as root only. Opening a file is what is reported: not asking for its status, not listing a directory, and
not looking for a name that is not there. A program that saw that a file exists, or how large it is, has left no trace here.
"""

from __future__ import annotations

import os

from agent_sandbox.values import dataclass

_WHOLE, _PART = b"agent-sandbox reads 1 whole", b"agent-sandbox reads 1 part"


@dataclass(frozen=True)
class Reads:
    """Absolute paths of files that were opened. When `complete` is False some were missed: then any file may have been read."""

    paths: frozenset[str]
    complete: bool = True

    def opened(self, path: str) -> bool:
        """Whether a file was, or may have been, opened."""
        return not self.complete or path in self.paths

    def opened_below(self, directory: str) -> bool:
        """The same of anything in a directory."""
        return not self.complete or any(path.startswith(directory + "/") for path in self.paths)

    def __or__(self, other: Reads) -> Reads:
        return Reads(self.paths | other.paths, self.complete and other.complete)


def write(directory: str, run: str, reads: Reads) -> None:
    """Keep what a run read as `<directory>/<run>`, whole or not at all. Raises OSError."""
    os.makedirs(directory, mode=0o700, exist_ok=True)
    path = os.path.join(directory, run)
    with open(os.open(path + ".new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), "wb") as file:
        file.write(b"\0".join([_WHOLE if reads.complete else _PART, *sorted(map(os.fsencode, reads.paths)), b""]))
    os.rename(path + ".new", path)


def recall(directory: str) -> Reads | None:
    """What all runs that were watched have read; None when none was. A damaged list is one of which some were missed."""
    found: Reads | None = None
    try:
        names = sorted(os.listdir(directory))
    except FileNotFoundError:
        return None
    for name in names:
        if not name.endswith(".new"):
            with open(os.path.join(directory, name), "rb") as file:
                first, *paths = file.read().split(b"\0")
            whole = first == _WHOLE and paths[-1:] == [b""]
            one = Reads(frozenset(os.fsdecode(path) for path in paths if path), whole)
            found = one if found is None else found | one
    return found
