"""Who the gate asks: puts the action it judged into a question, and waits at the inbox."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from agent_sandbox.engine.approvals.inbox import Inbox
from agent_sandbox.engine.approvals.question import Question
from agent_sandbox.engine.gate import Granted, Refused
from agent_sandbox.policy import canonical
from agent_sandbox.policy.action import Action
from agent_sandbox.policy.decide import Ask


class InboxApprover:
    """Asks through an inbox, for one run of one sandbox under one policy; `needs` is what a yes takes there."""

    def __init__(
        self,
        inbox: Inbox,
        *,
        policy: str,
        sandbox: str,
        run: str,
        clock: Callable[[], float],
        needs: Sequence[str] = (),
    ) -> None:
        self._inbox = inbox
        self._policy = policy
        self._sandbox = sandbox
        self._run = run
        self._clock = clock
        self._needs = ", ".join(needs)

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
            details=verdict.details,
            needs=self._needs,
            asker=os.getuid(),
        )
        return self._inbox.ask(question)

    def end(self) -> None:
        """The run is over, and with it what was allowed for all of it."""
        self._inbox.end_run(self._run)
