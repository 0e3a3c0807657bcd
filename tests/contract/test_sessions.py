"""An interpreter that stays, turn by turn: the same claims for each runtime of Python code."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent_sandbox import Sandbox, SandboxError, SandboxResult, SandboxStatus
from agent_sandbox.ledger.event import Event, Intent, OutcomeEvent, RefusalEvent
from agent_sandbox.runtime.base import ExitReason
from tests.patience import given_time

pytestmark = pytest.mark.once

Make = Callable[..., Sandbox]
Events = Callable[[], list[Event]]


def test_what_a_turn_leaves_the_next_one_finds(sandboxes: Make) -> None:
    with sandboxes().session(env_vars={"A": "1"}, args=["one", "two"]) as session:
        assert session.run("import math, os, sys\nx = 20\ndef double(y): return 2 * y").success
        session.run("os.mkdir('/tmp/d'); os.chdir('/tmp/d'); open('f', 'w').write('kept')")
        found = session.run("[x, double(x), math.floor(2.5), os.getcwd(), open('f').read(), os.environ['A'], sys.argv[1:], __name__]")
        assert found.value == [20, 40, 2, "/tmp/d", "kept", "1", ["one", "two"], "__main__"], found
        assert session.run("import __main__; __main__.x").value == 20


VALUES: dict[str, tuple[Any, str | None]] = {
    "1 + 1": (2, None),
    "x = 5": (None, None),
    "x = 5\nx": (5, None),
    "None": (None, None),
    "'text'": ("text", None),
    "(1, [2], {'a': b'3'})": ([1, [2], {"a": b"3"}], None),
    "for i in range(3): i": (None, None),
    "print('said')": (None, None),
    "1 if True else 2;": (1, None),
    "{1: 2}": (None, "{1: 2}"),
    "range(3)": (None, "range(0, 3)"),
    "class Odd:\n    def __repr__(self): return 'odd'\nOdd()": (None, "odd"),
    "class Bad:\n    def __repr__(self): raise ValueError\nBad()": (None, "<Bad whose repr raised ValueError>"),
    "import sys; sys.setrecursionlimit(5000)\nx = []\nfor _ in range(200): x = [x]\nx": (None, "[" * 201 + "]" * 201),
    "# nothing": (None, None),
}


def test_the_value_of_a_last_expression_is_data_or_said_in_words(sandboxes: Make) -> None:
    with sandboxes().session() as session:
        for code, wanted in VALUES.items():
            made = session.run(code)
            assert (made.value, made.value_repr) == wanted and made.success, (code, made)


def test_a_turn_that_fails_shows_its_lines_and_leaves_the_session_as_it_was(sandboxes: Make) -> None:
    with sandboxes().session() as session:
        session.run("def divide(n):\n    # by nothing\n    return n / 0")
        failed = session.run("y = 1\ndivide(y)")
        lines = [line.strip() for line in failed.stderr.splitlines() if not set(line) <= set(" ~^")]
        assert lines == [
            "Traceback (most recent call last):",
            'File "<turn 2>", line 2, in <module>', "divide(y)",
            'File "<turn 1>", line 3, in divide', "return n / 0",
            "ZeroDivisionError: division by zero",
        ], failed.stderr  # fmt: skip
        assert (failed.status, failed.exit_code, failed.error) == (SandboxStatus.FAILED, 1, "ZeroDivisionError: division by zero")
        broken = session.run("def f(:\n")
        assert "SyntaxError" in (broken.error or "") and '"<turn 3>", line 1' in broken.stderr
        assert session.run("import inspect, traceback\ntry: divide(2)\nexcept ZeroDivisionError: traceback.print_exc()").stderr.count(
            "n / 0"
        )
        assert session.run("inspect.getsource(divide)").value == "def divide(n):\n    # by nothing\n    return n / 0"
        assert session.run("y").value == 1 and not session.ended


def test_leaving_ends_the_turn_with_its_code_and_not_the_session(sandboxes: Make) -> None:
    with sandboxes().session() as session:
        assert session.run("import sys\nx = 1\nsys.exit(3)\nx = 2").exit_code == 3
        said = session.run("sys.exit('gone wrong')")
        assert (said.exit_code, said.stderr, said.error) == (1, "gone wrong\n", "gone wrong")
        assert (session.run("raise SystemExit").exit_code, session.run("x").value) == (0, 1)


def test_each_turn_has_its_own_input_and_output(sandboxes: Make) -> None:
    heard: list[tuple[str, str]] = []
    with sandboxes(max_output_bytes=1000).session(on_output=lambda stream, text: heard.append((stream, text))) as session:
        assert session.run("a = input(); b = input(); [a, b]", stdin="é\n2\n3\n").value == ["é", "2"]
        assert "EOFError" in (session.run("input()").error or "")
        every_byte = bytes(range(256)) * 3
        copied = session.run("import sys; sys.stdout.buffer.write(sys.stdin.buffer.read()) and None", stdin=every_byte)
        assert (copied.stdout_bytes, copied.stderr_bytes) == (every_byte, b"")
        part = session.run("print('no end', end=''); print('oops', end='', file=sys.stderr)")
        assert (part.stdout, part.stderr) == ("no end", "oops")
        cut = session.run("print('x' * 5000)")
        assert cut.truncated and len(cut.stdout_bytes) == 1000 and cut.success
        assert not session.run("print('fine')").truncated
        heard.clear()
        session.run("print('hello')")
        assert heard == [("stdout", "hello\n")]
        mine: list[str] = []
        session.run("print('mine')", on_output=lambda _, text: mine.append(text))
        assert mine == ["mine\n"] and len(heard) == 1


def test_a_turn_beyond_its_time_ends_the_session_and_says_so(sandboxes: Make) -> None:
    def attempt(limit: float) -> SandboxResult:
        with sandboxes().session(timeout=limit) as session:
            first = session.run("x = 1")
            if not first.success:
                return first
            late = session.run("print('here')\nwhile True: pass")
            with pytest.raises(SandboxError, match="has ended: its turn 2 was timed-out"):
                session.run("x")
            return late

    late = given_time(attempt, lambda result: result.stdout, seconds=0.5)
    assert (late.status, late.stdout, late.limits_hit) == (SandboxStatus.TIMEOUT, "here\n", ("wall",)), late


ENDS = {
    "leaving on the spot": ("import os; os._exit(7)", 7, ExitReason.EXITED),
    "breaking": ("import os; os.abort()", 134, ExitReason.SIGNALLED),
}


@pytest.mark.parametrize(("code", "exit_code", "reason"), ENDS.values(), ids=ENDS.keys())
def test_a_turn_that_ends_the_interpreter_ends_the_session(sandboxes: Make, code: str, exit_code: int, reason: ExitReason) -> None:
    with sandboxes().session() as session:
        ended = session.run(code)
        assert ended.exit is not None and (ended.exit_code, ended.exit.reason) == (exit_code, reason), ended
        with pytest.raises(SandboxError, match="open another"):
            session.run("1")


@pytest.mark.both
def test_memory_is_limited_for_the_session(sandboxes: Make) -> None:
    with sandboxes(max_memory_mb=200).session() as session, sandboxes(max_memory_mb=700).session() as roomy:
        assert session.run("held = bytearray(20 << 20)").success and roomy.run("held = bytearray(20 << 20)").success
        assert not session.run("more = bytearray(200 << 20)").success and roomy.run("more = bytearray(200 << 20)").success


def test_each_turn_passes_the_gate_and_is_recorded(sandboxes: Make, events: Events) -> None:
    with sandboxes().session() as session:
        session.run("1 # CANARY-code")
        refused = session.run("")
        assert refused.status is SandboxStatus.FAILED and refused.verdict is not None and "no code" in (refused.error or "")
        assert session.run("2").value == 2
    found = events()
    assert [type(event) for event in found] == [Intent, OutcomeEvent, RefusalEvent, Intent, OutcomeEvent]
    assert [event.action["kind"] for event in found if isinstance(event, Intent)] == ["RunCode", "RunCode"]
    assert "CANARY" not in repr(found)


def test_tools_work_in_turns_and_cannot_take_one(sandboxes: Make) -> None:
    def again(code: str) -> Any:
        return session.run(code).value

    with sandboxes(tools={"double": lambda x: 2 * x}).session(tools=[again]) as session:
        assert session.run("y = double(4)\ny").value == 8
        failed = session.run("again('1')")
        assert failed.error == "ToolError: again failed" and "in a turn, which waits" in str(failed.tool_errors[0])
        fine = session.run("[double(n) for n in range(3)]")
        assert (fine.value, fine.tool_errors) == ([0, 2, 4], ())


@pytest.mark.both
def test_what_turns_changed_is_known_when_the_session_is_closed(sandboxes: Make, project: Path) -> None:
    settings = {"allow_file_read": True, "allow_file_write": True, "allowed_paths": [project], "working_dir": project}
    session = sandboxes(**settings).session()
    session.run("open('one.txt', 'w').write('1')")
    session.run(
        "import atexit; atexit.register(lambda: open('last.txt', 'w').write('end')); held = open('held.txt', 'w'); held.write('buffered')"
    )
    session.close()
    session.close()
    kinds = {change.path.rpartition("/")[2]: (change.kind.value, change.after and change.after.size) for change in session.changes}
    assert kinds == {"one.txt": ("added", 1), "last.txt": ("added", 3), "held.txt": ("added", 8)}
    assert sorted(os.listdir(project)) == [".git", "greeting.txt", "src"]
    with pytest.raises(SandboxError, match="it was closed"):
        session.run("1")


@pytest.mark.both
def test_closing_a_sandbox_ends_its_sessions(sandboxes: Make) -> None:
    sandbox = sandboxes()
    session, unused = sandbox.session(), sandbox.session()
    assert session.run("1").value == 1
    sandbox.close()
    for each in (session, unused):
        with pytest.raises(SandboxError, match="closed"):
            each.run("1")
    with pytest.raises(SandboxError, match="closed"):
        sandbox.session()


@pytest.mark.both
def test_a_session_can_be_killed_from_another_thread_while_it_runs_and_while_it_waits(sandboxes: Make) -> None:
    sandbox = sandboxes()
    with sandbox.session() as session, sandbox.session() as other:
        assert other.run("1").value == 1
        killer = threading.Thread(target=sandbox.kill)
        killed = session.run("print(1, flush=True)\nwhile True: pass", on_output=lambda *_: killer.start())
        killer.join()
        assert killed.exit is not None and killed.exit.reason is ExitReason.KILLED
        for each in (session, other):
            with pytest.raises(SandboxError, match="has ended"):
                each.run("1")
    assert sandbox.execute("print(1)").stdout == "1\n"


def test_a_turn_that_ends_by_itself_while_it_is_killed_has_been_killed(sandboxes: Make) -> None:
    """The kill is made slow: the guest's init sleeps, so that the guest can end its turn first."""
    later: list[threading.Timer] = []

    def kill() -> None:
        opened = session._turns._opened
        assert opened is not None
        init: int = opened.guest.init  # type: ignore[attr-defined]
        os.kill(init, signal.SIGSTOP)
        later.append(threading.Timer(1.0, os.kill, (init, signal.SIGCONT)))
        later[0].start()
        session.kill()

    with sandboxes(tools={"kill": kill}).session() as session:
        killed = session.run("kill()")
        assert killed.exit is not None and killed.exit.reason is ExitReason.KILLED
        assert session.ended
    later[0].join()


