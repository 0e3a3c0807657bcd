"""Compiling while nobody waits: one at a time, not again and again when it fails, and nothing half-done when it is killed."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import pytest

from agent_sandbox.assembly import Assembly
from agent_sandbox.cli.commands import setup
from agent_sandbox.engine.gate import Gate
from agent_sandbox.engine.run import Session
from agent_sandbox.engine.runtimes import RoutingQuestion, Runtimes
from agent_sandbox.engine.work import Code
from agent_sandbox.engine.work import Work as Submitted
from agent_sandbox.errors import RuntimeUnavailable
from agent_sandbox.ledger.writer import Ledger
from agent_sandbox.policy.model import locked
from agent_sandbox.runtime.process.runtime import ProcessRuntime
from agent_sandbox.runtime.process.zygote import argv_for
from agent_sandbox.runtime.router.model import Workload
from agent_sandbox.runtime.wasm import background_compiler, compiler
from agent_sandbox.runtime.wasm.cache import UNUSED_SECONDS, Cache
from agent_sandbox.runtime.wasm.compiler import Compilation
from agent_sandbox.runtime.wasm.runtime import WasmRuntime
from scripts.compile_wasm import CACHE, RECORDS
from tests.registries import registry_of
from tests.runtime.wasm.test_runtime import run

NOW = 1_000_000_000.0
CHECKOUT = Path(__file__).resolve().parents[3]


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(str(tmp_path / "cache"), str(tmp_path / "records"), "k" * 24)


def words(cache: Cache) -> list[str]:
    """What the compiling process is told; of an interpreter that is not there, so that it fails at once."""
    return ["", compiler.encoded(cache), "module", "1", "/nowhere/module", "0" * 64, "/nowhere/library", "library", "/nowhere/js", "0" * 64]


def awaited(cache: Cache) -> None:
    """Until it has ended, by waiting for the lock that it holds."""
    with open(f"{cache.directory}/lock", "rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)


def quietly(_: str) -> None:
    """For tests that are not about the announcement."""


def begun(cache: Cache, now: float) -> str:
    said = background_compiler.begin(cache, words(cache), quietly, now=now)
    awaited(cache)
    return said


def test_what_fails_is_not_tried_again_at_once_and_later_ever_more_rarely(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_compiler, "argv_for", hurried)
    assert begun(cache, time.time()) == background_compiler.GOING_ON
    now = time.time()
    assert background_compiler.standing(cache, now=now).startswith("compiling it failed: ")
    assert "agent-sandbox setup" in begun(cache, now)
    assert begun(cache, now + 700) == background_compiler.GOING_ON, "ten minutes later"
    assert "failed" in begun(cache, now + 700), "but the second time it takes longer"
    assert begun(cache, now + 1400) == background_compiler.GOING_ON
    assert (Path(cache.records) / f"{cache.key}-attempt").read_text().startswith("3\n")


def test_while_one_goes_on_there_is_no_second(cache: Cache) -> None:
    lock = compiler.try_lock(cache)
    assert lock is not None
    assert compiler.try_lock(cache) is None
    announced: list[str] = []
    begun = background_compiler.begin(cache, words(cache), announced.append, now=NOW)
    assert (begun, announced) == (background_compiler.GOING_ON, [])
    assert background_compiler.standing(cache, now=NOW) == background_compiler.GOING_ON
    assert compiler.compilation(cache) == compiler.Compilation()
    assert os.listdir(cache.records) == [], "it was not begun"
    os.close(lock)
    assert compiler.compilation(cache) is None
    assert "not been compiled" in background_compiler.standing(cache, now=NOW)


def test_the_holder_of_the_lock_is_never_one_that_held_it_before(cache: Cache) -> None:
    os.makedirs(cache.directory)
    (Path(cache.directory) / "lock").write_text("4194304 1 2 module")
    lock = compiler.try_lock(cache)
    assert lock is not None
    assert compiler.compilation(cache) == compiler.Compilation()
    compiler.report(lock, compiler.Compilation(17, 10, 12, "counting-javascript-0"))
    compiler.report(lock, compiler.Compilation(17, 1, 2, "module"))
    assert compiler.compilation(cache) == compiler.Compilation(17, 1, 2, "module"), "nor is what it said before"
    os.close(lock)


def test_with_little_memory_it_is_not_begun(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_compiler, "available_memory", lambda: 3 << 30)
    assert "3072 MB" in background_compiler.begin(cache, words(cache), quietly, now=NOW)
    assert os.listdir(cache.records) == []


def test_where_it_may_not_write_it_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    cache = Cache(str(tmp_path / "file" / "cache"), str(tmp_path), "k")
    assert "cannot be compiled" in background_compiler.begin(cache, [], quietly, now=NOW)


@pytest.fixture
def own(tmp_path: Path) -> Callable[[], WasmRuntime]:
    """A copy of what was compiled for the tests, without one of its images: a second to make. The lock is not shared with others."""
    for source, copy in ((CACHE, tmp_path / "cache"), (RECORDS, tmp_path / "records")):
        shutil.copytree(source, copy, ignore=shutil.ignore_patterns("*-plain-*", "lock"), copy_function=_linked)
        copy.chmod(0o700)
    return lambda: WasmRuntime(str(tmp_path / "cache"), str(tmp_path / "records"))


def _linked(source: str, copy: str) -> None:
    """They are never written to, but replaced."""
    try:
        os.link(source, copy)
    except OSError:
        shutil.copy(source, copy)


# Before what compiles. As the last in every queue it would get next to nothing of a busy machine, and the test would wait for that.
HURRY = "import os; os.nice = lambda by: 0; os.sched_setscheduler = lambda *given: None; "


def hurried(program: str, *given: str) -> list[str]:
    """The command that compiles, in an ordinary place of every queue."""
    python, first, flag, code, *rest = argv_for(program, *given)
    return [python, first, flag, HURRY + code, *rest]


class Gateway:
    """A place where a compiling process waits, once it has said which it is, until it is opened: so that it cannot be over too soon."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def close(self) -> BinaryIO:
        """Returns what keeps it closed."""
        file = self.path.open("wb")
        fcntl.flock(file, fcntl.LOCK_EX)
        return file

    def argv_for(self, program: str, *given: str) -> list[str]:
        """The command that compiles; that it waits is all that has changed."""
        wait = f"fcntl.flock(open({str(self.path)!r}), fcntl.LOCK_SH)"
        waiting = f"import fcntl; from {Cache.__module__} import Cache; clear = Cache.clear_debris; "
        waiting += f"Cache.clear_debris = lambda self: ({wait}, clear(self)); "
        python, first, flag, code, *rest = argv_for(program, *given)
        return [python, first, flag, code.replace("from ", waiting + "from ", 1), *rest]

    def hurried(self, program: str, *given: str) -> list[str]:
        """The same, in an ordinary place of every queue."""
        python, first, flag, code, *rest = self.argv_for(program, *given)
        return [python, first, flag, HURRY + code, *rest]


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[BinaryIO]:
    """A closed one, for what this test has compiled in the background; it opens when this file is closed."""
    gateway = Gateway(tmp_path / "gate")
    monkeypatch.setattr(background_compiler, "argv_for", gateway.hurried)
    with gateway.close() as file:
        yield file


