"""The contract of every runtime, as claims that a test suite can check on any runtime.

    @pytest.mark.parametrize("claim", CLAIMS)
    def test_my_runtime_keeps_the_contract(claim):
        claim(Bench(MyRuntime(), my_plan))

A claim is a function that takes a `Bench` and raises `AssertionError` where the runtime falls short. `CLAIMS` need nothing but a runtime
and a view with `/bin/sh` in it, `CODE_CLAIMS` need a runtime for Python code and any view, `JAVASCRIPT_CLAIMS` a runtime for JavaScript.
The claims show that a runtime keeps the contract, not that it is safe. Attacks are a suite of their own.

`FakeRuntime` runs nothing. It shows what the interface requires, and replaces a real runtime in tests of code that calls a runtime.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial

from agent_sandbox._fast.values import dataclass, field, replace
from agent_sandbox.errors import RuntimeUnavailable
from agent_sandbox.kernel.mount_plan import MountPlan
from agent_sandbox.policy.model import Guarantee, Limits
from agent_sandbox.runtime.base import (
    COMMAND,
    Argv,
    Completed,
    Confined,
    Demands,
    Exit,
    ExitReason,
    Hosted,
    JavaScriptCode,
    Launch,
    PythonCode,
    Runtime,
    Script,
    Support,
    Traits,
)

ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}
LATENESS = 1.0  # seconds that a run may outlive its deadline
_DEADLINES = (0.5, 2.0, 8.0, 30.0)  # on a busy machine, a program may not have said anything at the first of them


@dataclass(frozen=True)
class Bench:
    """A runtime, and the view in which claims test it. `launch` is the default launch, which a claim changes as it needs.

    `script` makes a program from JavaScript source: a `JavaScriptCode`, or a `Script` if the runtime uses a native interpreter.
    """

    runtime: Runtime
    root: MountPlan
    script: Callable[[str], Hosted | Script] = JavaScriptCode
    launch: Launch = field(init=False)

    def __post_init__(self) -> None:
        nothing = Launch(Argv(("true",)), self.root, "/", ENVIRONMENT, Limits(), frozenset({Guarantee.FILES_CONFINED}))
        object.__setattr__(self, "launch", nothing)

    def run(self, *words: str, stdin: bytes = b"", limits: Limits | None = None) -> Completed:
        """Run a program to its end."""
        return self._run(replace(self.launch, program=Argv(words), stdin=stdin, limits=limits or Limits()))

    def python(self, source: str, *words: str, stdin: bytes = b"", limits: Limits | None = None) -> Completed:
        """Run Python code to its end."""
        return self._run(replace(self.launch, program=PythonCode(source, words), stdin=stdin, limits=limits or Limits(), cwd="/tmp"))

    def javascript(self, source: str, *, stdin: bytes = b"", limits: Limits | None = None) -> Completed:
        """Run JavaScript to its end."""
        return self._run(replace(self.launch, program=self.script(source), stdin=stdin, limits=limits or Limits(), cwd="/tmp"))

    def _run(self, launch: Launch) -> Completed:
        process = self.runtime.launch(launch)
        try:
            return process.wait()
        finally:
            process.close()

    def shell(self, script: str, *, stdin: bytes = b"", limits: Limits | None = None) -> Completed:
        """Run a line of shell to its end."""
        return self.run("/bin/sh", "-c", script, stdin=stdin, limits=limits)


def an_exit_code_is_the_programs_own(bench: Bench) -> None:
    """Check that exit codes pass through: a failing program is not a failure of the runtime."""
    for code in (0, 1, 2, 42, 124, 125, 126, 127, 255):
        ended = bench.shell(f"exit {code}").exit
        assert (ended.code, ended.reason, ended.signal, ended.limits_hit) == (code, ExitReason.EXITED, None, ()), ended


def a_signal_is_reported_as_a_shell_does(bench: Bench) -> None:
    """Check that a program killed by a signal has the exit code 128 plus the signal's number, and reports that number."""
    for number in (1, 9, 11, 15):
        ended = bench.shell(f"kill -{number} $$").exit
        assert (ended.code, ended.reason, ended.signal) == (128 + number, ExitReason.SIGNALLED, number), ended


