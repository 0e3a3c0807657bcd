"""Attempts on the terminal while they run."""

from __future__ import annotations

from agent_sandbox.cli.render.attempts import AttemptLine, attempt_line, last_lines
from agent_sandbox.cli.render.messages import Console
from agent_sandbox.engine.experiment.conduct import AttemptProgress
from agent_sandbox.engine.experiment.model import AttemptOutcome, StepEnd


def test_the_line_tells_what_runs_and_what_waits_and_is_gone_in_the_end() -> None:
    written: list[str] = []
    now = [0.0]
    line = AttemptLine(written.append, 60, lambda: now[0])
    for name in ("a", "b", "c"):
        line.tell(AttemptProgress(name, "waiting"))
    line.tell(AttemptProgress("a", "running"))
    now[0] = 3.0
    line.tick()
    line.tell(AttemptProgress("b", "checking"))
    assert line.text() == "agent-sandbox: a running 3 s · b checking 0 s · 1 waiting" and written[-1].endswith(line.text())
    line.tell(AttemptProgress("a", "passed", AttemptOutcome("a", "passed", seconds=3.25)))
    assert any(text.endswith("agent-sandbox: a: passed after 3.2 s\n") for text in written)
    count = len(written)
    line.tick()
    assert len(written) == count, "a moment later there is nothing new"
    line.end()
    assert written[-1] == "\r\x1b[K"


def test_a_long_line_stays_on_the_terminal() -> None:
    written: list[str] = []
    line = AttemptLine(written.append, 30, lambda: 0.0)
    line.tell(AttemptProgress("a" * 40, "running"))
    assert len(written[-1].removeprefix("\r\x1b[K")) == 29


def test_there_is_no_line_without_a_terminal() -> None:
    with attempt_line(Console(shows=False)) as line:
        assert line is None


def test_the_last_lines_of_a_failed_attempt_are_shown_escaped() -> None:
    check = StepEnd(1, "exited", b"of stdout", b"one\n\x1b[2Jtwo\n\n" + b"x" * 1000)
    lines = last_lines(AttemptOutcome("a", "failed", check=check))
    assert lines[0] == "one" and "\x1b" not in "".join(lines) and len(lines[2]) == 200
    assert last_lines(AttemptOutcome("a", "passed", check=check)) == []
