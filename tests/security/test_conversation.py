"""A hostile program on the line to its host: whatever it says ends its own run, and nothing else.

Inside the process runtime the line is a socket that any code can find, and any fork has; inside WebAssembly it is one function. A program
that breaks out of the engine is where the first is, so what the supervisor can take is shown there, and what the door can take on its own.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import wasmtime

from agent_sandbox import Sandbox, SandboxError, SandboxStatus
from agent_sandbox.assembly import here
from agent_sandbox.runtime.base import ExitReason
from agent_sandbox.runtime.wasm.machine import WasmMachine, configuration
from tests.patience import until

# What is said is heard alike for everybody: as root in `make test`, for others in `make torture`; that it is at all is in the contract.
pytestmark = pytest.mark.torture if os.geteuid() else pytest.mark.slow

WIRE = """
import marshal, os, socket, struct
def opened(fd):
    try:
        return socket.socket(fileno=os.dup(fd)) if os.readlink(f"/proc/self/fd/{fd}").startswith("socket:") else None
    except OSError:
        return None
def send(body, number=1):
    line.sendall(struct.pack("!IQ", len(body), number) + body)
def exactly(count):
    data = b""
    while len(data) < count:
        part = line.recv(count - len(data))
        assert part
        data += part
    return data
def answer():
    length, number = struct.unpack("!IQ", exactly(12))
    return number, marshal.loads(exactly(length))
line = next(sock for fd in map(int, os.listdir("/proc/self/fd")) if fd > 2 and (sock := opened(fd)) is not None)
"""
CALL = b'{"call":"take","args":[1],"kwargs":{}}'


@pytest.fixture(scope="module", autouse=True)
def _nothing_waits() -> Iterator[None]:
    yield
    here().process().close()


@pytest.fixture
def taken() -> list[Any]:
    return []


@pytest.fixture
def sandbox(taken: list[Any]) -> Iterator[Sandbox]:
    with Sandbox(
        validate_code=False, tools={"take": taken.append, "forbidden": taken.append}, denied_tools=["forbidden"], timeout_seconds=300
    ) as made:
        yield made


def test_the_line_can_be_found_and_spoken_on(sandbox: Sandbox, taken: list[Any]) -> None:
    """The control: by the same way that garbage goes, a question is answered, under the number that was asked."""
    ran = sandbox.execute(f"{WIRE}\nfor number in (0, 7, 2**64 - 1):\n    send({CALL!r}, number)\n    print(*answer())")
    assert ran.stdout == f"0 {{'value': None}}\n7 {{'value': None}}\n{2**64 - 1} {{'value': None}}\n", ran
    assert taken == [1, 1, 1]


GARBAGE = {
    "no JSON": "send(b'hello')",
    "nothing": "send(b'')",
    "no UTF-8": "send(bytes(range(128, 256)))",
    "no question": "send(b'[1, 2]')",
    "an unknown kind": """send(b'{"run":"x","args":[],"kwargs":{}}')""",
    "a turn where there are none": """send(b'{"turn":{"code":0,"value":1}}')""",
    "arguments that are none": """send(b'{"call":"take","args":{},"kwargs":[]}')""",
    "a name that is none": """send(b'{"call":null,"args":[],"kwargs":{}}')""",
    "a name without end": """send(b'{"call":"' + b'x' * 1000 + b'","args":[],"kwargs":{}}')""",
    "a mark without its value": """send(b'{"call":"take","args":[{"$int":[]}],"kwargs":{}}')""",
    "bytes that are none": """send(b'{"call":"take","args":[{"$bytes":"?"}],"kwargs":{}}')""",
    "a dict that is none": """send(b'{"call":"take","args":[{"$dict":[1]}],"kwargs":{}}')""",
    "a dict with odd keys": """send(b'{"call":"take","args":[{"$dict":[[[1], 2]]}],"kwargs":{}}')""",
    "a number without end": """send(b'{"call":"take","args":[' + b'9' * 100_000 + b'],"kwargs":{}}')""",
    "depth": "send(b'[' * 100_000)",
    "less depth": """send(b'{"call":"take","args":[' + b'[' * 300 + b']' * 300 + b'],"kwargs":{}}')""",
    "very many lists": "send(b'[' + b'[],' * 1_000_000 + b'[]]')",
    "a length without end": "line.sendall(struct.pack('!IQ', 0xFFFFFFFF, 1))",
    "a length just too large": "line.sendall(struct.pack('!IQ', (17 << 20), 1))",
    "noise": "line.sendall(os.urandom(1 << 16).replace(bytes(1), b'x'))",
}


@pytest.mark.parametrize("words", GARBAGE.values(), ids=GARBAGE.keys())
def test_garbage_ends_the_run_and_says_why(sandbox: Sandbox, taken: list[Any], words: str) -> None:
    ran = sandbox.execute(f"{WIRE}\n{words}\nwhile True: line.recv(1) or os._exit(9)")
    assert ran.exit is not None and ran.exit.reason is ExitReason.GARBLED, ran
    assert ran.status is SandboxStatus.FAILED and "ended for a malformed message to its host" in (ran.error or "")
    assert taken == []


def test_garbage_ends_a_session_and_says_why(sandbox: Sandbox) -> None:
    for words in ("send(b'x')", "os.close(line.fileno()); os.closerange(3, 100); import time; time.sleep(60)"):
        with sandbox.session() as session:
            assert session.run(WIRE).success
            ran = session.run(words)
            assert ran.exit is not None and ran.exit.reason is ExitReason.GARBLED, ran
            with pytest.raises(SandboxError, match="garbled"):
                session.run("1")
    assert sandbox.execute("print(take(2))").stdout == "None\n", "and the next run is like any other"


FAKED = {
    "no exit code": '{"turn":{}}', "a huge one": '{"turn":{"code":1e99,"value":1}}', "a word": '{"turn":{"code":"0","value":1}}',
    "no JSON": '{"turn":', "depth": '{"turn":' + "[" * 50_000,
}  # fmt: skip


@pytest.mark.parametrize("words", FAKED.values(), ids=FAKED.keys())
def test_a_turn_that_ends_with_nonsense_ends_the_session(sandbox: Sandbox, words: str) -> None:
    with sandbox.session() as session:
        ran = session.run(f"{WIRE}\nsend({words.encode()!r})\nwhile True: pass")
        assert ran.exit is not None and ran.exit.reason is ExitReason.GARBLED and ran.value is None, ran
        assert session.ended


def test_a_turn_that_ends_itself_early_fools_only_itself(sandbox: Sandbox, taken: list[Any]) -> None:
    """Two ends of one turn: the second is the end of the next. Values are the program's own words in any case."""
    with sandbox.session() as session:
        early = session.run(f"""{WIRE}\nsend(b'{{"turn":{{"code":0,"value":"early"}}}}')\n'late'""")
        assert (early.value, early.success) == ("early", True)
        session.run("take(5)")
        assert sandbox.execute("print(1)").stdout == "1\n"