def streams_are_exact_and_apart(bench: Bench) -> None:
    """Check that bytes arrive unchanged, stdout and stderr separately, and that input has an end."""
    every_byte = bytes(range(256)) * 16
    ran = bench.shell("cat; echo oops >&2", stdin=every_byte)
    assert ran.stdout == every_byte
    assert ran.stderr == b"oops\n"


def the_environment_is_complete_and_nothing_else(bench: Bench) -> None:
    """Check that the guest has exactly the given variables."""
    variables = set(bench.run("/usr/bin/env").stdout.decode().splitlines())
    assert variables == {f"{name}={value}" for name, value in ENVIRONMENT.items()}


def what_cannot_be_found_ends_with_127_and_what_cannot_be_executed_with_126(bench: Bench) -> None:
    """Check that a program that cannot start gives the exit code of a shell, 127 or 126, and raises no exception."""
    assert bench.run("no-such-program").exit.code == 127
    assert bench.run("/no/such/program").exit.code == 127
    assert bench.run("/etc/passwd").exit.code == 126


def a_run_ends_at_its_deadline(bench: Bench) -> None:
    """Check that a run ends at its deadline, even if its program ignores signals."""
    for script in ("sleep 60", "trap '' TERM HUP INT; while :; do :; done", "kill -STOP $$"):
        began = time.monotonic()
        ended = bench.shell(script, limits=Limits(wall_seconds=0.3)).exit
        assert ended.reason is ExitReason.TIMED_OUT and "wall" in ended.limits_hit, ended
        assert time.monotonic() - began < 0.3 + LATENESS + 1, "the launch itself may take a moment more"


def output_beyond_its_limit_is_cut_and_said_to_be(bench: Bench) -> None:
    """Check that output is cut at its limit, and the run goes on."""
    ran = bench.shell("head -c 5000 /dev/zero; echo done >&2", limits=Limits(output_bytes=1000))
    assert len(ran.stdout) == 1000 and ran.stderr == b"done\n"
    assert ran.exit.code == 0 and "output" in ran.exit.limits_hit


def a_run_can_be_killed_from_another_thread(bench: Bench) -> None:
    """Check that a run can be killed, and that killing or closing it twice is harmless."""
    _kill(bench, Argv(("sleep", "60")))


def _kill(bench: Bench, program: Argv | PythonCode) -> None:
    process = bench.runtime.launch(replace(bench.launch, program=program))
    killer = threading.Thread(target=process.kill)
    try:
        killer.start()
        assert process.wait().exit.reason is ExitReason.KILLED
    finally:
        killer.join()
        process.kill()
        process.close()
        process.close()


def nothing_outlives_its_run(bench: Bench) -> None:
    """Check that a child in the background ends with the run, even if it holds a stream open."""
    began = time.monotonic()
    assert bench.shell("sleep 60 & exit 3").exit.code == 3
    assert time.monotonic() - began < 10


def code_ends_with_its_own_exit_code(bench: Bench) -> None:
    """Check the exit code of code that ends, calls sys.exit, raises, or ends its process."""
    ends = {"": 0, "raise SystemExit": 0, "import sys; sys.exit(42)": 42, "exit(-1)": 255, "1 / 0": 1, "raise KeyboardInterrupt": 130}
    for code in (0, 1, 2, 124, 125, 126, 127, 128, 137, 255):
        ends[f"import sys; sys.exit({code})"] = ends[f"import os; os._exit({code})"] = code
    for source, code in ends.items():
        ended = bench.python(source).exit
        assert (ended.code, ended.reason, ended.signal, ended.limits_hit) == (code, ExitReason.EXITED, None, ()), (source, ended)
    said = bench.python("import sys; sys.exit('gone wrong')")
    assert (said.exit.code, said.stderr) == (1, b"gone wrong\n")


