"""The timeline of a session: every state can be looked at and returned to, memory and files together, and nothing else is touched."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from agent_sandbox import AsyncSandbox, AuditLevel, LaunchFailed, Sandbox, SandboxError, SandboxSession
from agent_sandbox._calls import Run
from agent_sandbox.engine.timeline.tree import MOST_LAYERS, State, Step, StepTree
from agent_sandbox.kernel.frozen_layers import layer_entries, merge_layers
from tests.leftovers import left_since, traces
from tests.patience import until

pytestmark = pytest.mark.once

Open = Callable[..., SandboxSession]

# Expressions that end the process in which they are evaluated, each with what is said.
ENDS = {"os._exit(3)": "exit code 3", "os.kill(os.getpid(), 15)": "signal 15", "os.fork() and os._exit(4)": "exit code 4"}
GONE = {"d": "gone", "d/a": "gone"}  # a directory stands for the rest of what was in it
LINK = "os.symlink('{}', 'l'); os.utime('l', (1, 1), follow_symlinks=False)"


@pytest.fixture
def opened() -> Iterator[Open]:
    """Open sessions with a timeline."""
    made: list[SandboxSession] = []

    def start(*, most: int | None = None, **options: object) -> SandboxSession:
        session = Sandbox(validate_code=False, runtime="process", **options).session(timeline=True)  # type: ignore[arg-type]
        made.append(session)
        if most is not None:
            session._recording().tree.most = most
        return session

    yield start
    for session in made:
        session.close()


def before_line(session: SandboxSession, line: int) -> Step:
    """Return the step before the first statement of a line, of the first turn."""
    return next(step for step in session.timeline if (step.turn, step.line) == (1, line))


@pytest.mark.both
def test_a_state_has_the_variables_and_the_files_of_its_moment(opened: Open) -> None:
    session = opened()
    session.run("a = [1]\nopen('f', 'w').write('one')\na.append(2)\nopen('f', 'w').write('two')\nimport os; os.unlink('f')")
    assert [(step.line, step.text) for step in session.timeline][:3] == [
        (1, "a = [1]"),
        (2, "open('f', 'w').write('one')"),
        (3, "a.append(2)"),
    ]
    assert session.inspect(1).variables == ()
    assert [session.inspect(step).evaluate("a").repr for step in (2, 3, 4)] == ["[1]", "[1]", "[1, 2]"]
    assert [session.inspect(step).list("/tmp") for step in (2, 3, 7)] == [(), ("f",), ()]
    assert [session.inspect(step).read("f") for step in (3, 4, 5)] == [b"one", b"one", b"two"]
    session.rewind(4)
    assert session.run("a, open('f').read()").value == [[1, 2], "one"]


def test_the_old_future_stays_reachable_and_branches_do_not_see_one_another(opened: Open) -> None:
    session = opened()
    session.run("a = 0\na += 1; open('left', 'w').close()")
    end = session.timeline.steps[-1].number
    session.rewind(2)
    assert session.run("import os; a, os.path.exists('left')").value == [0, False]
    session.run("a = 50; open('right', 'w').close()")
    other = session.timeline.steps[-1].number
    session.rewind(end)
    assert session.run("import os; a, sorted(os.listdir())").value == [1, ["left"]]
    session.rewind(other)
    assert session.run("import os; a, sorted(os.listdir())").value == [50, ["right"]]
    assert str(session.timeline).count("\n") + 1 == len(session.timeline)


def test_after_a_return_the_present_state_is_the_one_that_was_returned_to(opened: Open) -> None:
    session = opened()
    session.run("a = 1\na = 2\na = 3")
    for step, a in ((3, "2"), (2, "1")):
        session.rewind(step)
        assert (session.inspect().step.number, session.inspect().evaluate("a").repr) == (step, a)
    session.rewind(1)
    assert session.inspect().variables == ()


def test_numeric_libraries_start_no_threads_which_no_state_could_hold(opened: Open) -> None:
    session = opened()
    session.run("import os; a = os.environ['OPENBLAS_NUM_THREADS']")
    session.run("import numpy; b = numpy.ones((200, 200)) @ numpy.ones((200, 200))")
    assert session.inspect().step.kept and session.inspect().evaluate("a, b[0, 0] > 0").repr == "('1', np.True_)"
    with Sandbox(validate_code=False, runtime="process").session() as plain:
        assert not plain.run("import os; 'OPENBLAS_NUM_THREADS' in os.environ").value, "without a timeline they may have them"


def test_a_file_of_a_state_is_read_whole_or_refused(opened: Open) -> None:
    session = opened()
    session.run("open('large', 'wb').write(bytes(range(256)) * (15 << 12)); open('larger', 'wb').write(bytes(17 << 20))")
    assert session.inspect().read("large") == bytes(range(256)) * (15 << 12), "in several messages"
    with pytest.raises(SandboxError, match="larger than 16 MiB"):
        session.inspect().read("larger")


def test_an_interrupt_ends_a_turn_and_not_the_session(opened: Open) -> None:
    session, run = opened(), Run()
    session.run("import time; a = 1")

    def interrupt(stream: str, text: str) -> None:
        if stream == "stdout" and run._guest is not None:
            run._guest.interrupt(signal.SIGINT)

    result = session._perform(
        run, "a = 2\nfor each in range(9999): each or print('here', flush=True); time.sleep(0.1)\na = 3", on_output=interrupt
    )
    assert (result.exit_code, result.error) == (130, "KeyboardInterrupt")
    assert "steps.py" not in result.stderr, "no frame of ours"
    assert session.run("a").value == 2


def test_an_alarm_of_the_program_ends_its_turn_and_not_the_session(opened: Open) -> None:
    """Its handler raises while the program waits for a state, most of the time. No copy is left that nobody knows."""
    session = opened()
    session.run("import signal\nclass Late(Exception): pass\ndef late(*_): raise Late('too late')\n_ = signal.signal(signal.SIGALRM, late)")
    for delay in (each / 1000 for each in range(5, 30)):
        done = session.run(f"_ = signal.setitimer(signal.ITIMER_REAL, {delay})\n" + "a = [1]\n" * 60)
        failed = session.timeline.failed
        assert "too late" in done.stderr and failed is not None and "too late" in failed.error
    assert session.run("signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()").value is True, "no signal is held back"
    asleep = session.run("import os; sum(name.isdigit() for name in os.listdir('/proc'))").value - 2  # without init and the program
    assert asleep - sum(step.kept for step in session.timeline) in (-1, 0, 1)  # the last statement of that turn, and what just ends
    session.rewind([step for step in session.timeline if step.kept][-5])  # one that was given up would meet the alarm elsewhere
    assert session.run("signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()").value is True


def test_a_timeline_that_is_printed_has_no_orders_for_a_terminal(opened: Open) -> None:
    session = opened()
    session.run("a = '\x1b[2J'\nraise ValueError('\x1b]0;title\x07 oh')")
    assert "oh" in str(session.timeline) and not {"\x1b", "\x07"} & {*str(session.timeline)}


def test_an_open_file_is_at_its_place_again(opened: Open) -> None:
    session = opened()
    session.run("open('f', 'w').write('0123456789'); file = open('f', 'r+b', 0)\nfile.read(4)\nfile.read(2)\nfile.write(b'X')")
    third = before_line(session, 3)
    assert session.inspect(third).evaluate("file.read(3)").repr == "b'456'"
    session.rewind(third)
    assert session.run("file.read(2)").value == b"45"
    assert session.run("open('f').read()").value == "0123456789", "and what was written later is not there"
    session.run("file.write(b'Y')")
    assert session.run("open('f').read()").value == "012345Y789"


def test_a_state_goes_on_as_if_nothing_had_been(opened: Open) -> None:
    session = opened()
    after = "told = []\nos.register_at_fork(after_in_child=lambda: told.append(1))"
    heard = "heard = []; signal.signal(signal.SIGUSR1, lambda *_: heard.append(1))"
    session.run(f"import os, random, signal, threading\n{after}\n{heard}\nrandom.seed(1)\nfirst = random.random()")
    drawn = before_line(session, 6)
    signalled = "signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)"
    expected = session.run("first").value
    score = "open('/proc/self/oom_score_adj').read()"
    last = session.run(score).value
    for _ in range(2):
        session.rewind(drawn)
        assert session.run("random.random()").value == expected, "the series of random numbers is the same"
        assert session.run(score).value == last, "nor is it ended sooner than before when memory runs out"
        assert session.run("told").value == [], "and what the program does after a fork is not done"
        session.run(f"other = threading.Thread(target=lambda: {signalled}); other.start(); other.join()")
        assert session.run("heard").value == [1], "another thread reaches the first one"
    forked = session.run("pid = os.fork() or os._exit(len(told))\nos.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])")
    assert forked.value == 1, "the control"


def test_looking_changes_nothing_whatever_it_runs(opened: Open) -> None:
    session = opened()
    session.run("import os\na = [1]\nme = os.getpid()\nopen('f', 'w').write('one')")
    for expression in ("a.append(2) or open('f', 'w').write('two')", "os.unlink('f')"):
        session.inspect().evaluate(expression)
    with pytest.raises(SandboxError, match="ProcessLookupError"):
        session.inspect().evaluate("os.kill(me, 9)")
    for expression, why in ENDS.items():
        with pytest.raises(SandboxError, match=why):
            session.inspect().evaluate(expression, timeout=10_000)
    with pytest.raises(SandboxError, match="no answer within"):
        session.inspect().evaluate("all(iter(lambda: 1, 0))", timeout=0.5)
    with pytest.raises(SandboxError, match="ZeroDivisionError"):
        session.inspect().evaluate("1 / 0")
    assert session.run("a, open('f').read(), os.getpid() == me").value == [[1], "one", True]
    assert session.run("a.append(2); a").value == [1, 2], "the same words in a turn do change it"


HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.both
def test_large_memory_lies_in_huge_pages_of_which_states_are_cheap(opened: Open) -> None:
    """The kernel copies one entry for each of them. Where it gives every program huge pages, or none, nothing is to be asked for."""
    if not HUGE_PAGES.exists() or "[madvise]" not in HUGE_PAGES.read_text():
        pytest.skip(f"this kernel gives no huge pages to those who ask for them ({HUGE_PAGES})")
    work = "held = bytearray(b'x') * (32 << 20)\nlines = open('/proc/self/smaps_rollup').read().splitlines()"
    huge = "next(int(line.split()[1]) for line in lines if line.startswith('AnonHugePages'))"
    with Sandbox(validate_code=False, runtime="process").session() as plain:
        plain.run(work)
        assert plain.run(huge).value < 8 << 10, "the control: nobody asks"
    session = opened()
    session.run(work)
    asked = session.run(huge).value
    if asked < 8 << 10:
        pytest.skip("the C library here does not know how to ask (glibc 2.35), or this machine has no huge page left")
    assert asked > 24 << 10
    session.run("held[0] = 1")
    before = next(step for step in reversed(session.timeline.steps) if step.text == "held[0] = 1")
    assert session.inspect(before).evaluate("held[0], len(held)").repr == "(120, 33554432)", "and a state is what it was"


@pytest.mark.both
@pytest.mark.parametrize("expression", ["[b'x' * 2**20 for each in iter(int, 1)]", "(os.fork(), [b'x' * 2**20 for each in iter(int, 1)])"])
def test_a_look_that_takes_all_memory_ends_no_state(opened: Open, expression: str) -> None:
    session = opened(max_memory_mb=250)
    session.run("import os\na = 1\na = 2\na = 3")
    kept = [step.number for step in session.timeline if step.kept]
    with pytest.raises(SandboxError, match=r"ended by signal 9, as when memory runs out|MemoryError"):
        session.inspect(3).evaluate(expression, timeout=10_000)
    assert [session.inspect(number).evaluate("1").repr for number in kept] == ["1"] * len(kept)
    assert [step.number for step in session.timeline if step.kept] == kept and len(kept) > 3
    assert session.run("a").value == 3


def test_a_repr_that_raises_prints_or_is_long_is_bounded(opened: Open) -> None:
    session = opened()
    session.run("class A:\n    def __repr__(self): print('heard'); raise OSError\na = A()\nb = 'x' * 10**7\nc = list(range(10**6))")
    said = {each.name: each for each in session.inspect().variables}
    assert said["a"].repr.startswith("<A") and len(said["b"].repr) < 1100 and len(said["c"].repr) < 1100
    assert said["c"].bytes > 10**6 and said["b"].type == "str"
    assert "heard" not in session.run("1").stdout


def test_at_an_error_every_frame_can_be_looked_at(opened: Open) -> None:
    session = opened()
    session.run("def half(number):\n    part = number / 2\n    return part / zero\nzero = 0\nhalf(8)")
    failed = session.timeline.failed
    assert failed is not None and (failed.text, failed.error) == ("half(8)", "ZeroDivisionError: float division by zero")
    frames = session.inspect().frames
    assert [frame.function for frame in frames] == ["<module>", "half"]
    assert {each.name: each.repr for each in frames[1].variables} == {"number": "8", "part": "4.0"}
    session.rewind(failed)
    assert session.run("zero = 2; half(8)").value == 2.0


# What a program could do to a process of its own user, if it knew its number.
ATTACKS = {
    "kill": "os.kill(pid, 9)",
    "kill its group": "os.killpg(pid, 9)",
    "stop": "os.kill(pid, signal.SIGSTOP)",
    "wake": "os.kill(pid, signal.SIGRTMAX)",
    "a descriptor": "signal.pidfd_send_signal(os.pidfd_open(pid), 9)",
    "limits": "resource.prlimit(pid, resource.RLIMIT_CPU, (1, 1))",
    "priority": "os.setpriority(os.PRIO_PROCESS, pid, 19)",
    "processors": "os.sched_setaffinity(pid, os.sched_getaffinity(0))",
    "scheduling": "os.sched_setscheduler(pid, os.SCHED_BATCH, os.sched_param(0))",
    "memory": "open(f'/proc/{pid}/mem', 'r+b', 0).read(0)",
    "environment": "open(f'/proc/{pid}/environ').read()",
    "descriptors": "os.listdir(f'/proc/{pid}/fd')",
    "out of memory first": "open(f'/proc/{pid}/oom_score_adj', 'w').write('1000')",
}


@pytest.mark.both
@pytest.mark.parametrize("attack", ATTACKS)
def test_a_sleeping_state_is_out_of_reach_of_its_program(opened: Open, attack: str) -> None:
    session = opened()
    session.run("import os, resource, signal\ncanary = 'here'")
    asleep = [state.process for state in session._recording().tree.states.values()]
    tried = f"for pid in {asleep}:\n    try: {ATTACKS[attack]}; reached.append(pid)\n    except OSError: pass"
    assert session.run(f"reached = []\n{tried}\nreached").value == []
    session.rewind(3)
    assert session.run("canary").value == "here"
    # The control: the same reaches an ordinary copy of the program.
    copy = "pid = os.fork()\nif not pid:\n    os.setsid(); os.write(ready[1], b'x'); signal.pause()\nos.read(ready[0], 1)"
    reached = session.run(
        f"ready = os.pipe()\n{copy}\ntry: {ATTACKS[attack]}; said = True\nexcept OSError as error: said = repr(error)\nsaid"
    ).value
    assert reached is True, reached


def test_everything_at_once_is_not_killed(opened: Open) -> None:
    session = opened()
    session.run("import os\na = 1")
    assert session.run("try: os.kill(-1, 9); said = 'done'\nexcept PermissionError: said = 'refused'\nsaid").value == "refused"
    session.rewind(2)
    assert session.run("1").value == 1


def test_what_a_state_cannot_hold_is_said(opened: Open) -> None:
    session = opened(allow_subprocess=True)
    begin, end = "stop = threading.Event(); thread = threading.Thread(target=stop.wait); thread.start()", "stop.set(); thread.join()"
    session.run(f"import os, threading, time\n{begin}\na = 1\n{end}\nb = 2")
    kept = {step.text: step for step in session.timeline}
    assert not kept["a = 1"].kept and "2 threads" in kept["a = 1"].why
    assert kept["b = 2"].kept
    with pytest.raises(SandboxError, match="2 threads"):
        session.inspect(kept["a = 1"]).evaluate("a")
    session.run("ends = os.pipe()\nc = 3")
    assert next(step for step in session.timeline if step.text == "c = 3").lost == ("2 pipes",)


def test_a_state_with_memory_that_copies_share_is_not_kept(opened: Open) -> None:
    session = opened()
    session.run("import mmap\nblock = mmap.mmap(-1, 4096)\nblock[0] = 1\nblock.close()\nb = 2")
    kept = {step.text: step for step in session.timeline}
    assert not kept["block[0] = 1"].kept and "copies share" in kept["block[0] = 1"].why
    assert kept["b = 2"].kept, "once it is closed, states are kept again"
    assert session.rewind(kept["block.close()"]).ran_again and session.run("block[0]").value == 1, "it is run to again"


@pytest.mark.both
def test_a_state_whose_files_another_process_still_writes_is_not_kept(opened: Open) -> None:
    session = opened(allow_subprocess=True)
    child = "    file = open('log', 'w'); os.write(go[1], b'x')\n    while True: time.sleep(60)"
    writer = f"child = os.fork()\nif not child:\n{child}\nos.read(go[0], 1)"
    session.run(f"import os, time; go = os.pipe()\n{writer}\na = 1\nos.kill(child, 9); os.waitpid(child, 0)\nopen('x', 'w').close()\nb = 2")
    kept = {step.text: step for step in session.timeline}
    assert not kept["a = 1"].kept and "open for writing" in kept["a = 1"].why, kept["a = 1"]
    assert kept["b = 2"].kept, "once it has ended, states are kept again"


def test_a_state_whose_files_are_open_on_their_way_through_a_socket_is_not_kept(opened: Open) -> None:
    """No process has such a file open, and whoever receives it writes to the frozen layer."""
    session = opened()
    send = "file = open('f', 'w')\nsocket.send_fds(ends[0], [b'x'], [file.fileno()])\nfile.close()"
    session.run(f"import os, socket\nends = socket.socketpair()\n{send}\na = 1\nb = 2\nfd = socket.recv_fds(ends[1], 1, 1)[1][0]\nc = 3")
    kept = {step.text: step for step in session.timeline}
    for text in ("a = 1", "b = 2"):
        assert not kept[text].kept and "on their way" in kept[text].why, kept[text]
    assert not kept["c = 3"].kept, "it is a file of an earlier state"
    session.run("os.write(fd, b'late')\nos.close(fd)\nopen('g', 'w').close()\nd = 4")
    assert next(step for step in session.timeline if step.text == "d = 4").kept, "once it is closed, states are kept again"


@pytest.mark.both
def test_a_state_in_whose_files_another_process_stands_is_not_kept(opened: Open) -> None:
    """It could write to the frozen files by relative paths."""
    session = opened(allow_subprocess=True)
    child = "    os.write(go[1], b'x')\n    while True: time.sleep(60)"
    session.run(
        f"import os, time; go = os.pipe()\nchild = os.fork()\nif not child:\n{child}\nos.read(go[0], 1)\nopen('x', 'w').close()\na = 1"
    )
    kept = {step.text: step for step in session.timeline}
    assert not kept["a = 1"].kept and "stands in" in kept["a = 1"].why, kept["a = 1"]


def test_a_state_with_an_open_file_that_was_removed_is_not_kept(opened: Open) -> None:
    session = opened()
    session.run("import os\nfile = open('f', 'w+')\nos.unlink('f')\na = 1\nfile.close()\nb = 2")
    kept = {step.text: step for step in session.timeline}
    assert not kept["a = 1"].kept and "was removed" in kept["a = 1"].why, kept["a = 1"]
    assert kept["b = 2"].kept


def give_up_all_but(session: SandboxSession, first: int) -> None:
    recorder = session._recording()
    assert recorder._checkpoints is not None
    for number in [number for number in recorder.tree.states if number != first]:
        recorder._checkpoints.drop(recorder.tree.give_up(number).process)


def test_what_the_caller_does_to_files_is_a_step_and_is_not_run_again(opened: Open) -> None:
    session = opened()
    session.run("a = 1")
    session.files.write("f", "one")
    assert session.timeline.steps[-1].text.startswith("write") and session.inspect().read("f") == b"one"
    session.run("a += 1")
    last = session.timeline.steps[-1]
    give_up_all_but(session, 1)
    with pytest.raises(SandboxError, match="did something to its files"):
        session.rewind(last)
    assert session.rewind(2).ran_again == "a = 1\n", "up to there it can"


def test_a_network_is_not_used_again_to_reach_a_state(opened: Open) -> None:
    session = opened(network=["a.example"])
    session.run("a = 1\nb = 2")
    give_up_all_but(session, 1)
    with pytest.raises(SandboxError, match="network"):
        session.rewind(2)


@pytest.mark.both
def test_a_program_whose_directory_has_gone_goes_on_without_states(opened: Open) -> None:
    session = opened()
    session.run("import os\nos.mkdir('d'); os.chdir('d'); os.rmdir('../d')\na = 1\nos.chdir('/tmp')\nb = 2")
    kept = {step.text: step for step in session.timeline}
    assert (kept["a = 1"].kept, kept["b = 2"].kept) == (False, True) and kept["a = 1"].why


@pytest.mark.both
def test_what_a_look_writes_takes_no_room_afterwards(opened: Open) -> None:
    session = opened(max_disk_mb=40)
    session.run("def fill(): return open('big', 'wb').write(bytes(30_000_000))")
    for _ in range(3):
        assert session.inspect().evaluate("fill()").repr == "30000000"
    assert session.run("fill()").value == 30_000_000


@pytest.mark.both
def test_layers_are_merged_as_the_kernel_shows_them(tmp_path: Path) -> None:
    def fill(top: Path, files: dict[str, str]) -> None:
        for name, text in files.items():
            (top / name).parent.mkdir(parents=True, exist_ok=True)
            (top / name).write_text(text)

    newer, older = tmp_path / "newer", tmp_path / "older"
    fill(older, {"a/x": "old", "a/y": "old", "b/z": "old", "gone/deep/w": "old", "file": "old", "dir/inner": "old"})
    fill(newer, {"a/x": "new", "a/n": "new", "dir2": "new", "file/now": "a directory"})
    (newer / "link").symlink_to("/etc")
    (newer / "b").mkdir()
    os.setxattr(newer / "b", "user.overlay.opaque", b"y")
    merge_layers(str(newer), str(older), str(tmp_path / "merged"), "user.overlay.opaque")
    assert {*layer_entries(str(tmp_path / "merged"))} == {
        *("a", "a/x", "a/y", "a/n", "b", "gone", "gone/deep", "gone/deep/w", "file", "file/now", "dir", "dir/inner", "dir2", "link"),
    }
    assert (tmp_path / "merged/a/x").read_text() == "new" and (tmp_path / "merged/a/y").read_text() == "old"
    assert os.readlink(tmp_path / "merged/link") == "/etc" and os.getxattr(tmp_path / "merged/b", "user.overlay.opaque") == b"y"


def test_states_are_given_up_far_from_the_present_and_reached_by_running_again(opened: Open) -> None:
    session = opened(most=8)
    session.run("\n".join(["a = 0", *["a += 1"] * 40]))
    kept = [step.number for step in session.timeline if step.kept]
    assert len(kept) <= 8 and 1 in kept and {41, 42} <= {*kept}
    gone = next(step for step in session.timeline if not step.kept and step.number > 10)
    assert "given up" in gone.why
    with pytest.raises(SandboxError, match="not kept"):
        session.inspect(gone).evaluate("a")
    rewound = session.rewind(gone)
    assert rewound.ran_again.count("a += 1") >= 1 and session.run("a").value == gone.number - 2
    assert session.rewind(session.timeline.steps[-1]).ran_again == ""


def test_states_that_would_cost_too_much_time_are_left_out_and_reached_by_running_again() -> None:
    sandbox = Sandbox(validate_code=False, runtime="process")
    with sandbox.session(timeline=True, overhead=1e-9) as session:
        session.run("a = [1]\na.append(2)\na.append(3)")
        session.run("a.append(4)\n1 / 0")
        steps = session.timeline.steps
        assert [step.kept for step in steps] == [True, False, False, True, False, False, True], "the first, and the end of each turn"
        assert "left out" in steps[1].why
        failed = session.timeline.failed
        assert failed is not None and session.rewind(failed).ran_again.strip() == "a.append(4)" and session.run("a").value == [1, 2, 3, 4]
        assert session.rewind(3).ran_again == "a = [1]\na.append(2)\n" and session.run("a").value == [1, 2]
    with sandbox.session(timeline=True, overhead=1e9) as session:
        session.run("a = 1\nb = 2\nc = 3")
        assert all(step.kept for step in session.timeline), "the control"
    for wrong in (0, -1, "0.1", True, float("nan")):
        with pytest.raises(ValueError, match="part of the time"):
            sandbox.session(timeline=True, overhead=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="needs a timeline"):
        sandbox.session(overhead=0.1)


def test_tools_are_not_called_again_to_reach_a_state() -> None:
    called: list[int] = []
    with Sandbox(validate_code=False, runtime="process").session(timeline=True, tools=[called.append]) as session:
        session._recording().tree.most = 3
        session.run("\n".join(f"append({number})" for number in range(10)))
        gone = next(step for step in session.timeline if not step.kept)
        with pytest.raises(SandboxError, match="tools"):
            session.rewind(gone)
    assert called == [*range(10)]


def test_input_is_not_left_out_to_reach_a_state(opened: Open) -> None:
    for given, refused in (("9", True), ("", False)):
        session = opened(most=3)
        for number in range(6):
            session.run(f"x = {number}; y = {'input()' if given else 9}", stdin=given)
        gone = next(step for step in session.timeline if not step.kept)
        if refused:
            with pytest.raises(SandboxError, match="were given input"):
                session.rewind(gone)
            assert session.run("x").value == 5, "nothing was done"
        else:
            assert session.rewind(gone).ran_again


@pytest.mark.both
def test_many_changes_of_files_are_merged_and_every_state_is_still_right(opened: Open) -> None:
    session = opened(most=6)
    session.run("import os\nfor number in range(5): open(f'base{number}', 'w').write('base')")
    for number in range(MOST_LAYERS + 10):
        change = (
            "open('f', 'w').write('{0}')",
            "os.makedirs('d{0}/e'); open('d{0}/e/g', 'w').write('{0}')",
            "os.rename('f', 'h'); os.link('h', 'f')",
        )
        session.run(change[number % 3].format(number) if number else "open('f', 'w').write('0')")
    tree = session._recording().tree
    assert len(tree.chain) <= MOST_LAYERS + 2
    look = "{p: open(p).read() if os.path.isfile(p) else sorted(os.listdir(p)) for p in sorted(os.listdir('.'))}"
    seen = session.run(look).value
    assert session.inspect(session.timeline.steps[-3]).evaluate(f"len({look})").repr == str(len(seen))
    session.rewind(session.timeline.steps[-2])
    assert session.run(look).value == seen


@pytest.mark.both
def test_near_the_memory_limit_old_states_are_given_up(opened: Open) -> None:
    session = opened(max_memory_mb=400)
    session.run("block = bytearray(40_000_000)")
    for number in range(12):
        assert session.run(f"block[:] = bytes([{number}]) * len(block)").success, "the program itself goes on"
    assert 0 < sum(step.kept for step in session.timeline) < len(session.timeline)
    assert session.run("block[0]").value == 11
    session.rewind(next(step for step in reversed(session.timeline.steps) if step.kept and step.text))
    assert session.run("len({*block})").value == 1


@pytest.mark.both
@pytest.mark.parametrize("megabytes", [60, 85, 150])
def test_a_program_near_its_memory_limit_goes_on_however_little_room_states_have(opened: Open, megabytes: int) -> None:
    """Without a cgroup each state counts in full: the program must not be ended for what its states share with it."""
    session = opened(max_memory_mb=200)
    session.run("block = bytearray(b'x') * 20_000_000\nblock = None")
    session.run(f"block = bytearray(b'x') * {megabytes}_000_000\na = 1\na = 2")
    for _ in range(4):
        assert session.run("len(block)").value == megabytes * 1_000_000
    for step in session.timeline.steps:
        assert step.kept or step.why, step
    assert not session.run("more = bytearray(b'x') * 300_000_000").success, "the control: the limit is in force"


@pytest.mark.both
def test_a_state_that_was_killed_from_outside_is_missed_and_nothing_else(opened: Open) -> None:
    session = opened()
    session.run("a = 1\na = 2\na = 3")
    recorder = session._recording()
    assert recorder._checkpoints is not None
    (host,) = [pid for pid, inner in _inner_pids(recorder._checkpoints._guest.init).items() if inner == recorder.tree.states[2].process]
    os.kill(host, signal.SIGKILL)
    assert until(lambda: not Path(f"/proc/{host}").exists()), "init collects it"
    for use in (session.rewind, lambda step: session.inspect(step).variables):
        with pytest.raises(SandboxError, match=r"given up|not kept"):
            use(2)
    assert not session.timeline[2].kept and session.run("a").value == 3, "the session goes on"
    session.rewind(3)
    assert session.run("a").value == 2


def _inner_pids(init: int) -> dict[int, int]:
    """Return the processes of a run: their numbers here, and those in the run."""
    here = Path(f"/proc/{init}/ns/pid").stat().st_ino if os.geteuid() == 0 else None
    found = {}
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            fields = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
            same = here is None or Path(f"{status.parent}/ns/pid").stat().st_ino == here
        except OSError:
            continue
        ancestors = _ancestors(int(status.parent.name))
        if same and init in ancestors:
            found[int(status.parent.name)] = int(fields["NSpid"].split()[-1])
    return found


def _ancestors(pid: int) -> set[int]:
    above: set[int] = set()
    while pid > 1:
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            break
        above.add(pid)
    return above


@pytest.mark.both
def test_the_changes_of_a_session_are_those_of_its_last_state(opened: Open, tmp_path: Path) -> None:
    place = tmp_path / "writable"
    place.mkdir()
    (place / "old").write_text("old")
    session = opened(allow_file_read=True, allow_file_write=True, allowed_paths=[str(place)], working_dir=str(place))
    session.run("import os\nopen('dropped', 'w').write('1')\na = 1")
    session.rewind(2)
    session.run("open('new', 'w').write('1')\nos.unlink('old')\nopen('new', 'a').write('2')")
    session.close()
    assert {(os.path.basename(each.path), each.kind.value) for each in session.changes.changes} == {("new", "added"), ("old", "deleted")}
    assert sorted(each.name for each in place.iterdir()) == ["old"], "the real directory is untouched"


def test_a_path_within_another_is_refused_beforehand(opened: Open, tmp_path: Path) -> None:
    inner = tmp_path / "outer" / "inner"
    inner.mkdir(parents=True)
    session = opened(allow_file_read=True, allow_file_write=True, allowed_paths=[str(tmp_path / "outer"), str(inner)])
    assert session.run("1").success, "one overlay is enough for both"
    with tempfile.TemporaryDirectory(dir="/tmp") as below, pytest.raises(LaunchFailed, match="which lies in /tmp"):
        opened(allow_file_read=True, allow_file_write=True, allowed_paths=[below]).run("1")


@pytest.mark.parametrize(
    ("options", "why"), [({"runtime": "wasm"}, "no state that can be kept"), ({"audit_level": AuditLevel.DEBUG}, "cannot be observed")]
)
def test_what_has_no_timeline_says_so(options: dict[str, Any], why: str) -> None:
    with pytest.raises(SandboxError, match=why), Sandbox(validate_code=False, **options).session(timeline=True) as session:
        session.run("1")


def test_it_is_the_same_with_asyncio() -> None:
    async def main() -> None:
        async with AsyncSandbox(validate_code=False, runtime="process") as sandbox, sandbox.session(timeline=True) as session:
            await session.run("a = [1]\na.append(2)")
            state = await session.inspect(2)
            assert (await state.evaluate("a")).repr == "[1]" and [each.name for each in await state.variables()] == ["a"]
            assert await state.frames() == () and await state.list("/tmp") == ()
            assert (await session.diff(2, 3)).variables == {"a": "changed"}
            assert (await session.rewind(2)).step == session.timeline[2]
            assert (await session.run("a")).value == [1]

    asyncio.run(main())


def test_two_states_are_compared(opened: Open) -> None:
    session = opened()
    first = "a = 1; b = [1]; open('same', 'w').write('x'); open('f', 'w').write('one')"
    session.run(f"{first}\nb.append(2)\nc = 1; del a; open('f', 'w').write('two'); open('g', 'w').close()\nd = 1")
    second, third, fourth = (before_line(session, line) for line in (2, 3, 4))
    between = session.timeline.diff(second, third)
    assert (between.variables, between.files) == ({"b": "changed"}, {})
    between = session.timeline.diff(third, fourth)
    assert between.variables == {"a": "gone", "c": "new"} and between.files == {"/tmp/f": "changed", "/tmp/g": "new"}
    assert session.timeline.diff(fourth, third).files == {"/tmp/f": "changed", "/tmp/g": "gone"}


@pytest.mark.both
@pytest.mark.parametrize(
    ("first", "then", "changed"),
    [
        ("os.mkdir('d'); open('d/old', 'w').close()", "shutil.rmtree('d'); os.mkdir('d')", {"d/old": "gone"}),
        (
            "os.mkdir('d'); open('d/old', 'w').close()",
            "shutil.rmtree('d'), os.mkdir('d'), open('d/a', 'w')",
            {"d/a": "new", "d/old": "gone"},
        ),
        ("os.makedirs('d/e'); open('d/e/f', 'w').close()", "shutil.rmtree('d')\nos.makedirs('d/e')", {"d/e/f": "gone"}),
        ("os.mkdir('d'); open('d/a', 'w').close()", "os.chmod('d', 0o700); open('d/b', 'w').close()", {"d": "changed", "d/b": "new"}),
        (f"{LINK.format('a')}", f"os.unlink('l'); {LINK.format('b')}", {"l": "changed"}),
        (
            "os.mkdir('d')",
            "os.makedirs('new/e'); open('new/e/f', 'w').close(); os.rmdir('d')",
            {"d": "gone", "new": "new", "new/e": "new", "new/e/f": "new"},
        ),
        (
            "os.mkdir('d'); open('d/a', 'w').close(); open('d/b', 'w').close()",
            "open('d/a', 'w').write('x')\nc = 1\nshutil.rmtree('d')",
            GONE,
        ),
        ("pass", "os.mkdir('d')\nopen('d/a', 'w').close()\nos.unlink('d/a')", {"d": "new"}),
    ],
)
def test_no_difference_of_files_is_missed(opened: Open, first: str, then: str, changed: dict[str, str]) -> None:
    session = opened()
    done = session.run(f"import os, shutil\n{first}\na = 1\n{then}\nb = 1")
    assert done.success, done.stderr
    old, new = (next(step for step in session.timeline if step.text == text) for text in ("a = 1", "b = 1"))
    assert session.timeline.diff(old, new).files == {f"/tmp/{path}": how for path, how in changed.items()}
    assert session.timeline.diff(new, old).files.keys() == session.timeline.diff(old, new).files.keys()


@pytest.mark.both
def test_two_states_are_compared_however_many_files_differ(opened: Open) -> None:
    """The answer is longer than the kernel's messages, which once ended the session."""
    session = opened(max_disk_mb=500)
    assert session.run("a = 1\nfor number in range(11_000): open(f'{number:0100}', 'w').close()\nb = 1").success
    old, new = (next(step for step in session.timeline if step.text == text) for text in ("a = 1", "b = 1"))
    assert len(session.timeline.diff(old, new).files) == 11_000
    assert session.run("a").value == 1


