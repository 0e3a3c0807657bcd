"""Forks of a session's state: they go on at the same time with its memory and files, and none of them reaches another or the session."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from agent_sandbox import AsyncSandbox, LiveExperiment, PolicyError, Sandbox, SandboxError, SandboxSession, SandboxStatus
from agent_sandbox.assembly import here
from agent_sandbox.runtime.process.checkpoint_guard import process_numbers
from tests.contract.test_timeline import DIGEST, before_line, give_up_all_but, random_program
from tests.leftovers import descendants, left_since, running, traces
from tests.patience import until

Open = Callable[..., SandboxSession]


@pytest.fixture
def opened() -> Iterator[Open]:
    """Open sessions with a timeline."""
    made: list[SandboxSession] = []

    def start(**options: object) -> SandboxSession:
        session = Sandbox(validate_code=False, runtime="process", **options).session(timeline=True)  # type: ignore[arg-type]
        fork = session.fork

        def note_forks(*arguments: Any, **named: Any) -> tuple[SandboxSession, ...]:
            forks = fork(*arguments, **named)
            made.extend(forks)
            return forks

        session.fork = note_forks  # type: ignore[method-assign]  # so that a test that fails leaves nothing
        made.append(session)
        return session

    yield start
    for session in made:
        session.close()


def close(*sessions: SandboxSession) -> None:
    for session in sessions:
        session.close()


def test_a_fork_has_the_memory_and_the_files_of_its_state_and_changes_only_its_own(opened: Open) -> None:
    session = opened()
    session.run("import os\na = [1]; open('f', 'w').write('one')\na.append(2); open('f', 'w').write('two')")
    third = before_line(session, 3)
    early, late = *session.fork(third), *session.fork()
    look = "a, open('f').read(), os.getcwd()"
    assert early.run(look).value == [[1], "one", "/tmp"] and late.run(look).value == [[1, 2], "two", "/tmp"]
    assert early.run("a.append('early'); open('f', 'a').write('!'); print('heard')").stdout == "heard\n"
    assert late.run("os.unlink('f'); os.mkdir('d'); a.clear()").success
    assert early.run(look).value == [[1, "early"], "one!", "/tmp"] and late.run("a, sorted(os.listdir())").value == [[], ["d"]]
    with pytest.raises(SandboxError, match="rests while there are forks"):
        session.run("1")
    close(early, late)
    assert session.run(look).value == [[1, 2], "two", "/tmp"], "and the session goes on where it was"


@pytest.mark.once
def test_forks_run_at_the_same_time(opened: Open) -> None:
    """Each waits for a word that the caller writes only once all of them run."""
    session = opened()
    session.run("import sys")
    forks = session.fork(count=3)
    with ThreadPoolExecutor(3) as pool:
        ready = [0, 0, 0]
        go: list[int] = []

        def take(number: int) -> object:
            def heard(stream: str, text: str) -> None:
                ready[number] += 1
                until(lambda: all(ready))
                go.append(number)

            return forks[number].run(f"print('here', flush=True); {number}", on_output=heard).value

        assert [*pool.map(take, range(3))] == [0, 1, 2] and all(ready)
    close(*forks)


def _leaves_nothing(opened: Open, times: int) -> None:
    place = Path(here().host.state)
    with opened() as first:
        first.run("1")
    before, descriptors = traces(place), _descriptors()
    session = opened()
    session.run("import os\nopen('f', 'w').write('x')")

    def fork_twice() -> None:
        for fork in session.fork(count=2):
            with fork:
                fork.run("os.fork() or os.abort(); open('g', 'w').close()")

    fork_twice()
    with_session, held = traces(place), _descriptors()
    for _ in range(times - 1):
        fork_twice()
    assert left_since(with_session, place) == [] and _descriptors() <= held, "also while the session stays"
    assert session.run("sorted(os.listdir())").value == ["f"]
    session.close()
    assert left_since(before, place) == [] and _descriptors() <= descriptors


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_forks_leave_nothing(opened: Open) -> None:
    _leaves_nothing(opened, 2)


@pytest.mark.torture
@pytest.mark.timeout(1800)
def test_two_hundred_forks_leave_nothing(opened: Open) -> None:
    _leaves_nothing(opened, 100)


def test_nothing_is_left_when_the_caller_is_killed() -> None:
    before = traces()
    script = textwrap.dedent("""
        from agent_sandbox import Sandbox
        session = Sandbox(validate_code=False, runtime="process").session(timeline=True)
        session.run("a = 1")
        forks = session.fork(count=2)
        forks[0].run("import os; os.fork()")
        print("ready", flush=True)
        input()
    """)
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as caller:
        assert caller.stdout is not None
        assert caller.stdout.readline() == b"ready\n"
        os.kill(caller.pid, signal.SIGKILL)
    assert until(lambda: left_since(before) == [])


# What a program could do to another that is not quite apart from it: `meet` leaves something, `find` says whether it is there.
MEETINGS = {
    "a process": (
        "pid = os.fork()\nif not pid:\n    while True: time.sleep(9)",
        "len([p for p in os.listdir('/proc') if p.isdigit()]) > 2",
    ),
    "a file in /tmp": ("open('/tmp/left', 'w').close()", "os.path.exists('/tmp/left')"),
    "shared memory": ("open('/dev/shm/left', 'w').close()", "os.path.exists('/dev/shm/left')"),
    "a file in /run": ("open('/run/left', 'w').close()", "os.path.exists('/run/left')"),
    "a server": ("server = socket.create_server(('127.0.0.1', 8123))", "socket.socket().connect_ex(('127.0.0.1', 8123)) == 0"),
    "an abstract socket": ("server = socket.socket(socket.AF_UNIX); server.bind('\\0left'); server.listen()", "reaches('\\0left')"),
    "a segment": ("left = libc.shmget(4321, 4096, 0o1666)", "libc.shmget(4321, 0, 0) >= 0"),
    "a terminal": ("ends = os.openpty()", "len(os.listdir('/dev/pts')) > 1"),
    "a pipe of the state": ("os.write(pipe[1], b'left')", "wrote_into(pipe)"),
}
FINDERS = textwrap.dedent("""
    import ctypes, os, select, signal, socket, time
    libc = ctypes.CDLL(None)
    pipe = os.pipe()
    def reaches(name):
        try: socket.socket(socket.AF_UNIX).connect(name)
        except OSError: return False
        return True
    def wrote_into(ends):
        try: return bool(select.select([ends[0]], [], [], 0)[0])
        except OSError: return False