def code_that_aborts_has_ended_by_a_signal(bench: Bench) -> None:
    """Check that an abort is reported as a signal, with the output before it."""
    ran = bench.python("import os; print('here'); os.abort()")
    assert (ran.exit.code, ran.exit.reason, ran.exit.signal, ran.stdout) == (134, ExitReason.SIGNALLED, 6, b"here\n"), ran


def code_that_recurses_without_end_gets_an_exception(bench: Bench) -> None:
    """Check that endless recursion, in Python or in C code, raises an exception that the program can catch."""
    ran = bench.python("""
import json, sys
def recurse(): recurse()
deep = []
for _ in range(100_000): deep = [deep]
for deed in (recurse, lambda: repr(deep), lambda: json.dumps(deep), lambda: json.loads("[" * 100_000)):
    try:
        deed()
    except RecursionError:
        print("caught")
del deep
print("freed")
""")
    assert (ran.exit.code, ran.stdout) == (0, b"caught\n" * 4 + b"freed\n"), ran


def code_is_a_script(bench: Bench) -> None:
    """Check that code runs as `__main__`, has arguments and `__file__`, and that tracebacks show only its own lines."""
    ran = bench.python("import sys\nprint(__name__, sys.argv[1:], open(__file__).readline())", "one", "", "two words", "é")
    assert ran.stdout.decode() == "__main__ ['one', '', 'two words', 'é'] import sys\n\n", ran
    lines = bench.python("def f():\n    1 / 0\nf()").stderr.decode().splitlines()
    assert lines[0] == "Traceback (most recent call last):" and lines[-1] == "ZeroDivisionError: division by zero", lines
    assert [line.strip() for line in lines if "File" in line or "1 / 0" in line] == [
        'File "/run/sandbox/main.py", line 3, in <module>',
        'File "/run/sandbox/main.py", line 2, in f',
        "1 / 0",
    ], lines
    broken = bench.python("print(")
    assert broken.exit.code == 1 and b"SyntaxError" in broken.stderr and broken.stdout == b""


def code_reads_and_writes_exact_bytes(bench: Bench) -> None:
    """Check that streams carry bytes unchanged, that input has an end, and that unread input is no error."""
    every_byte = bytes(range(256)) * 16
    copy = "import sys; sys.stdout.buffer.write(sys.stdin.buffer.read()); print('oops', file=sys.stderr)"
    ran = bench.python(copy, stdin=every_byte)
    assert (ran.stdout, ran.stderr) == (every_byte, b"oops\n"), ran
    assert bench.python("print(input(), input())", stdin="é\n2\n".encode()).stdout.decode() == "é 2\n"
    assert bench.python("pass", stdin=bytes(1 << 20)).exit.code == 0
    ended = bench.python("input()")
    assert ended.exit.code == 1 and ended.stderr.endswith(b"EOFError: EOF when reading a line\n"), ended
    much = bytes(range(251)) * 20_000  # several times what a pipe holds
    copy = "import sys; data = sys.stdin.buffer.read(); sys.stdout.buffer.write(data); sys.stderr.buffer.write(data)"
    ran = bench.python(copy, stdin=much, limits=Limits(output_bytes=len(much)))
    assert ran.stdout == much and ran.stderr == much
    assert bench.python("import sys; sys.stdout.write('no line'); sys.stderr.write('nor here')").stdout == b"no line"


def code_has_its_environment_and_no_other(bench: Bench) -> None:
    """Check that the guest has exactly the given variables."""
    ran = bench.python("import os; print(sorted(os.environ.items()))")
    assert ran.stdout.decode() == f"{sorted(ENVIRONMENT.items())}\n", ran


