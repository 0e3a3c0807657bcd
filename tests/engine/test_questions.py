"""The questions of a run about its network: who is asked, how often, for what the answer holds, and that nothing floods a person."""

from __future__ import annotations

import threading
from collections.abc import Callable
from math import inf
from pathlib import Path

import pytest

from agent_sandbox._fast.encoding import Seal
from agent_sandbox.egress.orders import decode_question
from agent_sandbox.engine import questions
from agent_sandbox.engine.approvals.approvers import CapabilityApprover
from agent_sandbox.engine.gate import Gate, Granted, Refused
from agent_sandbox.engine.grants import Capabilities
from agent_sandbox.engine.questions import Questions, RequestAnswer
from agent_sandbox.ledger.event import Intent, Noted, RefusalEvent
from agent_sandbox.ledger.writer import Ledger
from agent_sandbox.policy.action import Action, Connect
from agent_sandbox.policy.decide import Ask
from agent_sandbox.policy.model import cloned
from agent_sandbox.policy.network import NetworkRules
from agent_sandbox.policy.network_presets import network_of
from agent_sandbox.policy.tokens import Token
from tests.ledger.samples import read

RULES = network_of(["plain.test", "*.web.test+ask", "web.test+ask"])
ONCE, FOR_RUN, NO = Granted("alice"), Granted("alice", until=inf), Refused("alice said no")


class Boss:
    """Answers each question when the test says so. What it is asked, it remembers."""

    def __init__(self) -> None:
        self.asked: list[tuple[Connect, Ask]] = []
        self._answers: list[Granted | Refused] = []
        self._news = threading.Condition()

    def ask(self, action: Action, verdict: Ask, deadline: float) -> Granted | Refused:
        assert isinstance(action, Connect) and verdict.wanted is not None
        with self._news:
            self.asked.append((action, verdict))
            place = len(self.asked)
            self._news.notify_all()
            while len(self._answers) < place:
                if not verdict.wanted():
                    return Refused("nobody waits")
                self._news.wait(0.02)
            return self._answers[place - 1]

    def end(self) -> None:
        pass

    def answer(self, answer: Granted | Refused) -> None:
        """Answer the next question, which may not have come yet."""
        with self._news:
            self._answers.append(answer)
            self._news.notify_all()

    def until_asked(self, count: int) -> None:
        with self._news:
            assert self._news.wait_for(lambda: len(self.asked) >= count, 60)


class Desk:
    """The questions of one run, and the answers that its requests got."""

    def __init__(self, top: Path, *, tokens: list[Token] | None = None, now: float = 1000.0) -> None:
        self.now, self.boss, self.top = now, Boss(), top
        self.ledger = Ledger(top / "ledger", clock=lambda: self.now)
        self.capabilities = Capabilities(str(top / "capabilities"), Seal(b"k" * 32), self.ledger, clock=lambda: self.now)
        self.tokens = tokens if tokens is not None else []
        approver = CapabilityApprover(self.capabilities, self.tokens, sandbox="box", otherwise=self.boss)
        gate = Gate(cloned(masks=(), network=RULES), self.ledger, clock=lambda: self.now, approver=approver, sandbox="box")
        self.answers: dict[int, RequestAnswer] = {}
        self._news = threading.Condition()
        self.questions = Questions(gate, self._take, run="r1", clock=lambda: self.now)
        self._number = 0

    def _take(self, number: int, answer: RequestAnswer) -> None:
        with self._news:
            assert number not in self.answers, "each request is answered once"
            self.answers[number] = answer
            self._news.notify_all()

    def ask(self, host: str = "web.test", method: str = "GET", path: str = "/", *, rules: NetworkRules = RULES, **more: object) -> int:
        self._number += 1
        again = bool(more.pop("again", False))
        action = Connect(host, 443, method, path, str(more.get("data", "")))
        self.questions.hear(rules, self._number, action, again=again)
        return self._number

    def answered(self, number: int) -> RequestAnswer:
        with self._news:
            assert self._news.wait_for(lambda: number in self.answers, 60)
            return self.answers[number]

    def grant(self, *patterns: str, times: int | None = None) -> Token:
        words = tuple(tuple(each.split()) for each in patterns)
        self.tokens.append(self.capabilities.grant("box", words, seconds=60.0, times=times, by="alice"))
        return self.tokens[-1]


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def test_who_is_asked_for_a_host_is_told_by_which_run_and_program(desk: Desk) -> None:
    desk.questions.program = "make check"
    desk.ask()
    desk.boss.until_asked(1)
    assert desk.boss.asked[0][1].details.startswith("asked by run r1: make check\nonce: this request\n")
    desk.questions.close()