def test_half_a_question_keeps_nobody_waiting(sandbox: Sandbox) -> None:
    assert sandbox.execute(f"{WIRE}\nline.sendall(struct.pack('!IQ', 1000, 1) + b'x' * 10)").success
    stuck = sandbox.execute(f"{WIRE}\nline.sendall(bytes(5)); import time; time.sleep(60)", timeout=0.4)
    assert stuck.status is SandboxStatus.TIMEOUT


def test_questions_without_end_are_answered_one_at_a_time_and_held_by_nobody(taken: list[Any]) -> None:
    """Nobody reads the answers, so there is room for few; then the flood stands still, and the supervisor holds one question."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with Sandbox(validate_code=False, tools={"take": lambda word: word}, timeout_seconds=1.0, max_memory_mb=512) as sandbox:
        ran = sandbox.execute(WIRE + 'word = b\'x\' * (1 << 20)\nwhile True: send(b\'{"call":"take","args":["%b"],"kwargs":{}}\' % word)')
    assert ran.status is SandboxStatus.TIMEOUT, ran
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown < 100, f"{grown:.0f} MiB for a flood"


@pytest.mark.parametrize("name", ["forbidden", "Take", "take ", "take\0", "__class__", "append", "taken", "", "тake"])
def test_a_tool_is_reached_by_its_own_name_and_no_other(sandbox: Sandbox, taken: list[Any], name: str) -> None:
    body = json.dumps({"call": name, "args": [1], "kwargs": {}})
    ran = sandbox.execute(f"{WIRE}\nsend({body.encode()!r})\nprint(answer()[1]['raise'])")
    assert ran.stdout == "PermissionError\n", ran
    assert taken == []


def test_a_tool_gets_data_and_no_way_to_anything_else(sandbox: Sandbox, taken: list[Any]) -> None:
    """Arguments that would be something more in another reader: they are what they look like."""
    for words in ('{"__class__":"os.system"}', '{"py/object":"os.system"}', "\"__import__('os')\""):
        body = f'{{"call":"take","args":[{words}],"kwargs":{{}}}}'
        assert sandbox.execute(f"{WIRE}\nsend({body.encode()!r}); answer()").success
    assert taken == [{"__class__": "os.system"}, {"py/object": "os.system"}, "__import__('os')"]


def test_names_of_arguments_that_the_tool_does_not_have_are_its_failure(sandbox: Sandbox) -> None:
    body = b'{"call":"take","args":[],"kwargs":{"self":1,"__class__":2}}'
    ran = sandbox.execute(f"{WIRE}\nsend({body!r})\nprint(answer()[1])")
    assert ran.stdout == "{'raise': 'ToolError', 'text': 'take failed'}\n" and isinstance(ran.tool_errors[0], TypeError)


def test_a_program_cannot_say_that_it_was_never_started(sandbox: Sandbox) -> None:
    ran = sandbox.execute(f"{WIRE}\nline.sendall(b'127 not found'); line.close(); os._exit(0)")
    assert ran.exit is not None and "could not be started" not in (ran.error or ""), ran


THREADS = """
import threading
def call(n):
    for m in range(10):
        assert echo([n, m]) == [n, m]
