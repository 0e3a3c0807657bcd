"""Approvals: an answer is to exactly what was shown, once, by somebody outside; nothing that is shown acts on who reads it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest

from agent_sandbox.engine.approvals.approvers import InboxApprover
from agent_sandbox.engine.approvals.inbox import MOST_OF_ONE, Inbox
from agent_sandbox.engine.approvals.question import Answer, Decision, Question, decoded, sealed
from agent_sandbox.engine.gate import Granted, Refused
from agent_sandbox.engine.grants import Capabilities
from agent_sandbox.engine.work import Code, Command, Work, action_of
from agent_sandbox.errors import PolicyError
from agent_sandbox.ledger import private_files
from agent_sandbox.ledger.writer import Ledger
from agent_sandbox.policy.action import RunCommand
from agent_sandbox.policy.decide import Ask, Reason
from agent_sandbox.policy.tokens import Genuine, spell
from tests.e2e.program import PROGRAM, Shell
from tests.engine.approvals.test_inbox import KEY, Desk
from tests.engine.approvals.test_question import question
from tests.ledger.samples import exit_code, in_child
from tests.security.conftest import Tell
from tests.security.harness import Box, case

pytestmark = pytest.mark.once

PUSH = RunCommand.of(["git", "push"])


def _changed(random: Random, asked: Question) -> Question:
    """Something else in its place: what an agent would rather have answered."""
    return question(
        **random.choice(
            (
                {"argv": ("git", "push", "--force")},
                {"details": "+evil"},
                {"policy": "q" * 64},
                {"run": "r2"},
                {"sandbox": "other"},
                {"why": "harmless"},
                {"nonce": asked.nonce, "until": asked.until + 1},
            )
        )
    )


@case(91)
def test_an_answer_to_something_else_than_was_asked_is_none_however_it_is_raced(number: int, tmp_path: Path, tell: Tell) -> None:
    """One thread puts other questions, and answers to them, in the place of the one that waits; somebody says yes to whatever is shown."""
    random, desk, over = Random(91), Desk(tmp_path), threading.Event()
    desk.somebody = os.sched_yield
    waiting = tmp_path / "approvals/waiting"
    answered = list[str]()

    def meddle() -> None:
        while not over.is_set():
            for place in list(waiting.iterdir()) if waiting.exists() else ():
                try:
                    asked = decoded((place / "question").read_bytes())
                    if asked is None:
                        continue
                    other = _changed(random, asked)
                    (place / "question").write_bytes(other.encoded())
                    if random.random() < 0.5:
                        (place / "answer").write_bytes(sealed(Answer(other.digest(), Decision.ONCE, "alice", 1e9), KEY))
                except OSError:
                    continue

    def agree() -> None:
        while not over.is_set():
            for each in desk.inbox.waiting():
                try:
                    desk.inbox.answer(each.name, Decision.ONCE, digest=each.digest, by="alice")
                    answered.append(each.digest)
                except (PolicyError, OSError):
                    continue

    threads = [threading.Thread(target=target) for target in (meddle, agree)]
    for thread in threads:
        thread.start()
    granted = 0
    try:
        for _ in range(15):
            asked = question(until=1e9)
            granted += isinstance(desk.inbox.ask(asked), Granted)
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert granted <= len(answered), "a yes that nobody gave to what was asked"
    quiet = Desk(tmp_path / "quiet")
    quiet.says(Decision.ONCE)
    assert isinstance(quiet.inbox.ask(question()), Granted)
    tell(f"{15 - granted} of 15 were refused, and the rest were answered as asked", control="with nobody in between, a yes is a yes")


@case(91)
def test_what_is_done_is_what_was_asked_although_the_caller_changed_it_meanwhile(number: int, tmp_path: Path, tell: Tell) -> None:
    desk, words = Desk(tmp_path), ["git", "push"]
    action = RunCommand.of(words, cwd="/project", environment=["HOME"])
    seen = list[str]()

    def change_and_agree() -> None:
        words[:] = ["rm", "-rf", "/"]
        (waiting,) = desk.inbox.waiting()
        seen.append(waiting.text)
        desk.inbox.answer(waiting.name, Decision.FOR_THIS_RUN, digest=waiting.digest, by="alice")

    desk.somebody = change_and_agree
    approver = InboxApprover(desk.inbox, policy="p", sandbox="box", run="r", clock=lambda: desk.now)
    verdict = Ask(Reason("risky", "it is risky"), "x")
    assert approver.ask(action, verdict, desk.now + 300) == Granted("alice") and action.argv == ("git", "push")
    desk.somebody = desk.wait
    others = (RunCommand.of(words), RunCommand.of(["git", "push"], cwd="/"), RunCommand.of(["git", "push"], cwd="/project"))
    assert all(isinstance(approver.ask(other, verdict, desk.now + 100), Refused) for other in others)
    under_another = InboxApprover(desk.inbox, policy="q", sandbox="box", run="r", clock=lambda: desk.now)
    assert isinstance(under_another.ask(action, verdict, desk.now + 100), Refused)
    assert approver.ask(action, verdict, desk.now + 100) == Granted("alice")
    assert "git push" in seen[0] and "rm" not in seen[0].split()
    tell("other words, another directory, other variables or another policy are asked for anew", control="the same again is not")


@case(91)
def test_another_value_of_a_variable_another_input_or_argument_is_another_question(number: int, tmp_path: Path, tell: Tell) -> None:
    """The action names variables and does not hold them; a yes for the whole run is not one for whatever they will be."""
    desk, push = Desk(tmp_path), Command(("git", "push"))
    approver = InboxApprover(desk.inbox, policy="p", sandbox="box", run="r", clock=lambda: desk.now)

    def asked(work: Work) -> object:
        verdict = Ask(Reason("risky", "it is risky"), "x", details=work.text())
        return approver.ask(action_of(work), verdict, desk.now + 100)

    first = Work(push, {"GIT_AUTHOR_TOKEN": "secret-value", "GIT_SSH_COMMAND": "ssh -F mine"})
    desk.says(Decision.FOR_THIS_RUN)
    assert asked(first) == Granted("alice")
    assert "secret-value" not in first.text() and "GIT_SSH_COMMAND=ssh -F mine" in first.text(), "what runs is shown, what is secret is not"
    others = (
        Work(push, {**first.env, "GIT_SSH_COMMAND": "evil"}),
        Work(push, {**first.env, "GIT_AUTHOR_TOKEN": "evil"}),
        Work(push, first.env, stdin=b"evil"),
        Work(Code("python", "1"), {}),
    )
    assert all(isinstance(asked(other), Refused) for other in others)
    assert asked(first) == Granted("alice")
    assert Work(Code("python", "1", ("a",)), {}).text() != Work(Code("python", "1", ("b",)), {}).text()
    tell("each is asked about anew", control="the same with the same values is not")


@case(92)
def test_one_answer_is_good_for_one_of_many_who_wait(number: int, tmp_path: Path, tell: Tell) -> None:
    """Processes ask at once, and several say yes at once to the one question that all of them wait for."""
    ledger, over = Ledger(tmp_path / "ledger", clock=time.time), tmp_path / "over"
    until = time.time() + 1000

    def inbox() -> Inbox:
        clock = lambda: time.time() + (10_000 if over.exists() else 0)  # noqa: E731
        return Inbox(str(tmp_path / "approvals"), KEY, ledger, clock=clock, pause=lambda: time.sleep(0.005))

    def ask() -> None:
        os._exit(0 if isinstance(inbox().ask(question(until=until)), Granted) else 3)

    askers = {in_child(ask) for _ in range(5)}
    asked = inbox()
    while sum(each.times for each in asked.waiting()) < 5:
        time.sleep(0.005)
    (waiting,) = asked.waiting()

    def agree() -> None:
        with suppress(PolicyError):  # another was first
            inbox().answer(waiting.name, Decision.ONCE, digest=waiting.digest, by="alice")

    assert [exit_code(each) for each in [in_child(agree) for _ in range(3)]] == [0] * 3
    first, status = os.wait()
    over.touch()
    codes = [os.waitstatus_to_exitcode(status), *(exit_code(each) for each in askers - {first})]
    assert codes == [0, 3, 3, 3, 3]
    tell("one of five was let through, four were refused when their time was over", control="the one")


@case(92)
def test_an_answer_does_not_hold_elsewhere_later_or_under_another_policy(number: int, tmp_path: Path, tell: Tell) -> None:
    desk = Desk(tmp_path)
    kept = dict[str, bytes]()

    def replay(decision: Decision) -> Callable[[], None]:
        def put() -> None:
            for place in (tmp_path / "approvals/waiting").iterdir():
                if (place / "question").exists():
                    asked = decoded((place / "question").read_bytes())
                    assert asked is not None
                    kept.setdefault(decision.value, sealed(Answer(asked.digest(), decision, "alice", 200.0), KEY))
                    (place / "answer").write_bytes(kept[decision.value])
            desk.somebody = desk.wait

        return put

    for decision in (Decision.ONCE, Decision.FOR_THIS_RUN):
        desk.now, desk.somebody = 10.0, replay(decision)
        assert desk.inbox.ask(question(run=decision.value)) == Granted("alice"), "the control arm"
        for changed in ({"run": "r2"}, {"sandbox": "other"}, {"policy": "q"}, {"argv": ("rm",)}, {"details": "+x"}):
            desk.now, desk.somebody = 10.0, replay(decision)
            assert isinstance(desk.inbox.ask(question(**changed)), Refused), (decision, changed)
    desk.now = 201.0
    assert isinstance(desk.inbox.ask(question(run="run")), Refused), "its time is over"
    tell(
        "refused in another run or sandbox, under another policy, for something else, and afterwards",
        control="where it was given, it holds",
    )


_FIND = """
import json, os, subprocess
found = []
def look(what, content):
    for name, needle in NEEDLES.items():
        if bytes.fromhex(needle) in content: found.append(f"{name} in {what}")
