"""How we run the same jobs: through the SDK, as a user would, with one Sandbox object kept."""

from __future__ import annotations

import atexit
import json
import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from agent_sandbox import Sandbox, SandboxConfig
from agent_sandbox.assembly import WARM, here
from agent_sandbox.engine.gate import Gate
from agent_sandbox.engine.run import Session
from agent_sandbox.engine.runtimes import only
from agent_sandbox.engine.turns import InterpreterTurns, Turn
from agent_sandbox.engine.work import Code, Command, Work
from agent_sandbox.errors import RuntimeUnavailable
from agent_sandbox.policy.model import cloned
from agent_sandbox.policy.secrets import default_masks
from agent_sandbox.runtime.process.guest_handle import ProcessGuest
from agent_sandbox.runtime.wasm.runtime import WasmRuntime
from bench.peers import ENVIRONMENT, Call, Job, Missing, command, expect
from scripts.compile_wasm import CACHE, RECORDS

READY_SECONDS = 120.0
KIB = 1024


def locked(job: Job) -> Call:
    """The default: nothing of the machine but the interpreter and its packages."""
    return _executing(Sandbox(preload=job.preload), job)


def clone(job: Job) -> Call:
    """The whole machine readable and writable, every write captured, processes allowed."""
    return _executing(Sandbox(allow_file_read=True, allow_file_write=True, allow_subprocess=True, preload=job.preload), job)


def wasm(job: Job) -> Call:
    """The same as locked, with the interpreter inside WebAssembly: the one that was compiled for this checkout."""
    session = _wasm_session()

    def call() -> None:
        outcome = session.run(Work(Code(job.language, job.code), {**ENVIRONMENT, "HOME": "/tmp"}))
        expect(job.prints, outcome.stdout.decode(), outcome.stderr.decode(errors="replace"))

    return call


def _wasm_session() -> Session:
    runtime = WasmRuntime(str(CACHE), str(RECORDS), warm=WARM)
    try:
        if not runtime.ready:
            raise Missing("it has not been compiled: make setup")
    except RuntimeUnavailable as error:
        raise Missing(f"{error.message}: {error.hint}") from error
    return Session(Gate(SandboxConfig(runtime="wasm").policy(), here().ledger(), clock=time.time), only(runtime))


def turn(job: Job) -> Call:
    """One turn of an interpreter that stays: through the gate, in the ledger, with its output."""
    session = Sandbox().session()

    def call() -> None:
        result = session.run(job.code)
        expect(job.prints, result.stdout, result.stderr or result.error or "")

    return call


def wasm_turn(job: Job) -> Call:
    """The same inside WebAssembly."""
    turns = InterpreterTurns(_wasm_session(), Work(Code("python", ""), {**ENVIRONMENT, "HOME": "/tmp"}))

    def call() -> None:
        outcome = turns.run(Turn(job.code, wall=READY_SECONDS)).outcome
        expect(job.prints, outcome.stdout.decode(), outcome.stderr.decode(errors="replace"))

    return call


def _executing(sandbox: Sandbox, job: Job) -> Call:
    def call() -> None:
        result = sandbox.execute(job.code, job.language)
        expect(job.prints, result.stdout, result.stderr or result.error or "")

    return call


def clone_of(project: Path) -> Call:
    """`true` on a throw-away clone, as the command line makes one for this project, without its start."""
    if not project.is_dir():
        raise Missing(f"there is no {project}")
    state = os.path.realpath(here().host.state)
    masks = default_masks(
        homes=here().host.homes, homes_of_others=here().host.homes_of_others, projects=[str(project)], state_dirs=(state,)
    )
    gate = Gate(cloned(masks=masks), here().ledger(), clock=time.time)
    session = Session(gate, only(here().process()), project=str(project))
    work = Work(Command(("true",)), {**ENVIRONMENT, "HOME": here().host.home}, cwd=str(project))

    def call() -> None:
        outcome = session.run(work)
        if outcome.exit.code != 0:
            raise Missing(outcome.refused or f"true ended with {outcome.exit.code}")

    return call


def command_line() -> Call:
    """`agent-sandbox run -- true` in a project of its own, which keeps one sandbox between the calls."""
    return command(_typed("run", "--", "true"))


def by_daemon() -> Call:
    """The same while a daemon runs, which performs it."""
    return command(_typed("run", "--", "true"), settings={"AGENT_SANDBOX_STATE": serving("-of-a-daemon")})


