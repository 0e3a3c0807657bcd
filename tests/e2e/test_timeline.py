"""Sessions with a timeline, as their users meet them: a script fails, somebody looks at the moment before, mends it and goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_sandbox import SandboxSession
from agent_sandbox.server.places import Place
from tests.e2e.program import Shell, tree, words
from tests.e2e.sitting import sitting
from tests.e2e.test_schemas import checked
from tests.leftovers import adopting, left_since, traces
from tests.patience import given_time, until

pytestmark = pytest.mark.once

SCRIPT = """\
import sys, helper
rows = [("a", 3), ("b", 0), ("c", 4)]
open("rows.csv", "w").write("\\n".join(f"{name},{count}" for name, count in rows))
def share(total, count):
    return helper.divided(total, count)
print(sys.argv[1:])
shares = {name: share(100, count) for name, count in rows}
print("never")
"""
HELPER = "def divided(total, count):\n    return round(total / count, 2)\n"
MENDED = "rows = [row for row in rows if row[1]]\nprint({name: share(100, count) for name, count in rows})\n"
ODD = """\
import time
class Hanging:
    def __repr__(self): time.sleep(600)
class Printing:
    def __repr__(self): print('heard'); return 'said'
hanging, printing = Hanging(), Printing()
"""
FAILED = 6  # the step, which is in line 7
CONNECT = "import os, socket, sys; os.chdir(sys.argv[1]); socket.socket(socket.AF_UNIX).connect('socket')"


@pytest.fixture
def held(shell: Shell) -> Iterator[Shell]:
    """A project with a script. Its sessions are ended."""
    (shell.cwd / "analysis.py").write_text(SCRIPT)
    (shell.cwd / "helper.py").write_text(HELPER)
    yield shell
    shell("timeline", "--all", "--end")


def places(shell: Shell) -> list[Path]:
    top = Path(shell.env["AGENT_SANDBOX_STATE"], "timelines")
    return [path for path in top.iterdir() if not path.name.startswith(".")] if top.exists() else []


def holders(shell: Shell) -> list[int]:
    """The processes that hold sessions in this state directory."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            line = Path("/proc", pid, "cmdline").read_bytes()
        except OSError:
            continue
        if b"server.holder" in line and os.fsencode(shell.env["AGENT_SANDBOX_STATE"]) in line:
            found.append(int(pid))
    return found


@pytest.mark.timeout(300)
def test_a_script_that_fails_is_looked_at_mended_and_carried_on_without_repeating_what_worked(held: Shell) -> None:
    before = tree(held.cwd)
    failed = held("run", "--timeline", "analysis.py", "one", "two")
    assert failed.returncode == 1 and failed.stdout == b"['one', 'two']\n"
    assert 'analysis.py", line 7' in words(failed) and 'helper.py", line 2' in words(failed), "tracebacks name the files"
    assert words(failed).splitlines()[-1] == f"agent-sandbox: the state before step {FAILED} is kept for 1 hour: agent-sandbox inspect"

    looked = held("inspect")
    assert looked.returncode == 0, words(looked)
    lines = looked.stdout.decode().splitlines()
    assert f"before step {FAILED}: shares = " in lines[0]
    assert any(line.startswith("rows ") and "('b', 0)" in line for line in lines)
    assert "then: ZeroDivisionError: division by zero" in lines
    assert [line.split() for line in lines[lines.index("helper.py:2 in divided") + 1 :]] == [
        ["total", "int", "28", "bytes", "100"],
        ["count", "int", "28", "bytes", "0"],
    ]

    shown = held("timeline").stdout.decode().splitlines()
    assert f"error at step {FAILED}" in shown[0]
    assert "files: rows.csv new" in shown[3] and "✗" in shown[FAILED] and shown[FAILED + 1].startswith(">")

    document = checked(held("--json", "inspect", str(FAILED), "--eval", "rows.clear() or len(rows)"))
    assert document["value"]["repr"] == "0"
    assert checked(held("--json", "inspect", "--eval", "len(rows)"))["value"]["repr"] == "3", "whatever it did was undone"
    assert held("inspect", "4", "--file", "rows.csv").stdout == b"a,3\nb,0\nc,4", "byte for byte"
    assert "rows.csv" not in checked(held("--json", "inspect", "3", "--list", "."))["names"]
    differing = checked(held("--json", "inspect", "2", "4", "--diff"))
    assert differing["variables"] == {"rows": "new"} and list(differing["files"].values()) == ["new"]

    rewound = held("rewind", "--error")
    assert rewound.returncode == 0 and f"is before step {FAILED}: shares = " in words(rewound)
    (held.cwd / "mended.py").write_text(MENDED)
    went_on = held("run", "--in", "last", "mended.py")
    assert (went_on.returncode, went_on.stdout) == (0, b"{'a': 33.33, 'c': 25.0}\n"), words(went_on)
    branches = checked(held("--json", "timeline"))
    steps = {step["number"]: step for step in branches["steps"]}
    assert steps[FAILED]["error"].startswith("ZeroDivisionError") and not steps[FAILED]["present"]
    assert [each for each in steps if steps[each]["present"]] == [1, 2, 3, 4, 5, 8, 9, 10], "the failed line is another branch"
    (held.cwd / "mended.py").unlink()
    assert tree(held.cwd) == before, "the real project is as it was"

    ended = held("timeline", "--end")
    assert ended.returncode == 0 and branches["session"]["id"] in words(ended)
    assert until(lambda: not holders(held) and not places(held)), "neither process nor directory is left"


