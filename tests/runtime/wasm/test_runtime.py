"""Code inside WebAssembly: what it cannot reach, how it breaks without breaking anything else, and when it is refused."""

from __future__ import annotations

import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import wasmtime

from agent_sandbox import Sandbox, SandboxStatus
from agent_sandbox.assembly import here
from agent_sandbox.errors import PolicyError, RuntimeUnavailable
from agent_sandbox.kernel.mount_plan import ThrowAway
from agent_sandbox.policy.model import MIB, Guarantee, Limits, locked
from agent_sandbox.runtime.base import Argv, Completed, Exit, ExitReason, Launch, PythonCode
from agent_sandbox.runtime.process.runtime import ProcessRuntime
from agent_sandbox.runtime.wasm.cache import MODULE, Cache, CachedFile, Untrusted, checked
from agent_sandbox.runtime.wasm.machine import WasmMachine, configuration
from agent_sandbox.runtime.wasm.recipe import stored_as
from agent_sandbox.runtime.wasm.runtime import WasmRuntime
from agent_sandbox.workspace.view.plan import MachineFacts, Needs, plan_view
from scripts.compile_wasm import CACHE, RECORDS
from tests import compiled

LIMITS = Limits(wall_seconds=600, memory_bytes=512 * MIB, output_bytes=MIB, processes=32, open_files=256, disk_bytes=64 * MIB)


@pytest.fixture(scope="module")
def runtime() -> Iterator[WasmRuntime]:
    made = compiled.runtime(warm=2)
    yield made
    made.close()


def launch(source: str, *, limits: Limits = LIMITS) -> Launch:
    plan = plan_view(locked().files, Needs(), ThrowAway(64 * MIB), host=MachineFacts.look(), scratch_bytes=64 * MIB)
    return Launch(PythonCode(source), plan, "/tmp", {}, limits, locked().requires, processes=False, writable=False)


def run(runtime: WasmRuntime, source: str, *, limits: Limits = LIMITS) -> Completed:
    with runtime.launch(launch(source, limits=limits)) as guest:
        return guest.wait()


FILES = """
for number in range(100):
    open(f"/tmp/{number}", "w").write("x")
print(sum(len(open(f"/tmp/{number}").read()) for number in range(100)))
"""


def test_the_engines_threads_do_not_reach_the_programs_limit(runtime: WasmRuntime) -> None:
    completed = run(runtime, FILES, limits=replace(LIMITS, processes=6))
    assert (completed.stdout, completed.exit.limits_hit) == (b"100\n", ())


def test_pandas_is_there_and_was_imported_beforehand(runtime: WasmRuntime) -> None:
    ran = run(
        runtime, "import sys\nfound = 'pandas' in sys.modules\nimport pandas as pd\nprint(found, pd.DataFrame({'A': [1, 2, 3]})['A'].sum())"
    )
    assert ran.stdout == b"True 6\n", ran
    assert run(runtime, "import sys; print('pandas' in sys.modules)").stdout == b"False\n", "and only for who wants it"


def test_it_gives_what_the_process_runtime_gives_and_what_only_it_can(runtime: WasmRuntime) -> None:
    support, process = runtime.probe(), ProcessRuntime()
    try:
        assert (support.available, support.runtime) == (True, "wasm")
        assert support.guarantees == process.probe().guarantees - {Guarantee.EGRESS_ONLY} | {
            Guarantee.DETERMINISTIC,
            Guarantee.FUEL_LIMITED,
        }
    finally:
        process.close()


OUT_OF_THE_VIEW = """
import os
print(sorted(os.listdir("/")))
os.symlink("../../proc/self/mem", "/tmp/up")
os.symlink("/proc/self/mem", "/tmp/absolute")
for path in ("/proc/self/mem", "/../proc/self/status", "/tmp/../../proc/self/mem", "/tmp/up", "/tmp/absolute", "/dev/null", "/compiled",
             "/view", "/../compiled", "/usr/local/lib/../../../../compiled"):
    try:
        open(path, "rb")
        print("opened", path)
    except OSError:
        pass
"""


