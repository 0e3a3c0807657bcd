"""`approve` and `deny`: show the waiting questions, each with the exact action it is about, and answer them."""

from __future__ import annotations

import getpass
import os
import time

from agent_sandbox._fast.values import dataclass
from agent_sandbox.assembly import here
from agent_sandbox.cli.parser import UsageError
from agent_sandbox.cli.permission_options import ApproveOptions
from agent_sandbox.cli.render.messages import Console, remark, reset_terminal
from agent_sandbox.cli.results import VerbResult
from agent_sandbox.engine.approvals.inbox import RUN_SECONDS, Inbox, Waiting
from agent_sandbox.engine.approvals.question import Decision
from agent_sandbox.errors import PolicyError
from agent_sandbox.policy.model import SECOND_FACTOR

NOTHING_ANSWERED = 3
_WATCH_SECONDS = 0.5
_SHORTEST = 4  # letters of a digest that are enough to name a question, if the question is shown before the answer


@dataclass(frozen=True)
class QuestionFacts:
    """A question that waits for an answer: its text, when it expires (`until`), and how often it was asked (`times`)."""

    digest: str
    text: str
    times: int
    until: float


@dataclass(frozen=True)
class ApproveResult(VerbResult):
    """The questions that were waiting, and the answer given on the command line, if any."""

    kind = "approve"

    waiting: tuple[QuestionFacts, ...]
    answered: Decision | None
    exit: int

    def text(self, console: Console) -> None:
        if not self.waiting:
            remark("nothing is waiting")


@dataclass(frozen=True)
class EnrollResult(VerbResult):
    """A new second factor: the secret to add to an authenticator."""

    kind = "approve-enroll"

    secret: str

    def text(self, console: Console) -> None:
        print(self.secret)
        remark("add this to an authenticator now: it is not shown again")


def approve(options: ApproveOptions, console: Console) -> VerbResult:
    """Show the waiting questions, and answer them."""
    if options.enroll:
        return EnrollResult(here().second_factor().enroll(user_name()))
    inbox = here().inbox(of=options.of)
    if options.watch:
        _watch(options, inbox, console)
    waiting = inbox.waiting() if options.digest is None else _chosen(inbox.waiting(), options.digest)
    facts = tuple(QuestionFacts(each.digest, each.text, each.times, each.until) for each in waiting)
    decision = _given(options)
    if console.shows:
        answered = [_ask(options, inbox, each, console) for each in waiting]
        return ApproveResult(facts, decision if any(answered) else None, 0 if any(answered) else NOTHING_ANSWERED)
    for each in waiting if decision is not None else ():
        _answer(options, inbox, each, decision or Decision.NO, console)
    return ApproveResult(facts, decision if waiting else None, 0 if waiting or options.digest is None else NOTHING_ANSWERED)


def _watch(options: ApproveOptions, inbox: Inbox, console: Console) -> None:
    """Ask the user about each question as it arrives, until interrupted. Raises `UsageError` without a terminal."""
    if not console.asks:
        raise UsageError("--watch needs a terminal", hint="list with: agent-sandbox approve --json")
    seen: set[str] = set()
    while True:
        for each in inbox.waiting():
            if each.digest not in seen:
                seen.add(each.digest)
                _ask(options, inbox, each, console)
        time.sleep(_WATCH_SECONDS)


def _ask(options: ApproveOptions, inbox: Inbox, waiting: Waiting, console: Console) -> bool:
    """Show a question, and answer it as the command line or the user says. Returns whether it was answered."""
    reset_terminal()
    print(waiting.text, end="")
    if waiting.times > 1:
        print(f"asked     {waiting.times} times")
    left = max(waiting.until - time.time(), 0)
    print(f"for       {left:.0f} seconds more; then the answer is no\n")
    decision = _given(options) or (_asked(options, console) if console.asks else None)
    if decision is None:
        return False
    try:
        _answer(options, inbox, waiting, decision, console)
    except PolicyError as error:  # meanwhile somebody answered the question elsewhere, or it expired
        remark(str(error))
        return False
    return True


def _given(options: ApproveOptions) -> Decision | None:
    """Return the answer given on the command line; None if there is none."""
    if options.allow is None:
        return None
    return _yes(options) if options.allow else Decision.NO


def _asked(options: ApproveOptions, console: Console) -> Decision | None:
    """Ask the person at the terminal for the answer. Returns None if the person gives none."""
    yes = _yes(options)
    answers = {"y": yes, "yes": yes, "n": Decision.NO, "no": Decision.NO}
    return answers.get(console.answer("Allow exactly this? [y/n, or Enter to leave it] "))


def _yes(options: ApproveOptions) -> Decision:
    return Decision.FOR_THIS_RUN if options.for_run else Decision.ONCE


def _answer(options: ApproveOptions, inbox: Inbox, waiting: Waiting, decision: Decision, console: Console) -> None:
    code = options.code
    if code is None and SECOND_FACTOR in waiting.needs and decision is not Decision.NO and console.asks:
        code = console.answer("Second factor: ")
    seconds = RUN_SECONDS if options.seconds is None else options.seconds
    inbox.answer(waiting.name, decision, digest=waiting.digest, by=user_name(), seconds=seconds, code=code)
    console.note({Decision.NO: "refused", Decision.ONCE: "allowed, once"}.get(decision, "allowed for this run"))


def _chosen(waiting: list[Waiting], digest: str) -> list[Waiting]:
    chosen = [each for each in waiting if each.digest.startswith(digest.lower())] if len(digest) >= _SHORTEST else []
    if len(chosen) > 1:
        raise UsageError(f"{len(chosen)} questions begin with {digest!r}", hint="give more of the digest")
    if not chosen:
        raise PolicyError(f"no waiting question begins with {digest!r}", hint="see: agent-sandbox approve")
    return chosen


def user_name() -> str:
    """Return the name of this user, as it is recorded with an answer."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container may run as a number without an account
        return f"user {os.getuid()}"
