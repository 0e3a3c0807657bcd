"""A timeline whose steps are lines too: each line of the program's own functions can be looked at, with its local variables."""

from __future__ import annotations

import asyncio
import textwrap
from collections.abc import Callable, Iterator

import pytest

from agent_sandbox import AsyncSandbox, Sandbox, SandboxError, SandboxSession
from agent_sandbox.engine.timeline import recorder as recorder_module
from agent_sandbox.engine.timeline.tree import Step

pytestmark = pytest.mark.once

Open = Callable[..., SandboxSession]
PROGRAM = textwrap.dedent("""\
    import json, os
    def half(number):
        part = number / 2
        try:
            with open('f', 'w') as file:
                file.write(json.dumps(part)); file.flush()
                return part / zero
        finally:
            open('cleaned', 'a').write('x')
    zero = 2
    half(6)
    zero = 0
    half(8)
    """)


@pytest.fixture
def opened() -> Iterator[Open]:
    """Open sessions whose lines are steps."""
    made: list[SandboxSession] = []

    def start(*, most: int = 100) -> SandboxSession:
        session = Sandbox(validate_code=False, runtime="process").session(timeline=True, steps="line")
        made.append(session)
        session._recording().tree.most = most
        return session

    yield start
    for session in made:
        session.close()


def at(session: SandboxSession, text: str) -> Step:
    """Return the last step of a line."""
    return next(step for step in reversed(session.timeline.steps) if step.text.startswith(text))


def test_before_each_line_the_local_variables_are_there_and_nothing_that_was_under_way_goes_on(opened: Open) -> None:
    session = opened()
    assert "ZeroDivisionError" in session.run(PROGRAM).stderr
    half = [step for step in session.timeline if step.function == "half"]
    assert [step.line for step in half if step.parent >= at(session, "half(8)").number][:5] == [3, 4, 5, 6, 7]
    assert {step.function for step in session.timeline} == {"", "half"}, "no line of a library is a step"
    failed = session.timeline.failed
    assert failed is not None and (failed.text, failed.function) == ("half(8)", ""), "the statement is marked, and can be returned to"

    state = session.inspect(at(session, "return part"))
    assert [frame.function for frame in state.frames] == ["<module>", "half"]
    assert {each.name: each.repr for each in state.frames[1].variables if each.name != "file"} == {"number": "8", "part": "4.0"}
    assert state.evaluate("[part + zero for _ in range(2)]").repr == "[4.0, 4.0]" and state.read("f") == b"4.0"
    between = session.timeline.diff(at(session, "part ="), at(session, "return part"))
    assert between.variables == {"half.part": "new", "half.file": "new"} and between.files == {"/tmp/f": "changed"}

    assert session.run("open('cleaned').read()").value == "xx", "the control: both calls have cleaned up"
    session.rewind(at(session, "return part"))
    assert session.run("zero, open('f').read(), open('cleaned').read()").value == [0, "4.0", "x"], "and the second has not, here"
    assert session.run("zero = 4; half(8)").value == 1.0
    assert at(session, "return part").turn == 4, "lines are steps there, too"
    assert session.run("1 / 0").stderr.splitlines()[1].strip() == 'File "<turn 4>", line 1, in <module>'
    session.rewind(failed)
    assert session.run("zero = 1; half(8)").value == 4.0


def test_a_loop_makes_ever_fewer_steps_and_what_was_given_up_is_refused_or_run_again(opened: Open) -> None:
    session = opened(most=12)
    assert session.run("def count(most):\n    n = 0\n    while n < most:\n        n += 1\n    return n\nx = 1\ncount(5000)").value == 5000
    body = [step for step in session.timeline if step.text == "n += 1"]
    assert 100 < len(body) < 250
    kept = [step for step in session.timeline if step.kept]
    assert len(kept) <= 12 and at(session, "count(5000)") in kept, "the statement that runs is kept, however many lines it has"
    values = [int(session.inspect(step).evaluate("n").repr) for step in kept if step.function and step.text != "n = 0"]
    assert values == sorted(values) and values[-1] > 4500, "densely near the present"
    gone = next(step for step in body if not step.kept)
    for use in (session.rewind, lambda step: session.inspect(step).frames):
        with pytest.raises(SandboxError, match="given up"):
            use(gone)
    recorder = session._recording()
    assert recorder._checkpoints is not None
    for step in [step for step in kept if not step.function and step.number > 1]:
        recorder._checkpoints.drop(recorder.tree.give_up(step.number).process)
    rewound = session.rewind(at(session, "x = 1"))
    assert rewound.ran_again.startswith("def count"), "a statement is reached from a statement, never from a line"
    assert session.run("'x' in globals(), count(3)").value == [False, 3]


def test_what_followed_a_line_is_reached_from_that_line_or_not_at_all(opened: Open) -> None:
    """Running the whole statement again would lead elsewhere."""
    session = opened()
    session.run("seen = []\ndef f():\n    seen.append(1)\n    seen.append(2)\nf()")
    line = at(session, "seen.append(2)")
    session.rewind(line)
    session.run("seen.append(10)\nlast = 1")
    recorder, after = session._recording(), at(session, "last = 1")
    assert recorder._checkpoints is not None
    for number in [number for number in recorder.tree.states if number > line.number]:
        recorder._checkpoints.drop(recorder.tree.give_up(number).process)
    assert session.rewind(after).ran_again == "seen.append(10)\n" and session.run("seen").value == [1, 10]
    for number in [number for number in recorder.tree.states if number >= line.number]:
        recorder._checkpoints.drop(recorder.tree.give_up(number).process)
    with pytest.raises(SandboxError, match="not kept"):
        session.rewind(after)
    assert session.run("seen").value == [1, 10]


def test_a_tracer_of_the_program_itself_is_left_alone(opened: Open) -> None:
    session = opened()
    session.run("import sys\ndef work():\n    a = 1\n    return a\nseen = []\ndef tracer(frame, event, argument): seen.append(event)")
    session.run("sys.settrace(tracer)\nwork()\nsys.settrace(None)")
    assert session.run("'call' in seen").value and not [step for step in session.timeline if step.function == "work"]
    session.run("work()")
    assert [step.line for step in session.timeline if step.function == "work"] == [3, 4], "the control"


def test_steps_without_end_are_not_recorded_without_end(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "MOST_STEPS", 20)
    session = opened()
    assert session.run("def f():\n" + "    a = 1\n" * 30 + "    return a\nf()").value == 1
    assert len(session.timeline) == 20 and session.run("f()").value == 1
    session.rewind(2)
    assert session.run("f()").value == 1


def test_what_is_no_sort_of_step_is_refused_and_asyncio_has_them_too() -> None:
    sandbox = Sandbox(validate_code=False, runtime="process")
    for bad in ("lines", "", None, 1, ["line"]):
        with pytest.raises(ValueError, match='steps is "statement" or "line"'):
            sandbox.session(timeline=True, steps=bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="needs a timeline"):
        sandbox.session(steps="line")

    async def main() -> None:
        async with AsyncSandbox(validate_code=False, runtime="process") as other, other.session(timeline=True, steps="line") as session:
            await session.run("def f(a):\n    b = a\n    return b\nf(3)")
            state = await session.inspect(4)
            assert [(each.name, each.repr) for each in (await state.frames())[1].variables] == [("a", "3"), ("b", "3")]

    asyncio.run(main())
