"""The approvers of an SDK sandbox: capability tokens, then a caller's function or a person who answers with `agent-sandbox approve`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import inf

from agent_sandbox.assembly import here, words_that_count
from agent_sandbox.engine.approvals.approvers import CapabilityApprover
from agent_sandbox.engine.gate import Approver, Granted, Refused
from agent_sandbox.errors import PolicyError
from agent_sandbox.policy.action import Action
from agent_sandbox.policy.decide import Ask
from agent_sandbox.policy.model import Policy
from agent_sandbox.policy.tokens import Token, parse

Answering = Callable[[Action, Ask], "bool | str"]
FOR_THE_RUN = "run"  # what a function returns to let a run reach a host from now on


class Function:
    """An approver that calls a function of the caller. Only the return value True approves, and "run" for as long as the run goes on."""

    def __init__(self, function: Answering) -> None:
        self._function = function

    def ask(self, action: Action, verdict: Ask, deadline: float) -> Granted | Refused:
        """Call the function, and return whether it approved the action."""
        answer = self._function(action, verdict)
        if answer is True or answer == FOR_THE_RUN:
            return Granted("the application", until=inf if answer == FOR_THE_RUN else 0.0)
        return Refused("the application said no")

    def end(self) -> None:
        """Do nothing: this approver stores no approvals."""


class Asking:
    """Makes the approvers of one sandbox: one for each policy under which it runs work."""

    def __init__(self, sandbox: str, approver: Approver | Answering | None, tokens: Iterable[Token | str]) -> None:
        self._sandbox = sandbox
        self._capabilities = here().capabilities()
        self._tokens = [token_of(each) for each in tokens]
        self._given = _approver(approver)
        self._made: list[Approver] = []

    def approver(self, policy: Policy) -> Approver:
        """Make the approver for runs under this policy."""
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
        """Create a capability token for actions that match these patterns, use it in this sandbox from now on, and return it."""
        from shlex import split  # slow to load, and most approvers are functions

        words = tuple(tuple(split(pattern)) for pattern in patterns)
        token = self._capabilities.grant(self._sandbox, words, seconds=seconds, times=times, by="the application")
        self._tokens.append(token)
        return token

    def revoke(self, token: Token | str) -> None:
        """Revoke a token and all tokens derived from it."""
        self._capabilities.revoke(token if isinstance(token, Token) else parse(token) or token, by="the application")

    def end(self) -> None:
        """Revoke the approvals that were given for the lifetime of the sandbox."""
        while self._made:
            self._made.pop().end()


def opened_hosts(tokens: Iterable[Token | str], sandbox: str) -> tuple[str, ...]:
    """Return the hosts that these tokens open for a sandbox. Raises `PolicyError` for an invalid token."""
    granted = here().capabilities()
    return tuple(dict.fromkeys(host for each in tokens for host in granted.opened(token_of(each), sandbox=sandbox)))


def _approver(given: Approver | Answering | None) -> Approver | None:
    if given is None or hasattr(given, "ask"):
        return given  # type: ignore[return-value]  # a function has no such method
    return Function(given)


def token_of(text: Token | str) -> Token:
    """Return a token, parsed if it is text. Raises `PolicyError` for an invalid token; the message does not contain the token."""
    token = parse(text) if isinstance(text, str) else text
    if not isinstance(token, Token):
        raise PolicyError("invalid capability token", hint="give what grant() returned, or its text")
    return token
