"""The approver of the command line: the given capability tokens, then a person, at this terminal or with `approve`."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Iterable

from agent_sandbox.assembly import here
from agent_sandbox.cli.caller import CAPABILITY
from agent_sandbox.cli.render.messages import at_a_terminal, counted, remark, say
from agent_sandbox.engine.approvals.approvers import Desk
from agent_sandbox.engine.approvals.inbox import Inbox, Waiting
from agent_sandbox.engine.approvals.question import Decision
from agent_sandbox.errors import PolicyError
from agent_sandbox.policy.model import Policy
from agent_sandbox.policy.tokens import Token, parse

_LOOK_SECONDS = 0.1
_ANSWERS = {"y": Decision.ONCE, "yes": Decision.ONCE, "r": Decision.FOR_THIS_RUN, "n": Decision.NO, "no": Decision.NO}


def desk_for(capabilities: tuple[str, ...], policy: Policy, *, sandbox: str, prompt: bool) -> Desk:
    """Return the approver for a command.

    With `prompt`, it may ask a person at our terminal. `prompt` must be false if the sandboxed program reads from that terminal.
    """
    tokens = tokens_of((*capabilities, os.environ.get(CAPABILITY, "")))
    return here().desk(policy, inbox_for(policy, prompt=prompt), sandbox=sandbox, tokens=tokens)


def inbox_for(policy: Policy, *, prompt: bool) -> Inbox:
    """Return the inbox that holds questions until a person answers them. It prints each new question."""
    asking = _AtTheTerminal() if prompt and at_a_terminal() and not policy.asks.needs else _Elsewhere()
    inbox = here().inbox(policy=policy, on_wait=asking.shown, pause=asking.pause)
    asking.inbox = inbox
    return inbox


def tokens_of(texts: Iterable[str]) -> tuple[Token, ...]:
    """Return the capability tokens in these texts; one text may hold several. Raises `PolicyError`, which never contains the token."""
    tokens: list[Token] = []
    for word in (word for text in texts for word in text.split()):
        if (token := parse(word)) is None:
            raise PolicyError("invalid capability token", hint="make one with: agent-sandbox grant")
        tokens.append(token)
    return tuple(tokens)


class _Elsewhere:
    """Prints the command that answers a question (`agent-sandbox approve`), and waits for the answer."""

    inbox: Inbox

    def shown(self, waiting: Waiting) -> None:
        """Print that a question is waiting, and the command that answers it."""
        minutes = counted(max(round((waiting.until - time.time()) / 60), 1), "minute")
        why = next((line[10:] for line in waiting.text.split("\n") if line.startswith("because ")), "the policy asks")
        remark(f"{why}; waiting {minutes} for an answer: agent-sandbox approve {waiting.digest[:12]}")

    def pause(self) -> None:
        """Sleep for a moment, before the inbox is checked again."""
        time.sleep(_LOOK_SECONDS)


class _AtTheTerminal(_Elsewhere):
    """Asks at this terminal, while `agent-sandbox approve` can answer too. The first answer counts."""

    def __init__(self) -> None:
        self._waiting: Waiting | None = None
        self._typed = b""

    def shown(self, waiting: Waiting) -> None:
        """Show a question. Discards earlier typing, so that it cannot be taken as the answer."""
        import termios  # only at a terminal

        super().shown(waiting)
        self._waiting = waiting
        termios.tcflush(0, termios.TCIFLUSH)
        say(waiting.text.rstrip("\n"))
        say("Allow exactly this? [y once, r for this run, n] ")

    def pause(self) -> None:
        """Wait a moment for a typed answer, before the inbox is checked again."""
        if not select.select([0], [], [], _LOOK_SECONDS)[0]:
            return
        typed = os.read(0, 4096)
        self._typed += typed
        line, ended, rest = self._typed.partition(b"\n")
        if not typed:  # the terminal has gone
            time.sleep(_LOOK_SECONDS)
        decision = _ANSWERS.get(line.decode(errors="replace").strip().lower()) if ended else None
        self._typed = rest if ended else self._typed
        if decision is None or self._waiting is None:
            return
        from agent_sandbox.cli.commands.approve import user_name  # that module prompts with this one

        try:
            self.inbox.answer(self._waiting.name, decision, digest=self._waiting.digest, by=user_name())
        except PolicyError as error:  # somebody answered elsewhere in this moment
            remark(error.message)
