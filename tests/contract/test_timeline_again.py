"""States that were given up are reached by running again exactly what led to them, or not at all."""

from __future__ import annotations

import pytest

from agent_sandbox import SandboxError
from tests.contract.test_timeline import Open, give_up_all_but, opened

__all__ = ["opened"]

pytestmark = pytest.mark.once


def test_a_step_is_its_statement_whatever_ends_a_line_elsewhere(opened: Open) -> None:
    """For `str.splitlines` a form feed ends a line, as in many an old source, and so does U+2028 in a text. For Python they do not."""
    session = opened()
    statements = ["s = 'a\u2028b\x85'", "def f():\n    return 'q\x0cz'", "x = 3", "x = 4"]
    session.run("\n\x0c\n".join(statements).replace("x = 3\n", "x = 3\r"))
    assert [step.text for step in session.timeline if step.text] == statements
    give_up_all_but(session, 1)
    session.rewind(4)
    assert session.run("s, f(), x").value == ["a\u2028b\x85", "q\x0cz", 3]


def test_what_followed_a_turn_that_the_program_ended_is_run_again_too(opened: Open) -> None:
    session = opened()
    session.run("a = 1\nimport sys\nsys.exit(0)\na = 2")
    session.run("b = 2\nc = 3")
    give_up_all_but(session, 1)
    session.rewind(next(step for step in session.timeline if step.text == "c = 3"))
    assert session.run("a, b").value == [1, 2]


def test_what_is_run_again_means_what_it_meant(opened: Open) -> None:
    """An import from __future__ changes what follows it in its turn, also if the way begins after it."""
    session = opened()
    session.run("from __future__ import annotations\ndef f(a: int): pass\nx = 1\ny = 2")
    give_up_all_but(session, 2)
    assert session.rewind(4).ran_again == "def f(a: int): pass\nx = 1\n"
    assert session.run("type(f.__annotations__['a']).__name__").value == "str"


def test_another_course_of_what_is_run_again_is_refused(opened: Open) -> None:
    """It ends its turn early without an error this time, so the rest of the turn does not run."""
    session = opened()
    session.run(
        "import os, sys\na = 1\nif os.getpid() != first: sys.exit()\nb = 1\nc = 1".replace(
            "import", "first = __import__('os').getpid(); import", 1
        )
    )
    assert session.run("b").value == 1
    give_up_all_but(session, 3)
    with pytest.raises(SandboxError, match="came out otherwise"):
        session.rewind(next(step for step in session.timeline if step.text == "c = 1"))


def test_a_statement_that_was_interrupted_is_not_run_again(opened: Open) -> None:
    session = opened()
    session.run("import signal\nraise KeyboardInterrupt")
    session.run("b = 2\nc = 3")
    give_up_all_but(session, 1)
    with pytest.raises(SandboxError, match="was interrupted"):
        session.rewind(next(step for step in session.timeline if step.text == "c = 3"))
    assert session.run("b").value == 2, "the session goes on where it was"