def test_many_requests_to_a_host_wait_for_one_question_and_a_yes_for_the_run_lets_them_all_pass(desk: Desk) -> None:
    numbers = [desk.ask(path=f"/{each}") for each in range(20)]
    desk.boss.until_asked(1)
    assert desk.answers == {}
    desk.boss.answer(FOR_RUN)
    assert all(desk.answered(number) == RequestAnswer(True, "", 1e9, True) for number in numbers)
    assert desk.answered(desk.ask(path="/later")).allowed and len(desk.boss.asked) == 1
    assert desk.questions.may_resolve("web.test") and not desk.questions.may_resolve("a.web.test")
    (intent,) = (entry.event for entry in read(desk.ledger.path) if isinstance(entry.event, Intent))
    assert intent.rule == "approval of alice (network.ask)" and intent.action["host"] == "web.test", "who decided is on record"
    action, verdict = desk.boss.asked[0]
    assert (action.method, action.path) == ("GET", "/0") and "every request to web.test:443" in verdict.details


def test_a_yes_once_is_for_the_request_that_was_shown_and_the_others_are_asked_about(desk: Desk) -> None:
    shown, other = desk.ask(path="/shown"), desk.ask("web.test", "POST", "/other")
    desk.boss.answer(ONCE)
    assert desk.answered(shown) == RequestAnswer(True)
    desk.boss.until_asked(2)
    assert desk.boss.asked[1][0].path == "/other" and other not in desk.answers
    desk.boss.answer(NO)
    assert not desk.answered(other).allowed
    assert not desk.answered(desk.ask(path="/shown")).allowed, "a no holds for the run, so that nobody is worn down"
    assert len(desk.boss.asked) == 2
    assert desk.questions.may_resolve("web.test") and not desk.questions.may_resolve("web.test"), "one request, one look-up"
    (refusal,) = (entry.event for entry in read(desk.ledger.path) if isinstance(entry.event, RefusalEvent))
    assert "alice said no" in refusal.why


def test_a_client_that_has_gone_gets_nothing_and_its_question_serves_the_next_try(desk: Desk) -> None:
    gone = desk.ask(path="/slow")
    desk.boss.until_asked(1)
    desk.questions.withdraw(gone)
    desk.questions.withdraw(gone)
    desk.questions.withdraw(99)
    again = desk.ask(path="/slow")
    desk.boss.answer(ONCE)
    assert desk.answered(again).allowed and gone not in desk.answers and len(desk.boss.asked) == 1


def test_a_flood_of_hosts_does_not_flood_a_person(desk: Desk) -> None:
    numbers = [desk.ask(f"h{each}.web.test") for each in range(500)]
    desk.boss.until_asked(questions.MOST_OPEN)
    refused = [desk.answered(number) for number in numbers[questions.MOST_OPEN :]]
    assert {each.why for each in refused} == {"4 questions of this run wait for an answer already"}
    for _ in range(questions.MOST_QUESTIONS):
        desk.boss.answer(NO)
    assert not any(desk.answered(number).allowed for number in numbers[: questions.MOST_OPEN])
    for each in range(questions.MOST_QUESTIONS * 2):
        assert not desk.answered(desk.ask(f"x{each}.web.test")).allowed
    assert len(desk.boss.asked) == questions.MOST_QUESTIONS
    assert desk.answered(desk.ask("last.web.test")).why == "no more than 20 questions are asked in one run"
    assert not any(desk.questions.may_resolve(f"h{each}.web.test") for each in range(500)), "and no resolver heard of them"


