"""The options of timelines: a number is a step, anything else a session, and what does not go together is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from agent_sandbox.cli.parser import Request, UsageError, parse
from agent_sandbox.cli.timeline_options import ForkOptions, InspectOptions, RewindOptions, TimelineOptions, TimelineRunOptions
from agent_sandbox.errors import PolicyError

READ: dict[str, Callable[[Request], object]] = {
    "rewind": RewindOptions.read,
    "inspect": InspectOptions.read,
    "timeline": TimelineOptions.read,
    "fork": ForkOptions.read,
}


def test_words_are_steps_and_sessions() -> None:
    assert RewindOptions.read(parse(["rewind", "7"])) == RewindOptions(None, 7)
    assert RewindOptions.read(parse(["rewind", "t3f9", "7"])) == RewindOptions("t3f9", 7)
    assert RewindOptions.read(parse(["rewind", "last", "--error"])) == RewindOptions(None, "error")
    assert InspectOptions.read(parse(["inspect"])) == InspectOptions()
    assert InspectOptions.read(parse(["inspect", "t1", "3", "7", "--diff"])) == InspectOptions("t1", 3, "diff", other=7)
    assert InspectOptions.read(parse(["inspect", "3", "--eval", "a"])) == InspectOptions(None, 3, "value", "a")
    assert ForkOptions.read(parse(["fork", "t1.2", "--count", "3"])) == ForkOptions("t1.2", None, 3)
    assert TimelineOptions.read(parse(["timeline", "t1", "--end"])) == TimelineOptions("t1", end=True)


def test_a_run_takes_a_file_and_everything_after_it_is_the_scripts() -> None:
    options = TimelineRunOptions.read(parse(["run", "--timeline", "--for", "10m", "a.py", "--memory", "3"]))
    assert (options.file, options.arguments, options.kept_seconds) == ("a.py", ("--memory", "3"), 600.0)
    going_on = TimelineRunOptions.read(parse(["code", "--in", "last", "-"]))
    assert (going_on.file, going_on.session) == ("-", "last")


@pytest.mark.parametrize(
    "line",
    (
        "rewind",
        "rewind 3 t1",
        "rewind 3 --error",
        "inspect 1 2",
        "inspect --diff",
        "inspect --eval a --file b",
        "timeline 3",
        "timeline t1 --all",
        "run --timeline --throw-away a.py",
        "run --in last a.py b",
        "run --in last --timeout 3 a.py",
        "code --timeline a.py b",
    ),
)
def test_what_does_not_go_together_is_refused(line: str) -> None:
    request = parse(line.split(" "))
    with pytest.raises(UsageError):
        READ.get(request.verb, TimelineRunOptions.read)(request)


@pytest.mark.parametrize("line", ("fork --count 0", "fork --count 17", "run --timeline --for 8d a.py", "run --timeline --for none a.py"))
def test_numbers_have_limits(line: str) -> None:
    request = parse(line.split(" "))
    with pytest.raises(PolicyError):
        READ.get(request.verb, TimelineRunOptions.read)(request)