def code_starts_where_it_was_told_to(bench: Bench) -> None:
    """Check that code starts in the given working directory, and imports modules from there."""
    ran = bench.python(
        "import os; open('mine.py', 'w').write('x = 5'); import mine; print(os.getcwd(), mine.x, os.path.exists('/tmp/mine.py'))"
    )
    assert ran.stdout == b"/tmp 5 True\n", ran


_FILES = """
import os, stat, tempfile
os.makedirs("tree/below")
with open("tree/file", "wb") as file: file.write(bytes(range(256)) * 300)
with open("tree/file", "r+b") as file:
    file.seek(1000); file.write(b"middle"); file.seek(0, 2); file.write(b"end"); file.truncate(76_000)
with open("tree/file", "ab") as file: print(file.tell(), os.path.getsize("tree/file"))
with open("tree/file", "rb") as file: file.seek(998); print(file.read(10), len(file.read()))
for name in ("é", "a b", "two\\nlines", "x" * 200, "日本"): open(f"tree/below/{name}", "w").write(name)
print(sorted(os.listdir("tree/below")) == sorted(["é", "a b", "two\\nlines", "x" * 200, "日本"]))
os.rename("tree/below/é", "tree/moved"); os.replace("tree/below/a b", "tree/moved"); print(open("tree/moved").read())
os.symlink("moved", "tree/link"); print(os.readlink("tree/link"), open("tree/link").read(), os.path.islink("tree/link"))
os.link("tree/moved", "tree/twin"); print(os.stat("tree/twin").st_ino == os.stat("tree/moved").st_ino)
os.utime("tree/moved", (1, 2)); print(os.stat("tree/moved").st_mtime, stat.S_ISDIR(os.stat("tree").st_mode))
print(sorted((top, sorted(names)) for top, _, names in os.walk("tree") if top == "tree"))
with tempfile.TemporaryFile() as file: file.write(b"x"); file.seek(0); print(file.read())
for deed in (lambda: open("nowhere"), lambda: open("tree"), lambda: os.mkdir("tree"), lambda: os.rmdir("tree"),
             lambda: os.listdir("tree/file"), lambda: os.rename("nowhere", "x"), lambda: os.remove("nowhere"), lambda: open("tree/file/x"),
             lambda: open("tree/link", "x")):
    try:
        deed()
    except OSError as error:
        print(type(error).__name__)
"""
_FOUND = """\
76000 76000
b'\\xe6\\xe7middle\\xee\\xef' 74992
True
a b
moved a b True
True
2.0 True
[('tree', ['file', 'link', 'moved', 'twin'])]
b'x'
FileNotFoundError
IsADirectoryError
FileExistsError
OSError
NotADirectoryError
FileNotFoundError
FileNotFoundError
NotADirectoryError
FileExistsError
"""


def files_of_code_are_files(bench: Bench) -> None:
    """Check that file operations and their errors are those of ordinary files."""
    ran = bench.python(_FILES)
    assert ran.stdout.decode() == _FOUND, ran


def processor_time_and_open_files_of_code_are_limited(bench: Bench) -> None:
    """Check that a run ends at its limit of processor time, and that opening too many files is an error."""
    ran = bench.python("while True: pass", limits=Limits(cpu_seconds=0.5, wall_seconds=30))
    assert ran.exit.reason is ExitReason.CPU_LIMIT and "cpu" in ran.exit.limits_hit, ran.exit
    held = "held = []\ntry:\n    while len(held) < 500: held.append(open('/tmp/x', 'w'))\nexcept OSError: print('refused')"
    assert bench.python(held, limits=Limits(open_files=100)).stdout == b"refused\n"
    assert bench.python(held, limits=Limits(open_files=1000)).stdout == b""


def _said_before_its_deadline(run: Callable[..., Completed]) -> bytes:
    for seconds in _DEADLINES:
        began = time.monotonic()
        ran = run(limits=Limits(wall_seconds=seconds))
        assert ran.exit.reason is ExitReason.TIMED_OUT and "wall" in ran.exit.limits_hit, ran.exit
        assert time.monotonic() - began < seconds + LATENESS + 2, "the launch itself may take a moment more"
        if ran.stdout:
            return ran.stdout
    raise AssertionError(f"it said nothing in {_DEADLINES[-1]:.0f} s")