def test_it_sees_its_view_and_nothing_of_the_process_that_holds_it(runtime: WasmRuntime) -> None:
    assert run(runtime, OUT_OF_THE_VIEW).stdout == b"['run', 'sys', 'tmp']\n"


def test_its_library_cannot_be_written(runtime: WasmRuntime) -> None:
    ran = run(runtime, "open('/usr/local/lib/python315.zip', 'ab')")
    assert ran.exit.code == 1 and b"Error" in ran.stderr
    assert run(runtime, "open('/usr/local/lib/other', 'wb')").exit.code == 1


WHAT_IT_HAS_NOT = {
    "processes": "import os; os.fork()",
    "programs": "import subprocess; subprocess.run(['/bin/true'])",
    "threads": "import threading; threading.Thread(target=print).start()",
    "a network": "import socket; socket.create_connection(('127.0.0.1', 1), timeout=2)",
    "native code": "import ctypes; ctypes.CDLL(None)",
}


@pytest.mark.parametrize("source", WHAT_IT_HAS_NOT.values(), ids=WHAT_IT_HAS_NOT.keys())
def test_what_it_has_not_is_an_exception(runtime: WasmRuntime, source: str) -> None:
    ran = run(runtime, source)
    assert (ran.exit.code, ran.exit.reason) == (1, ExitReason.EXITED) and ran.stderr.startswith(b"Traceback"), ran


BREAKS = {
    "recursion": ("def f(): f()\nf()", b"RecursionError"),
    "recursion in C": ("x = []\nfor _ in range(200_000): x = [x]\nrepr(x)", b"RecursionError"),
    "recursion of a C encoder": ("import json\nx = []\nfor _ in range(200_000): x = [x]\njson.dumps(x)", b"RecursionError"),
    "recursion without a limit of Python's": (
        "import sys\nsys.setrecursionlimit(10**9)\nclass A:\n  def __repr__(self): return repr(self)\nrepr(A())",
        b"RecursionError",
    ),
    "an abort": ("import os; os.abort()", b"ended"),
}


@pytest.mark.parametrize(("source", "said"), BREAKS.values(), ids=BREAKS.keys())
def test_what_breaks_it_ends_only_that_run(runtime: WasmRuntime, source: str, said: bytes) -> None:
    ran = run(runtime, source)
    assert ran.exit.code == (128 + signal.SIGABRT if said == b"ended" else 1) and said in ran.stderr, ran
    assert run(runtime, "print('fine')").stdout == b"fine\n"


def test_things_in_one_another_are_freed_however_deep_they_lie(runtime: WasmRuntime) -> None:
    for kind in ("[x]", "(x,)", "{1: x}"):
        assert run(runtime, f"x = None\nfor _ in range(200_000): x = {kind}\ndel x\nprint('freed')").stdout == b"freed\n"


def test_ten_thousand_files_are_made_and_no_more_are_open_than_may_be(runtime: WasmRuntime) -> None:
    made = run(
        runtime,
        "import os\nfor n in range(10_000): os.close(os.open(f'/tmp/{n}', os.O_CREAT | os.O_WRONLY))\nprint(os.path.exists('/tmp/9999'))",
    )
    assert made.stdout == b"True\n", made
    held = run(runtime, "held = []\nfor n in range(10_000): held.append(open(f'/tmp/{n}', 'w'))")
    assert held.exit.code == 1 and b"OSError" in held.stderr, held


def test_memory_beyond_the_limit_ends_only_that_run(runtime: WasmRuntime) -> None:
    ran = run(runtime, "x = []\nwhile True: x.append(bytearray(1 << 20))")
    assert ran.exit.reason is ExitReason.OUT_OF_MEMORY or b"MemoryError" in ran.stderr, ran
    assert run(runtime, "print('fine')").stdout == b"fine\n"


def test_an_interrupt_ends_it_also_while_it_computes(runtime: WasmRuntime) -> None:
    with runtime.launch(launch("while True: pass")) as guest:
        guest.interrupt(signal.SIGINT)
        ended = guest.wait().exit
    assert (ended.code, ended.signal) == (128 + signal.SIGINT, signal.SIGINT), ended


