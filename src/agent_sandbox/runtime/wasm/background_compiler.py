"""Compile the interpreter in the background: one detached process for each cache, at the lowest priority.

The starting process takes the lock of the cache and passes it to the compiling process. So there is never a second compiling process, and a
held lock means that compiling goes on. Each attempt is recorded in a file before it begins; success removes the file. A recorded attempt
without a held lock has failed or was killed, and is retried after a delay that grows.

The compiling process outlives the program that started it. So the caller announces it, with its process id, and `doctor` shows it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress

from agent_sandbox.kernel.memory import available_memory
from agent_sandbox.kernel.wire import above_streams
from agent_sandbox.runtime.process.zygote import argv_for
from agent_sandbox.runtime.wasm import compiler
from agent_sandbox.runtime.wasm.cache import Cache, Untrusted

NEEDED_BYTES = 4 << 30  # of available memory: compiling takes 2.5 GiB, and must not push other processes out
GOING_ON = "it is being compiled in the background"
_FIRST_WAIT, _LONGEST_WAIT = 600.0, 86400.0  # seconds
_PROGRAM = "agent_sandbox.runtime.wasm.background_compiler"
_LOCK = 3  # descriptor of the lock in the compiling process
_REMEDY = "run: agent-sandbox setup"
_ANNOUNCEMENT = (
    "the WebAssembly interpreter is being compiled in the background, once, for some minutes, also after this program ends "
    "(process {pid}; to stop it: kill {pid}; to forbid it: AGENT_SANDBOX_NO_BACKGROUND=1)"
)


def begin(cache: Cache, words: Sequence[str], announce: Callable[[str], None], *, now: float) -> str:
    """Start compiling in the background, and return a message about its state.

    Nothing is started while compiling goes on, shortly after a failure, or without enough available memory. `words` are the arguments of
    `compiler`. `announce` is called with one line if a process was started.
    """
    try:
        lock = compiler.try_lock(cache)
        if lock is None:
            return GOING_ON
        lock = above_streams(lock)
        try:
            if why := _obstacle(cache, now):
                return why
            _start(cache, lock, words)
        finally:
            os.close(lock)
    except Untrusted as error:
        return f"it cannot be compiled: {error}"
    except OSError as error:
        return f"it cannot be compiled: {error.strerror} ({_REMEDY})"
    state = compiler.compilation(cache)
    if state is not None:  # else it has ended already
        announce(_ANNOUNCEMENT.format(pid=state.pid))
    return GOING_ON


def standing(cache: Cache, *, now: float) -> str:
    """Return a message about the state of compiling. Starts nothing."""
    state = compiler.compilation(cache)
    if state is not None:
        return f"{GOING_ON}{progress(state)}"
    if why := cache.distrust():
        return f"it cannot be compiled: {why}"
    return _obstacle(cache, now) or f"it has not been compiled yet ({_REMEDY})"


def progress(state: compiler.Compilation) -> str:
    """Return the progress of a compilation and how to stop it, to follow a message; "" if nothing is known yet."""
    if not state.pid:
        return ""
    step = f", {state.step} of {state.steps}: {state.what}" if state.step else ""
    return f"{step}; process {state.pid}, to stop it: kill {state.pid}"


def _obstacle(cache: Cache, now: float) -> str:
    failures, last, message = _read_record(_record_path(cache))
    if failures and now < last + min(_FIRST_WAIT * 2 ** min(failures - 1, 10), _LONGEST_WAIT):
        return f"compiling it failed{f': {message}' if message else ', or was ended'} ({_REMEDY})"
    available = available_memory()
    if available is not None and available < NEEDED_BYTES:
        return f"compiling it takes more memory than the {available >> 20} MB that are available ({_REMEDY})"
    return ""


def _record_path(cache: Cache) -> str:
    return os.path.join(cache.records, f"{cache.key}-attempt")


def _read_record(path: str) -> tuple[int, float, str]:
    """Return the number of unfinished attempts, the time of the last one, and its last line of output."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            count, *lines = file.read(1 << 16).splitlines()
            return int(count), os.fstat(file.fileno()).st_mtime, next((line for line in reversed(lines) if line.strip()), "")[:200]
    except (OSError, ValueError):
        return 0, 0.0, ""


def _start(cache: Cache, lock: int, words: Sequence[str]) -> None:
    path = _record_path(cache)
    failures, _, _ = _read_record(path)
    record = above_streams(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
    try:
        os.write(record, f"{failures + 1}\n".encode())
        streams = [(os.POSIX_SPAWN_OPEN, fd, "/dev/null", os.O_RDWR, 0) for fd in (0, 1)]
        actions = [*streams, (os.POSIX_SPAWN_DUP2, record, 2), (os.POSIX_SPAWN_DUP2, lock, _LOCK)]
        environment = {"PATH": os.defpath, "LANG": "C.UTF-8", "HOME": "/"}
        first = os.posix_spawn(sys.executable, argv_for(_PROGRAM, path, *words), environment, file_actions=actions, setsid=True)
    finally:
        os.close(record)
    with suppress(ChildProcessError):  # the application waits for every child itself
        os.waitpid(first, 0)  # it forks and ends; the fork that compiles is not our child


def main() -> None:
    """Run the compiling process: fork once, take the lowest priority, compile, and remove the record of the attempt."""
    if pid := os.fork():
        compiler.report(_LOCK, compiler.Compilation(pid))  # before the program that waits for us announces it
        os._exit(0)
    os.nice(19)
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")  # killed first when memory runs out
    root, record, *words = sys.argv[1:]
    os.set_inheritable(_LOCK, False)
    compiler.make([root, *words], _LOCK)
    os.unlink(record)
