"""Questions to a person about what a call of a tool wants to do, through the same inbox as the command line's.

Where the client can ask its user at once, the call waits for the answer. Elsewhere the call is refused with the identifier of the question,
which goes on waiting in the inbox; once a person has answered, the same call finds the answer. A question holds the action, its details and
the digest of the policy. Its answer counts once, for a call that comes to exactly the same question, until the question expires.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from agent_sandbox._fast.encoding import as_json, canonical_form, sha256
from agent_sandbox._fast.values import dataclass, replace
from agent_sandbox.assembly import here, words_that_count
from agent_sandbox.engine.approvals.approvers import CapabilityApprover
from agent_sandbox.engine.approvals.question import Decision, Question
from agent_sandbox.engine.gate import Granted, Refused
from agent_sandbox.errors import PolicyError
from agent_sandbox.policy.action import Connect

if TYPE_CHECKING:
    from agent_sandbox.engine.approvals.inbox import Inbox, Waiting
    from agent_sandbox.engine.gate import Approver
    from agent_sandbox.mcp.calls import ServedCall
    from agent_sandbox.policy.action import Action
    from agent_sandbox.policy.decide import Ask
    from agent_sandbox.policy.model import Policy
    from agent_sandbox.policy.tokens import Token

LATER_SECONDS = 900.0  # how long a question waits that no call waits for
_PAUSE_SECONDS = 0.05
_JUST_ANSWERED_SECONDS = 0.5
_SHOWN_SECONDS = 30.0  # until a new question must lie in the inbox
Put = Callable[["Inbox", Callable[[], bool], float], "Granted | Refused"]


class _Later:
    """A question that waits while no call does, and its answer, which counts `until` then."""

    def __init__(self, until: float) -> None:
        self.until = until
        self.waiting: Waiting | None = None
        self.answer: Granted | Refused | None = None
        self.shown = threading.Event()  # it lies in the inbox, or never will
        self.ended = threading.Event()

    def show(self, waiting: Waiting) -> None:
        """Remember the question as it lies in the inbox."""
        self.waiting = waiting
        self.shown.set()


class PersonQuestions:
    """The questions of one server about one sandbox. `tokens` are capabilities of the person who started the server."""

    def __init__(self, sandbox: str, tokens: Sequence[Token]) -> None:
        self.sandbox = sandbox
        self._tokens = tuple(tokens)
        self._lock = threading.Lock()
        self._later: dict[str, _Later] = {}
        self._closed = False

    def approver(self, policy: Policy, call: Callable[[], ServedCall], *, in_person: bool = False) -> Approver:
        """Return the approver of the calls that `call` returns: capabilities first, then a person.

        With `in_person`, capabilities do not count.
        """
        return CapabilityApprover(
            here().capabilities(),
            () if in_person else self._tokens,
            sandbox=self.sandbox,
            otherwise=_Person(self, policy, call),
            counts=words_that_count(policy),
        )

    def ask(self, question: Question, policy: Policy, call: ServedCall) -> Granted | Refused:
        """Ask a person a question that is about no action of the gate."""
        key = sha256(as_json([question.action, question.policy, question.why, question.details], sort_keys=True).encode()).hexdigest()

        def put(inbox: Inbox, wanted: Callable[[], bool], until: float) -> Granted | Refused:
            return inbox.ask(replace(question, asked=time.time(), until=until), wanted)

        return self.decided(key, policy, call, put, question.until)

    def decided(
        self, key: str, policy: Policy, call: ServedCall, put: Put, deadline: float, still: Callable[[], bool] = lambda: True
    ) -> Granted | Refused:
        """Return the answer to a question with this key, which `put` asks. The call waits for it only if its client can ask its user.

        `still` returns whether the work itself waits for the answer.
        """
        if call.asks_at_once and not policy.asks.needs:
            inbox = here().inbox(policy=policy, on_wait=call.ask, pause=lambda: time.sleep(_PAUSE_SECONDS))
            answer = put(inbox, lambda: call.wants_answer() and still(), deadline)
            if call.asks_at_once:
                return answer  # otherwise the client could not ask
        with self._lock:
            known = later = self._later.get(key)
            if later is None:
                later = self._later[key] = _Later(time.time() + LATER_SECONDS)
                threading.Thread(target=self._wait, args=(key, later, policy, put), name="agent-sandbox-question", daemon=True).start()
        later.shown.wait(_SHOWN_SECONDS)
        if known is not None:  # a person may have answered in this moment
            later.ended.wait(_JUST_ANSWERED_SECONDS)
        if later.answer is not None:
            with self._lock:  # two threads of one call may come for it, and it counts once
                mine = self._later.get(key) is later and self._later.pop(key) is later
            return later.answer if mine and time.time() < later.until else Refused("its answer has been used, or is too old")
        if later.waiting is None:
            return Refused("the question could not be asked")
        call.wait_later(later.waiting)
        return Refused(f"it waits for a person: agent-sandbox approve {later.waiting.digest[:12]}")

    def _wait(self, key: str, later: _Later, policy: Policy, put: Put) -> None:
        """Wait for the answer to a question. A yes is kept for one call, until the question would have expired."""
        until = later.until
        try:
            inbox = here().inbox(policy=policy, on_wait=later.show, pause=lambda: time.sleep(_PAUSE_SECONDS))
            later.answer = put(inbox, lambda: not self._closed, until)
        except Exception as error:  # a question that breaks is a refusal, as in the gate
            later.answer = Refused(f"asking failed: {type(error).__name__}")
        finally:
            later.shown.set()
            later.ended.set()
        while not self._closed and time.time() < until and key in self._later:
            time.sleep(1)
        with self._lock:
            if self._later.get(key) is later:
                del self._later[key]

    def answer(self, digest: str, policy: Policy, *, yes: bool, by: str) -> None:
        """Answer a question of this server on behalf of the client's user. Raises `PolicyError` if it no longer waits."""
        with self._lock:
            later = next((each for each in self._later.values() if each.waiting is not None and each.waiting.digest == digest), None)
        if later is None:
            raise PolicyError("this question no longer waits", hint="call the tool again without an answer")
        here().inbox(policy=policy).answer(digest, Decision.ONCE if yes else Decision.NO, digest=digest, by=by)
        later.ended.wait(_SHOWN_SECONDS)

    def close(self) -> None:
        """Take back all questions."""
        self._closed = True
        with self._lock:
            waiting = [each for each in self._later.values() if each.answer is None]
        for each in waiting:
            each.ended.wait(2 * _PAUSE_SECONDS + 1)


