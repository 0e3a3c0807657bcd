"""Which files of a project a run opened: a decision of an agent may rest on what it read, and that may have moved on since.

`kernel.fanotify` reports them, as root only. Opening a file is what is reported: not asking for its status, not listing a directory, and
not looking for a name that is not there. A program that saw that a file exists, or how large it is, has left no trace here.
"""

from __future__ import annotations

import os
import select
from threading import Thread
from types import TracebackType

from agent_sandbox._fast.values import dataclass
from agent_sandbox.errors import WorkspaceError
from agent_sandbox.kernel import fanotify
from agent_sandbox.workspace.changes import covers

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


_MOST_PATHS = 1_000_000


class ReadWatch:
    """Begin it when the guest is confined and waits for its program, end it when the guest has ended. A context manager.

    `init` is a process in the guest's mount namespace, by whose root the project is found as the guest sees it.
    """

    def __init__(self, init: int, project: str) -> None:
        """Raises `WorkspaceError` where it cannot be done."""
        self._project = project
        try:
            self._group = fanotify.watch_opens(f"/proc/{init}/root{project}")
        except OSError as error:
            raise WorkspaceError(f"cannot watch what the run reads: {error.strerror}", hint="it takes root; run without it") from error
        self._paths: set[str] = set()
        self._complete = True
        self._stop, self._stopping = os.pipe2(os.O_CLOEXEC)
        self._thread = Thread(target=self._follow, daemon=True)
        self._thread.start()

    def __enter__(self) -> ReadWatch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.end()

    def end(self) -> Reads:
        """What was opened. The reports of all that has ended by now are among it."""
        if self._stopping >= 0:
            os.close(self._stopping)
            self._thread.join()
            os.close(self._stop)
            os.close(self._group)
            self._stopping = -1
        return Reads(frozenset(self._paths), self._complete)

    def _follow(self) -> None:
        poller = select.poll()
        poller.register(self._group, select.POLLIN)
        poller.register(self._stop, select.POLLIN)
        ended = False
        while not ended:
            ended = any(fd == self._stop for fd, _ in poller.poll())
            try:
                for path in fanotify.opened(self._group):
                    if covers(self._project, path):
                        self._paths.add(path)
            except (fanotify.Overflow, OSError):
                self._complete = False
            if len(self._paths) > _MOST_PATHS:
                self._complete = False
                self._paths.clear()
