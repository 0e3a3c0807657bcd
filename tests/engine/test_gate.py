"""The gate's order: decide, record the intent, act, record the outcome; and nothing is done that is not recorded."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from agent_sandbox.engine.gate import APPROVAL_SECONDS, Gate, Granted, Refused
from agent_sandbox.errors import Denied, LaunchFailed, LedgerBroken, LedgerUnavailable
from agent_sandbox.ledger.chain import verify
from agent_sandbox.ledger.event import Entry, Event, Intent, Noted, OutcomeEvent, RefusalEvent
from agent_sandbox.ledger.writer import Ledger
from agent_sandbox.policy.action import Action, Promote, RunCode, RunCommand, Undo
from agent_sandbox.policy.decide import Allow, Ask, Deny, Reason
from agent_sandbox.policy.model import AskRules, cloned, locked
from tests.ledger.samples import read

ALLOWED = RunCode.of("python", b"print(1)")
REFUSED = RunCommand.of(["ls"])


@dataclass
class FakeLedger:
    """Keeps events in a list, and fails from the given one on."""

    fails_from: int = 1_000
    error: Exception = field(default_factory=lambda: LedgerUnavailable("full", hint="free it"))
    events: list[Event] = field(default_factory=list)
    lasting: list[bool] = field(default_factory=list)

    def record(self, event: Event, *, lasting: bool = False) -> Entry:
        if len(self.events) + 1 >= self.fails_from:
            raise self.error
        self.events.append(event)
        self.lasting.append(lasting)
        return Entry(len(self.events), 0.0, "", "", event)

    def unended(self, action_digest: str) -> int | None:
        ended = [event.intent for event in self.events if isinstance(event, OutcomeEvent)]
        announced = [at for at, event in enumerate(self.events, 1) if isinstance(event, Intent) and event.digest == action_digest]
        return next((at for at in reversed(announced) if at not in ended), None)


@dataclass
class Deed:
    """Counts its calls, and remembers what the ledger held at each."""

    ledger: FakeLedger
    raises: BaseException | None = None
    seen: list[list[Event]] = field(default_factory=list)

    def __call__(self, verdict: Allow) -> str:
        self.seen.append(list(self.ledger.events))
        if self.raises:
            raise self.raises
        return "result"


@dataclass
class FakeApprover:
    answer: Granted | Refused | Exception
    takes: float = 0.0
    clock: list[float] = field(default_factory=lambda: [0.0])
    asked: list[tuple[Action, Ask, float]] = field(default_factory=list)

    def ask(self, action: Action, verdict: Ask, deadline: float) -> Granted | Refused:
        self.asked.append((action, verdict, deadline))
        self.clock[0] += self.takes
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def end(self) -> None:
        self.asked.clear()


def gate(ledger: FakeLedger) -> Gate:
    return Gate(locked(), ledger, clock=lambda: 0.0)


def test_the_intent_is_recorded_before_the_deed_and_the_outcome_after() -> None:
    ledger = FakeLedger()
    deed = Deed(ledger)
    assert gate(ledger).perform(ALLOWED, deed, describe=lambda result: {"said": result}) == "result"
    intent = Intent(ledger.events[0].action, ALLOWED.digest(), locked().digest(), "code")  # type: ignore[union-attr]
    assert deed.seen == [[intent]]
    assert ledger.events == [intent, OutcomeEvent(1, "done", {"said": "result"})]
    assert intent.action["kind"] == "RunCode"


def test_a_refusal_is_recorded_and_raised_and_nothing_is_done() -> None:
    ledger = FakeLedger()
    deed = Deed(ledger)
    with pytest.raises(Denied) as refusal:
        gate(ledger).perform(REFUSED, deed)
    assert isinstance(refusal.value.verdict, Deny) and refusal.value.hint
    assert deed.seen == []
    [event] = ledger.events
    assert isinstance(event, RefusalEvent) and (event.rule, event.digest) == ("processes", REFUSED.digest())


@pytest.mark.parametrize("error", [LedgerUnavailable("full"), LedgerBroken("changed")])
def test_nothing_is_done_when_the_intent_cannot_be_recorded(error: Exception) -> None:
    ledger = FakeLedger(fails_from=1, error=error)
    deed = Deed(ledger)
    with pytest.raises(type(error)):
        gate(ledger).perform(ALLOWED, deed)
    assert deed.seen == []


def test_nothing_is_done_when_the_refusal_cannot_be_recorded() -> None:
    ledger = FakeLedger(fails_from=1)
    deed = Deed(ledger)
    with pytest.raises(LedgerUnavailable):
        gate(ledger).perform(REFUSED, deed)
    assert deed.seen == []


@pytest.mark.parametrize("error", [ValueError("hunter2"), KeyboardInterrupt(), SystemExit(3), LaunchFailed("no namespaces")])
def test_what_a_deed_raises_is_recorded_and_raised_again(error: BaseException) -> None:
    ledger = FakeLedger()
    with pytest.raises(type(error)) as raised:
        gate(ledger).perform(ALLOWED, Deed(ledger, raises=error))
    assert raised.value is error
    outcome = ledger.events[-1]
    assert isinstance(outcome, OutcomeEvent) and (outcome.intent, outcome.ended) == (1, "raised")
    assert outcome.facts["error"] == type(error).__name__
    assert "hunter2" not in str(ledger.events)


@pytest.mark.parametrize("error", [LedgerUnavailable("full", hint="free it"), LedgerBroken("changed", hint="look")])
def test_an_outcome_that_cannot_be_recorded_is_said_with_the_fact_that_the_deed_was_done(error: Exception) -> None:
    ledger = FakeLedger(fails_from=2, error=error)
    deed = Deed(ledger)
    with pytest.raises(LedgerUnavailable, match="the action was performed, but how it ended could not be recorded"):
        gate(ledger).perform(ALLOWED, deed)
    assert len(deed.seen) == 1


def test_a_failed_deed_whose_outcome_cannot_be_recorded_raises_its_own_error_with_a_note() -> None:
    ledger = FakeLedger(fails_from=2)
    with pytest.raises(KeyboardInterrupt) as raised:
        gate(ledger).perform(ALLOWED, Deed(ledger, raises=KeyboardInterrupt()))
    assert raised.value.__notes__ == ["and this could not be recorded: full (free it)"]


def test_a_description_that_fails_does_not_make_the_deed_fail(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger", clock=lambda: 0.0)
    door = Gate(locked(), ledger, clock=lambda: 0.0)
    assert door.perform(ALLOWED, lambda _: 1, describe=lambda result: {"x": 1 // 0}) == 1
    assert door.perform(ALLOWED, lambda _: 2, describe=lambda result: {"no name": result}) == 2
    facts = [entry.event.facts for entry in read(ledger.path) if isinstance(entry.event, OutcomeEvent)]
    assert facts == [{"undescribed": "ZeroDivisionError"}, {"undescribed": "ValueError"}]


def test_with_a_real_ledger_the_record_verifies_and_names_the_action(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger", clock=lambda: 0.0)
    door = Gate(locked(processes=True), ledger, clock=lambda: 0.0)
    action = RunCommand.of(["echo", "\udcff\n\0x"[:2]], environment={"TOKEN": "hunter2"})
    door.perform(action, lambda verdict: None)
    assert verify(ledger.path).count == 2
    event = next(iter(read(ledger.path))).event
    assert isinstance(event, Intent)
    assert event.action == {"kind": "RunCommand", "argv": list(action.argv), "cwd": None, "environment": ["TOKEN"]}
    assert b"hunter2" not in Path(ledger.path).read_bytes()


def asking(ledger: FakeLedger, approver: FakeApprover | None) -> Gate:
    """A gate whose policy asks about all code."""
    policy = replace(locked(), asks=AskRules(effects=("runs-code",)))
    return Gate(policy, ledger, clock=lambda: approver.clock[0] if approver else 0.0, approver=approver)


def test_a_question_that_is_answered_with_yes_in_time_is_permission() -> None:
    ledger, approver = FakeLedger(), FakeApprover(Granted("alice"), takes=APPROVAL_SECONDS)
    door = asking(ledger, approver)
    assert door.perform(ALLOWED, Deed(ledger), details=lambda: "print(1)") == "result"
    [(action, verdict, deadline)] = approver.asked
    assert (action, verdict.suggest, deadline) == (ALLOWED, f"code python {ALLOWED.source_sha256}", APPROVAL_SECONDS)
    assert verdict.details == "print(1)", "who is asked sees what belongs to it"
    assert isinstance(ledger.events[0], Intent) and ledger.events[0].rule == "approval of alice (approvals.effects)"
    assert ledger.lasting == [True, True], "what somebody agreed to is on record even if the power fails"
    door.end()
    assert approver.asked == [], "who was asked is told that it is over"
    asking(ledger, None).end()


def test_nobody_is_asked_about_what_is_denied() -> None:
    ledger, approver = FakeLedger(), FakeApprover(Granted("alice"))
    policy = replace(locked(), asks=AskRules(opaque=True, commands=("ls",)))
    with pytest.raises(Denied) as refusal:
        Gate(policy, ledger, clock=lambda: 0.0, approver=approver).perform(REFUSED, Deed(ledger))
    assert approver.asked == [] and refusal.value.verdict.because.rule == "processes"


def test_details_are_made_only_where_somebody_is_asked() -> None:
    def broken() -> str:
        raise OSError("the diff cannot be made")

    ledger = FakeLedger()
    assert gate(ledger).perform(ALLOWED, Deed(ledger), details=broken) == "result"
    with pytest.raises(Denied, match="asking failed: OSError"):
        asking(ledger, FakeApprover(Granted("alice"))).perform(ALLOWED, Deed(ledger), details=broken)


@pytest.mark.parametrize(
    ("approver", "why"),
    [
        (None, "there is no approver"),
        (FakeApprover(Refused("no thanks")), "no thanks"),
        (FakeApprover(OSError("gone")), "OSError"),
        (FakeApprover(Granted("alice"), takes=APPROVAL_SECONDS + 1), "in time"),
        (FakeApprover(True), "in time"),  # type: ignore[arg-type]
    ],
    ids=["nobody", "no", "exception", "too late", "not an answer"],
)
def test_anything_but_a_yes_in_time_is_a_refusal(approver: FakeApprover | None, why: str) -> None:
    ledger = FakeLedger()
    deed = Deed(ledger)
    with pytest.raises(Denied, match=why) as refusal:
        asking(ledger, approver).perform(ALLOWED, deed)
    verdict = refusal.value.verdict
    assert verdict.because.rule == "approval" and "approvals.effects" in verdict.because.why
    assert verdict.missing == f"code python {ALLOWED.source_sha256}"
    assert refusal.value.hint == f"agent-sandbox grant '{verdict.missing}' --for 10m"
    assert deed.seen == []
    assert isinstance(ledger.events[0], RefusalEvent)


def test_what_was_cut_off_is_concluded_once(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger", clock=lambda: 0.0)
    door = Gate(locked(), ledger, clock=lambda: 0.0)
    door.conclude(ALLOWED.digest(), "done", {})
    door.perform(ALLOWED, lambda allow: None)
    door.conclude(ALLOWED.digest(), "raised", {})
    assert verify(ledger.path).count == 2, "its end was recorded already"
    intent = next(entry.event for entry in read(ledger.path) if isinstance(entry.event, Intent))
    ledger.record(intent)
    for _ in range(2):
        door.conclude(ALLOWED.digest(), "done", {"recovered": True})
    assert [entry.event for entry in read(ledger.path)][3:] == [OutcomeEvent(3, "done", {"recovered": True})]


@pytest.mark.parametrize(("action", "lasting"), [(Promote("/p", "0" * 64, 1), True), (Undo("/p", "x"), True), (ALLOWED, False)])
def test_what_changes_the_real_tree_is_recorded_against_a_power_cut(action: Action, lasting: bool) -> None:
    ledger = FakeLedger()
    Gate(cloned(masks=()), ledger, clock=lambda: 0.0).perform(action, lambda _: None)
    assert ledger.lasting == [lasting, lasting]


def test_what_somebody_in_front_of_the_gate_refuses_is_a_refusal_like_any_other() -> None:
    ledger = FakeLedger()
    with pytest.raises(Denied, match="too odd") as refusal:
        gate(ledger).refuse(ALLOWED, Reason("odd", "it is too odd", "make it even"))
    assert refusal.value.hint == "make it even" and refusal.value.verdict == Deny(Reason("odd", "it is too odd", "make it even"))
    assert isinstance(ledger.events[0], RefusalEvent) and ledger.events[0].rule == "odd"


def test_what_is_seen_of_an_action_is_noted_under_its_sandbox() -> None:
    ledger = FakeLedger()
    Gate(locked(), ledger, clock=lambda: 0.0, sandbox="box").note("file.read", {"target": "/x"})
    assert ledger.events == [Noted("file.read", {"target": "/x"}, "box")]


def test_how_long_somebody_has_to_answer_is_for_who_makes_the_gate_to_say() -> None:
    ledger, approver = FakeLedger(), FakeApprover(Granted("alice"), takes=6.0)
    policy = replace(locked(), asks=AskRules(effects=("runs-code",)))
    with pytest.raises(Denied, match="in time"):
        Gate(policy, ledger, clock=lambda: approver.clock[0], approver=approver, patience=5.0).perform(ALLOWED, Deed(ledger))
    assert approver.asked[0][2] == 5.0
