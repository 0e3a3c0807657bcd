"""A sandbox that asks, in Python: who answers, what is granted, and what is taken back."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

import pytest

from agent_sandbox import AskRules, PolicyError, Sandbox, SandboxResult, SandboxStatus, shell
from agent_sandbox.assembly import here
from agent_sandbox.engine.approvals.inbox import Waiting
from agent_sandbox.engine.approvals.question import Decision
from agent_sandbox.engine.gate import Granted, Refused
from agent_sandbox.ledger.event import Entry, Event, Noted
from agent_sandbox.ledger.writer import Ledger
from agent_sandbox.policy.action import Action, CallTool, RunCode
from agent_sandbox.policy.decide import Ask, Deny
from agent_sandbox.policy.tokens import Only, Times, spell
from tests.ledger.samples import read
from tests.patience import given_time

TOOL = AskRules(tools=("send",))
CALL = "for _ in range(100): print(send('x'))"
CODE = AskRules(effects=("runs-code",))


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AGENT_SANDBOX_STATE", str(tmp_path / "state"))
    return tmp_path / "state"


class Boss:
    """Answers, and remembers what was asked."""

    def __init__(self, answer: bool = True) -> None:
        self.answer = answer
        self.asked: list[tuple[Action, Ask]] = []

    def __call__(self, action: Action, question: Ask) -> bool:
        self.asked.append((action, question))
        return self.answer


@contextmanager
def at_the_inbox(decision: Decision) -> Iterator[list[Waiting]]:
    """Somebody who looks into the inbox and answers all that comes."""
    seen: list[Waiting] = []
    over = threading.Event()

    def work() -> None:
        while not over.wait(0.02):
            inbox = here().inbox()
            for each in inbox.waiting():
                seen.append(each)
                inbox.answer(each.name, decision, digest=each.digest, by="alice")

    thread = Thread(target=work)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


def noted(state: Path) -> list[str]:
    return [entry.event.what for entry in read(str(state / "ledger.jsonl")) if isinstance(entry.event, Noted)]


def test_a_tool_that_is_called_a_hundred_times_in_a_session_is_asked_about_once(state: Path) -> None:
    calls: list[str] = []
    with at_the_inbox(Decision.FOR_THIS_RUN) as seen, Sandbox(asks=TOOL) as sandbox, sandbox.session(tools={"send": calls.append}) as turns:
        assert turns.run(CALL).success and turns.run(CALL).success
    assert len(calls) == 200 and len(seen) == 1
    assert "send(*['x'], **{})" in seen[0].text, "who is asked sees what would be sent"
    assert noted(state) == ["approval.asked", "approval.answered", "approval.ended"], "and it is taken back with the sandbox"


def test_the_time_in_which_somebody_is_asked_is_not_the_programs() -> None:
    def attempt(limit: float) -> list[str]:
        def slow(action: Action, question: Ask) -> bool:
            time.sleep(2 * limit)  # injected: more than the program has
            return True

        with Sandbox(asks=TOOL, approver=slow, timeout_seconds=limit, tools={"send": str.upper}) as sandbox:
            said = [sandbox.run("print(send('x'))").stdout]
            with sandbox.session() as session:
                said += [session.run("print(send('y'))").stdout]
                if not session.ended:
                    said += [session.run("print(send('z'))").stdout]
        return said

    wanted = ["X\n", "Y\n", "Z\n"]
    assert given_time(attempt, lambda said: said == wanted, seconds=0.5) == wanted


def test_the_time_that_recording_takes_is_not_the_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    record, pause = Ledger.record, [0.0]

    def slowly(self: Ledger, event: Event, *, lasting: bool = False) -> Entry:
        time.sleep(pause[0])  # injected: a slow disk
        return record(self, event, lasting=lasting)

    def attempt(limit: float) -> str:
        pause[0] = limit / 10
        with Sandbox(timeout_seconds=limit, tools={"send": str.upper}) as sandbox:
            return sandbox.run("print(*(send(x) for x in 'abcdefghij'))").stdout

    monkeypatch.setattr(Ledger, "record", slowly)
    wanted = "A B C D E F G H I J\n"  # two entries each: twice as long as the program has
    assert given_time(attempt, lambda said: said == wanted, seconds=0.5) == wanted


def test_the_time_that_a_tool_takes_is_the_programs_also_where_somebody_was_asked() -> None:
    """The control arm of the two above: the clock goes on while the tool does."""
    calls: list[float] = []

    def attempt(limit: float) -> SandboxResult:
        def send(seconds: float) -> None:
            calls.append(seconds)
            time.sleep(seconds)

        with Sandbox(asks=TOOL, approver=Boss(), timeout_seconds=limit, tools={"send": send}) as sandbox:
            return sandbox.run(f"send({2 * limit}); print('late')")

    ran = given_time(attempt, lambda _: calls, seconds=0.5)
    assert (ran.status, ran.stdout, ran.limits_hit) == (SandboxStatus.TIMEOUT, "", ("wall",))


def test_asking_does_not_prolong_the_lifetime_of_a_sandbox() -> None:
    asked: list[float] = []

    def attempt(lifetime: float) -> SandboxResult:
        def slow(action: Action, question: Ask) -> bool:
            asked.append(lifetime)
            time.sleep(2 * lifetime)
            return True

        with Sandbox(asks=TOOL, approver=slow, lifetime_seconds=lifetime, tools={"send": str.upper}) as sandbox:
            return sandbox.run("print(send('x'))")

    ran = given_time(attempt, lambda _: asked, seconds=0.5)
    assert (ran.status, ran.stdout, ran.limits_hit) == (SandboxStatus.TIMEOUT, "", ("lifetime",))


def test_a_no_at_the_inbox_reaches_the_program_as_a_refusal() -> None:
    calls: list[str] = []
    with at_the_inbox(Decision.NO), Sandbox(asks=TOOL) as sandbox:
        done = sandbox.run("try: send('x')\nexcept PermissionError as error: print('refused', error)", tools={"send": calls.append})
    assert done.stdout.startswith("refused") and "alice said no" in done.stdout and calls == []


def test_a_function_answers_and_sees_the_source() -> None:
    boss = Boss()
    with Sandbox(asks=CODE, approver=boss) as sandbox:
        assert sandbox.run("print(6 * 7)").stdout == "42\n"
        boss.answer = False
        refused = sandbox.run("print('canary')")
    assert refused.stdout == "" and isinstance(refused.verdict, Deny) and refused.verdict.because.rule == "approval"
    assert refused.verdict.missing.startswith("code python ")
    (action, question), _ = boss.asked
    assert isinstance(action, RunCode) and question.because.rule == "approvals.effects"
    source, *_, given = question.details.split("\n")
    assert source == "print(6 * 7)" and given.startswith("given: variables and input with the digest ")


@pytest.mark.parametrize("answer", [None, 1, "yes", RuntimeError()])
def test_only_true_is_yes(answer: object) -> None:
    def odd(action: Action, question: Ask) -> bool:
        if isinstance(answer, Exception):
            raise answer
        return answer  # type: ignore[return-value]

    with Sandbox(asks=CODE, approver=odd) as sandbox:
        assert sandbox.run("print('canary')").stdout == ""


def test_an_approver_of_ones_own_is_asked_and_ended() -> None:
    class Own:
        ended = 0

        def ask(self, action: Action, verdict: Ask, deadline: float) -> Granted | Refused:
            return Granted("me") if isinstance(action, CallTool) else Refused("no code")

        def end(self) -> None:
            self.ended += 1

    own = Own()
    asks = AskRules(tools=("send",), effects=("network",))
    with Sandbox(asks=asks, approver=own, allow_subprocess=True, validate_code=False) as sandbox:
        assert sandbox.run("print(send())", tools={"send": lambda: 5}).stdout == "5\n"
        refused = sandbox.run(shell("curl example.com"))
        assert isinstance(refused.verdict, Deny) and refused.verdict.because.rule == "approval"
        assert sandbox.run(shell("echo quiet")).stdout == "quiet\n"
    assert own.ended >= 1


def test_a_grant_is_used_until_it_is_revoked_also_in_a_session_that_goes_on() -> None:
    boss = Boss(answer=False)
    calls: list[str] = []
    with Sandbox(asks=TOOL, approver=boss) as sandbox:
        token = sandbox.grant("call send *", seconds=600)
        with sandbox.session(tools={"send": calls.append}) as session:
            assert session.run("send('x')").success and calls == ["x"] and boss.asked == []
            sandbox.revoke(token)
            assert not session.run("send('x')").success and calls == ["x"] and len(boss.asked) == 1


def test_a_token_is_for_the_sandbox_of_its_name_and_less_of_it_can_be_handed_on() -> None:
    boss = Boss(answer=False)
    with Sandbox(asks=CODE, approver=boss, name="worker") as sandbox:
        token = sandbox.grant("code **", seconds=600)
        less = token.attenuate(Times(1), Only((("code", "python", "*"),)))
    for held, runs in ((spell(less), ["42\n", ""]), (str(token), ["42\n", "42\n"])):
        with Sandbox(asks=CODE, approver=boss, name="worker", capabilities=[held]) as sandbox:
            assert [sandbox.run("print(42)").stdout for _ in runs] == runs
    with Sandbox(asks=CODE, approver=boss, name="another", capabilities=[token]) as sandbox:
        assert sandbox.run("print(42)").stdout == ""
    with Sandbox(asks=CODE, approver=boss, name="worker") as sandbox:
        assert sandbox.run("print(42)").stdout == "", "a grant without its token is nothing"


def test_what_says_nothing_is_refused() -> None:
    with pytest.raises(PolicyError, match="without approval rules"):
        Sandbox(approver=Boss())
    with pytest.raises(PolicyError, match="invalid capability token"):
        Sandbox(asks=AskRules(), capabilities=["cap1.x"])
    other = Sandbox(name="another", asks=TOOL).grant("call send *", seconds=60)
    with pytest.raises(PolicyError, match="without approval rules"):
        Sandbox(asks=AskRules(), capabilities=[other])
    with pytest.raises(PolicyError, match="invalid capability token") as refusal:
        Sandbox(asks=CODE, capabilities=["cap1.secret"])
    assert "cap1.secret" not in str(refusal.value)
    with Sandbox() as sandbox, pytest.raises(PolicyError, match="no approval rules"):
        sandbox.grant("code **", seconds=5)
