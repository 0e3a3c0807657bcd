"""Capabilities as answers: what the policy asks about is allowed by a token that covers it, and a person is asked only if none does.

No more than that: what the policy denies stays denied, whatever a token says. Each question is a look of its own, so a token that was
revoked or used up since the last one is no answer any more.
"""

from __future__ import annotations

from collections.abc import Sequence

from agent_sandbox.engine.capabilities import Capabilities
from agent_sandbox.engine.gate import Approver, Granted, Refused
from agent_sandbox.policy.action import Action
from agent_sandbox.policy.capabilities import Genuine, Token
from agent_sandbox.policy.decide import Ask


class CapabilityApprover:
    """Answers for one sandbox with the tokens that it holds, and otherwise as somebody else does."""

    def __init__(self, capabilities: Capabilities, tokens: Sequence[Token], *, sandbox: str, otherwise: Approver | None = None) -> None:
        self._capabilities = capabilities
        self._tokens = tuple(tokens)
        self._sandbox = sandbox
        self._otherwise = otherwise

    def ask(self, action: Action, verdict: Ask, deadline: float) -> Granted | Refused:
        """The first token that covers exactly this action counts as used. Raises OSError when that cannot be counted."""
        why = "no capability covers it"
        for token in self._tokens:
            found = self._capabilities.use(token, action, sandbox=self._sandbox)
            if isinstance(found, Genuine):
                return Granted(f"capability {found.names[0]}")
            why = found.why
        return self._otherwise.ask(action, verdict, deadline) if self._otherwise is not None else Refused(why)