def test_what_waits_is_bounded(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(questions, "MOST_WAITING", 3)
    numbers = [desk.ask(path=f"/{each}") for each in range(5)]
    assert [desk.answered(number).why for number in numbers[3:]] == ["too many requests wait for an answer"] * 2


def test_an_answer_that_comes_after_the_end_of_the_run_is_for_nobody(desk: Desk) -> None:
    number = desk.ask()
    desk.boss.until_asked(1)
    desk.questions.close()
    assert desk.answered(number) == RequestAnswer(False, "the run has ended")
    desk.boss.answer(FOR_RUN)
    assert not desk.answered(desk.ask()).allowed and not desk.questions.may_resolve("web.test")


def test_a_yes_for_one_run_is_none_for_another(tmp_path: Path) -> None:
    one, other = Desk(tmp_path / "one"), Desk(tmp_path / "two")
    one.ask()
    one.boss.answer(FOR_RUN)
    assert one.answered(1).allowed
    other.ask()
    other.boss.until_asked(1)
    assert other.answers == {} and not other.questions.may_resolve("web.test")
    other.questions.close()


def test_the_rules_of_the_moment_are_asked_whatever_the_egress_says(desk: Desk) -> None:
    assert desk.answered(desk.ask("plain.test")) == RequestAnswer(True), "which nobody is asked for"
    assert not desk.answered(desk.ask("evil.test")).allowed
    denied = RULES.narrowed(NetworkRules(True, denied=("web.test",)))
    assert "denies web.test" in desk.answered(desk.ask(rules=denied)).why
    assert not desk.answered(desk.ask("evil.test", data="email in the body")).allowed
    assert desk.boss.asked == []


def test_an_approval_for_the_run_ends_with_its_time_and_is_asked_for_again(desk: Desk) -> None:
    desk.ask()
    desk.boss.answer(Granted("alice", until=1010.0))
    assert desk.answered(1) == RequestAnswer(True, "", 10.0, True)
    assert desk.answered(desk.ask(again=True)).allowed
    desk.now = 1010.0
    assert desk.answered(desk.ask(again=True)).why == "the approval for this run has expired"
    desk.boss.answer(NO)
    assert not desk.answered(desk.ask()).allowed and len(desk.boss.asked) == 2


def test_data_is_asked_about_by_rule_and_host_and_a_capability_for_the_host_does_not_answer(desk: Desk) -> None:
    desk.grant("network plain.test", "network web.test")
    desk.questions.program = "curl -d canary"
    first = desk.ask("plain.test", data="email in the body")
    desk.boss.answer(FOR_RUN)
    assert desk.answered(first).allowed and desk.boss.asked[0][0].data == "email in the body"
    assert "canary" not in desk.boss.asked[0][1].details, "a command line may hold the value"
    assert desk.answered(desk.ask("plain.test", data="email in the head of the request")).allowed
    other = desk.ask("plain.test", data="card in the body")
    desk.boss.answer(NO)
    assert not desk.answered(other).allowed and len(desk.boss.asked) == 2


def ended_by_revoking(desk: Desk, token: Token) -> str:
    Capabilities(str(desk.top / "capabilities"), Seal(b"k" * 32), desk.ledger, clock=lambda: desk.now).revoke(token, by="bob")
    return "the capability was revoked"


def ended_by_time(desk: Desk, token: Token) -> str:
    desk.now += 60.0
    return "the capability has expired"


@pytest.mark.parametrize("end", [ended_by_revoking, ended_by_time])
def test_a_capability_answers_for_each_request_until_it_ends_and_then_the_next_is_refused(
    desk: Desk, end: Callable[[Desk, Token], str]
) -> None:
    token = desk.grant("network web.test")
    assert all(desk.answered(desk.ask(path=f"/{each}")) == RequestAnswer(True, watched=True) for each in range(3))
    assert desk.answered(desk.ask(again=True)).allowed, "an open connection goes on"
    why = end(desk, token)
    assert desk.answered(desk.ask()).why == f"{why}, so web.test:443 is not reached any more"
    assert not desk.answered(desk.ask(again=True)).allowed and desk.boss.asked == []
    noted = [entry.event.facts for entry in read(desk.ledger.path) if isinstance(entry.event, Noted) and "network" in entry.event.what]
    assert len(noted) == 1, "the first use for a host is recorded, the flows are as well"
    other = desk.ask("a.web.test")
    desk.boss.answer(ONCE)
    assert desk.answered(other).allowed, "of another host the capability says nothing, so somebody is asked"


def test_the_uses_of_a_capability_are_counted_and_looking_again_is_none(desk: Desk) -> None:
    desk.grant("network web.test", times=2)
    assert desk.answered(desk.ask()).allowed
    assert all(desk.answered(desk.ask(again=True)).allowed for _ in range(5))
    assert desk.answered(desk.ask()).allowed
    assert "used up" in desk.answered(desk.ask()).why and desk.boss.asked == []


def test_where_only_a_capability_opens_a_host_nobody_is_asked(desk: Desk) -> None:
    rules = network_of(["plain.test"]).with_capable(["cap.test"])
    assert desk.answered(desk.ask("cap.test", rules=rules)).why == "no capability of this run covers GET at cap.test:443"
    desk.grant("network cap.test GET")
    assert desk.answered(desk.ask("cap.test", rules=rules)).allowed
    assert "covers POST" in desk.answered(desk.ask("cap.test", "POST", rules=rules)).why and desk.boss.asked == []


@pytest.mark.parametrize(
    "wrong",
    [
        *({"host": "WEB.test"}, {"host": "web.test/x"}, {"host": 5}, {"port": "443"}, {"port": 0}, {"port": True}, {"number": None}),
        *({"path": "/" * 400}, {"again": 1}, {"data": ["x"]}, {"method": None}),
    ],
)
def test_a_question_of_the_egress_is_read_as_hostile(wrong: dict[str, object]) -> None:
    good = {"kind": "ask", "number": 1, "host": "web.test", "port": 443, "method": "GET", "path": "/", "data": "", "again": False}
    assert decode_question(good) == (1, Connect("web.test", 443, "GET", "/"), False)
    with pytest.raises(ValueError):
        decode_question({**good, **wrong})