def question() -> RoutingQuestion:
    return RoutingQuestion(Workload("python", "print(1)"))


def test_who_may_choose_runs_at_once_and_finds_it_compiled_later(own: Callable[[], WasmRuntime], gate: BinaryIO) -> None:
    now, process, wasm = [0.0], ProcessRuntime(), own()
    runtimes = Runtimes("auto", registry_of(process=lambda: process, wasm=lambda: wasm), background=True, clock=lambda: now[0])
    chosen = runtimes.choose(locked(), question).route
    assert (chosen.runtime, chosen.passed_over) == ("process", (("wasm", f"not available: {background_compiler.GOING_ON}"),))
    assert wasm.compilation is not None
    with pytest.raises(RuntimeUnavailable, match="is being compiled") as refusal:
        run(wasm, "print(1)")
    assert "agent-sandbox setup" in refusal.value.hint
    gate.close()
    awaited(wasm._cache)
    now[0] = 10.0
    assert runtimes.choose(locked(), question).route.runtime == "wasm"
    assert run(wasm, "print(1)").stdout == b"1\n"
    assert not list(Path(wasm._cache.records).glob("*-attempt")), "what has succeeded is forgotten"
    wasm.close()


def test_what_was_spoilt_is_made_anew_while_the_other_does_the_work(
    own: Callable[[], WasmRuntime], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background_compiler, "argv_for", hurried)
    now, process, wasm = [0.0], ProcessRuntime(), own()
    subprocess.run(wasm.building(), check=True)
    (image,) = Path(wasm._cache.directory).glob("*-plain-*")
    image.write_bytes(image.read_bytes()[:-1])
    runtimes = Runtimes("auto", registry_of(process=lambda: process, wasm=lambda: wasm), background=True, clock=lambda: now[0])
    session = Session(Gate(locked(), Ledger(tmp_path / "ledger", clock=lambda: 0.0), clock=lambda: 0.0), runtimes)
    work = Submitted(Code("python", "print(1)"), {})
    first = session.run(work)
    assert (first.stdout, first.route.runtime) == (b"1\n", "process")
    assert "not what was made here" in first.route.passed_over[0][1]
    awaited(wasm._cache)
    now[0] = 61.0
    assert session.run(work).route.runtime == "wasm"
    wasm.close()
    process.close()


