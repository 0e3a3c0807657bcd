"""The gate of every action: decide, record the intent, do it, record the outcome.

The order is the point. A refused action is recorded and not done. An action that cannot be recorded is not done. The outcome is always
recorded, also when the action failed. The gate knows nothing of how an action is done: the deed is a function, called at most once.
"""

from __future__ import annotations

from agent_sandbox._fast.encoding import canonical_form, digest_of_form
from agent_sandbox._fast.values import TYPE_CHECKING, Protocol, assert_never, dataclass, field, replace
from agent_sandbox.errors import Denied, LedgerBroken, LedgerUnavailable, SandboxError
from agent_sandbox.ledger.event import Entry, Event, Facts, Intent, Noted, OutcomeEvent, RefusalEvent
from agent_sandbox.policy.action import Action, Promote, Undo
from agent_sandbox.policy.decide import Allow, Ask, Deny, Grants, Reason, Verdict, decide
from agent_sandbox.policy.model import Policy

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Literal, NoReturn, TypeVar

    from agent_sandbox.policy.approval_rules import Word

    T = TypeVar("T")
    Ended = Literal["done", "raised"]

APPROVAL_SECONDS = 300.0  # time to answer a question; no answer is a refusal


class EntryWriter(Protocol):
    """The part of a ledger that the gate needs."""

    def record(self, event: Event, *, lasting: bool = False) -> Entry:
        """Write an event. If it raises, the caller must not act. A `lasting` entry survives a power cut."""
        ...

    def unended(self, action_digest: str) -> int | None:
        """Return the entry number of the last intent of this action that has no outcome yet; None if there is none."""
        ...


def _unknown_person() -> Word:
    from agent_sandbox.policy.approval_rules import Word  # most runs ask nobody

    return Word(-1)


@dataclass(frozen=True)
class Granted:
    """An approval by `by`. `word` identifies the person who gave it, if known. One for the whole run holds `until` a time; 0 is once."""

    by: str
    word: Word = field(default_factory=_unknown_person, compare=False)
    until: float = field(default=0.0, compare=False)


@dataclass(frozen=True)
class Refused:
    """A refusal by an approver, with the reason."""

    why: str


class Approver(Protocol):
    """Answers the question whether an action may be done, for a policy that asks."""

    def ask(self, action: Action, verdict: Ask, deadline: float) -> Granted | Refused:
        """Return the answer to exactly this action. An exception, or an answer after the deadline, counts as a refusal."""
        ...

    def end(self) -> None:
        """Revoke the approvals that were given for the whole run. Called when the run is over."""
        ...


def _nothing(result: object) -> Facts:
    return {}