@pytest.mark.parametrize(
    ("first", "then", "changed"),
    [
        ("def f(): return 1", "def f(): return 2", {"f"}),
        ("def f(): return 1", "def f(): return 1", set()),
        ("f = lambda x=1: x", "f.__defaults__ = (2,)", {"f"}),
        ("def m():\n    n = [0]\n    return lambda: n\nf = m()", "f().append(1)", {"f"}),
        ("class C: v = 1", "C.v = 2", {"C"}),
        ("class C:\n    def m(self): return 1\nc = C()", "C.m = lambda self: 2", {"C", "c"}),
        ("class C:\n    @property\n    def p(self): return 1", "class C:\n    @property\n    def p(self): return 2", {"C"}),
        ("g = (each for each in range(9)); _ = next(g)", "_ = next(g)", {"_", "g"}),
        ("_ = open('f', 'w').write('abc'); h = open('f')", "_ = h.read(1)", {"_", "h"}),
        ("import threading\nclass C: pass\nc = C(); c.lock = threading.Lock(); c.v = 1", "c.v = 2", {"c"}),
        ("__v = 1", "__v = 2", {"__v"}),
        ("globals().update({f'v{number}': 1 for number in range(2000)})", "v1999 = 2", {"v1999"}),
        ("class C: pass\nC.self = C; d = {}; d[1] = d; k = [len, C, open, d, print, int]", "C.w = 1", {"C", "k"}),
    ],
)
def test_no_difference_of_variables_is_missed(opened: Open, first: str, then: str, changed: set[str]) -> None:
    """Values that pickle knows by name only, or cannot pickle, are compared too."""
    session = opened()
    done = session.run(f"{first}\nbegin = 1\n{then}\nend = 1")
    assert done.success, done.stderr
    old, new = (next(step for step in session.timeline if step.text == text) for text in ("begin = 1", "end = 1"))
    assert {*session.timeline.diff(old, new).variables} == {"begin", *changed}