threads = [threading.Thread(target=call, args=(n,)) for n in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(echo("done"))
"""
FORKS = """
import os, sys
children = []
for n in range(6):
    pid = os.fork()
    if pid == 0:
        for m in range(5):
            assert echo([n, m]) == [n, m]
        os._exit(0)
    children.append(pid)
for m in range(5):
    assert echo(["parent", m]) == ["parent", m]
assert all(os.waitpid(pid, 0)[1] == 0 for pid in children)
print(echo("done"))
"""


@pytest.mark.parametrize("code", [THREADS, FORKS], ids=["threads", "forks"])
def test_answers_are_not_mixed_up(code: str) -> None:
    calls: list[Any] = []

    def echo(value: Any) -> Any:
        calls.append(value)
        return value

    with Sandbox(validate_code=False, tools=[echo], allow_subprocess=True) as sandbox:
        ran = sandbox.execute(code)
        assert ran.stdout == "done\n", ran
        with sandbox.session() as session:
            assert session.run(code).success and session.run("echo(1)").value == 1


def test_a_process_that_dies_in_the_middle_of_a_question_takes_nobody_along(sandbox: Sandbox) -> None:
    code = """
import os, signal
pid = os.fork()
if pid == 0:
    wait("child")
    os._exit(0)
seen()
os.kill(pid, signal.SIGKILL)
os.waitpid(pid, 0)
print(take(7))
"""
    taken: list[Any] = []
    tools: dict[str, Callable[..., object]] = {"take": taken.append, "wait": taken.append, "seen": lambda: None}
    with Sandbox(validate_code=False, tools=tools, allow_subprocess=True) as sandbox:
        assert sandbox.execute(code).stdout == "None\n"
    assert 7 in taken


def test_a_fork_that_outlives_its_turn_does_not_speak_for_the_session() -> None:
    with Sandbox(validate_code=False, allow_subprocess=True) as sandbox, sandbox.session() as session:
        first = session.run("import os\npid = os.fork()\n'child' if pid == 0 else (os.waitpid(pid, 0), 'parent')[1]")
        assert first.value == "parent", first
        assert session.run("1 + 1").value == 2


def test_a_handler_that_interrupts_a_question_is_told_so_and_does_not_wait_for_ever() -> None:
    code = """
import signal
said = []
def handler(*_):
    try:
        slow(0)
    except RuntimeError as error:
        said.append(str(error))
signal.signal(signal.SIGALRM, handler)
signal.setitimer(signal.ITIMER_REAL, 0.1)
print(slow(1), said, slow(0))
"""
    busy = Sandbox(validate_code=False)

    def slow(longer: int) -> int:
        if longer:
            busy.execute("while True: pass", timeout=0.4)
        return longer

    with busy, Sandbox(validate_code=False, tools=[slow]) as sandbox:
        ran = sandbox.execute(code)
    assert ran.stdout == "1 ['this thread is waiting for an answer of the host already'] 0\n", ran


def test_what_threads_say_between_turns_waits_for_the_next() -> None:
    code = """
import threading
told = threading.Event()
def later():
    told.wait()
    print("from behind")
    heard.append(double(4))
heard = []
thread = threading.Thread(target=later)
thread.start()
"""
    with Sandbox(validate_code=False, tools={"double": lambda x: 2 * x}).session() as session:
        assert session.run(code).stdout == ""
        assert session.run("told.set()").success
        after = session.run("thread.join()\nheard")
        assert after.value == [8]


def _door_of(module: str, answer: Callable[[bytes], bytes] | None) -> int:
    engine = wasmtime.Engine(configuration())
    machine = WasmMachine(engine, wasmtime.Module(engine, module))
    machine.door.answer = answer
    return machine.instance(()).run("")


def _asking(at: int, length: int, answer_at: int, length_at: int, *, alloc: int = 1024) -> str:
    return f"""(module
      (import "host" "call" (func $call (param i32 i32 i32 i32) (result i32)))
      (memory (export "memory") 1)
      (func (export "host_alloc") (param i32) (result i32)
        (select (i32.const 0) (i32.const {alloc}) (i32.eqz (local.get 0))))
      (func (export "turn") (param i32 i32) (result i32)
        (call $call (i32.const {at}) (i32.const {length}) (i32.const {answer_at}) (i32.const {length_at}))))"""


POINTERS = {
    "a question beyond memory": (65530, 10, 0, 4), "a length of all memory and more": (0, 65537, 0, 4), "a negative address": (-1, 1, 0, 4),
    "a negative length": (0, -1, 0, 4), "a sum that wraps": (0x7FFFFFFF, 0x7FFFFFFF, 0, 4), "nowhere for the address": (0, 1, 65533, 4),
    "nowhere for the length": (0, 1, 0, -4),
}  # fmt: skip


@pytest.mark.parametrize("numbers", POINTERS.values(), ids=POINTERS.keys())
def test_the_door_follows_no_pointer_out_of_memory(numbers: tuple[int, int, int, int]) -> None:
    asked: list[bytes] = []

    def answer(words: bytes) -> bytes:
        asked.append(words)
        return b"yes"

    assert _door_of(_asking(*numbers), answer) == -2
    assert asked == []


def test_the_door_writes_no_answer_where_there_is_no_room() -> None:
    assert _door_of(_asking(0, 4, 0, 4), lambda words: b"yes") == 0, "the control: there is room"
    for alloc in (65534, -1, 0):
        assert _door_of(_asking(0, 4, 0, 4, alloc=alloc), lambda words: b"yes") == -2


def test_the_door_is_closed_where_nobody_offers_anything() -> None:
    assert _door_of(_asking(0, 4, 0, 4), None) == -1


def test_a_host_that_listens_no_longer_is_a_fault_and_no_more() -> None:
    def gone(words: bytes) -> bytes:
        raise ConnectionError

    assert _door_of(_asking(0, 4, 0, 4), gone) == -2


def test_a_guest_that_reads_its_own_output_keeps_nobody_waiting() -> None:
    code = """
import os, threading
def steal():
    pipe = os.open("/proc/self/fd/1", os.O_RDONLY)
    while True: os.read(pipe, 1 << 16)
threading.Thread(target=steal, daemon=True).start()
"""
    with Sandbox(validate_code=False).session() as session:
        assert session.run(code).success
        for _ in range(30):
            assert session.run("print('x' * 5000)").success


KILLED = """
import os, signal
from agent_sandbox import Sandbox
from agent_sandbox.assembly import here
session = Sandbox(validate_code=False, tools={"gone": lambda: os.kill(os.getpid(), signal.SIGKILL)}).session()
session.run("1")
print(session._turns._opened.guest.init, flush=True)
WORK
"""


@pytest.mark.parametrize("work", ["os.kill(os.getpid(), signal.SIGKILL)", "session.run('gone()')"], ids=["between turns", "in a tool"])
def test_a_session_ends_with_its_supervisor(work: str) -> None:
    with subprocess.Popen([sys.executable, "-c", KILLED.replace("WORK", work)], stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        init = int(supervisor.stdout.readline())
        assert until(lambda: not os.path.exists(f"/proc/{init}")), "it lives on"
    assert supervisor.returncode == -signal.SIGKILL


def test_an_alarm_between_turns_ends_the_session_and_is_said() -> None:
    code = """
import signal, threading
def wake(*_): raise KeyError("late")
signal.signal(signal.SIGALRM, wake)
signal.setitimer(signal.ITIMER_REAL, 0.05)
"""
    with Sandbox(validate_code=False).session() as session:
        assert session.run(code).success
        guest = session._turns._opened.guest  # type: ignore[union-attr]
        while guest.waiting:
            os.sched_yield()
        with pytest.raises(SandboxError, match="exited between two turns"):
            session.run("1")


def test_programs_that_a_turn_starts_find_their_input_empty() -> None:
    with Sandbox(validate_code=False, allow_subprocess=True).session() as session:
        ran = session.run("import subprocess; subprocess.run(['cat'], check=True, timeout=10)", stdin="for the turn alone")
        assert (ran.stdout, ran.success) == ("", True), ran


FORKED = """
import os, sys
from agent_sandbox import Sandbox, SandboxError
with Sandbox(validate_code=False) as sandbox, sandbox.session() as session:
    session.run("x = 1")
    child = os.fork()
    if child == 0:
        try:
            session.run("x = 2")
        except SandboxError as error:
            print(error, flush=True)
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
    print(session.run("x").value, flush=True)
"""


def test_a_fork_of_the_application_leaves_its_parents_session_alone() -> None:
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done
    assert "another process" in done.stdout.splitlines()[0] and done.stdout.splitlines()[1] == "1"