class Gate:
    """The gate of one policy. Safe to share between threads if its ledger and approver are."""

    def __init__(
        self,
        policy: Policy,
        ledger: EntryWriter,
        *,
        clock: Callable[[], float],
        grants: Grants = (),
        approver: Approver | None = None,
        sandbox: str = "",
        patience: float = APPROVAL_SECONDS,
    ) -> None:
        """`sandbox` is the name in the ledger; `patience` is how many seconds an approver has to answer."""
        self.policy = policy
        self._digest = policy.digest()
        self._ledger = ledger
        self._clock = clock
        self._grants = grants
        self._approver = approver
        self._sandbox = sandbox
        self._patience = patience

    def perform(
        self,
        action: Action,
        deed: Callable[[Allow], T],
        *,
        describe: Callable[[T], Facts] = _nothing,
        details: Callable[[], str] = str,
        wanted: Callable[[], bool] | None = None,
    ) -> T:
        """Do an action if the policy allows it, and return the result of the deed.

        `describe` returns the facts of the result for the ledger. `details` returns text for an approver, such as the source or the diff.
        `wanted` returns whether somebody still waits for the answer of an approver.

        Raises `Denied` for a refusal. Raises `LedgerUnavailable` or `LedgerBroken` if the intent cannot be recorded; then the deed is not
        called. Raises any exception of the deed. Raises `LedgerUnavailable`, with a message that says so, if the deed was done but its
        outcome could not be recorded.
        """
        verdict = self._settled(action, decide(self.policy, self._grants, action, now=self._clock()), details, wanted)
        facts, rule = canonical_form(action), verdict.because.rule
        digest = digest_of_form(facts)  # the same as `action.digest()`, but the form is made only once
        if not isinstance(verdict, Allow):
            self._refuse(facts, digest, verdict)
        # The intent to change the real tree, or to do an approved action, is on disk before the deed: a power failure must not lose it.
        approved = rule == "approval"
        lasting = isinstance(action, Promote | Undo) or approved
        rule = verdict.because.why if approved else rule  # by whom, or by which capability
        intent = self._ledger.record(Intent(facts, digest, self._digest, rule, self._sandbox), lasting=lasting).sequence
        try:
            result = deed(verdict)
        except BaseException as error:  # also an interrupt: what was begun has ended, and the record says how
            self._record_failure(intent, error, lasting)
            raise
        self._record_success(intent, result, describe, lasting)
        return result

    def refuse(self, action: Action, because: Reason) -> NoReturn:
        """Record a refusal of the action, for a reason that the caller found, and raise `Denied`."""
        facts = canonical_form(action)
        self._refuse(facts, digest_of_form(facts), Deny(because))

    def _refuse(self, facts: Facts, digest: str, verdict: Deny) -> NoReturn:
        self._ledger.record(RefusalEvent(facts, digest, self._digest, verdict.because.rule, verdict.because.why, self._sandbox))
        raise Denied(f"denied: {verdict.because.why}", verdict=verdict, hint=verdict.because.remedy)

    def pre_approval(self, action: Action, *, again: bool = False) -> Granted | Refused | None:
        """Return what the capabilities of the sandbox say of an action, without a question; None if none speaks of it.

        A use is counted, unless the same action goes on and is looked at `again`. Nothing is recorded. Raises OSError.
        """
        look = getattr(self._approver, "pre_approval", None)  # an application's own approver has none
        return None if look is None else look(action, again=again)

    def end(self) -> None:
        """Revoke all approvals given so far, so that the same actions need approval again."""
        if self._approver is not None:
            self._approver.end()

    def note(self, what: str, facts: Facts) -> None:
        """Record an observation (`what`) with its facts in the ledger. Raises what the ledger raises."""
        self._ledger.record(Noted(what, facts, self._sandbox))

    def conclude(self, action_digest: str, ended: Ended, facts: Facts) -> None:
        """Record the outcome of an action whose process was killed, if the ledger has none yet. Raises what the ledger raises."""
        intent = self._ledger.unended(action_digest)
        if intent is not None:
            self._ledger.record(OutcomeEvent(intent, ended, facts, self._sandbox), lasting=True)

    def _settled(self, action: Action, verdict: Verdict, details: Callable[[], str], wanted: Callable[[], bool] | None) -> Allow | Deny:
        match verdict:
            case Allow() | Deny():
                return verdict
            case Ask():
                return self._answered(action, replace(verdict, wanted=wanted), details)
            case _:
                assert_never(verdict)

    def _answered(self, action: Action, verdict: Ask, details: Callable[[], str]) -> Allow | Deny:
        """Ask the approver. Anything but a yes in time gives a `Deny`, which names the rule and the remedy."""

        def refused(why: str) -> Deny:
            asked = verdict.because
            return Deny(Reason("approval", f"{asked.why} ({asked.rule}), {why}", asked.remedy), verdict.suggest)

        if self._approver is None:
            return refused("and there is no approver")
        deadline = self._clock() + self._patience
        try:
            answer = self._approver.ask(action, replace(verdict, details=details()), deadline)
        except Exception as error:
            return refused(f"and asking failed: {type(error).__name__}")
        if isinstance(answer, Granted) and self._clock() <= deadline:
            return Allow(Reason("approval", f"approval of {answer.by} ({verdict.because.rule})"), answer.until)
        return refused(f"and it was not approved: {answer.why if isinstance(answer, Refused) else 'no answer came in time'}")

    def _record_success(self, intent: int, result: T, describe: Callable[[T], Facts], lasting: bool) -> None:
        try:
            try:
                self._ledger.record(OutcomeEvent(intent, "done", describe(result), self._sandbox), lasting=lasting)
            except (LedgerUnavailable, LedgerBroken):
                raise
            except Exception as error:  # a failure of `describe` must not make a deed look failed that was done
                self._ledger.record(OutcomeEvent(intent, "done", {"undescribed": type(error).__name__}, self._sandbox), lasting=lasting)
        except (LedgerUnavailable, LedgerBroken) as error:
            message = f"the action was performed, but how it ended could not be recorded: {error.message}"
            raise LedgerUnavailable(message, hint=f"entry {intent} of the ledger has its intent; {error.hint}") from error

    def _record_failure(self, intent: int, error: BaseException, lasting: bool) -> None:
        facts: dict[str, str] = {"error": type(error).__name__}
        if isinstance(error, SandboxError):  # only our own messages: others' may hold anything
            facts["message"] = error.message
        try:
            self._ledger.record(OutcomeEvent(intent, "raised", facts, self._sandbox), lasting=lasting)
        except (LedgerUnavailable, LedgerBroken) as unrecorded:
            error.add_note(f"and this could not be recorded: {unrecorded}")
