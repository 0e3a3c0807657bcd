"""Keep with a stored sandbox which files of its project a run opened, so that `status` can tell which of those have moved on since."""

from __future__ import annotations

from agent_sandbox.errors import PolicyError
from agent_sandbox.workspace import read_tracking
from agent_sandbox.workspace.durable import explained
from agent_sandbox.workspace.read_tracking import ReadWatch
from agent_sandbox.workspace.store import SandboxState


class Reading:
    """Watches one run. Between `begin` and `end` a thread takes the kernel's reports."""

    def __init__(self, state: SandboxState | None, run: int) -> None:
        """`run` tells it from others of this sandbox. Raises `PolicyError` for a sandbox that nothing is kept of."""
        if state is None:
            raise PolicyError("what a throw-away run reads is not kept", hint="leave out --watch-reads, or --throw-away")
        self._state, self._run = state, run
        self._watch: ReadWatch | None = None

    def begin(self, init: int) -> None:
        """When the guest waits for its program. Raises `WorkspaceError` where it cannot be done: then nothing runs."""
        self._watch = ReadWatch(init, self._state.project)

    def end(self) -> None:
        """When it has ended: keep what was opened. May be repeated. Raises `WorkspaceError`."""
        watch, self._watch = self._watch, None
        if watch is not None:
            found = watch.end()
            with explained("keep what the run has read"):
                read_tracking.write(self._state.reads, str(self._run), found)
