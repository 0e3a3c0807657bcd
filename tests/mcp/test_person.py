"""An answer that comes later counts once, whoever comes for it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from agent_sandbox.engine.gate import Granted, Refused
from agent_sandbox.mcp.calls import ServedCall
from agent_sandbox.mcp.person import PersonQuestions
from agent_sandbox.policy.model import cloned

POLICY = cloned(masks=())


def test_one_answer_is_used_by_one_of_many_who_come_for_it() -> None:
    questions, together = PersonQuestions("sandbox", ()), threading.Barrier(16)
    asked: list[int] = []

    def put(inbox: object, wanted: object, until: float) -> Granted | Refused:
        asked.append(1)
        return Granted("somebody")

    def come(_: int) -> bool:
        together.wait()
        return isinstance(questions.decided("key", POLICY, ServedCall("run", {}), put, 0.0), Granted)

    with ThreadPoolExecutor(16) as threads:
        used = sum(threads.map(come, range(16)))
    assert 1 <= used <= len(asked)  # a yes for each question, and no more
    questions.close()


def test_a_question_that_breaks_and_one_that_is_refused_let_nothing_pass() -> None:
    questions = PersonQuestions("sandbox", ())

    def breaks(inbox: object, wanted: object, until: float) -> Granted | Refused:
        raise OSError("the disk is full")

    assert questions.decided("a", POLICY, ServedCall("run", {}), breaks, 0.0) == Refused("asking failed: OSError")
    assert questions.decided("b", POLICY, ServedCall("run", {}), lambda *_: Refused("no"), 0.0) == Refused("no")
    questions.close()