BEGIN = """
import sys
from pathlib import Path
from agent_sandbox.runtime.wasm import background_compiler as background
from agent_sandbox.runtime.wasm.runtime import WasmRuntime
from tests.runtime.wasm.test_background_compiler import Gateway
background.argv_for = Gateway(Path(sys.argv[1])).argv_for
print(WasmRuntime(*sys.argv[2:]).compile_in_background(lambda line: print(line, file=sys.stderr)))
"""


def test_the_compiling_process_is_nobodys_child_and_last_in_every_queue(own: Callable[[], WasmRuntime], gate: BinaryIO) -> None:
    wasm = own()
    command = [sys.executable, "-c", BEGIN, gate.name, *wasm._directories]
    started = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=True)
    assert started.stdout == f"{background_compiler.GOING_ON}\n"
    pid = 0
    if (state := wasm.compilation) is not None:
        pid = state.pid
    assert pid, "it has outlived who began it"
    assert started.stderr.count("\n") == 1 and f"kill {pid}" in started.stderr and "after this program ends" in started.stderr
    assert f"process {pid}" in wasm.standing, "doctor says so, too"
    with open(f"/proc/{pid}/stat") as stat:
        fields = stat.read().rpartition(")")[2].split()
    assert (os.sched_getscheduler(pid), os.getpriority(os.PRIO_PROCESS, pid)) == (os.SCHED_IDLE, 19)
    assert int(fields[1]) != os.getpid() and int(fields[3]) != os.getsid(0), "another session, and another parent"
    os.kill(pid, signal.SIGKILL)
    awaited(wasm._cache)
    assert "was ended" in wasm.standing
    assert not wasm.ready, "nothing half-done"
    assert subprocess.run(wasm.building(), check=False).returncode == 0, "who asks for it does not wait"
    assert wasm.ready
    assert not [name for name in os.listdir(wasm._cache.directory) if name.startswith("scratch-") or name.endswith(".new")]


IN_PYTHON = "from agent_sandbox import Sandbox; print(Sandbox(runtime='auto').execute('print(1)').stdout)"
COMMAND = "import sys; from agent_sandbox.cli.main import main; sys.exit(main(sys.argv[1:]))"
LINE = ["code", "-", "-l", "python", "--runtime", "auto", "--throw-away"]


