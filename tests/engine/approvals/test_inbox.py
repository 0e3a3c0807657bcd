"""An answer is good for exactly what was shown, once, in time, from somebody whose word counts; silence is a refusal."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from agent_sandbox._fast.encoding import Seal
from agent_sandbox.engine.approvals.approvers import InboxApprover
from agent_sandbox.engine.approvals.inbox import MOST_WAITING, Inbox
from agent_sandbox.engine.approvals.question import Answer, Decision, Question, opened, sealed
from agent_sandbox.engine.gate import Granted, Refused
from agent_sandbox.errors import LedgerUnavailable, PolicyError
from agent_sandbox.ledger.event import Noted
from agent_sandbox.ledger.writer import Ledger
from agent_sandbox.policy.action import RunCommand
from agent_sandbox.policy.decide import Ask, Reason
from tests.engine.approvals.test_question import question
from tests.ledger.samples import read

KEY = Seal(b"k" * 32)


class Desk:
    """An inbox with a clock to turn, and somebody who does something between two looks of who asks."""

    def __init__(self, top: Path) -> None:
        self.top = top
        self.now = 10.0
        self.somebody: Callable[[], None] = self.wait
        self.ledger = Ledger(top / "ledger", clock=lambda: self.now)
        self.inbox = self.another()

    def another(self, approvers: set[int] | None = None) -> Inbox:
        directory, clock = str(self.top / "approvals"), lambda: self.now
        return Inbox(directory, KEY, self.ledger, clock=clock, pause=lambda: self.somebody(), approvers=approvers)

    def wait(self) -> None:
        self.now += 50.0

    def says(self, decision: Decision) -> None:
        def say() -> None:
            for waiting in self.inbox.waiting():
                self.inbox.answer(waiting.name, decision, digest=waiting.digest, by="alice")
            self.somebody = self.wait

        self.somebody = say

    def noted(self) -> list[str]:
        return [entry.event.what for entry in read(self.ledger.path) if isinstance(entry.event, Noted)]

    def left(self) -> list[str]:
        return [name for _, _, names in os.walk(self.top / "approvals") for name in names if name != "lock"]


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def test_nobody_answering_is_a_refusal(desk: Desk) -> None:
    assert desk.inbox.ask(question()) == Refused("nobody answered in time")
    assert desk.noted() == ["approval.asked", "approval.unanswered"] and desk.left() == []


def test_a_question_that_nobody_waits_for_any_more_is_taken_back_and_cannot_be_answered(desk: Desk) -> None:
    waits, shown = [True], []

    def leave() -> None:
        shown.extend(desk.inbox.waiting())
        waits.clear()

    desk.somebody = leave
    assert desk.inbox.ask(question(), lambda: bool(waits)) == Refused("nobody waits for the answer any more")
    assert len(shown) == 1 and desk.inbox.waiting() == [] and desk.left() == []
    with pytest.raises(PolicyError, match="no such question"):
        desk.inbox.answer(shown[0].name, Decision.ONCE, digest=shown[0].digest, by="alice")


def _asking(desk: Desk) -> tuple[int, int]:
    """Another process that asks and waits for ever. Returns its pid, and a pipe that ends with it."""
    told, tell = os.pipe()
    pid = os.fork()
    if not pid:

        def wait() -> None:
            os.write(tell, b"waits")
            signal.pause()

        desk.somebody = wait
        desk.inbox.ask(question())
        os._exit(0)
    os.close(tell)
    assert os.read(told, 5) == b"waits"
    return pid, told


@pytest.mark.parametrize("second", [False, True], ids=["alone", "beside another"])
def test_a_question_of_a_killed_asker_is_taken_off_the_list(desk: Desk, *, second: bool) -> None:
    askers = [_asking(desk) for _ in range(1 + second)]
    (shown,) = desk.inbox.waiting()
    for pid, told in askers:
        assert [each.digest for each in desk.inbox.waiting()] == [shown.digest]
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(told)
    with pytest.raises(PolicyError, match="no such question"):
        desk.inbox.answer(shown.name, Decision.ONCE, digest=shown.digest, by="alice")
    assert desk.inbox.waiting() == [] and desk.left() == []
    assert desk.noted() == ["approval.asked", "approval.unanswered"], "which is recorded"
    desk.says(Decision.ONCE)
    assert isinstance(desk.inbox.ask(question()), Granted), "the control arm: one that lives gets its answer"


def test_questions_of_killed_askers_leave_room_for_others(desk: Desk) -> None:
    for _ in range(MOST_WAITING):
        pid, told = _asking(desk)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(told)
    desk.says(Decision.ONCE)
    assert isinstance(desk.inbox.ask(question()), Granted)


def test_an_answer_for_the_run_says_until_when(desk: Desk) -> None:
    desk.says(Decision.FOR_THIS_RUN)
    answer = desk.inbox.ask(question())
    assert isinstance(answer, Granted) and answer.until == desk.now + 3600.0
    desk.says(Decision.ONCE)
    assert isinstance(again := desk.inbox.ask(question()), Granted) and again.until == answer.until, "which stands"


@pytest.mark.parametrize(
    ("decision", "answer"),
    [(Decision.ONCE, Granted("alice")), (Decision.NO, Refused("alice said no")), (Decision.FOR_THIS_RUN, Granted("alice"))],
)
def test_what_somebody_says_is_what_who_asked_gets(desk: Desk, decision: Decision, answer: object) -> None:
    desk.says(decision)
    assert desk.inbox.ask(question()) == answer
    assert desk.noted() == ["approval.asked", "approval.answered"]


def test_yes_once_is_good_for_one(desk: Desk) -> None:
    desk.says(Decision.ONCE)
    assert isinstance(desk.inbox.ask(question()), Granted)
    assert isinstance(desk.inbox.ask(question()), Refused), "asked again, and nobody answers"
    assert desk.left() == []


def test_yes_for_this_run_is_not_asked_again_until_its_time_or_the_run_is_over(desk: Desk) -> None:
    desk.says(Decision.FOR_THIS_RUN)
    for _ in range(100):
        assert desk.inbox.ask(question()) == Granted("alice")
    assert desk.noted() == ["approval.asked", "approval.answered"], "nobody is asked a hundred times"
    for other in (question(run="r2"), question(argv=("git", "pull")), question(policy="q"), question(sandbox="x"), question(details="+x")):
        desk.now = 10.0
        assert isinstance(desk.inbox.ask(other), Refused)
    desk.now = 10.0
    desk.inbox.end_run("r1")
    assert desk.noted()[-1] == "approval.ended" and isinstance(desk.inbox.ask(question()), Refused)


def test_an_elevation_is_taken_back_when_its_time_is_over_and_that_is_recorded(desk: Desk) -> None:
    desk.says(Decision.FOR_THIS_RUN)
    later = question(until=1e6)
    assert isinstance(desk.inbox.ask(later), Granted)
    desk.now += 3601.0
    desk.inbox.sweep()
    assert desk.noted()[-1] == "approval.ended" and desk.left() == []
    desk.now = 1e6 - 60
    assert isinstance(desk.inbox.ask(later), Refused)


CHANGED = (
    *(question(argv=("git", "pull")), question(details="-x"), question(policy="q"), question(until=299.0), question(run="r2")),
    *(question(why="harmless"), question(sandbox="other"), question(asked=2.0)),
)


@pytest.mark.parametrize("changed", CHANGED, ids=lambda each: each.digest()[:8])
def test_what_is_changed_after_it_was_shown_is_refused(desk: Desk, changed: Question) -> None:
    """The file is changed between her look and her answer; and even a good answer to what stands there then is none to what was asked."""

    def change_then_answer() -> None:
        (waiting,) = desk.inbox.waiting()
        place = desk.top / "approvals" / "waiting" / waiting.name
        (place / "question").write_bytes(changed.encoded())
        with pytest.raises(PolicyError, match="no such question"):
            desk.inbox.answer(waiting.name, Decision.ONCE, digest=waiting.digest, by="alice")
        (place / "answer").write_bytes(sealed(Answer(changed.digest(), Decision.ONCE, "alice", 300.0), KEY))
        desk.somebody = desk.wait

    desk.somebody = change_then_answer
    refused = desk.inbox.ask(question())
    assert isinstance(refused, Refused) and "for another question" in refused.why


def test_an_answer_to_something_else_than_what_was_shown_is_not_given(desk: Desk) -> None:
    def answer() -> None:
        (waiting,) = desk.inbox.waiting()
        with pytest.raises(PolicyError, match="has changed since it was shown"):
            desk.inbox.answer(waiting.name, Decision.ONCE, digest=question(details="-x").digest(), by="alice")
        desk.somebody = desk.wait

    desk.somebody = answer
    assert isinstance(desk.inbox.ask(question()), Refused)


def _answer_file(desk: Desk, content: Callable[[Question], bytes]) -> None:
    def put() -> None:
        (waiting,) = desk.inbox.waiting()
        place = desk.top / "approvals" / "waiting" / waiting.name
        from agent_sandbox.engine.approvals.question import decoded

        asked = decoded((place / "question").read_bytes())
        assert asked is not None
        (place / "answer").write_bytes(content(asked))
        desk.somebody = desk.wait

    desk.somebody = put


@pytest.mark.parametrize(
    "content",
    [
        lambda asked: b"yes",
        lambda asked: sealed(Answer(asked.digest(), Decision.ONCE, "eve", 300.0), Seal(b"another key")),
        lambda asked: sealed(Answer("0" * 64, Decision.ONCE, "eve", 300.0), KEY),
        lambda asked: sealed(Answer(asked.digest(), Decision.ONCE, "eve", 5.0), KEY),
        lambda asked: sealed(Answer(asked.digest(), Decision.NO, "eve", 300.0), KEY).replace(b"\nno\n", b"\nonce\n"),
        lambda asked: sealed(Answer(asked.group(), Decision.FOR_THIS_RUN, "eve", 300.0), KEY),
    ],
    ids=["no seal", "another key", "another question", "expired", "changed", "the group's digest"],
)
def test_an_answer_that_is_made_up_replayed_or_late_is_none(desk: Desk, content: Callable[[Question], bytes]) -> None:
    _answer_file(desk, content)
    assert isinstance(desk.inbox.ask(question()), Refused)


def test_an_answer_to_the_same_question_asked_earlier_is_none(desk: Desk) -> None:
    """A replay: the file that was good for one is kept and put back for the next."""
    kept: list[bytes] = []

    def keep(asked: Question) -> bytes:
        kept.append(sealed(Answer(asked.digest(), Decision.ONCE, "alice", 300.0), KEY))
        return kept[0]

    _answer_file(desk, keep)
    assert isinstance(desk.inbox.ask(question()), Granted)
    _answer_file(desk, lambda asked: kept[0])
    assert isinstance(desk.inbox.ask(question(nonce="m" * 32)), Refused)


@pytest.mark.needs_root
def test_where_another_users_word_is_needed_ones_own_does_not_count(desk: Desk) -> None:
    for approvers, expected in (({4242}, Refused), ({0}, Granted)):
        desk.now = 10.0
        desk.says(Decision.ONCE)
        assert isinstance(desk.another(approvers).ask(question()), expected)


def test_a_late_answer_a_second_answer_and_an_answer_to_nothing_are_refused(desk: Desk) -> None:
    names: list[str] = []

    def look() -> None:
        (waiting,) = desk.inbox.waiting()
        names.append(waiting.name)
        desk.inbox.answer(waiting.name, Decision.NO, digest=waiting.digest, by="alice")
        with pytest.raises(PolicyError, match="no such question"):
            desk.inbox.answer(waiting.name, Decision.ONCE, digest=waiting.digest, by="bob")
        assert desk.inbox.waiting() == []

    desk.somebody = look
    assert desk.inbox.ask(question()) == Refused("alice said no")
    for name in (*names, "0" * 64, "../ledger", ""):
        desk.now = 10.0
        with pytest.raises(PolicyError, match="no such question"):
            desk.inbox.answer(name, Decision.ONCE, digest=question().digest(), by="bob")


def test_equal_questions_wait_as_one_and_one_yes_is_for_one_of_them(desk: Desk) -> None:
    found: list[Granted | Refused] = []
    answered = threading.Condition()

    def ask(number: int) -> None:
        got = desk.inbox.ask(question(nonce=str(number), until=1e9))
        with answered:
            found.append(got)
            answered.notify()

    def enough(number: int) -> bool:
        return len(found) == number

    desk.somebody = os.sched_yield
    threads = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for number in range(1, 7):
        while not (waiting := desk.inbox.waiting()):
            continue
        assert len(waiting) == 1, "one of them waits for all"
        desk.inbox.answer(waiting[0].name, Decision.ONCE, digest=waiting[0].digest, by="alice")
        with answered:
            assert answered.wait_for(partial(enough, number))
    for thread in threads:
        thread.join()
    assert found == [Granted("alice")] * 6


def test_how_often_it_was_asked_is_told(desk: Desk) -> None:
    told: list[int] = []

    def look() -> None:
        told.extend(each.times for each in desk.inbox.waiting())
        desk.wait()

    def ask_the_same_once_more() -> None:
        desk.somebody = look
        desk.another().ask(question(nonce="another", until=desk.now + 20.0))

    desk.somebody = ask_the_same_once_more
    desk.inbox.ask(question())
    assert told[0] == 2


def test_a_flood_is_refused_and_recorded(desk: Desk) -> None:
    for number in range(MOST_WAITING):
        other = question(argv=("x", str(number)), sandbox=f"box {number}")
        place = desk.top / "approvals" / "waiting" / other.digest()
        place.mkdir(parents=True)
        (place / "question").write_bytes(other.encoded())
    refused = desk.inbox.ask(question())
    assert isinstance(refused, Refused) and "waiting already" in refused.why
    assert desk.noted() == ["approval.flooded"]
    assert len(desk.inbox.waiting()) == MOST_WAITING


def test_questions_whose_askers_died_are_cleared_away(desk: Desk) -> None:
    place = desk.top / "approvals" / "waiting" / question().digest()
    place.mkdir(parents=True)
    (place / "question").write_bytes(question().encoded())
    assert len(desk.inbox.waiting()) == 1
    desk.now = 301.0
    assert desk.inbox.waiting() == [] and desk.left() == []


def test_what_cannot_be_recorded_is_not_asked(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    (tmp_path / "ledger").mkdir()
    with pytest.raises(LedgerUnavailable):
        desk.inbox.ask(question())
    assert desk.left() == []


def test_through_the_gate_the_question_is_the_action_itself(desk: Desk) -> None:
    seen: list[str] = []

    def look() -> None:
        (waiting,) = desk.inbox.waiting()
        seen.append(waiting.text)
        desk.inbox.answer(waiting.name, Decision.ONCE, digest=waiting.digest, by="alice")

    desk.somebody = look
    approver = InboxApprover(desk.inbox, policy="p", sandbox="box", run="r", clock=lambda: desk.now)
    action, verdict = RunCommand.of(["git", "push", "--force"]), Ask(Reason("risky", "it is risky"), "x", "+diff")
    assert approver.ask(action, verdict, desk.now + 300) == Granted("alice")
    assert "git push --force" in seen[0] and "it is risky (risky)" in seen[0] and "| +diff" in seen[0]


def test_an_answer_reads_back_as_it_was_said() -> None:
    for by in ("alice", "a\nb\x00ü\u202e\\n", ""):
        answer = Answer("d" * 64, Decision.FOR_THIS_RUN, by, 1.5)
        assert opened(sealed(answer, KEY), KEY) == answer
