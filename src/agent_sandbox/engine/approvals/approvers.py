"""Approvers answer for a policy that asks: first the capability tokens of a sandbox, then a person at the inbox.

The question holds exactly the action that was judged.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from agent_sandbox._fast.encoding import canonical_form
from agent_sandbox.engine.approvals.inbox import Inbox
from agent_sandbox.engine.approvals.question import Question
from agent_sandbox.engine.gate import Approver, Granted, Refused
from agent_sandbox.engine.grants import Capabilities, Mark
from agent_sandbox.policy.action import Action
from agent_sandbox.policy.approval_rules import Word
from agent_sandbox.policy.decide import Ask
from agent_sandbox.policy.model import Policy
from agent_sandbox.policy.tokens import Genuine, Token


class InboxApprover:
    """Asks a person through an inbox, for one run of a sandbox. `needs` are the conditions on an approval, such as a second factor."""

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
        """Ask a person about exactly this action, and return the answer."""
        question = Question(
            action=canonical_form(action),
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
        return self._inbox.ask(question) if verdict.wanted is None else self._inbox.ask(question, verdict.wanted)

    def end(self) -> None:
        """Revoke the approvals that were given for this run. Called when the run is over."""
        self._inbox.end_run(self._run)


class CapabilityApprover:
    """Approves the actions that capability tokens of one sandbox cover. Passes other questions on to the next approver."""

    def __init__(
        self,
        capabilities: Capabilities,
        tokens: Sequence[Token],
        *,
        sandbox: str,
        otherwise: Approver | None = None,
        counts: Callable[[Word], bool] | None = None,
    ) -> None:
        """`otherwise` is the next approver. `counts` returns whether a grantor's approval counts; without it, every grantor's does."""
        self._capabilities = capabilities
        self._tokens = tokens  # read anew for each question, so that tokens count that were added after this call
        self._sandbox = sandbox
        self._otherwise = otherwise
        self._counts = counts
        self._marks: dict[str, Mark] = {}

    def ask(self, action: Action, verdict: Ask, deadline: float) -> Granted | Refused:
        """Use the first token that covers this action; if none does, ask the next approver. Raises OSError if a use cannot be counted."""
        found, why = self._used(action)
        if found is not None:
            return found
        return self._otherwise.ask(action, verdict, deadline) if self._otherwise is not None else Refused(why)

    def pre_approval(self, action: Action, *, again: bool = False) -> Granted | Refused | None:
        """Return what the tokens say of this action; None if none speaks of it. Nobody is asked.

        A token that speaks of it and counts no more refuses. Set `again` to look at an action that goes on: that is no other use. Raises
        OSError if a use cannot be counted.
        """
        found, _ = self._used(action, again=again)
        if found is not None:
            return found
        ended = (self._capabilities.ended(token, action, sandbox=self._sandbox, counts=self._counts) for token in tuple(self._tokens))
        return next((Refused(why) for why in ended if why), None)

    def _used(self, action: Action, *, again: bool = False) -> tuple[Granted | None, str]:
        """Use the first token that covers this action. Returns the approval, and else why there is none."""
        why = "no capability covers it"
        for token in tuple(self._tokens):
            check = self._capabilities.use(token, action, sandbox=self._sandbox, counts=self._counts, again=again)
            if isinstance(check, Genuine):
                name = check.names[0]
                if name not in self._marks:  # so that `revoke` can name the processes that still use the capability
                    self._marks[name] = self._capabilities.mark(name)
                return Granted(f"capability {name}"), ""
            why = check.why
        return None, why

    def end(self) -> None:
        """Remove the in-use marks of the capabilities, and end the next approver. Called when the run is over."""
        while self._marks:
            self._marks.popitem()[1].end()
        if self._otherwise is not None:
            self._otherwise.end()


class Desk:
    """The approver of one run of one sandbox under one policy. It looks for a capability that allows the action, and else asks a person."""

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
        """`counts` returns whether a grantor's approval counts under this policy; without it, every grantor's does."""
        self._inbox = inbox
        self._capabilities = capabilities
        asks = policy.asks
        needs = (*asks.needs, *((f"the word of {' or '.join(asks.approvers) or 'nobody'}",) if asks.approvers is not None else ()))
        person = InboxApprover(inbox, policy=policy.digest(), sandbox=sandbox, run=run, clock=clock, needs=needs)
        self._first = CapabilityApprover(capabilities, tokens, sandbox=sandbox, otherwise=person, counts=counts)

    def ask(self, action: Action, verdict: Ask, deadline: float) -> Granted | Refused:
        """Return the answer of the first approver that has one to exactly this action."""
        return self._first.ask(action, verdict, deadline)

    def pre_approval(self, action: Action, *, again: bool = False) -> Granted | Refused | None:
        """Return what the capabilities say of this action, without a question: see `CapabilityApprover`."""
        return self._first.pre_approval(action, again=again)

    def end(self) -> None:
        """Revoke the approvals of this run, and remove the in-use marks of its capabilities. Called when the run is over.

        Also removes expired approvals and capabilities that other processes left.
        """
        self._first.end()
        self._inbox.sweep()
        self._capabilities.sweep()
