"""Who the gate asks: puts the action it judged into a question, and waits at the inbox."""

from __future__ import annotations

from collections.abc import Callable

from agent_sandbox.engine.approvals.inbox import Inbox
from agent_sandbox.engine.approvals.question import Question
from agent_sandbox.engine.gate import Granted, Refused
from agent_sandbox.policy import canonical
from agent_sandbox.policy.action import Action
from agent_sandbox.policy.decide import Ask


def _nothing(action: Action) -> str:
    return ""


class InboxApprover:
    """Asks through an inbox, for one run of one sandbox under one policy. `details` adds what belongs to an action: its diff, its plan."""

    def __init__(
        self,
        inbox: Inbox,
        *,
        policy: str,
        sandbox: str,
        run: str,
        clock: Callable[[], float],
        details: Callable[[Action], str] = _nothing,
    ) -> None:
        self._inbox = inbox
        self._policy = policy
        self._sandbox = sandbox
        self._run = run
        self._clock = clock
        self._details = details

    def ask(self, action: Action, verdict: Ask, deadline: float) -> Granted | Refused:
        """The answer to exactly this action."""
        question = Question(
            action=canonical.plain(action),
            policy=self._policy,
            sandbox=self._sandbox,
            run=self._run,
            why=f"{verdict.because.why} ({verdict.because.rule})",
            asked=self._clock(),
            until=deadline,
            details=self._details(action),
        )
        return self._inbox.ask(question)