class _Person:
    """The person who answers for the calls of a server, under one policy."""

    def __init__(self, questions: PersonQuestions, policy: Policy, call: Callable[[], ServedCall]) -> None:
        self._questions, self._policy, self._call = questions, policy, call

    def ask(self, action: Action, verdict: Ask, deadline: float) -> Granted | Refused:
        """Ask about exactly this action."""
        policy, call = self._policy, self._call()
        # The details of a request name its run, which is over when the answer comes; the next run asks for the same.
        details = "" if isinstance(action, Connect) else verdict.details
        about = [canonical_form(action), policy.digest(), verdict.because.rule, details]
        key = sha256(as_json(about).encode()).hexdigest()

        def put(inbox: Inbox, wanted: Callable[[], bool], until: float) -> Granted | Refused:
            desk = here().desk(policy, inbox, sandbox=self._questions.sandbox, tokens=())
            try:
                return desk.ask(action, replace(verdict, wanted=wanted), until)
            finally:
                desk.end()

        return self._questions.decided(key, policy, call, put, deadline, verdict.wanted or (lambda: True))

    def end(self) -> None:
        """Do nothing: an answer counts once."""


@dataclass(frozen=True)
class PendingQuestion:
    """A question that waits for a person, as an answer of a tool names it."""

    id: str
    approve: str
    until: float

    @classmethod
    def of(cls, waiting: Waiting) -> PendingQuestion:
        """Return what a model is told about a waiting question."""
        return cls(waiting.digest, f"agent-sandbox approve {waiting.digest[:12]}", waiting.until)


def elevation_question(policy: Policy, sandbox: str, lifts: str, seconds: float, why: str, deadline: float) -> Question:
    """Return the question whether rules may be lifted for a time."""
    return Question(
        action={"kind": "Elevate", "lifts": lifts, "seconds": seconds},
        policy=policy.digest(),
        sandbox=sandbox,
        run=os.urandom(8).hex(),
        why=why,
        asked=0.0,
        until=deadline,
        needs=", ".join(policy.asks.needs),
        asker=os.getuid(),
    )
