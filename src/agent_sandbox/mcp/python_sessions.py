"""Python sessions of the server: interpreters with a timeline, under the policy of the server and without a network.

A session sees the project as it really is. Its files lie in the session: they are part of its states, and go when it ends. One that began
under an elevation ends with it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from agent_sandbox.assembly import here
from agent_sandbox.config import SandboxConfig
from agent_sandbox.errors import PolicyError, SandboxError
from agent_sandbox.sandbox import Sandbox
from agent_sandbox.session import SandboxSession

if TYPE_CHECKING:
    from agent_sandbox.engine.code_check import EarlyLook
    from agent_sandbox.engine.run import Session
    from agent_sandbox.mcp.workspace import ServedWorkspace
    from agent_sandbox.policy.model import Policy

MOST_SESSIONS = 9  # the first one and eight forks


class ServedSandbox(Sandbox):
    """The sandbox of a server's Python sessions. Its policy is the server's, not that of its settings."""

    def __init__(self, workspace: ServedWorkspace) -> None:
        self._workspace, self._policy = workspace, workspace.policy_of_sessions()
        self._made = False
        seconds = self._policy.limits.wall_seconds
        left = workspace.elevated_seconds()
        if left is not None and left <= 0:
            raise SandboxError("the elevation expired before the session could start", hint="ask again for what it needs")
        config = SandboxConfig(
            allow_file_read=True,
            allow_file_write=True,
            allow_subprocess=True,
            allow_shell=True,
            working_dir=workspace.project,
            env_vars=dict(workspace.variables),
            validate_code=False,
            enable_audit=False,
            timeout_seconds=seconds,
            lifetime_seconds=left,
        )
        super().__init__(config)
        self._most_seconds = seconds

    @property
    def digest(self) -> str:
        """The digest of the policy that its sessions run under."""
        return self._policy.digest()

    def _session_for(self, policy: Policy, early: EarlyLook | None) -> Session:
        workspace = self._workspace
        if not self._made:  # what the settings say does not count
            policy, self._made = self._policy, True
        approver = workspace.questions.approver(policy, lambda: workspace.call) if policy.asks_somebody else None
        gate = here().gate(policy, sandbox=f"{workspace.id}/python", approver=approver)
        return here().session(gate, here().runtimes("process"), project=workspace.project, early=workspace.early)

    def _search_again(self) -> None:
        """Do nothing: a session sees what it saw when it began."""


def can_fork() -> bool:
    """Return whether a session can be forked."""
    return hasattr(SandboxSession, "fork")


class PythonSessions:
    """The Python sessions of one server, by number: 0 is the first, the others are its forks."""

    def __init__(self, workspace: ServedWorkspace) -> None:
        self._workspace = workspace
        self._sandbox: ServedSandbox | None = None
        self._sessions: dict[int, SandboxSession] = {}
        self._next = 1

    def session(self, number: int = 0, *, begin: bool = False) -> SandboxSession:
        """Return a session. With `begin`, the first one is begun if there is none. Raises `SandboxError` if there is no such session.

        A session that began under another policy has ended: it would have more than the present one allows.
        """
        if self._sandbox is not None and self._sandbox.digest != self._digest_now():
            self.close()
            raise SandboxError(
                "the policy has changed, and the python session has ended with it", hint="call python again to begin another"
            )
        known = self._sessions.get(number)
        if known is not None and known.ended:
            del self._sessions[number]
            known.close()
            known = None
        if known is None and begin and number == 0:
            if not self._sessions:
                self.close()  # the sandbox of an earlier session may have ended with its elevation
            if self._sandbox is None:
                self._sandbox = ServedSandbox(self._workspace)
            known = self._sessions[0] = self._sandbox.session(timeline=True)
        if known is None:
            raise SandboxError(f"there is no python session {number}", hint="use the tool python to begin one")
        return known

    def _digest_now(self) -> str:
        """Return the digest of the policy that a session would have now; empty if there could be none."""
        try:
            return self._workspace.policy_of_sessions().digest()
        except PolicyError:
            return ""

    def fork(self, number: int, step: int | None, count: int) -> tuple[int, ...]:
        """Fork a session at a step, and return the numbers of the forks."""
        session = self.session(number)
        if len(self._sessions) + count > MOST_SESSIONS:
            raise SandboxError(f"there are {len(self._sessions)} sessions, and at most {MOST_SESSIONS}", hint="restart ends them all")
        fork: Any = getattr(session, "fork", None)
        if fork is None:
            raise SandboxError("a session cannot be forked in this version", hint="go back with rewind instead")
        forks: tuple[SandboxSession, ...] = fork(step, count)
        numbers = tuple(range(self._next, self._next + len(forks)))
        self._next += len(forks)
        self._sessions |= dict(zip(numbers, forks, strict=True))
        return numbers

    def close_forks(self, numbers: Iterable[int]) -> tuple[int, ...]:
        """End the forks with these numbers. Return those that there were."""
        closed = tuple(number for number in dict.fromkeys(numbers) if number and number in self._sessions)
        for number in closed:
            self._sessions.pop(number).close()
        return closed

    def close(self) -> None:
        """End all sessions, forks first."""
        sessions, self._sessions = list(self._sessions.values())[::-1], {}
        for each in sessions:
            each.close()
        if self._sandbox is not None:
            self._sandbox.close()
            self._sandbox = None