@pytest.mark.timeout(300)
def test_what_cannot_be_had_of_a_session_is_refused_in_words(held: Shell) -> None:
    nothing = held("inspect")
    assert nothing.returncode == 2 and "no session with a timeline is held" in words(nothing)
    (held.cwd / "odd.py").write_text(ODD)
    begun = held("run", "--timeline", "odd.py", "--for", "10m")  # what follows the file is the script's
    assert begun.returncode == 0 and "is kept for 1 hour after its last use" in words(begun)
    for line, code, why in (
        (("inspect", "99"), 2, "has no step 99: there are 5"),
        (("rewind", "99"), 2, "has no step 99"),
        (("rewind", "--error"), 2, "has raised an error"),
        (("rewind",), 2, "rewind needs a step, or --error"),
        (("rewind", "soon"), 2, "rewind needs a step"),
        (("inspect", "tffffff", "2"), 2, "there is no session tffffff"),
        (("inspect", "--eval", "1 / 0"), 1, "the expression raised ZeroDivisionError"),
        (("inspect", "--eval", "printing +"), 1, "SyntaxError"),
        (("inspect", "--timeout", "0.5", "--eval", "[each for each in iter(int, 1)]"), 125, "no answer within 0.5 seconds"),
        (("inspect", "--timeout", "0.5", "--eval", "hanging"), 125, "no answer within 0.5 seconds"),
        (("inspect", "--timeout", "0.5"), 125, "no answer within 0.5 seconds"),
        (("inspect", "--file", "none.txt"), 1, "FileNotFoundError"),
        (("run", "--in", "last", "--memory", "1G", "odd.py"), 2, "the session has its settings already"),
        (("run", "--timeline", "--observe", "odd.py"), 2, "--observe does not go with --timeline"),
        (("run", "--timeline", "python odd.py"), 2, "takes a file of Python code"),
        (("run", "--timeline", "--cwd", "/etc", "odd.py"), 126, "does not show the working directory '/etc'"),
        (("run", "--timeline", "--project", "/tmp", "--cwd", "/tmp", "odd.py"), 2, "a timeline cannot keep the files"),
    ):
        done = held(*line)
        assert (done.returncode, why in words(done)) == (code, True), (line, done.returncode, words(done))
    printed = held("inspect", "--eval", "printing")
    assert (printed.returncode, printed.stdout) == (0, b"said\n"), "what a repr prints is dropped"
    assert len(checked(held("--json", "timeline", "--all"))["sessions"]) == 1, "and the session is still there"

    ends = held("run", "--in", "last", "-", stdin=b"import os; os._exit(3)")
    assert ends.returncode == 3 and "nothing is kept: the session has ended" in words(ends)
    assert "no session with a timeline is held" in words(held("timeline"))


