"""Approvers of the SDK: a function of the caller, capability tokens, or a person at the inbox; and tokens granted to a sandbox."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from agent_sandbox.assembly import here, words_that_count
from agent_sandbox.engine.approvals.approvers import CapabilityApprover
from agent_sandbox.engine.gate import Approver, Granted, Refused
from agent_sandbox.errors import PolicyError
from agent_sandbox.policy.action import Action
from agent_sandbox.policy.decide import Ask
from agent_sandbox.policy.model import Policy
from agent_sandbox.policy.tokens import Token, parse

Answering = Callable[[Action, Ask], bool]


class Function:
    """A function of the caller as an approver: only True is a yes."""

    def __init__(self, function: Answering) -> None:
        self._function = function

    def ask(self, action: Action, verdict: Ask, deadline: float) -> Granted | Refused:
        """Return the answer of the function."""
        return Granted("the application") if self._function(action, verdict) is True else Refused("the application said no")

    def end(self) -> None:
        """Do nothing: a function keeps no approvals."""


class Asking:
    """The approvers of one sandbox, one for each policy of its runs."""

    def __init__(self, sandbox: str, approver: Approver | Answering | None, tokens: Iterable[Token | str]) -> None:
        self._sandbox = sandbox
        self._capabilities = here().capabilities()
        self._tokens = [token_of(each) for each in tokens]
        self._given = _approver(approver)
        self._made: list[Approver] = []

    def approver(self, policy: Policy) -> Approver:
        """Return the approver for a policy."""
        approver: Approver = (
            here().desk(policy, here().inbox(policy=policy), sandbox=self._sandbox, tokens=self._tokens)
            if self._given is None
            else CapabilityApprover(
                self._capabilities,
                self._tokens,
                sandbox=self._sandbox,
                otherwise=self._given,
                counts=words_that_count(policy),
            )
        )
        self._made.append(approver)
        return approver

    def grant(self, patterns: Iterable[str], *, seconds: float, times: int | None) -> Token:
        """Make a token and give it to the sandbox."""
        from shlex import split  # slow to load, and most approvers are functions

        words = tuple(tuple(split(pattern)) for pattern in patterns)
        token = self._capabilities.grant(self._sandbox, words, seconds=seconds, times=times, by="the application")
        self._tokens.append(token)
        return token

    def revoke(self, token: Token | str) -> None:
        """Revoke a token and all derived from it."""
        self._capabilities.revoke(token if isinstance(token, Token) else parse(token) or token, by="the application")

    def end(self) -> None:
        """Revoke the approvals that were given for the lifetime of the sandbox."""
        while self._made:
            self._made.pop().end()


def _approver(given: Approver | Answering | None) -> Approver | None:
    if given is None or hasattr(given, "ask"):
        return given  # type: ignore[return-value]  # a function has no such method
    return Function(given)


def token_of(text: Token | str) -> Token:
    """Return the token of a text or token. Raises `PolicyError` for an invalid one, without repeating it."""
    token = parse(text) if isinstance(text, str) else text
    if not isinstance(token, Token):
        raise PolicyError("invalid capability token", hint="give what grant() returned, or its text")
    return token