STATEMENTS = (
    "v{0} = {1}",
    "v{0} = [v for v in (globals().get('v{2}'), {1})]",
    "globals().pop('v{0}', None)",
    "open('f{0}', 'w').write('{1}')",
    "open('f{0}', 'a').write('{1}')",
    "os.path.exists('f{0}') and os.unlink('f{0}')",
    "os.makedirs('d{0}', exist_ok=True); open('d{0}/x', 'w').write('{1}')",
    "import shutil; shutil.rmtree('d{0}', ignore_errors=True)",
    "os.path.exists('f{0}') and os.replace('f{0}', 'f{2}')",
)
DIGEST = (
    "sorted((n, repr(v)) for n, v in globals().items() if n[0] == 'v' and n[1:].isdigit()),"
    " sorted((os.path.join(d, n), open(os.path.join(d, n)).read()) for d, _, ns in os.walk('.') for n in ns)"
)


def random_program(seed: int, length: int) -> list[str]:
    chance = random.Random(seed)
    return ["import os", *(chance.choice(STATEMENTS).format(*(chance.randrange(4) for _ in range(3))) for _ in range(length))]


def test_a_session_without_a_timeline_has_none(opened: Open) -> None:
    with Sandbox(validate_code=False, runtime="process").session() as session, pytest.raises(SandboxError, match="no timeline"):
        session.rewind(1)
    session = opened()
    session.run("a = 1")
    for number in (0, -1, 99):
        with pytest.raises(SandboxError, match="no step"):
            session.rewind(number)
        with pytest.raises(SandboxError, match="no step"):
            session.inspect(number)
    session.close()
    with pytest.raises(SandboxError, match="ended"):
        session.rewind(1)