""")


@pytest.fixture(scope="module")
def pairs() -> Iterator[Callable[[], tuple[SandboxSession, SandboxSession]]]:
    """Return two forks of one state, for each test two new ones."""
    with Sandbox(validate_code=False, runtime="process").session(timeline=True) as session:
        assert session.run(FINDERS).success
        made: list[SandboxSession] = []

        def make() -> tuple[SandboxSession, SandboxSession]:
            close(*made)
            made[:] = session.fork(count=2)
            return made[0], made[1]

        yield make
        close(*made)


@pytest.mark.parametrize("meeting", MEETINGS)
def test_a_fork_finds_nothing_of_another(pairs: Callable[[], tuple[SandboxSession, SandboxSession]], meeting: str) -> None:
    meet, find = MEETINGS[meeting]
    one, other = pairs()
    left = one.run(f"{meet}")
    found_by_itself = one.run(find).value
    assert other.run(find).value is False
    if meeting != "a pipe of the state":
        assert left.success and found_by_itself is True, "the control: the fork itself finds it"
    else:
        assert "Bad file descriptor" in str(left.error), "a pipe would lead to all copies of the state, so a fork has it closed"


def test_a_fork_reaches_no_process_but_its_own(pairs: Callable[[], tuple[SandboxSession, SandboxSession]]) -> None:
    one, other = pairs()
    reach = textwrap.dedent("""
        reached = set()
        for pid in [*range(1, 400), *range(-400, -1), -1]:
            kill = lambda: abs(pid) != os.getpid() and os.kill(pid, signal.SIGKILL)
            for deed in (lambda: os.kill(pid, 0), kill, lambda: os.listdir(f'/proc/{pid}/root')):
                try: deed(); reached.add(pid)
                except (ProcessLookupError, FileNotFoundError): pass
                except PermissionError: pass
        sorted(reached), os.getpid()
    """)
    reached, own = one.run(reach).value
    assert {*reached} <= {1, own, -own, -1}, "its first process ignores what comes from within"
    assert other.run("1").value == 1 and one.run("1").value == 1
    assert one.run("pid = os.fork()\nif not pid: signal.pause()\nos.kill(pid, 9); os.waitpid(pid, 0)[1]").value == 9, "the control"


# What a hostile program can do to our own code in its memory before the state is forked, and what is said of the fork then.
TAMPERED = {
    "keeps capabilities": ("ours['namespaces'].drop_capabilities = lambda: None", "kept capabilities"),
    "keeps a pipe": ("pipe = os.pipe(); ours['_close_all_but'] = lambda files: None", "of the session open"),
    "stays in its directory": ("ours['os'] = patched(chdir=lambda path: None)", "of the session open"),
    "shares memory": ("import mmap; ours['shared_for_writing'] = lambda process: []; block = mmap.mmap(-1, 4096)", "memory that it shares"),
    "keeps the streams": (
        "ours['os'] = patched(dup2=lambda fd, to, inheritable=True: to == 3 and os.dup2(fd, to, inheritable))",
        "streams",
    ),
    "has another process": ("ours['_close_all_but'] = lambda files: (closing(files), os.fork() or forever())", "processes or threads"),
}
PATCHES = textwrap.dedent("""
    import os, sys, time, types
    ours = sys._getframe(1).f_globals
    closing = ours['_close_all_but']
    def patched(**functions): return types.SimpleNamespace(**{**vars(os), **functions})
    def forever():
        while True: time.sleep(9)