def serving(suffix: str, *options: str) -> str:
    """Start a daemon that runs until this process ends, and return its directory of state, which is its own."""
    state = f"{here().host.state}{suffix}"
    program = _typed("run", "--", "true")[0]
    surroundings = {**os.environ, "AGENT_SANDBOX_STATE": state}
    daemon = subprocess.Popen((program, "serve", *options), env=surroundings, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    atexit.register(daemon.terminate)
    until = time.monotonic() + READY_SECONDS
    while not Path(state, "daemon", "socket").exists():
        if daemon.poll() is not None or time.monotonic() > until:
            raise Missing("the daemon does not start")
        time.sleep(0.05)
    return state


def hook() -> Call:
    """The answer to one tool call of a coding agent, with the start of the program. The event comes through a shell, as it does there."""
    event = {"hook_event_name": "PreToolUse", "tool_name": "Bash", "tool_input": {"command": "make test"}, "cwd": str(project())}
    path = project().parent / "event.json"
    path.write_text(json.dumps(event))
    program = Path(sys.executable).parent / "agent-sandbox"
    return command(("sh", "-c", f"{shlex.quote(str(program))} hook claude < {shlex.quote(str(path))} && echo"), None, lines=1)


BUSY = "for i in $(seq 100); do cat /etc/passwd > made.txt; done"  # programs started, and files opened and written


def simulating(line: str) -> Call:
    """A command line and its plan."""
    return command(_typed("sim", "--json", line), None, lines=10, cwd=project())


def thrown_away(line: str) -> Call:
    """The same command line, run and forgotten."""
    return command(_typed("run", "--throw-away", line), cwd=project())


def _typed(verb: str, *words: str) -> tuple[str, ...]:
    return (str(Path(sys.executable).parent / "agent-sandbox"), verb, "--project", str(project()), *words)


def project() -> Path:
    """Return the project of the measures, beside the directory of state."""
    made = Path(here().host.state).parent / "project"
    made.mkdir(parents=True, exist_ok=True)
    return made


ASLEEP = "print(flush=True); import time; time.sleep(3600)"


def megabytes_asleep(*, alive: int) -> float:
    """Proportional memory of one guest with its init, so many of them at once, asleep in their first line.

    A guest that waits for its program holds a little less: this is the upper bound, and needs no look inside the runtime.
    """
    sandbox = Sandbox(timeout_seconds=READY_SECONDS)
    return while_asleep(lambda told: sandbox.execute(ASLEEP, on_output=told), alive, sandbox.kill, _megabytes_of_each_guest)


def megabytes_asleep_inside(*, alive: int) -> float:
    """All the memory that so many guests inside WebAssembly take at once, asleep in their first line: theirs, their inits', and the
    zygote's with the compiled interpreter and its images. The pages they share are counted once."""
    session = _wasm_session()
    guests: list[ProcessGuest] = []

    def run(told: Callable[[str, bytes], None]) -> object:
        return session.run(Work(Code("python", ASLEEP), {**ENVIRONMENT, "HOME": "/tmp"}, on_output=told, on_start=guests.append))

    def end() -> None:
        for guest in guests:
            guest.kill()

    return while_asleep(run, alive, end, megabytes_of_all)


def while_asleep(run: Callable[..., object], alive: int, end: Callable[[], object], look: Callable[[], float]) -> float:
    """Start so many runs, and return what `look` finds while all of them are asleep. `run` is told by their first output."""
    asleep = threading.Semaphore(0)
    with ThreadPoolExecutor(alive) as threads:
        runs = [threads.submit(run, lambda *_: asleep.release()) for _ in range(alive)]
        try:
            if not all(asleep.acquire(timeout=READY_SECONDS) for _ in range(alive)):
                raise Missing(f"{alive} guests were not alive at once within {READY_SECONDS:.0f} s")
            return look()
        finally:
            end()
            for each in runs:
                each.result()


def megabytes_of_all() -> float:
    """Proportional memory of all processes that this one has started. The pages they share are counted once."""
    try:
        return sum(proportional_kib(pid) for pid in descendants(os.getpid())) / KIB
    except PermissionError as error:
        raise Missing("init hides its memory from this user, as from its guest; only root can look") from error


def megabytes_waiting(call: Call, *, calls: int, gap: float) -> float:
    """The same of the guests that wait between runs, however many the runtime thinks right."""
    for _ in range(calls):
        call()
        time.sleep(gap)
    return _megabytes_of_each_guest()


def _megabytes_of_each_guest() -> float:
    zygotes = _children(os.getpid())
    inits = [init for zygote in zygotes for init in _children(zygote)]
    if not inits:
        raise Missing("no pool yet: nothing waits between runs")
    try:
        total = sum(proportional_kib(pid) for init in inits for pid in (init, *descendants(init)))
    except PermissionError as error:
        raise Missing("init hides its memory from this user, as from its guest; only root can look") from error
    return total / KIB / len(inits)


def descendants(pid: int) -> list[int]:
    """Return the processes below one."""
    found = _children(pid)
    return [*found, *(grandchild for child in found for grandchild in descendants(child))]


def _children(pid: int) -> list[int]:
    return [int(word) for task in Path(f"/proc/{pid}/task").iterdir() for word in (task / "children").read_text().split()]


def proportional_kib(pid: int) -> int:
    """Return the proportional memory (PSS) of a process in KiB."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