def test_two_threads_take_turns_one_after_the_other(sandboxes: Make) -> None:
    with sandboxes().session() as session:
        session.run("n = 0")
        threads = [threading.Thread(target=lambda: [session.run("m = n\nn = m + 1") for _ in range(5)]) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert session.run("n").value == 15


def test_a_callback_that_raises_ends_the_session(sandboxes: Make) -> None:
    def stop(*_: object) -> None:
        raise KeyError("enough")

    with sandboxes().session() as session:
        with pytest.raises(KeyError):
            session.run("print(1)", on_output=stop)
        with pytest.raises(SandboxError, match="cut off by KeyError"):
            session.run("1")


def test_the_lifetime_of_a_sandbox_ends_a_session_that_waits(sandboxes: Make) -> None:
    def attempt(lifetime: float) -> tuple[object, SandboxResult]:
        with sandboxes(lifetime_seconds=lifetime).session() as session:
            first = session.run("1")
            try:
                return first.value, session.run("while True: pass") if first.success else first
            except SandboxError:  # it was over before the second turn began
                return None, first

    value, late = given_time(attempt, lambda made: made[0] == 1, seconds=2.0)
    assert (value, late.status, late.limits_hit) == (1, SandboxStatus.TIMEOUT, ("lifetime",)), late
    sandbox = sandboxes(lifetime_seconds=600)
    outlived = sandbox.session()
    assert outlived.run("1").value == 1
    sandbox._expires = 0.0
    with pytest.raises(SandboxError, match="outlived its lifetime"):
        outlived.run("1")
    outlived.close()
    assert outlived.ended == "it was closed", "and not left to a turn that is not being taken"


ODD_ENDS = (
    "import sys; sys.excepthook = lambda *_: 1 / 0",
    "import sys; sys.stdout.close()",
    "import sys; sys.stdout = sys.stderr = None",
    "import sys; sys.stdout = sys.stderr = object()",
    "class Flush:\n    def flush(self): raise SystemExit(3)\nimport sys; sys.stdout = Flush()",
    "class Evil(int):\n    def __int__(self): raise KeyError\nEvil(1)",
    "class Evil(dict):\n    def __iter__(self): raise KeyboardInterrupt('x') if False else ValueError\nEvil(a=1)",
    "import linecache; linecache.cache = None; linecache.clearcache = None",
    "import builtins; builtins.print = None; builtins.repr = None",
)


def test_what_a_turn_does_to_its_interpreter_ends_no_session(sandboxes: Make) -> None:
    sandbox = sandboxes()
    for code in ODD_ENDS:
        with sandbox.session() as session:
            session.run(code)
            session.run("1 / 0")
            assert session.run("40 + 2").value == 42, (code, session.ended)


def test_time_that_passes_between_turns_is_no_turns(sandboxes: Make) -> None:
    """Whether the turn before was over in a moment or took its time; and each has a limit of its own."""

    def attempt(limit: float) -> list[object]:
        values: list[object] = []
        with sandboxes().session(timeout=limit) as session:
            for code in ("1", "for _ in range(300_000): pass\n1", "2"):
                if not session.ended:
                    values.append(session.run(code).value)
                    time.sleep(1.6 * limit)  # more than a turn may take
            if not session.ended:
                assert session.run("while True: pass", timeout=0.2).status is SandboxStatus.TIMEOUT
        return values

    assert given_time(attempt, lambda values: values == [1, 1, 2], seconds=0.5) == [1, 1, 2]
    with sandboxes().session() as session:
        assert session.run("while True: pass", timeout=0.2).status is SandboxStatus.TIMEOUT, "the first one, too"


def test_what_could_not_be_started_says_so_and_nothing_runs(sandboxes: Make, project: Path) -> None:
    settings = {"allow_file_read": True, "allowed_paths": [project], "working_dir": project / "nowhere", "tools": {"one": lambda: 1}}
    sandbox = sandboxes(**settings)
    ran = sandbox.execute("print(one())")
    assert (ran.exit_code, ran.stdout) == (125, "") and "could not be started: cannot start in" in (ran.error or ""), ran
    with sandbox.session() as session:
        turn = session.run("one()")
        assert (turn.exit_code, turn.value) == (125, None) and "could not be started: cannot start in" in (turn.error or ""), turn
        assert session.ended
