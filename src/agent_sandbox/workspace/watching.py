"""Watch which files of a project a run opens, from before its program starts until it has ended.

A thread takes the reports, so that they cost the run little; there is no bound on how many may wait. Only root may ask for them, and they
cost a few microseconds for each file that is opened: so a run is watched when somebody asks for it.
"""

from __future__ import annotations

import os
import select
from threading import Thread
from types import TracebackType

from agent_sandbox.errors import WorkspaceError
from agent_sandbox.kernel import fanotify
from agent_sandbox.workspace.changes import covers
from agent_sandbox.workspace.reads import Reads

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
