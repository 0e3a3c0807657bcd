"""What timelines and experiments leave: nothing, however many states there were, and whenever their supervisor is killed."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from agent_sandbox import LiveExperiment, Sandbox, SandboxSession
from agent_sandbox.assembly import here
from tests.leftovers import adopting, left_since, traces

# Opens a session, begins one thing, and is killed by itself when it is about to send the so many-th message of it, or is about to read the
# answer. Says whether it got that far.
VICTIM = textwrap.dedent("""\
    import os, sys
    from agent_sandbox.runtime.process.checkpoints import Checkpoints

    def struck():
        global left
        left -= 1
        if not left:
            os.kill(os.getpid(), 9)

    def strike(name):
        original = getattr(Checkpoints, name)
        def strike_first(*arguments):
            struck()
            return original(*arguments)
        setattr(Checkpoints, name, strike_first)

    def die(deed, moment):
        global left
        left = -1
        for name in ("_order", "_ask", "_answer", "_await"):
            strike(name)
        from agent_sandbox import LiveExperiment, Sandbox
        session = Sandbox(validate_code=False, runtime="process").session(timeline=True)
        session.run("a = 1\\nopen('f', 'w').write('x')\\nb = 2")
        left = moment
        if deed == "checkpoint":
            session.run("open('g', 'w').write('y')\\nc = 3")
        elif deed == "rewind":
            session.rewind(2)
        elif deed == "fork":
            session.fork(2, count=2)
        elif deed == "experiment":
            def drive(fork):
                fork.run("open('h', 'w').write('z')")
                struck()
                fork.run("a")
            with LiveExperiment(session, check="a == 1", at_once=1) as experiment:
                experiment.attempt("code", "open('g', 'w').write('y')")
                experiment.attempt("driven", drive)
                assert experiment.run().winner
        else:
            session.inspect(2).evaluate("open('f', 'w').write('z')")
        os._exit(0)

    for deed in sys.argv[1].split(","):
        for moment in map(int, sys.argv[2].split(",")):
            child = os.fork()
            if not child:
                die(deed, moment)
            status = os.waitpid(child, 0)[1]
            print(deed, moment, "killed" if os.WIFSIGNALED(status) else "whole" if status == 0 else f"failed: {status}")
""")
EXPERIMENT = textwrap.dedent("""\
    import os, sys
    from agent_sandbox import Experiment, shell
    left = int(sys.argv[2])
    def heard(progress):
        global left
        left -= 1
        if not left:
            os.kill(os.getpid(), 9)
    with Experiment(sys.argv[1], check=shell("grep -q x new")) as experiment:
        for name in "ab":
            experiment.attempt(name, shell("echo x > new"))
        experiment.run(heard)