@pytest.mark.timeout(300)
def test_an_interrupt_ends_the_statement_and_a_session_outlives_its_terminal(held: Shell) -> None:
    # In one statement, which is interrupted at any moment, and in short sleeps: Python misses a signal that comes just before a long one.
    waiting = "while True:\n    print('wor\\x1bking', flush=True)\n    for _ in range(6000): time.sleep(0.1)\n"
    (held.cwd / "long.py").write_text(f"import time\na = 1\n{waiting}")
    with sitting(held, "run", "--timeline", "long.py", before="trap true INT;") as person:  # the shell goes on
        person.expect(b"wor\\x1bking")  # escaped on a terminal
        person.type(b"\x03")
        person.expect(b"the state before step 3 is kept")
        assert person.end() == 130
    with held.start("run", "--in", "last", "long.py") as process:
        assert process.stdout is not None and process.stdout.readline() == b"wor\x1bking\n", "and byte for byte into a pipe"
        for line in (("rewind", "1"), ("run", "--in", "last", "analysis.py")):
            busy = held(*line)
            assert busy.returncode == 125 and "is busy with another command" in words(busy)
        process.kill()
    assert until(lambda: not checked(held("--json", "timeline"))["session"]["busy"]), "whoever began the turn has gone: it is interrupted"
    assert checked(held("--json", "inspect", "--eval", "a"))["value"]["repr"] == "1"


@pytest.mark.timeout(300)
def test_a_time_limit_ends_the_statement_and_not_the_session(held: Shell) -> None:
    (held.cwd / "endless.py").write_text("import time\na = 1\nwhile True:\n    time.sleep(0.01)\n")
    done = given_time(
        lambda seconds: held("run", "--timeline", "--timeout", f"{seconds}", "endless.py"),
        lambda done: "the state before step 3 is kept" in words(done),
        seconds=2.0,
    )
    assert done.returncode == 124 and "ended: the time limit was reached" in words(done)
    assert held("inspect", "--eval", "a").stdout == b"1\n"


@pytest.mark.both
@pytest.mark.timeout(300)
def test_nothing_is_left_of_a_holder_that_is_killed(held: Shell) -> None:
    watched = Path(held.env["AGENT_SANDBOX_STATE"], "timelines")
    with adopting():
        assert held("timeline", "--all").returncode == 0
        before = traces(watched, adopted=True)
        assert held("run", "--timeline", "analysis.py").returncode == 1
        (holder,), (place,) = holders(held), places(held)
        assert left_since(before, watched, adopted=True, seconds=0.0), "the control: a session that is held can be seen"
        os.kill(holder, signal.SIGKILL)
        assert until(lambda: not holders(held))
        assert place.exists()
        gone = held("inspect", place.name)
        assert gone.returncode == 2 and f"there is no session {place.name}, or it has ended" in words(gone)
        assert not place.exists(), "the next use sweeps its directory"
        (watched / ".lock").unlink()
        assert left_since(before, watched, adopted=True) == []


@pytest.mark.both
@pytest.mark.timeout(300)
def test_a_sandboxed_program_cannot_reach_a_held_session(held: Shell) -> None:
    assert held("run", "--timeline", "analysis.py").returncode == 1
    (place,) = places(held)
    assert oct(place.stat().st_mode & 0o777) == "0o700" and oct((place / "socket").stat().st_mode & 0o777) == "0o600"
    outside = subprocess.run([sys.executable, "-c", CONNECT, place], check=False, capture_output=True)
    assert outside.returncode == 0, "the control: its user can"
    inside = held("run", "--throw-away", "--", sys.executable, "-c", CONNECT, str(place))
    assert inside.returncode == 1 and "FileNotFoundError" in words(inside)
    with Place(str(place)).connect() as link:
        link.sendall(b"\xff\xff\xff\xff")
        assert link.recv(1) == b"", "whoever speaks nonsense is not answered"
    assert held("inspect", "--eval", "1").stdout == b"1\n", "and the holder goes on"


