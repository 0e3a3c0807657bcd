"""The timeline of a session as people read it."""

from __future__ import annotations

from typing import Any

from agent_sandbox._fast.values import replace
from agent_sandbox.cli.commands.inspect import FrameFacts, VariableFacts
from agent_sandbox.cli.commands.timeline import TimelineStep, timeline_result
from agent_sandbox.cli.render.timeline import frame_lines, session_line, tree_lines, variable_lines


def step(number: int, parent: int, text: str, **more: Any) -> dict[str, Any]:
    known = {"turn": 1, "line": 1, "at": number / 10, "kept": True, "files_changed": False, "lost": [], "why": "", "error": ""}
    return {"number": number, "parent": parent, "text": text, **known, **more}


TOLD: dict[str, Any] = {
    **{"id": "t1", "script": "a.py", "project": "/p", "since": 0.0, "parent": "", "parent_step": 0, "steps": 6, "present": 6, "failed": 3},
    **{"ended": "", "busy": False, "line": [1, 2, 5, 6], "files": {"2": ["f new"]}},
    "step_list": [
        step(1, 0, "a = 1", kept=False, why="it was given up, so that newer states could be kept"),
        step(2, 1, "open('f', 'w')\nx"),
        step(3, 2, "1 / 0", error="ZeroDivisionError: division by zero", files_changed=True),
        step(4, 3, "", lost=["1 pipe"]),
        step(5, 2, "b = 2", turn=2),
        step(6, 5, "", turn=2),
    ],
}


def test_a_tree_has_branches_errors_changes_and_what_was_given_up() -> None:
    result = timeline_result(TOLD, 3600.0)
    assert list(tree_lines(result.steps, result.session.present)) == [
        "* -   1      0.10 s  a = 1   # not kept: it was given up, so that newer states could be kept",
        "*     2      0.20 s  open('f', 'w') …   # files: f new",
        " ✗    3      0.30 s    1 / 0   # ZeroDivisionError: division by zero",
        "      4      0.40 s    (end of turn 1)   # without 1 pipe",
        "*     5      0.50 s  b = 2",
        ">     6      0.60 s  (end of turn 2)",
    ]
    assert [each.number for each in result.steps if each.files_changed] == [2], "the statement that changed them, not the one after it"


def test_a_session_is_one_line() -> None:
    session = timeline_result(TOLD, 3600.0).session
    assert session_line(session).startswith("t1  a.py in /p · 6 steps · error at step 3 · begun ")
    assert session_line(session).endswith(", kept 1 hour after its last use")
    forked = replace(session, parent="t0", parent_step=2, ended="its turn 2 was killed")
    assert "forked from t0 before step 2" in session_line(forked) and "ended: its turn 2 was killed" in session_line(forked)


def test_variables_are_a_table_and_tables_show_their_head() -> None:
    table = VariableFacts("df", "pandas.core.frame.DataFrame", 2048, "   a\n0  1", (1, 1), ("a",))
    long = VariableFacts("text", "str", 5000, "'" + "x" * 100, (), ())
    assert list(variable_lines((table, long))) == [
        "df    DataFrame    2 KiB  1 × 1: a",
        "       a",
        "    0  1",
        f"text  str        4.9 KiB  '{'x' * 58}…",
    ]
    assert list(variable_lines(())) == []


def test_frames_have_their_own_variables_and_not_those_of_the_module() -> None:
    one = VariableFacts("n", "int", 28, "0", (), ())
    hidden = VariableFacts(".0", "iterator", 28, "<…>", (), ())
    frames = (FrameFacts("<module>", "a.py", 3, (one,)), FrameFacts("f", "a.py", 2, (hidden, *(one,) * 9)))
    lines = list(frame_lines(frames))
    assert lines[:3] == ["a.py:3 in <module>", "a.py:2 in f", "    n  int  28 bytes  0"]
    assert len(lines) == 11 and lines[-1] == "    and 1 more"
    library = FrameFacts("g", "/v/lib/python3.11/site-packages/g.py", 1, (one,))
    assert list(frame_lines((library, library)))[:2] == [f"{library.file}:1 in g"] * 2, "of libraries only the last has its variables"
    assert len(list(frame_lines((library, library)))) == 3


def test_a_step_that_a_holder_told_has_no_empty_words() -> None:
    facts = TimelineStep.of(step(1, 0, "a"))
    assert (facts.why, facts.error, facts.files) == (None, None, ())