@pytest.mark.parametrize(
    ("words", "lines"),
    [(["-c", COMMAND, *LINE], 1), (["-c", COMMAND, "--json", *LINE], 1), (["-c", COMMAND, "--quiet", *LINE], 0), (["-c", IN_PYTHON], 1)],
    ids=["command line", "json", "quiet", "python"],
)
def test_who_starts_a_compilation_that_outlives_it_is_told_so_in_one_line(
    own: Callable[[], WasmRuntime], tmp_path: Path, words: list[str], lines: int
) -> None:
    wasm = own()
    for name, directory in zip(("shared/wasm/cache", "shared/wasm/records"), wasm._directories, strict=True):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).symlink_to(directory)
    (tmp_path / "home/agent-sandbox").mkdir(parents=True)
    (tmp_path / "home/agent-sandbox/wasm").symlink_to(wasm._directories[0])
    (tmp_path / "state").mkdir(mode=0o700)
    (tmp_path / "state/wasm").symlink_to(wasm._directories[1])  # for root the first two, for everybody else these
    environment = {name: value for name, value in os.environ.items() if name != "AGENT_SANDBOX_NO_BACKGROUND"}
    environment |= {"AGENT_SANDBOX_SHARED_CACHE": str(tmp_path / "shared"), "XDG_CACHE_HOME": str(tmp_path / "home")}
    environment |= {"AGENT_SANDBOX_STATE": str(tmp_path / "state")}
    command = [sys.executable, *words]
    ran = subprocess.run(command, cwd=tmp_path, env=environment, input="print(1)", capture_output=True, text=True, check=True)
    told = [line for line in ran.stderr.splitlines() if "in the background" in line]
    state = wasm.compilation
    if state is not None:  # else it has ended already
        os.kill(state.pid, signal.SIGKILL)
        awaited(wasm._cache)
        assert len(told) == 0 or f"kill {state.pid};" in told[0]
    assert len(told) == lines and all(re.search(r"after this program ends \(process \d+; to stop it: kill \d+", line) for line in told)
    assert "in the background" not in ran.stdout or "--json" in words, "standard output is the program's own"


def test_setup_waits_for_what_goes_on_in_the_background(
    own: Callable[[], WasmRuntime], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    wasm = own()
    monkeypatch.setattr(Assembly, "wasm", lambda self: wasm)
    lock = compiler.try_lock(wasm._cache)
    assert lock is not None
    waited: list[Compilation | None] = []

    def look(state: Compilation | None, _: float) -> None:
        if not waited:
            os.close(lock)
        waited.append(state)

    monkeypatch.setattr(setup, "_show", look)
    assert setup.compile_wasm()[0] == "ready"
    assert waited and wasm.ready
    assert "by another process. Waiting" in capfd.readouterr().err


def test_files_that_nobody_has_used_for_long_are_removed_and_others_stay(tmp_path: Path) -> None:
    records, directory = tmp_path / "records", tmp_path / "cache"
    caches = {name: Cache(str(directory), str(records), name * 24) for name in "abc"}
    for cache in caches.values():
        cache.keep("module", lambda file: file.write(b"compiled"))
    (directory / "notes.txt").write_text("somebody else's")
    now = time.time() + 2 * UNUSED_SECONDS
    used = caches["a"].entry("module")
    assert used is not None
    with open(directory / f"{'b' * 24}-module") as loaded:
        fcntl.flock(loaded, fcntl.LOCK_SH)  # as a zygote does
        caches["a"].used([used], now)
    assert sorted(os.listdir(directory)) == [f"{'a' * 24}-module", f"{'b' * 24}-module", "notes.txt"]
    assert sorted(os.listdir(records)) == [f"{'a' * 24}-module.sha256", f"{'b' * 24}-module.sha256"]
    caches["a"].used([used], now)
    assert sorted(os.listdir(directory)) == [f"{'a' * 24}-module", "notes.txt"]