@pytest.mark.skipif(not hasattr(SandboxSession, "fork"), reason="live forks are not in this version")
@pytest.mark.timeout(300)
def test_forks_are_held_sessions_of_their_own(held: Shell) -> None:
    assert held("run", "--timeline", "analysis.py").returncode == 1
    forked = checked(held("--json", "fork", "--error", "--count", "2"))
    first, second = forked["forks"]
    assert forked["step"] == FAILED and first.endswith(".1") and second.endswith(".2")
    for name, code in ((first, "rows = [('x', 5)]"), (second, "rows = [('y', 4)]")):
        assert held("run", "--in", name, "-", stdin=f"{code}\nopen('rows.csv', 'w').write(repr(rows))".encode()).returncode == 0
    assert [held("inspect", name, "--file", "rows.csv").stdout for name in (first, second)] == [b"[('x', 5)]", b"[('y', 4)]"]
    assert held("run", "--in", first, "-", stdin=b"print(rows)").stdout == b"[('x', 5)]\n", "they do not see one another"
    looked = held("inspect", second)
    assert looked.returncode == 0 and b"rows" in looked.stdout and "code ran again" in words(looked)
    assert held("run", "--in", second, "-", stdin=b"rows = []").returncode == 0
    assert held("rewind", second, "4").returncode == 0 and held("inspect", second, "--eval", "rows").stdout == b"[('y', 4)]\n"
    (third,) = checked(held("--json", "fork", second, "4"))["forks"]
    assert held("run", "--in", third, "-", stdin=b"print(rows)").stdout == b"[('y', 4)]\n", "a fork is forked, too"
    assert held("timeline", third, "--end").returncode == 0
    refused = held("inspect", second, "--diff", "1", "2")
    assert refused.returncode == 125 and "keeps no two states to compare" in words(refused)
    assert f"forked from {forked['session']} before step {FAILED}" in held("timeline", "--all").stdout.decode()
    resting = held("run", "--in", forked["session"], "-", stdin=b"rows")
    assert resting.returncode == 125 and "rests while there are forks" in words(resting)
    assert held("timeline", first, "--end").returncode == held("timeline", second, "--end").returncode == 0
    assert held("inspect", "--eval", "rows").stdout == b"[('a', 3), ('b', 0), ('c', 4)]\n", "and the first one goes on as it was"


@pytest.mark.both
@pytest.mark.timeout(300)
def test_files_of_a_session_and_of_a_fork_are_kept_in_the_projects_sandbox_and_promoted(held: Shell) -> None:
    (held.cwd / "old").write_text("old")
    change = b"import os; os.mkdir('made'); open('made/f', 'w').write('new'); open('helper.py', 'a').write('x = 1'); os.unlink('old')"
    done = held("--json", "run", "--timeline", "-", stdin=change)
    session = json.loads(done.stdout)["session"]
    expected = {"helper.py": "changed", "made": "new", "made/f": "new", "old": "gone"}
    assert checked(held("--json", "timeline", session, "--keep-files"))["files"] == expected
    assert held("reset", "--yes").returncode == 0
    (fork,) = checked(held("--json", "fork"))["forks"]
    assert held("run", "--in", fork, "-", stdin=b"open('made/g', 'w').write('of the fork')").returncode == 0
    resting = held("timeline", session, "--keep-files")
    assert resting.returncode == 125 and "rests while there are forks" in words(resting)
    assert (held.cwd / "old").exists() and not (held.cwd / "made").exists(), "nothing of the project has changed"
    assert checked(held("--json", "timeline", fork, "--keep-files"))["files"] == {**expected, "made/g": "new"}
    assert held("timeline", "--all", "--end").returncode == 0
    assert held("promote", "--yes").returncode == 0
    assert (held.cwd / "made/f").read_text() == "new" and (held.cwd / "made/g").read_text() == "of the fork"
    assert (held.cwd / "helper.py").read_text().endswith("x = 1") and not (held.cwd / "old").exists()
    for line in ("timeline --all --keep-files", "timeline --keep-files --end"):
        assert held(*line.split()).returncode == 2


def test_a_projects_policy_binds_a_session(held: Shell) -> None:
    (held.cwd / "agent-sandbox.toml").write_text(f'[files]\ndenied = ["{held.cwd}/secret.txt"]\n')
    (held.cwd / "secret.txt").write_text("canary")
    (held.cwd / "plain.txt").write_text("shown")
    code = b"import os; print(os.path.exists('plain.txt'), os.path.exists('secret.txt'))"
    done = held("--json", "run", "--timeline", "-", stdin=code)
    assert json.loads(done.stdout)["stdout"] == "True False\n", "the other file is the control"