def code_ends_at_its_deadline_and_what_it_said_before_is_kept(bench: Bench) -> None:
    """Check that computing and waiting programs end at their deadline, and that their earlier output is kept."""
    for source in ("print('here')\nwhile True: pass", "import time; print('here'); time.sleep(60)"):
        assert _said_before_its_deadline(partial(bench.python, source)).startswith(b"here\n")


def output_of_code_beyond_its_limit_is_cut_and_said_to_be(bench: Bench) -> None:
    """Check that output is cut at its limit, and the run goes on."""
    ran = bench.python("import sys; print('x' * 5000); print('done', file=sys.stderr)", limits=Limits(output_bytes=1000))
    assert len(ran.stdout) == 1000 and ran.stderr == b"done\n"
    assert ran.exit.code == 0 and "output" in ran.exit.limits_hit
    endless = bench.python("while True: print('x' * 1000)", limits=Limits(output_bytes=1000, wall_seconds=30))
    assert endless.exit.reason is ExitReason.OUTPUT_LIMIT and len(endless.stdout) == 1000, endless.exit


def memory_of_code_is_limited(bench: Bench) -> None:
    """Check that too much memory is refused or ends the run, and that the same code runs with enough."""
    hungry = "x = bytearray(300 << 20); print(len(x))"
    ran = bench.python(hungry, limits=Limits(memory_bytes=200 << 20, wall_seconds=30))
    assert ran.exit.code != 0 and (ran.exit.reason is ExitReason.OUT_OF_MEMORY or b"MemoryError" in ran.stderr), ran
    assert bench.python(hungry, limits=Limits(memory_bytes=1 << 30)).stdout == b"314572800\n"


def code_can_be_killed_from_another_thread(bench: Bench) -> None:
    """Check that code can be killed while it computes, and that killing or closing it twice is harmless."""
    _kill(bench, PythonCode("while True: pass"))


def callers_are_told_of_a_guest_that_is_ready_and_while_it_runs(bench: Bench) -> None:
    """Check that `on_ready` is called once, before the launch returns, and `on_tick` while the guest runs."""
    moments: list[str] = []
    told = replace(bench.launch, program=PythonCode("print('here')"), cwd="/tmp", on_tick=(lambda: moments.append("tick"),))
    guest = bench.runtime.launch(replace(told, on_ready=(lambda confined: moments.append("ready"),)))
    try:
        assert moments == ["ready"], moments
        assert guest.wait().stdout == b"here\n"
        assert moments.count("ready") == 1 and "tick" in moments, moments
    finally:
        guest.close()


def two_runs_of_code_share_nothing(bench: Bench) -> None:
    """Check that runs share no memory, no scratch files and no random numbers."""
    draw = "import os, random, sys, uuid; sys.left = 1; open('/tmp/left', 'w'); print(random.random(), os.urandom(8).hex(), uuid.uuid4())"
    first, second = bench.python(draw).stdout.split(), bench.python(draw).stdout.split()
    assert len(first) == 3 and not set(first) & set(second), (first, second)
    assert bench.python("import os, sys; print(hasattr(sys, 'left'), os.path.exists('/tmp/left'))").stdout == b"False False\n"


def javascript_ends_with_its_own_exit_code(bench: Bench) -> None:
    """Check the exit code of JavaScript that ends, and of unhandled errors: at once, later, or in a promise."""
    ends = {"": 0, "throw new Error('x')": 1, "setTimeout(() => { throw 5 }, 1)": 1, "Promise.reject(new Error('x'))": 1, "let x = ;": 1}
    for source, code in ends.items():
        ended = bench.javascript(source).exit
        assert (ended.code, ended.reason, ended.limits_hit) == (code, ExitReason.EXITED, ()), (source, ended)


