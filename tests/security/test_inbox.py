"""What else may lie where questions and answers are: links, pipes, files of others. None of it is an answer, and nobody waits for it."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from agent_sandbox.engine.approvals.inbox import Inbox
from agent_sandbox.engine.approvals.question import Answer, Decision, Question, decoded, sealed
from agent_sandbox.engine.gate import Granted, Refused
from agent_sandbox.ledger import private_files
from agent_sandbox.ledger.writer import Ledger
from agent_sandbox.policy.model import ANOTHER_USER
from tests.e2e.program import PROGRAM
from tests.engine.approvals.test_inbox import KEY, Desk
from tests.engine.approvals.test_question import question
from tests.security.conftest import Tell
from tests.security.harness import case


def _yes(asked: Question) -> bytes:
    return sealed(Answer(asked.digest(), Decision.ONCE, "eve", 300.0), KEY)


def _link(place: Path, asked: Question) -> None:
    elsewhere = place.parent.parent / "elsewhere"
    elsewhere.write_bytes(_yes(asked))
    (place / "answer").symlink_to(elsewhere)


def _pipe(place: Path, asked: Question) -> None:
    os.mkfifo(place / "answer")


def _directory(place: Path, asked: Question) -> None:
    (place / "answer").mkdir()


def _everybodys(place: Path, asked: Question) -> None:
    (place / "answer").write_bytes(_yes(asked))
    (place / "answer").chmod(0o666)


def _as_it_is_made(place: Path, asked: Question) -> None:
    (place / "answer").write_bytes(_yes(asked))
    (place / "answer").chmod(0o644)


def _asked_with(desk: Desk, put: Callable[[Path, Question], None], *, approvers: set[int] | None = None, needs: str = "") -> object:
    """What who asks gets, when this is put where the answer is looked for."""

    def meanwhile() -> None:
        for place in (desk.top / "approvals/waiting").iterdir():
            if (place / "question").exists():
                asked = decoded((place / "question").read_bytes())
                assert asked is not None
                put(place, asked)
        desk.somebody = desk.wait

    desk.now, desk.somebody = 10.0, meanwhile
    return desk.another(approvers).ask(question(needs=needs))


@case(92)
@pytest.mark.parametrize("put", [_link, _pipe, _directory], ids=["a link", "a pipe", "a directory"])
def test_what_is_no_file_is_no_answer_and_keeps_nobody_waiting(
    number: int, tmp_path: Path, tell: Tell, put: Callable[[Path, Question], None]
) -> None:
    desk = Desk(tmp_path)
    assert isinstance(_asked_with(desk, put), Refused)
    assert desk.inbox.waiting() == []
    assert isinstance(_asked_with(Desk(tmp_path / "control"), _as_it_is_made), Granted)
    tell("refused at once", control="the same answer as a file of its own is one")


@case(95)
def test_pipes_and_links_in_the_place_of_questions_stop_nobody_who_looks(number: int, tmp_path: Path, tell: Tell) -> None:
    desk = Desk(tmp_path)
    for kind, name in (("pipe", "1" * 64), ("link", "2" * 64), ("place", "3" * 64)):
        place = tmp_path / "approvals/waiting" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        if kind == "place":
            place.symlink_to("/")
            continue
        place.mkdir()
        (os.mkfifo if kind == "pipe" else lambda path: os.symlink("/etc/passwd", path))(place / "question")
    assert desk.inbox.waiting() == []
    desk.says(Decision.ONCE)
    assert isinstance(desk.inbox.ask(question()), Granted)
    tell("nothing of it is shown, and nothing waits for it", control="a question beside it is asked and answered")


@case(95)
@pytest.mark.needs_root
def test_a_file_that_only_belongs_to_another_user_is_not_their_word(
    number: int, tmp_path: Path, tell: Tell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who asks has the key. What they lack is somebody else's name on the file: a file of theirs that anybody may write, or one that was
    made with the ids that a user has for containers."""

    def owned(owner: int, put: Callable[[Path, Question], None]) -> Callable[[Path, Question], None]:
        def give(place: Path, asked: Question) -> None:
            put(place, asked)
            os.chown(place / "answer", owner, -1)

        return give

    tries = {
        "of an approver, and everybody may write it": (owned(4242, _everybodys), {4242}, "", Refused),
        "of an approver": (owned(4242, _as_it_is_made), {4242}, "", Granted),
        "of an id for containers": (owned(100_000, _as_it_is_made), None, ANOTHER_USER, Refused),
        "of root, and everybody may write it": (owned(0, _everybodys), None, ANOTHER_USER, Refused),
        "of root": (owned(0, _as_it_is_made), None, ANOTHER_USER, Granted),
        "of who asks": (owned(1234, _as_it_is_made), None, ANOTHER_USER, Refused),
    }
    monkeypatch.setattr(os, "getuid", lambda: 1234)
    for number_, (name, (put, approvers, needs, expected)) in enumerate(tries.items()):
        assert isinstance(_asked_with(Desk(tmp_path / str(number_)), put, approvers=approvers, needs=needs), expected), name
    tell("four such files were refused", control="one that only root, or the approver, can have written was taken")


@case(91)
@pytest.mark.parametrize(("typed", "expected"), [("n", Refused), ("y", Granted)])
def test_what_was_typed_before_the_question_was_shown_is_no_answer(
    number: int, project: Path, tmp_path: Path, tell: Tell, typed: str, expected: type
) -> None:
    """Somebody has answered `y` once too often, or an agent has waited for them to be about to."""
    state = tmp_path / "state"
    ledger = Ledger(state / "ledger.jsonl", clock=time.time)
    seal = private_files.load_key(ledger.keys).derived(b"approvals")
    inbox = Inbox(str(state / "approvals"), seal, ledger, clock=time.time, pause=lambda: time.sleep(0.01))
    got = list[object]()
    asker = threading.Thread(target=lambda: got.append(inbox.ask(question(until=time.time() + 600))))
    asker.start()
    while not inbox.waiting():
        time.sleep(0.01)
    ours, theirs = os.openpty()
    environment = {**os.environ, "AGENT_SANDBOX_STATE": str(state)}
    os.write(ours, b"y\n")
    with subprocess.Popen([*PROGRAM, "approve"], cwd=project, env=environment, stdin=theirs, stdout=theirs, stderr=theirs) as program:
        seen = b""
        while b"Allow exactly this?" not in seen:
            seen += os.read(ours, 4096)
        os.write(ours, typed.encode() + b"\n")
        assert program.wait() == 0
    os.close(theirs)
    os.close(ours)
    asker.join()
    assert isinstance(got[0], expected)
    tell("it is thrown away before somebody is asked", control="what is typed then is the answer, no or yes")