@pytest.mark.both
def test_a_timeline_leaves_nothing(opened: Open) -> None:
    opened().run("1")
    before = traces()
    session = opened()
    session.run("import os\nfor number in range(3): os.fork() or os._exit(0)\nopen('f', 'w').write('x')")
    session.rewind(2)
    assert session.inspect(1).variables == ()
    session.close()
    assert left_since(before) == []


@pytest.mark.both
def test_nothing_is_left_when_the_caller_is_killed() -> None:
    before = traces()
    script = textwrap.dedent("""
        from agent_sandbox import Sandbox
        session = Sandbox(validate_code=False, runtime="process").session(timeline=True)
        session.run("a = 1\\nopen('f', 'w').write('x')\\nb = 2")
        session.rewind(2)
        print("ready", flush=True)
        input()
    """)
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as caller:
        assert caller.stdout is not None
        assert caller.stdout.readline() == b"ready\n"
        os.kill(caller.pid, signal.SIGKILL)
    assert until(lambda: left_since(before) == [])


def test_the_tree_gives_up_what_has_the_nearest_neighbours_and_keeps_errors() -> None:
    tree = StepTree(most=10)
    for number in range(1, 101):
        tree.add(1, number, "x", 0.0)
        tree.states[number] = State(number, ("1",))
        if number == 30:
            tree.change(number, error="E")
        while len(tree.states) > tree.most:
            tree.give_up(tree.least_wanted())
    kept = sorted(tree.states)
    assert len(kept) == 10 and {1, 30, 99, 100} <= {*kept}
    gaps = [after - before for before, after in pairwise(kept)]
    assert gaps[-1] <= gaps[len(gaps) // 2] + 1
