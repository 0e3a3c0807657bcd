"""`approve`: what waits for somebody, shown as it will be done, and the answer to exactly that."""

from __future__ import annotations

import getpass
import os
import sys
import termios
import time
from contextlib import suppress

from agent_sandbox._fast.values import replace
from agent_sandbox.assembly import here
from agent_sandbox.cli.parser import Request, UsageError
from agent_sandbox.cli.render import quantities
from agent_sandbox.cli.render.messages import at_a_terminal, remark
from agent_sandbox.engine.approvals.inbox import RUN_SECONDS, Inbox, Waiting
from agent_sandbox.engine.approvals.question import Decision
from agent_sandbox.errors import PolicyError
from agent_sandbox.policy.approval_rules import SECOND_FACTOR

NOTHING_ANSWERED = 3
_WATCH_SECONDS = 0.5
_SHORTEST = 4  # letters of a digest that are taken for it, where it is shown before it is answered


def approve(request: Request) -> int:
    """The verb `approve`."""
    if request.has("--enroll"):
        return _enroll()
    inbox = here().inbox(of=request.value("--of"))
    _check(request)
    if request.has("--watch"):
        return _watch(request, inbox)
    waiting = _chosen(inbox.waiting(), request.words[0]) if request.words else inbox.waiting()
    if request.has("--json"):
        return _document(request, inbox, waiting)
    if not waiting:
        remark("nothing is waiting")
        return NOTHING_ANSWERED
    answered = [_ask(request, inbox, each) for each in waiting]
    return 0 if any(answered) else NOTHING_ANSWERED


def deny(request: Request) -> int:
    """The verb `deny`: no, to one that waits."""
    return approve(replace(request, given={**request.given, "--refuse": ("",)}))


def _enroll() -> int:
    """Make the second factor, and print it once."""
    print(here().second_factor().enroll(somebody()))
    remark("put this into an authenticator now: it is not shown again")
    return 0


def _check(request: Request) -> None:
    if request.has("--yes") and request.has("--refuse"):
        raise UsageError("--yes and --refuse say opposite things", hint="give one of them")
    if request.has("--yes") and not (request.words and len(request.words[0]) == 64):
        raise UsageError("what is allowed unseen is named by its whole digest", hint="look first: agent-sandbox approve")
    if request.has("--refuse") and not request.words:  # some letters will do: a no to something else is asked for again
        raise UsageError("what is refused unseen is named by its digest", hint="look first: agent-sandbox approve")


def _watch(request: Request, inbox: Inbox) -> int:
    """Until it is interrupted: each question once, as it comes."""
    if not at_a_terminal():
        raise UsageError("--watch asks a person, and there is no terminal", hint="list with: agent-sandbox approve --json")
    seen: set[str] = set()
    while True:
        for each in inbox.waiting():
            if each.digest not in seen:
                seen.add(each.digest)
                _ask(request, inbox, each)
        time.sleep(_WATCH_SECONDS)


def _ask(request: Request, inbox: Inbox, waiting: Waiting) -> bool:
    """Show a question and answer it, if somebody does."""
    print(waiting.text, end="")
    if waiting.times > 1:
        print(f"asked     {waiting.times} times")
    left = max(waiting.until - time.time(), 0)
    print(f"for       {left:.0f} seconds more; then the answer is no\n")
    decision = _decision(request)
    if decision is None:
        return False
    try:
        _answer(request, inbox, waiting, decision)
    except PolicyError as error:  # it was answered, or its time was over, while somebody thought about it
        remark(str(error))
        return False
    return True


def _decision(request: Request) -> Decision | None:
    yes = Decision.FOR_THIS_RUN if request.has("--for-run") else Decision.ONCE
    if request.has("--yes"):
        return yes
    if request.has("--refuse"):
        return Decision.NO
    if not at_a_terminal():
        return None
    sys.stdout.flush()
    with suppress(termios.error):
        termios.tcflush(0, termios.TCIFLUSH)  # what was typed before the question was seen is no answer to it
    sys.stderr.write("Allow exactly this? [y/n, or Enter to leave it] ")
    sys.stderr.flush()
    return {"y": yes, "yes": yes, "n": Decision.NO, "no": Decision.NO}.get(sys.stdin.readline().strip().lower())


def _answer(request: Request, inbox: Inbox, waiting: Waiting, decision: Decision) -> None:
    text = request.value("--timeout")
    seconds = RUN_SECONDS if text is None else quantities.seconds("--timeout", text)
    if seconds is None:
        raise UsageError("what is allowed for a run has an end", hint="--timeout 10m")
    code = request.value("--code")
    if code is None and SECOND_FACTOR in waiting.needs and decision is not Decision.NO and at_a_terminal():
        sys.stderr.write("Second factor: ")
        sys.stderr.flush()
        code = sys.stdin.readline()
    inbox.answer(waiting.name, decision, digest=waiting.digest, by=somebody(), seconds=seconds, code=code)
    if not request.has("--quiet"):
        remark({Decision.NO: "refused", Decision.ONCE: "allowed, once"}.get(decision, "allowed for this run"))


def _document(request: Request, inbox: Inbox, waiting: list[Waiting]) -> int:
    from agent_sandbox.cli.render.json import print_document

    decision = _decision(request) if request.has("--yes") or request.has("--refuse") else None
    if decision is not None:
        for each in waiting:
            _answer(request, inbox, each, decision)
    shown = [{"digest": each.digest, "text": each.text, "times": each.times, "until": each.until} for each in waiting]
    print_document("approve", {"waiting": shown, "answered": decision.value if decision is not None and waiting else None})
    return 0 if waiting or not request.words else NOTHING_ANSWERED


def _chosen(waiting: list[Waiting], digest: str) -> list[Waiting]:
    found = [each for each in waiting if each.digest.startswith(digest.lower())] if len(digest) >= _SHORTEST else []
    if len(found) > 1:
        raise UsageError(f"{len(found)} questions begin with {digest!r}", hint="give more of the digest")
    if not found:
        raise PolicyError(f"no question that waits begins with {digest!r}", hint="see: agent-sandbox approve")
    return found


def somebody() -> str:
    """Who we are, in words."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container may run as a number without an account
        return f"user {os.getuid()}"