look("the environment", repr(dict(os.environ)).encode())
for top, directories, names in os.walk(PLACE):
    for name in names:
        path = os.path.join(top, name)
        try:
            if not os.path.islink(path) and os.path.getsize(path) < 1 << 20: look("a file", open(path, "rb").read())
        except OSError: pass
for process in filter(str.isdigit, os.listdir("/proc")):
    for name in ("environ", "cmdline", "maps"):
        try: look(f"/proc/N/{name}", open(f"/proc/{process}/{name}", "rb").read())
        except OSError: pass
    try: names = os.listdir(f"/proc/{process}/fd")
    except OSError: continue
    for fd in names:
        try:
            if os.path.isfile(f"/proc/{process}/fd/{fd}"): look("a descriptor", open(f"/proc/{process}/fd/{fd}", "rb").read(1 << 16))
        except OSError: pass
for name in os.listdir("/dev/shm"): look("shared memory", open(f"/dev/shm/{name}", "rb").read())
print(json.dumps(sorted(set(found))))
"""


@pytest.mark.both
@case(94)
def test_a_guest_finds_no_token_and_one_of_another_run_is_of_no_use(number: int, box: Box, tell: Tell) -> None:
    state = box.project.parent / "state"
    ledger = Ledger(state / "ledger.jsonl", clock=time.time)
    seal = private_files.load_key(ledger.keys)
    capabilities = Capabilities(str(state / "capabilities"), seal.derived(b"capabilities"), ledger, clock=time.time)
    token = capabilities.grant("another sandbox", (("run", "git", "**"),), seconds=600, by="alice")
    needles = {"the token": spell(token).rpartition(".")[2].encode().hex(), "the key": Path(ledger.keys, "key").read_bytes().hex()}
    probe = f"NEEDLES, PLACE = {needles!r}, {str(box.project.parent)!r}\n{_FIND}"
    assert box.probe(probe) == []
    control = box.unmasked.probe(probe)
    assert {"the token in a file", "the key in a file"} <= set(control)
    refused = capabilities.use(token, PUSH, sandbox="this sandbox")
    assert not isinstance(refused, Genuine) and "another sandbox" in refused.why
    assert isinstance(capabilities.use(token, PUSH, sandbox="another sandbox"), Genuine)
    tell("nothing found; a stolen one is refused", control="without masks both are found; in its own sandbox the token holds")


@pytest.mark.both
@case(95)
def test_a_guest_cannot_answer_its_own_question(number: int, box: Box, tell: Tell) -> None:
    """It runs our own program in its sandbox, and writes what an answer looks like where answers are."""
    state = box.project.parent / "state"
    ledger = Ledger(state / "ledger.jsonl", clock=time.time)
    seal = private_files.load_key(ledger.keys).derived(b"approvals")
    inbox = Inbox(str(state / "approvals"), seal, ledger, clock=time.time, pause=lambda: time.sleep(0.01))
    got = list[Granted | Refused]()
    asker = threading.Thread(target=lambda: got.append(inbox.ask(question(until=time.time() + 600))))
    asker.start()
    try:
        while not (waiting := inbox.waiting()):
            time.sleep(0.01)
        environment = {**box.environment, "AGENT_SANDBOX_STATE": str(state)}
        place = f"{state}/approvals/waiting/{waiting[0].name}"
        script = f"""
            {" ".join(PROGRAM)} approve {waiting[0].digest} --yes; {" ".join(PROGRAM)} approve --json
            mkdir -p {place}; echo yes > {place}/answer; ls -A {place}
        """
        inside = box.shell(script, env=environment)
        assert b'"waiting":[]' in inside.stdout.replace(b" ", b"") and b"answer" in inside.stdout, (inside.stdout, inside.stderr)
        time.sleep(0.1)
        assert got == [] and len(inbox.waiting()) == 1
        done = Shell(box.project, {"AGENT_SANDBOX_STATE": str(state)})("approve", waiting[0].digest, "--yes")
        assert done.returncode == 0, done.stderr
    finally:
        inbox.end_run("r1")
        asker.join()
    assert got and isinstance(got[0], Granted)
    tell("it found no question, and what it wrote was read by nobody", control="the same command outside the sandbox is an answer")


@case(101)
def test_a_flood_of_questions_is_bounded_and_equal_ones_are_one(number: int, tmp_path: Path, tell: Tell) -> None:
    desk, over = Desk(tmp_path), threading.Event()
    desk.somebody = lambda: time.sleep(0.001) if not over.is_set() else desk.wait()
    got = list[object]()
    argvs = [("x", str(n)) for n in range(MOST_OF_ONE)]
    threads = [threading.Thread(target=lambda argv=argv: got.append(desk.inbox.ask(question(argv=argv)))) for argv in argvs * 2]
    for thread in threads:
        thread.start()
    try:
        while sum(each.times for each in desk.inbox.waiting()) < 2 * MOST_OF_ONE:
            time.sleep(0.005)
        waiting = desk.inbox.waiting()
        refused = [desk.inbox.ask(question(argv=("y", str(n)))) for n in range(30)]
        other = threading.Thread(target=lambda: got.append(desk.inbox.ask(question(sandbox="another"))))
        other.start()
        threads.append(other)
        while len(desk.inbox.waiting()) == MOST_OF_ONE:
            time.sleep(0.005)
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert len(waiting) == MOST_OF_ONE and all(each.times == 2 for each in waiting)
    assert all(isinstance(each, Refused) and "waiting already" in each.why for each in refused)
    assert len(got) == 2 * MOST_OF_ONE + 1 and all(isinstance(each, Refused) for each in got), "nobody answering is a refusal"
    tell(f"{MOST_OF_ONE} wait, two askers each; 30 more were refused at once", control="one of another sandbox is put before somebody")
