"""Record which files of a project a run opened. An agent's decision may rest on a file that has changed since.

`kernel.notify` reports the opened files, as root only. Only opening a file is reported: not reading its status, not listing a directory,
and not looking up a name that does not exist. A program that only looked whether a file exists, or at its size, leaves no trace here.
"""

from __future__ import annotations

import os
import select
from threading import Thread

from agent_sandbox._fast.values import dataclass
from agent_sandbox.errors import PolicyError, WorkspaceError
from agent_sandbox.kernel import notify
from agent_sandbox.policy.paths import contains
from agent_sandbox.workspace.durable import explained, write_atomically
from agent_sandbox.workspace.store import SandboxState

_WHOLE, _PART = b"agent-sandbox reads 1 whole", b"agent-sandbox reads 1 part"
_MOST_PATHS = 1_000_000


@dataclass(frozen=True)
class Reads:
    """Absolute paths of opened files. If `complete` is False, some are missing, so any other file may have been opened too."""

    paths: frozenset[str]
    complete: bool = True

    def opened(self, path: str) -> bool:
        """Return whether a file was, or may have been, opened."""
        return not self.complete or path in self.paths

    def opened_below(self, directory: str) -> bool:
        """Return whether any file below a directory was, or may have been, opened."""
        return not self.complete or any(path.startswith(directory + "/") for path in self.paths)

    def __or__(self, other: Reads) -> Reads:
        return Reads(self.paths | other.paths, self.complete and other.complete)


def write(directory: str, run: str, reads: Reads) -> None:
    """Store the opened files of a run as `<directory>/<run>`, completely or not at all. Raises OSError."""
    os.makedirs(directory, mode=0o700, exist_ok=True)
    content = b"\0".join([_WHOLE if reads.complete else _PART, *sorted(map(os.fsencode, reads.paths)), b""])
    write_atomically(os.path.join(directory, run), content, sync=False)


def recall(directory: str) -> Reads | None:
    """Return the files that any watched run opened; None if no run was watched. A damaged list counts as incomplete."""
    total: Reads | None = None
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
            total = one if total is None else total | one
    return total


class ReadWatch:
    """A context manager that records the files a guest opens.

    Begin it when the guest is confined and waits for its program; end it when the guest has ended. `init` is a process in the guest's mount
    namespace; the project is found below the root of that process, as the guest sees it.
    """

    def __init__(self, init: int, project: str) -> None:
        """Start watching. Raises `WorkspaceError` if that is not possible."""
        self._project = project
        try:
            self._group = notify.watch_opens(f"/proc/{init}/root{project}")
        except OSError as error:
            raise WorkspaceError(f"cannot watch what the run reads: {error.strerror}", hint="it takes root; run without it") from error
        self._paths: set[str] = set()
        self._complete = True
        self._stop, self._stopping = os.pipe2(os.O_CLOEXEC)
        self._thread = Thread(target=self._follow, daemon=True)
        self._thread.start()

    def __enter__(self) -> ReadWatch:
        return self

    def __exit__(self, *ended: object) -> None:
        self.end()

    def end(self) -> Reads:
        """Stop watching and return the opened files, including those of every process that has ended by now."""
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
                for path in notify.opened(self._group):
                    if contains(self._project, path):
                        self._paths.add(path)
            except (notify.Overflow, OSError):
                self._complete = False
            if len(self._paths) > _MOST_PATHS:
                self._complete = False
                self._paths.clear()


class ReadTracker:
    """Records the files that one run opens. Between `begin` and `end` a thread takes the kernel's reports."""

    def __init__(self, state: SandboxState | None, run: int) -> None:
        """`run` is the number of the run. Raises `PolicyError` if `state` is None, as for a throw-away sandbox."""
        if state is None:
            raise PolicyError("what a throw-away run reads is not kept", hint="leave out --watch-reads, or --throw-away")
        self._state, self._run = state, run
        self._watch: ReadWatch | None = None

    def begin(self, init: int) -> None:
        """Start watching; call it while the guest waits for its program. Raises `WorkspaceError` if that is not possible."""
        self._watch = ReadWatch(init, self._state.project)

    def end(self) -> None:
        """Stop watching and store the opened files; call it when the run has ended. May be repeated. Raises `WorkspaceError`."""
        watch, self._watch = self._watch, None
        if watch is not None:
            reads = watch.end()
            with explained("keep what the run has read"):
                write(self._state.reads, str(self._run), reads)
