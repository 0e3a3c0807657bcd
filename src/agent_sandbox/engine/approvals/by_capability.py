"""Capabilities as answers: what the policy asks about is allowed by a token that covers it, and a person is asked only if none does.

No more than that: what the policy denies stays denied, whatever a token says. Each question is a look of its own, so a token that was
revoked or used up since the last one is no answer any more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from agent_sandbox.engine.capabilities import Capabilities, Mark
from agent_sandbox.engine.gate import Approver, Granted, Refused
from agent_sandbox.policy.action import Action
from agent_sandbox.policy.approval_rules import Word
from agent_sandbox.policy.decide import Ask
from agent_sandbox.policy.tokens import Genuine, Token


class CapabilityApprover:
    """Answers for one sandbox with the tokens that it holds, and otherwise as somebody else does."""

    def __init__(
        self,
        capabilities: Capabilities,
        tokens: Sequence[Token],
        *,
        sandbox: str,
        otherwise: Approver | None = None,
        counts: Callable[[Word], bool] | None = None,
    ) -> None:
        """`counts` tells whose grants are enough; without it everybody's are."""
        self._capabilities = capabilities
        self._tokens = tokens  # looked at for each question: what is handed over later counts from then on
        self._sandbox = sandbox
        self._otherwise = otherwise
        self._counts = counts
        self._marks: dict[str, Mark] = {}

    def ask(self, action: Action, verdict: Ask, deadline: float) -> Granted | Refused:
        """The first token that covers exactly this action counts as used. Raises OSError when that cannot be counted."""
        why = "no capability covers it"
        for token in tuple(self._tokens):
            found = self._capabilities.use(token, action, sandbox=self._sandbox, counts=self._counts)
            if isinstance(found, Genuine):
                name = found.names[0]
                if name not in self._marks:  # so that who revokes it is told what goes on
                    self._marks[name] = self._capabilities.mark(name)
                return Granted(f"capability {name}")
            why = found.why
        return self._otherwise.ask(action, verdict, deadline) if self._otherwise is not None else Refused(why)

    def end(self) -> None:
        """Nothing goes on any more under these capabilities."""
        while self._marks:
            self._marks.popitem()[1].end()
        if self._otherwise is not None:
            self._otherwise.end()
