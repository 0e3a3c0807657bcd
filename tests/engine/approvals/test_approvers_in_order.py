"""A gate with everybody who can answer for a run: tokens, then a person; silence is no, and a yes is to exactly one thing."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from agent_sandbox._fast.encoding import Seal
from agent_sandbox.engine.approvals.approvers import Desk
from agent_sandbox.engine.approvals.inbox import Inbox, Waiting
from agent_sandbox.engine.approvals.question import Decision
from agent_sandbox.engine.gate import Gate
from agent_sandbox.engine.grants import Capabilities
from agent_sandbox.errors import Denied, PolicyError
from agent_sandbox.ledger.writer import Ledger
from agent_sandbox.policy.action import RunCommand
from agent_sandbox.policy.model import AskRules, cloned
from agent_sandbox.policy.tokens import Token

KEY = Seal(b"k" * 32)
PUSH, FORCE = RunCommand.of(["git", "push"]), RunCommand.of(["git", "push", "--force"])
PUSHING = AskRules(commands=("git push **",))


class Office:
    """An inbox, capabilities and a gate, all of them real. `answer` is what somebody does when a question begins to wait."""

    def __init__(self, top: Path, asks: AskRules = PUSHING, *, factor: str = "123456") -> None:
        self.now = 1_000.0
        self.clock = lambda: self.now
        self.policy = replace(cloned(masks=()), asks=asks)
        self.ledger = Ledger(top / "ledger", clock=self.clock)
        self.capabilities = Capabilities(str(top / "capabilities"), KEY, self.ledger, clock=self.clock)
        self.inbox = Inbox(
            str(top / "approvals"),
            KEY,
            self.ledger,
            clock=self.clock,
            pause=self.wait,
            factor=lambda code: code == factor,
            on_wait=lambda waiting: self.answer(waiting),
        )
        self.tokens: list[Token] = []
        self.asked: list[Waiting] = []
        self.decisions: list[Decision] = []
        self.approvers: set[int] | None = None

    def wait(self) -> None:
        """Nobody says anything for a while."""
        self.now += 100.0

    def answer(self, waiting: Waiting) -> None:
        self.asked.append(waiting)
        if self.decisions:
            self.inbox.answer(waiting.name, self.decisions.pop(0), digest=waiting.digest, by="alice")

    def desk(self) -> Desk:
        run, asks = os.urandom(4).hex(), self.policy.asks
        counts = lambda word: word.counts(asks.needs, self.approvers, asker=os.getuid())  # noqa: E731  as `places` has it
        return Desk(self.inbox, self.capabilities, self.policy, sandbox="box", run=run, tokens=self.tokens, clock=self.clock, counts=counts)

    def gate(self) -> Gate:
        return Gate(self.policy, self.ledger, clock=self.clock, approver=self.desk(), sandbox="box")


def done(gate: Gate, action: RunCommand = PUSH) -> bool:
    """Whether it was: the deed itself says so."""
    deeds: list[str] = []
    try:
        gate.perform(action, lambda allow: deeds.append(allow.because.rule))
    except Denied:
        assert deeds == []
    return bool(deeds)


def test_nobody_answering_is_a_refusal(tmp_path: Path) -> None:
    office = Office(tmp_path)
    assert not done(office.gate()) and len(office.asked) == 1
    assert os.listdir(tmp_path / "approvals" / "waiting") == ["lock"], "and nothing waits any more"
    office.decisions = [Decision.ONCE]
    assert done(office.gate()), "the control arm"


def test_a_yes_is_to_exactly_what_was_shown_and_to_one_of_it(tmp_path: Path) -> None:
    office = Office(tmp_path)
    office.decisions = [Decision.ONCE]
    gate = office.gate()
    assert done(gate) and not done(gate), "once"
    office.decisions = [Decision.FOR_THIS_RUN]
    assert done(gate) and done(gate) and len(office.asked) == 3, "for the run, and nobody is asked again"
    assert not done(gate, FORCE), "another action is another question"
    assert not done(office.gate()), "and so is the same in another run"
    gate.end()
    assert not done(gate), "it was taken back with the end"


def test_a_changed_policy_is_another_question(tmp_path: Path) -> None:
    office = Office(tmp_path)
    office.decisions = [Decision.FOR_THIS_RUN]
    desk = office.desk()
    assert done(Gate(office.policy, office.ledger, clock=office.clock, approver=desk, sandbox="box"))
    wider = replace(office.policy, name="wider")
    other = Desk(office.inbox, office.capabilities, wider, sandbox="box", run="x", tokens=(), clock=office.clock)
    assert not done(Gate(wider, office.ledger, clock=office.clock, approver=other, sandbox="box"))


def test_a_token_answers_before_anybody_is_asked_until_it_is_revoked(tmp_path: Path) -> None:
    office = Office(tmp_path)
    gate = office.gate()
    token = office.capabilities.grant("box", (("run", "git", "push", "**"),), seconds=60_000, by="alice")
    assert not done(gate), "nobody holds it yet"
    office.tokens.append(token)
    assert done(gate) and done(gate, FORCE) and len(office.asked) == 1
    office.capabilities.revoke(token, by="alice")
    assert not done(gate), "at once, in a run that goes on"


def test_a_grant_is_no_way_around_what_a_yes_needs(tmp_path: Path) -> None:
    pushing = (("run", "git", "push", "**"),)
    office = Office(tmp_path / "a", replace(PUSHING, needs=("second-factor",)))
    office.tokens = [office.capabilities.grant("box", pushing, seconds=60_000, by="agent")]
    assert not done(office.gate())
    office.tokens = [office.capabilities.grant("box", pushing, seconds=60_000, by="alice", factor=True)]
    assert done(office.gate()), "the control arm"
    office = Office(tmp_path / "b", replace(PUSHING, needs=("another-user",)))
    office.tokens = [office.capabilities.grant("box", pushing, seconds=60_000, by="root", factor=True)]
    assert not done(office.gate()), "whatever it says, it is one's own"
    office = Office(tmp_path / "c", PUSHING)
    office.tokens = [office.capabilities.grant("box", pushing, seconds=60_000, by="alice")]
    office.approvers = {os.getuid() + 1}
    assert not done(office.gate())
    office.approvers = {os.getuid()}
    assert done(office.gate()), "the control arm"


def test_a_line_of_plain_words_is_covered_like_the_words_and_nothing_more(tmp_path: Path) -> None:
    office = Office(tmp_path)
    office.tokens = [office.capabilities.grant("box", (("run", "git", "push", "**"),), seconds=60_000, by="alice")]
    gate = office.gate()
    assert done(gate, RunCommand.of(["bash", "-c", "git push origin main"]))
    for line in (
        "git push; id",
        "git push && id",
        "git push $(id)",
        "git push `id`",
        "git push\nid",
        "A=1 git push",
        "git push > /x",
        "git push *",
    ):
        assert not done(gate, RunCommand.of(["bash", "-c", line])), line
    assert not done(gate, RunCommand.of(["/home/u/bash", "-c", "git push"])), "another program of that name"
    assert not done(gate, RunCommand.of(["bash", "-c", "git push", "extra"]))


def test_a_second_factor_is_asked_for_and_checked(tmp_path: Path) -> None:
    office = Office(tmp_path, replace(PUSHING, needs=("second-factor",)))
    refused: list[str] = []

    def answer(waiting: Waiting) -> None:
        assert "second-factor" in waiting.text
        for code in (None, "000000"):
            with pytest.raises(PolicyError, match="second factor"):
                office.inbox.answer(waiting.name, Decision.ONCE, digest=waiting.digest, by="alice", code=code)
            refused.append(waiting.digest)

    office.answer = answer  # type: ignore[method-assign]
    assert not done(office.gate()) and len(refused) == 2

    def right(waiting: Waiting) -> None:
        office.inbox.answer(waiting.name, Decision.ONCE, digest=waiting.digest, by="alice", code="123456")

    office.answer = right  # type: ignore[method-assign]
    assert done(office.gate())


def test_without_a_second_factor_here_nobody_can_say_yes_but_anybody_no(tmp_path: Path) -> None:
    office = Office(tmp_path, replace(PUSHING, needs=("second-factor",)))
    bare = Inbox(str(tmp_path / "approvals"), KEY, office.ledger, clock=office.clock, pause=lambda: None)

    def answer(waiting: Waiting) -> None:
        with pytest.raises(PolicyError, match="none is set up"):
            bare.answer(waiting.name, Decision.ONCE, digest=waiting.digest, by="alice", code="123456")
        bare.answer(waiting.name, Decision.NO, digest=waiting.digest, by="alice")

    office.answer = answer  # type: ignore[method-assign]
    assert not done(office.gate())


def test_ones_own_word_is_not_another_users(tmp_path: Path) -> None:
    office = Office(tmp_path, replace(PUSHING, needs=("another-user",)))

    def answer(waiting: Waiting) -> None:
        with pytest.raises(PolicyError, match="another user"):
            office.inbox.answer(waiting.name, Decision.ONCE, digest=waiting.digest, by="root")

    office.answer = answer  # type: ignore[method-assign]
    assert not done(office.gate())


def test_only_the_word_of_those_named_counts_and_who_they_are_is_shown(tmp_path: Path) -> None:
    office = Office(tmp_path, replace(PUSHING, approvers=("alice",)))
    assert not done(office.gate()) and "the word of alice" in office.asked[0].text
    others = Inbox(str(tmp_path / "approvals"), KEY, office.ledger, clock=office.clock, pause=lambda: None, approvers={os.getuid() + 1})

    def answer(waiting: Waiting) -> None:
        with pytest.raises(PolicyError, match="does not accept your approval"):
            others.answer(waiting.name, Decision.ONCE, digest=waiting.digest, by="mallory")

    office.answer = answer  # type: ignore[method-assign]
    assert not done(office.gate())


def test_who_is_killed_while_answering_has_answered_or_not_and_leaves_nothing(tmp_path: Path) -> None:
    """Killed at each call that changes something: another can answer, or the answer counts, and in the end nothing is left."""
    from tests.engine.test_elevations import _die_at

    ended = False
    for cut in range(1, 40):
        place = tmp_path / str(cut)
        place.mkdir()
        office = Office(place)

        def answer(waiting: Waiting, cut: int = cut, office: Office = office) -> None:
            nonlocal ended
            pid = os.fork()
            if pid == 0:
                _die_at(cut)
                office.inbox.answer(waiting.name, Decision.ONCE, digest=waiting.digest, by="alice")
                os._exit(0)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            assert status in (0, -signal.SIGKILL)
            ended = status == 0
            if any(each.digest == waiting.digest for each in office.inbox.waiting()):
                office.inbox.answer(waiting.name, Decision.ONCE, digest=waiting.digest, by="bob")

        office.answer = answer  # type: ignore[method-assign]
        assert done(office.gate())
        assert os.listdir(place / "approvals" / "waiting") == ["lock"], f"cut {cut}"
        if ended:
            return
    pytest.fail("it never came to its end")


@pytest.mark.needs_root
def test_a_visitor_writes_only_where_the_asker_is_at_home(tmp_path: Path) -> None:
    """Root answers for somebody whose directory leads elsewhere: nothing is written there."""
    office = Office(tmp_path)

    def answer(waiting: Waiting) -> None:
        place = tmp_path / "approvals" / "waiting" / waiting.digest
        os.chown(place, 4242, 4242)
        with pytest.raises(PolicyError, match="belongs to another user"):
            office.inbox.answer(waiting.name, Decision.ONCE, digest=waiting.digest, by="root")
        assert os.listdir(place) == ["question"]

    office.answer = answer  # type: ignore[method-assign]
    assert not done(office.gate())