def javascript_says_where_it_failed(bench: Bench) -> None:
    """Check that the message of an error has the error's name and line."""
    ran = bench.javascript("function f() {\n    throw new TypeError('oops')\n}\nf()")
    assert b"TypeError: oops" in ran.stderr and b"main.js:2" in ran.stderr and ran.stdout == b"", ran


def javascript_prints_to_two_streams(bench: Bench) -> None:
    """Check that the console prints values readably, to two streams."""
    ran = bench.javascript("console.log('é', 1, [1, {a: 'x'}], new Map([[1, null]])); console.error('%s is %d', 'it', 2)")
    assert (ran.stdout.decode(), ran.stderr) == ("é 1 [ 1, { a: 'x' } ] Map(1) { 1 => null }\n", b"it is 2\n"), ran


def javascript_does_what_promises_and_timers_have_left(bench: Bench) -> None:
    """Check that promises run before timers, timers in order, and that the program then ends."""
    ran = bench.javascript("""
setTimeout(() => console.log('last'), 30)
setTimeout(() => { console.log('first'); Promise.resolve().then(() => console.log('between')) }, 2)
setTimeout(() => console.log('second'), 2)
const again = setInterval(() => { console.log('again'); clearInterval(again) }, 10)
clearTimeout(setTimeout(() => console.log('never'), 1));
(async () => { for (let n = 0; n < 1000; n++) await null; console.log('promised') })()
console.log('now')
""")
    assert ran.stdout.decode().split() == ["now", "promised", "first", "between", "second", "again", "last"], ran


def javascript_ends_at_its_deadline_and_what_it_said_before_is_kept(bench: Bench) -> None:
    """Check that computing and waiting programs end at their deadline, and that their earlier output is kept."""
    for source in ("console.log('here'); while (true);", "console.log('here'); setTimeout(() => {}, 60000)"):
        assert _said_before_its_deadline(partial(bench.javascript, source)) == b"here\n"


def output_of_javascript_beyond_its_limit_is_cut_and_said_to_be(bench: Bench) -> None:
    """Check that output is cut at its limit, and the run goes on."""
    ran = bench.javascript("console.log('x'.repeat(5000)); console.error('done')", limits=Limits(output_bytes=1000))
    assert len(ran.stdout) == 1000 and ran.stderr == b"done\n", ran
    assert ran.exit.code == 0 and "output" in ran.exit.limits_hit, ran.exit


def memory_of_javascript_is_limited(bench: Bench) -> None:
    """Check that too much memory is refused or ends the run."""
    hungry = "const x = []; while (x.length < 400) x.push(new Uint8Array(1 << 20).fill(1)); console.log(x.length)"
    ran = bench.javascript(hungry, limits=Limits(memory_bytes=200 << 20, wall_seconds=30))
    assert ran.exit.code != 0 and ran.stdout == b"", ran


def two_runs_of_javascript_share_nothing(bench: Bench) -> None:
    """Check that runs share no globals and no random numbers."""
    draw = "console.log(globalThis.left, Math.random()); globalThis.left = 1"
    first, second = bench.javascript(draw).stdout.split(), bench.javascript(draw).stdout.split()
    assert first[0] == second[0] == b"undefined" and first[1] != second[1], (first, second)


