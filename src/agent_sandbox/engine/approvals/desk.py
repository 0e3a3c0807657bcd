"""Everybody who can answer for one run: the capabilities that it holds first, then a person at the inbox. Closed when the run is over."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from agent_sandbox.engine.approvals.approver import InboxApprover
from agent_sandbox.engine.approvals.by_capability import CapabilityApprover
from agent_sandbox.engine.approvals.inbox import Inbox
from agent_sandbox.engine.capabilities import Capabilities
from agent_sandbox.engine.gate import Granted, Refused
from agent_sandbox.policy.action import Action
from agent_sandbox.policy.approval_rules import Word
from agent_sandbox.policy.decide import Ask
from agent_sandbox.policy.model import Policy
from agent_sandbox.policy.tokens import Token


class Desk:
    """The approver of one run of one sandbox under one policy."""

    def __init__(
        self,
        inbox: Inbox,
        capabilities: Capabilities,
        policy: Policy,
        *,
        sandbox: str,
        run: str,
        tokens: Sequence[Token],
        clock: Callable[[], float],
        counts: Callable[[Word], bool] | None = None,
    ) -> None:
        """`counts` tells whose grants are enough under this policy; without it everybody's are."""
        self._inbox = inbox
        self._capabilities = capabilities
        asks = policy.asks
        needs = (*asks.needs, *((f"the word of {' or '.join(asks.approvers) or 'nobody'}",) if asks.approvers is not None else ()))
        person = InboxApprover(inbox, policy=policy.digest(), sandbox=sandbox, run=run, clock=clock, needs=needs)
        self._first = CapabilityApprover(capabilities, tokens, sandbox=sandbox, otherwise=person, counts=counts)

    def ask(self, action: Action, verdict: Ask, deadline: float) -> Granted | Refused:
        """The answer to exactly this action."""
        return self._first.ask(action, verdict, deadline)

    def end(self) -> None:
        """The run is over: what was allowed for it is taken back, and nothing goes on any more under its capabilities.

        And what others have left when their time was over, without being there to see to it.
        """
        self._first.end()
        self._inbox.sweep()
        self._capabilities.sweep()