""")

DEEDS = ("checkpoint", "rewind", "inspect", "fork", "experiment")


def states_and_ways(session: SandboxSession, count: int) -> int:
    """Make at least so many states, with ways back and looks in between; return how many."""
    while len(session.timeline) < count:
        assert session.run("import os\nopen('f', 'w').write('x')\nos.fork() or os._exit(0)\nos.wait()\nos.unlink('f')").success
        step = next(step for step in reversed(session.timeline.steps) if step.kept and step.text.startswith("os.fork"))
        assert session.inspect(step).read("f") == b"x"
        session.rewind(step)
    return len(session.timeline)


def some_states(count: int, place: Path) -> list[str]:
    """Return what so many states leave: processes, mounts, control groups, files, and descriptors of our own."""
    with Sandbox(validate_code=False, runtime="process").session(timeline=True) as warm:
        states_and_ways(warm, 5)
    before, descriptors = traces(place), len(os.listdir("/proc/self/fd"))
    with Sandbox(validate_code=False, runtime="process").session(timeline=True) as session:
        assert states_and_ways(session, count) >= count
    left = left_since(before, place)
    return [*left, *(["a descriptor"] if len(os.listdir("/proc/self/fd")) > descriptors else [])]


def test_states_leave_nothing() -> None:
    assert some_states(15, Path(here().host.state)) == []


@pytest.mark.torture
@pytest.mark.timeout(1800)
def test_a_thousand_states_leave_nothing() -> None:
    assert some_states(1000, Path(here().host.state)) == []


def live_experiments(count: int) -> list[str]:
    """Return what so many experiments from a live state leave, while their session stays: also descriptors of our own."""
    place = Path(here().host.state)
    with Sandbox(validate_code=False, runtime="process").session(timeline=True) as session:
        session.run("a = [1]\nopen('f', 'w').write('x')")

        def once(number: int) -> None:
            with LiveExperiment(session, check=f"a[-1] == {number}") as experiment:
                experiment.attempt("right", f"import os; a.append({number}); os.fork() or os.abort(); open('g', 'w').write('y')")
                experiment.attempt("wrong", "a.clear()\n1 / 0")
                assert experiment.run().winner == "right"

        once(0)
        before, descriptors = traces(place), len(os.listdir("/proc/self/fd"))
        for number in range(count):
            once(number)
        left = left_since(before, place)
        assert session.run("import os; a, sorted(os.listdir())").value == [[1], ["f"]]
        return [*left, *(["a descriptor"] if len(os.listdir("/proc/self/fd")) > descriptors else [])]


def test_experiments_from_a_live_state_leave_nothing() -> None:
    assert live_experiments(2) == []


@pytest.mark.torture
@pytest.mark.timeout(1800)
def test_a_hundred_experiments_from_a_live_state_leave_nothing() -> None:
    assert live_experiments(100) == []


def test_forks_that_nobody_closed_end_with_their_sandbox() -> None:
    def once() -> None:
        with Sandbox(validate_code=False, runtime="process") as sandbox, sandbox.session(timeline=True) as session:
            session.run("a = [1]")
            forks = session.fork(count=3)
            assert [fork.run(f"a.append({number}); a").value for number, fork in enumerate(forks)] == [[1, 0], [1, 1], [1, 2]]
            held.extend(forks)

    held: list[SandboxSession] = []
    once()
    before = traces()
    once()
    assert left_since(before) == [] and all(fork.ended for fork in held)


def kills(deeds: str, moments: range) -> list[list[str]]:
    """Kill supervisors in the middle of these deeds; return what became of each, when nothing is left of any."""
    place = Path(here().host.state)
    line = [sys.executable, "-c", VICTIM, deeds]
    with adopting():
        subprocess.run([*line, "0"], capture_output=True, check=True)  # what the first one keeps for all is there
        before = traces(place, adopted=True)
        done = subprocess.run([*line, ",".join(map(str, moments))], capture_output=True, text=True, check=True)
        assert left_since(before, place, adopted=True) == []
    return [each.split() for each in done.stdout.splitlines()]


@pytest.mark.parametrize("deed", DEEDS)
def test_nothing_is_left_when_the_supervisor_is_killed_in_the_middle(deed: str) -> None:
    assert [became for _, _, became in kills(deed, range(2, 7, 2))] == ["killed"] * 3


@pytest.mark.torture
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("deed", DEEDS)
def test_nothing_is_left_when_the_supervisor_is_killed_at_any_message(deed: str) -> None:
    became = [word for _, _, word in kills(deed, range(1, 60))]
    assert {*became} == {"killed", "whole"} and became.index("whole") > 5, "up to the last message, and beyond it"


def kill_experiments(project: Path, moments: range) -> int:
    """Kill supervisors of experiments at these moments of their progress, and return how many were. The next one clears away."""
    killed = 0
    with adopting():
        before = traces(adopted=True)
        for moment in moments:
            done = subprocess.run([sys.executable, "-c", EXPERIMENT, str(project), str(moment)], capture_output=True, check=False)
            killed += done.returncode == -9
            assert done.returncode in (0, -9), done.stderr
            assert left_since(before, adopted=True) == []
    done = subprocess.run([sys.executable, "-c", EXPERIMENT, str(project), "0"], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [name for name in os.listdir(Path(here().host.state, "experiments")) if not name.startswith(".")] == []
    return killed


@pytest.fixture
def tried(tmp_path: Path) -> Path:
    project = tmp_path / "tried"
    (project / ".git").mkdir(parents=True)
    (project / "old").write_text("x\n")
    return project


def test_nothing_is_left_when_the_supervisor_of_an_experiment_is_killed(tried: Path) -> None:
    assert kill_experiments(tried, range(2, 6, 3)) == 2
    assert sorted(os.listdir(tried)) == [".git", "old"]


@pytest.mark.torture
@pytest.mark.timeout(1800)
def test_nothing_is_left_when_the_supervisor_of_an_experiment_is_killed_at_any_moment(tried: Path) -> None:
    assert kill_experiments(tried, range(1, 12)) >= 6