Claim = Callable[[Bench], None]
CLAIMS: tuple[Claim, ...] = (
    an_exit_code_is_the_programs_own,
    a_signal_is_reported_as_a_shell_does,
    streams_are_exact_and_apart,
    the_environment_is_complete_and_nothing_else,
    what_cannot_be_found_ends_with_127_and_what_cannot_be_executed_with_126,
    a_run_ends_at_its_deadline,
    output_beyond_its_limit_is_cut_and_said_to_be,
    a_run_can_be_killed_from_another_thread,
    nothing_outlives_its_run,
)
CODE_CLAIMS: tuple[Claim, ...] = (
    code_ends_with_its_own_exit_code,
    code_that_aborts_has_ended_by_a_signal,
    code_that_recurses_without_end_gets_an_exception,
    code_is_a_script,
    code_reads_and_writes_exact_bytes,
    code_has_its_environment_and_no_other,
    code_starts_where_it_was_told_to,
    files_of_code_are_files,
    processor_time_and_open_files_of_code_are_limited,
    code_ends_at_its_deadline_and_what_it_said_before_is_kept,
    output_of_code_beyond_its_limit_is_cut_and_said_to_be,
    memory_of_code_is_limited,
    code_can_be_killed_from_another_thread,
    two_runs_of_code_share_nothing,
    callers_are_told_of_a_guest_that_is_ready_and_while_it_runs,
)
JAVASCRIPT_CLAIMS: tuple[Claim, ...] = (
    javascript_ends_with_its_own_exit_code,
    javascript_says_where_it_failed,
    javascript_prints_to_two_streams,
    javascript_does_what_promises_and_timers_have_left,
    javascript_ends_at_its_deadline_and_what_it_said_before_is_kept,
    output_of_javascript_beyond_its_limit_is_cut_and_said_to_be,
    memory_of_javascript_is_limited,
    two_runs_of_javascript_share_nothing,
)


class FakeGuest:
    """A guest that has ended with code 0 before anybody waits for it."""

    layers: int | None = None
    notes: tuple[str, ...] = ()
    refused = ""
    irrevocable = False
    terminal: int | None = None

    def __init__(self, launch: Launch) -> None:
        self.launch = launch

    def wait(self) -> Completed:
        """Return exit code 0, without output."""
        return Completed(Exit(0), b"", b"")

    def kill(self) -> None:
        """Do nothing: the guest has ended."""

    def interrupt(self, number: int) -> None:
        """Do nothing: the guest has ended."""

    def wake_on(self, fd: int) -> None:
        """Do nothing: `wait` returns at once."""

    def close(self) -> None:
        """Do nothing: the guest holds no resources."""


class FakeRuntime:
    """A runtime that runs nothing. `launches` lists the launches it received.

    It claims every guarantee, so use it only to test code that calls a runtime.
    """

    def __init__(self, name: str = "fake", *, cost: int = 1, absent: str = "", objects: str = "", refuses: str = "") -> None:
        """Take reasons: `absent`, why it is unavailable; `objects`, why it supports no launch; `refuses`, why each launch fails."""
        languages = frozenset({"python", "javascript", "ruby", "bash", COMMAND})
        self.traits = Traits(name, cost, languages, frozenset(Guarantee), brings=frozenset({"python"}))
        self.launches: list[Launch] = []
        self._absent, self._objects, self._refuses = absent, objects, refuses

    def absence(self) -> str:
        """Return the reason that the constructor was given as `absent`."""
        return self._absent

    def prepare(self, announce: Callable[[str], None]) -> str:
        """Return the reason `absent`: there is nothing to prepare."""
        return self._absent

    def objection(self, demands: Demands) -> str:
        """Return the reason `objects`."""
        return self._objects

    def probe(self) -> Support:
        """Claim every guarantee without a launch."""
        return Support(self.traits.name, self.traits.guarantees, {})

    def launch(self, launch: Launch) -> FakeGuest:
        """Add the launch to `launches`. Raises `RuntimeUnavailable` with the reason `refuses`, if that was given."""
        if self._refuses:
            raise RuntimeUnavailable(self._refuses, missing=("fake",), hint="use a real one")
        self.launches.append(launch)
        for tell in launch.on_ready:
            tell(Confined(None, None))
        return FakeGuest(launch)

    @property
    def identity(self) -> dict[str, str]:
        """Return the name of this runtime."""
        return {"engine": self.traits.name}

    def close(self, *, leaving: bool = False) -> None:
        """Do nothing: this runtime holds no resources."""