""")


@pytest.mark.once
@pytest.mark.parametrize("tampering", TAMPERED)
def test_a_program_that_tampers_with_its_state_gets_no_fork(opened: Open, tampering: str) -> None:
    how, why = TAMPERED[tampering]
    session = opened()
    assert session.run(PATCHES).success
    close(*session.fork())  # the control: before that, it can
    assert session.run(how).success
    with pytest.raises(SandboxError, match=why):
        session.fork()
    assert session.run("1").value == 1, "and the session goes on"


def test_no_process_of_the_session_runs_while_it_has_forks(opened: Open) -> None:
    """A program may call anything a sleeping state, and what is awake there would see the processes of the forks."""
    session = opened()
    assert session.run(PATCHES).success
    assert session.run("ours['_sleep'] = lambda *_: forever()\na = 1").success
    checkpoints = session._recording()._checkpoints
    assert checkpoints is not None
    init = checkpoints._guest.init
    assert "S" in _states_beside(init), "the control: before that, they do"
    (fork,) = session.fork(1)
    assert {*_states_beside(init)} == {"T"}
    fork.close()
    assert until(lambda: "S" in _states_beside(init)) and session.run("a").value == 1


def _states_beside(init: int) -> list[str]:
    """Return the states of the processes in the pid namespace of an init, without its own."""
    found, depth = [], len(process_numbers(init))
    for pid in descendants(init, running()):
        with suppress(OSError):
            fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
            if len(fields["NSpid"].split()) == depth and pid != init:
                found.append(fields["State"].split()[0])
    return found


def test_only_the_supervisor_lets_a_state_fork(opened: Open) -> None:
    session = opened()
    session.run("import ctypes")
    call = "ctypes.CDLL(None, use_errno=True).syscall({0}, ctypes.c_ulong({1}), None, None, None, None), ctypes.get_errno()"
    from agent_sandbox.kernel.syscall_rules import FORK_FLAGS, numbers
    from agent_sandbox.kernel.syscalls import MACHINE

    asked = call.format(numbers(MACHINE)["clone"], FORK_FLAGS | signal.SIGCHLD)
    assert session.run(asked).value == [-1, 1]
    (fork,) = session.fork()
    assert fork.run(asked).value == [-1, 1]
    assert fork.run("open('/proc/self/status').read().count('CapEff:\\t0000000000000000')").value == 1
    fork.close()


def test_the_session_may_be_closed_first_and_its_changes_and_those_of_forks_are_apart(opened: Open, tmp_path: Path) -> None:
    place = tmp_path / "writable"
    place.mkdir()
    (place / "old").write_text("old")
    session = opened(allow_file_read=True, allow_file_write=True, allowed_paths=[str(place)], working_dir=str(place))
    session.run("import os; open('both', 'w').close()")
    one, other = session.fork(count=2)
    one.run("open('one', 'w').write('1')")
    session.close()
    assert other.run("os.unlink('old'); sorted(os.listdir())").value == ["both"]
    assert one.run("sorted(os.listdir())").value == ["both", "old", "one"]
    close(one, other)
    changed = [{os.path.basename(each.path): each.kind.value for each in made.changes.changes} for made in (session, one, other)]
    assert changed == [{"both": "added"}, {"both": "added", "one": "added"}, {"both": "added", "old": "deleted"}]
    assert sorted(each.name for each in place.iterdir()) == ["old"], "the real directory is untouched"


def test_the_end_of_a_fork_is_its_own(opened: Open) -> None:
    session = opened()
    session.run("import os, time")
    ended, late, killed, well = session.fork(count=4)
    assert ended.run("os._exit(3)").exit_code == 3
    assert late.run("while True: pass", timeout=0.5).status is SandboxStatus.TIMEOUT
    killed.kill()
    for fork in (ended, late, killed):
        with pytest.raises(SandboxError, match="has ended"):
            fork.run("1")
    assert well.run("os.getpid() > 1").value is True
    close(ended, late, killed, well)
    assert session.run("1").value == 1


def test_forks_share_memory_until_they_write(opened: Open) -> None:
    session = opened(max_memory_mb=900)
    session.run("block = bytearray(b'x') * 200_000_000")
    checkpoints = session._recording()._checkpoints
    assert checkpoints is not None
    if not checkpoints.shares_memory:
        pytest.skip("no control group counts the memory here")
    before = checkpoints.memory_bytes
    forks = session.fork(count=8)
    assert all(fork.run("block[-1]").value == ord("x") for fork in forks)
    assert checkpoints.memory_bytes - before < 200_000_000, "eight copies would be 1,600 MB"
    forks[0].run("block[:] = bytes(len(block))")
    assert checkpoints.memory_bytes - before > 190_000_000, "the control: what is written to is counted"
    assert forks[1].run("block[0]").value == ord("x")
    close(*forks)


def test_what_a_fork_has_written_takes_no_room_after_it(opened: Open) -> None:
    session = opened(max_disk_mb=40)
    session.run("def fill(): return open('big', 'wb').write(bytes(30_000_000))")
    for _ in range(3):
        with session.fork()[0] as fork:
            assert fork.run("fill()").value == 30_000_000
    assert session.run("fill()").value == 30_000_000


def test_a_fork_is_refused_before_memory_runs_out(opened: Open) -> None:
    session = opened(max_memory_mb=200)
    session.run("block = bytearray(b'x') * 80_000_000")
    with pytest.raises(SandboxError, match="forks need about"):
        session.fork(count=8)
    assert session.run("len(block)").value == 80_000_000, "and nothing has happened to the session"
    for count in (0, -1, 33):
        with pytest.raises(SandboxError, match="at most 32"):
            session.fork(count=count)


@pytest.mark.once
def test_a_state_that_was_given_up_is_run_to_again_in_each_fork(opened: Open) -> None:
    session = opened()
    session.run("a = [0]\na.append(1)\na.append(2)\na.append(3)")
    give_up_all_but(session, 1)
    forks = session.fork(4, count=2)
    assert [fork.run("a").value for fork in forks] == [[0, 1, 2]] * 2
    close(*forks)
    session.run(
        "import threading\ndef begin():\n    new = threading.Timer(60, print); new.daemon = True; new.start(); return new\nthread = begin()"
    )
    (fork,) = session.fork()
    assert fork.run("thread.is_alive(), a").value == [True, [0, 1, 2, 3]], "nor was one with threads ever kept"
    assert next(iter(fork.timeline)).text == "thread = begin()", "its timeline shows what was run again"
    fork.close()
    with pytest.raises(SandboxError, match="no step 99"):
        session.fork(99)


@pytest.mark.once
def test_what_cannot_be_forked_says_so(opened: Open) -> None:
    session = opened(network=["a.example"])
    session.run("1")
    with pytest.raises(SandboxError, match="network"):
        session.fork()
    session = opened()
    with pytest.raises(SandboxError, match="no step 0"):
        session.fork()
    session.run("a = 1")
    (fork,) = session.fork()
    assert fork.run("b = 2\n1 / 0").exit_code == 1
    for use in (fork.fork, fork.rewind, lambda step: fork.inspect(step).variables):
        with pytest.raises(SandboxError, match="no step 99"):
            use(99)
    with pytest.raises(SandboxError, match="keeps no states"):
        fork.timeline.diff(1, 2)
    for refused in (lambda: session.rewind(1), lambda: session.inspect().variables, lambda: session.files.write("f", "")):
        with pytest.raises(SandboxError, match="rests"):
            refused()
    fork.close()
    assert session.inspect().evaluate("a").repr == "1"


@pytest.mark.once
def test_a_fork_goes_back_by_running_again_from_the_state_that_it_was_made_from(opened: Open) -> None:
    session = opened()
    session.run("a = [0]; open('f', 'w').write('of the session')")
    (fork,) = session.fork()
    name = fork.id
    assert fork.run("a.append(1)\na.append(2)\nopen('f', 'w').write('of the fork')").success
    assert fork.run("a.append(3); missing").exit_code == 1
    failed = fork.timeline.failed
    assert failed is not None and failed.text == "missing" and not failed.kept and "no states of its own" in failed.why
    assert fork.inspect(2).evaluate("a").repr == "[0, 1]" and fork.inspect(3).read("f") == b"of the session"
    assert fork.inspect(failed).evaluate("a.append(9), len(a)").repr == "(None, 5)"
    after = next(step for step in fork.timeline if step.parent == failed.number)
    assert [each.name for each in fork.inspect(after).frames[-1].variables] == ["a"], "the error is there again, too"
    assert fork.run("a").value == [0, 1, 2, 3], "looking has changed nothing"
    back = fork.rewind(3)
    assert back.ran_again == "a.append(1)\na.append(2)\n" and fork.id == name
    assert fork.run("a, open('f').read()").value == [[0, 1, 2], "of the session"]
    assert fork.inspect(after).evaluate("a").repr == "[0, 1, 2, 3]", "the old future stays reachable"
    other, another = fork.fork(failed, count=2)
    assert other.run("a.append('other'); a").value == [0, 1, 2, 3, "other"] and another.run("a").value == [0, 1, 2, 3]
    assert other.rewind(1).ran_again == "" and other.run("a").value == [0], "before its first step, nothing has to run again"
    other.rewind(next(step for step in other.timeline if step.text == "a.append(2)"))
    assert other.run("a").value == [0, 1]
    assert fork.rewind(1).step.number == 1 and fork.inspect().evaluate("a").repr == "[0]", "where it is now"
    close(fork, other, another)
    assert session.run("a, open('f').read()").value == [[0], "of the session"]


@pytest.mark.once
def test_a_fork_that_would_come_out_otherwise_or_has_lost_its_session_says_so(opened: Open) -> None:
    session = opened()
    session.run("import os")
    (fork,) = session.fork()
    space = fork.run("os.readlink('/proc/self/ns/pid')").value
    fork.run(f"assert os.readlink('/proc/self/ns/pid') == {space!r}\na = 1")
    with pytest.raises(SandboxError, match="came out otherwise"):
        fork.rewind(4)
    (fork,) = fork.fork(1)
    fork.run("a = 1\nb = 2")
    session.close()
    for use in (lambda: fork.rewind(2), lambda: fork.fork(2), lambda: fork.inspect(2).variables):
        with pytest.raises(SandboxError, match="has ended, and its states with it"):
            use()
    assert fork.run("a, b").value == [1, 2], "the fork itself goes on"


@pytest.mark.once
def test_tools_answer_each_fork() -> None:
    called: list[str] = []
    with Sandbox(validate_code=False, runtime="process").session(timeline=True, tools=[called.append]) as session:
        session.run("append('session')")
        for number, fork in enumerate(session.fork(count=2)):
            with fork:
                fork.run(f"append('fork {number}')")
    assert called == ["session", "fork 0", "fork 1"]


def _equal_straight_runs(opened: Open, seed: int, length: int) -> None:
    chance, session = random.Random(seed), opened()
    program = random_program(seed, length)
    assert session.run("\n".join(program)).success
    for line in chance.sample(range(2, length + 2), 2):
        futures = [random_program(seed * 100 + number, 5) for number in range(2)]
        forks = session.fork(before_line(session, line), count=2)
        for fork, future in zip(forks, futures, strict=True):
            assert fork.run("\n".join(future)).success
        for fork, future in zip(forks, futures, strict=True):
            with Sandbox(validate_code=False, runtime="process").session() as straight:
                assert straight.run("\n".join([*program[: line - 1], *future])).success
                assert fork.run(DIGEST).value == straight.run(DIGEST).value, (seed, line)
        close(*forks)


@pytest.mark.once
def test_every_fork_equals_a_straight_run_whatever_the_others_do(opened: Open) -> None:
    _equal_straight_runs(opened, 7, 15)


@pytest.mark.torture
@pytest.mark.parametrize("seed", range(100, 125))
def test_every_fork_equals_a_straight_run_for_many(opened: Open, seed: int) -> None:
    _equal_straight_runs(opened, seed, 40)


@pytest.mark.once
def test_it_is_the_same_with_asyncio() -> None:
    async def main() -> None:
        async with AsyncSandbox(validate_code=False, runtime="process") as sandbox, sandbox.session(timeline=True) as session:
            await session.run("a = [1]")
            one, other = await session.fork(count=2)
            results = await asyncio.gather(one.run("a.append(2); a"), other.run("a"))
            assert [each.value for each in results] == [[1, 2], [1]]
            await one.close()
            await other.close()

    asyncio.run(main())


@pytest.mark.once
def test_the_story_of_a_failed_analysis_and_three_fixes(opened: Open) -> None:
    """A step fails; three fixes go on from just before it at once; the one that works is kept, and nothing before it ran again."""
    session = opened()
    steps = [
        "runs = open('runs', 'a').write('.')",
        "rows = [('a', 3), ('b', 0), ('c', 4)]",
        "open('rows.csv', 'w').write('\\n'.join(f'{name},{count}' for name, count in rows))",
        "total = 100",
        "shares = {name: total / count for name, count in rows}",
        "best = max(shares)",
    ]
    session.run("\n".join(steps))
    failed = session.timeline.failed
    assert failed is not None and failed.line == 5
    assert session.inspect(failed).evaluate("rows[1]").repr == "('b', 0)" and b"b,0" in session.inspect(failed).read("rows.csv")
    with LiveExperiment(session, failed, check="len(shares) == 2 and all(shares.values())", score=lambda each: -each.place) as experiment:
        experiment.attempt("zero", "shares = {name: total / count if count else 0 for name, count in rows}")
        experiment.attempt("drop", "shares = {name: total / count for name, count in rows if count}")
        experiment.attempt("again", steps[4])
        comparison = experiment.run()
        assert {each.name: each.state for each in comparison.results} == {"zero": "failed", "drop": "passed", "again": "failed"}
        assert comparison.winner == "drop" and "ZeroDivisionError" in comparison["again"].why and "no changes" not in str(comparison)
        with pytest.raises(PolicyError, match="no attempt 'other'"):
            experiment.keep("other")
        winner = experiment.keep()
    assert winner.run(f"{steps[5]}\nbest, open('runs').read()").value == ["c", "."]
    winner.close()
    assert session.run("'shares' in globals(), open('runs').read()").value == [False, "."]


@pytest.mark.once
def test_the_first_to_pass_ends_the_others_and_functions_drive_their_fork(opened: Open) -> None:
    session = opened()
    session.run("a = 1")

    def drive(fork: SandboxSession) -> None:
        assert fork.run("a += 1").success
        fork.files.write("note", "from outside")

    with LiveExperiment(session, check=lambda fork: fork.run("a == 2").value, first=True, at_once=2) as experiment:
        experiment.attempt("never", "while True: pass")
        experiment.attempt("driven", drive)
        comparison = experiment.run()
        assert (comparison.winner, comparison["never"].state, comparison["driven"].portable) == ("driven", "cancelled", False)
        with pytest.raises(SandboxError, match="has run"):
            experiment.run()
        with experiment.keep() as fork:
            assert fork.files.read("note") == "from outside"
    with LiveExperiment(session) as experiment:
        with pytest.raises(PolicyError, match="no attempts"):
            experiment.run()
        experiment.attempt("fails", "1 / 0")
        assert experiment.run().winner is None
        with pytest.raises(PolicyError, match="no winner"):
            experiment.keep()
    assert session.run("a").value == 1


@pytest.mark.once
def test_the_ledger_has_the_session_and_the_step_of_a_fork() -> None:
    sandbox = Sandbox(validate_code=False, runtime="process", enable_audit=True)
    assert sandbox.audit is not None
    with sandbox.session(timeline=True) as session:
        session.run("a = 1\nb = 2")
        with session.fork(2)[0] as fork:
            fork.run("a")
    (noted,) = [entry for entry in sandbox.audit.get_entries(category="session") if entry.action == "forked"]
    assert noted.details["facts"] == {"session": session.id, "turn": 1, "step": 2, "fork": fork.id}
    turns = [facts for entry in sandbox.audit.get_entries() if (facts := entry.details.get("facts", {})).get("session") == fork.id]
    assert [each["turn"] for each in turns] == [1], "and each turn of the fork is recorded as its own"