GARBAGE = """(module
  (import "host" "call" (func $call (param i32 i32 i32 i32) (result i32)))
  (memory (export "memory") 1)
  (func (export "host_alloc") (param i32) (result i32) (i32.const 0))
  (func (export "turn") (param i32 i32) (result i32)
    (call $call (i32.const -1) (i32.const -1) (i32.const 0x7fffffff) (i32.const 65533))))"""


def test_garbage_handed_to_the_host_is_answered_and_not_followed() -> None:
    engine = wasmtime.Engine(configuration())
    instance = WasmMachine(engine, wasmtime.Module(engine, GARBAGE)).instance(())
    assert instance.run("") == -1


def test_only_python_code_runs_there(runtime: WasmRuntime) -> None:
    with pytest.raises(RuntimeUnavailable, match="Python code") as refusal:
        runtime.launch(replace(launch(""), program=Argv(("true",))))
    assert refusal.value.hint


def test_what_was_not_compiled_here_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    for record in RECORDS.iterdir():
        (tmp_path / record.name).write_text("0" * 64)
    broken = WasmRuntime(str(CACHE), str(tmp_path))
    assert broken.ready, "there is something; that it is wrong shows when it is read"
    with pytest.raises(RuntimeUnavailable, match="not what was made here") as refusal:
        run(broken, "print(1)")
    assert "agent-sandbox setup" in refusal.value.hint
    broken.close()


def test_what_has_not_been_compiled_yet_is_said(tmp_path: Path) -> None:
    bare = WasmRuntime(str(tmp_path / "cache"), str(tmp_path / "records"))
    assert not bare.ready
    with pytest.raises(RuntimeUnavailable, match="not been compiled") as refusal:
        run(bare, "print(1)")
    assert "agent-sandbox setup" in refusal.value.hint
    assert not bare.probe().available


def _kept(tmp_path: Path) -> CachedFile:
    cache = Cache(str(tmp_path / "cache"), str(tmp_path / "records"), "key")
    cache.keep(MODULE, lambda file: file.write(b"compiled"))
    entry = cache.entry(MODULE)
    assert entry is not None
    with checked(entry) as fd:
        assert os.pread(fd, 100, 0) == b"compiled"
    assert (os.stat(entry.path).st_mode & 0o777, os.stat(tmp_path / "cache").st_mode & 0o777) == (0o600, 0o700)
    return entry


def _changed(path: Path) -> None:
    path.write_bytes(b"Compiled")


def _exchanged(path: Path) -> None:
    path.rename(path.with_name("real"))
    path.symlink_to("real")


@pytest.mark.parametrize(
    "spoil", [_changed, _exchanged, lambda path: path.chmod(0o662), Path.unlink], ids=["changed", "link", "mode", "gone"]
)
def test_a_file_of_the_cache_counts_only_as_it_was_made(tmp_path: Path, spoil: object) -> None:
    entry = _kept(tmp_path)
    spoil(Path(entry.path))  # type: ignore[operator]
    with pytest.raises(Untrusted), checked(entry):
        pytest.fail("it was opened")


@pytest.mark.needs_root
def test_a_file_of_somebody_elses_does_not_count(tmp_path: Path) -> None:
    entry = _kept(tmp_path)
    os.chown(entry.path, 12345, 12345)
    with pytest.raises(Untrusted, match="somebody else"), checked(entry):
        pytest.fail("it was opened")


@pytest.mark.slow
def test_a_spoilt_image_is_made_anew_by_whoever_comes_first_and_nothing_else_is(tmp_path: Path) -> None:
    own = WasmRuntime(str(tmp_path / "cache"), str(tmp_path / "records"))
    for source, copy in ((CACHE, tmp_path / "cache"), (RECORDS, tmp_path / "records")):
        shutil.copytree(source, copy, ignore=shutil.ignore_patterns("*-counting*", "lock"))
        copy.chmod(0o700)
    (image,) = (tmp_path / "cache").glob(f"*-{stored_as('plain')}")
    good = image.read_bytes()
    image.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    module = next((tmp_path / "cache").glob("*-module")).stat().st_ino
    assert own.ready
    with pytest.raises(RuntimeUnavailable, match="not what was made here"):
        run(own, "print(1)")
    own.close()
    both = [subprocess.Popen(own.building()) for _ in range(2)]
    assert [process.wait() for process in both] == [0, 0]
    assert image.stat().st_mode & 0o777 == 0o600
    assert next((tmp_path / "cache").glob("*-module")).stat().st_ino == module
    assert run(own, "print(1)").stdout == b"1\n"
    own.close()


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    entry = _kept(tmp_path)
    cache = Cache(str(tmp_path / "cache"), str(tmp_path / "records"), "key")

    def fail(_: object) -> None:
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        cache.keep(MODULE, fail)
    with checked(entry):
        assert sorted(os.listdir(tmp_path / "cache")) == ["key-module"]


def test_without_the_extra_it_says_what_to_install() -> None:
    code = "from agent_sandbox import Sandbox\nSandbox(runtime='wasm').execute('print(1)')"
    source = Path(compiled.__file__).resolve().parents[1] / "src"
    ran = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(source)!r})\n{code}"], capture_output=True, check=False
    )
    needed = tomllib.loads((source.parent / "pyproject.toml").read_text())["project"]["optional-dependencies"]["wasm"]
    assert b"RuntimeUnavailable" in ran.stderr and b"pip install " in ran.stderr and shlex.join(needed).encode() in ran.stderr, ran.stderr


@pytest.fixture
def offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A user who has run `agent-sandbox setup`."""
    compiled.offer(tmp_path / "cache", tmp_path / "state")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("AGENT_SANDBOX_STATE", str(tmp_path / "state"))
    yield
    here().wasm().close()


@pytest.mark.usefixtures("offered")
def test_a_sandbox_can_ask_for_it() -> None:
    with Sandbox(runtime="wasm") as sandbox:
        result = sandbox.execute("import sys; print(sys.platform)")
        assert (result.stdout, result.status) == ("wasi\n", SandboxStatus.COMPLETED), result
        assert result.route is not None and result.route.runtime == "wasm"
        script = sandbox.execute("setTimeout(() => console.log([6 * 7]), 1)", "javascript")
        assert (script.stdout, script.status) == ("[ 42 ]\n", SandboxStatus.COMPLETED), script
        failed = sandbox.execute("throw new TypeError('oops')", "javascript")
        assert (failed.exit_code, failed.status) == (1, SandboxStatus.FAILED) and "TypeError: oops" in failed.stderr, failed
        refused = sandbox.execute("echo hello", "bash")
        assert refused.status is SandboxStatus.FAILED and refused.error is not None and "Python code" in refused.error


def test_a_permission_that_it_cannot_grant_is_refused() -> None:
    with pytest.raises(PolicyError, match="allow_subprocess"):
        Sandbox(runtime="wasm", allow_subprocess=True)


MIXED = (
    "print(1)", "while True: pass", "import os; os.abort()", "x = []\nwhile True: x.append(bytearray(1 << 20))", "def f(): f()\nf()",
    "while True: print('x' * 1000)", "import os; os._exit(3)", "import pandas; print(1)", "raise KeyboardInterrupt", "\0",
    "# " + "é" * (1 << 20),
)  # fmt: skip


@pytest.mark.torture
def test_runs_of_every_kind_at_once_some_killed_end_as_they_ended_and_leave_nothing(runtime: WasmRuntime) -> None:
    def one(seed: int) -> Exit:
        draw = random.Random(seed)
        with runtime.launch(launch(draw.choice(MIXED), limits=replace(LIMITS, wall_seconds=5))) as guest:
            killer = threading.Timer(draw.random() * 0.2, guest.kill)
            if draw.random() < 0.5:
                killer.start()
            ended = guest.wait().exit
            killer.cancel()
        return ended

    with ThreadPoolExecutor(12) as threads:
        ends = list(threads.map(one, range(500)))
    assert {each.reason for each in ends} >= {ExitReason.EXITED, ExitReason.SIGNALLED, ExitReason.KILLED, ExitReason.TIMED_OUT}
    assert {each.code for each in ends if each.reason is ExitReason.KILLED} == {137}, "who ended by itself was not killed"
