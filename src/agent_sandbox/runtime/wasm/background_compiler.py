"""Compile the interpreter in the background: one detached process for each cache, at the lowest priority.

The starting process takes the lock of the cache and passes it to the compiling process. So there is never a second compiling process, and a
held lock means that compiling goes on. Each attempt is recorded in a file before it begins; success removes the file. A recorded attempt
without a held lock has failed or was killed, and is retried after a delay that grows.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress

from agent_sandbox.kernel.memory import available_memory
from agent_sandbox.runtime.process.zygote import argv_for
from agent_sandbox.runtime.wasm import compiler
from agent_sandbox.runtime.wasm.cache import Cache

NEEDED_BYTES = 4 << 30  # of available memory: compiling takes 2.5 GiB, and must not push other processes out
GOING_ON = "it is being compiled in the background"
_FIRST_WAIT, _LONGEST_WAIT = 600.0, 86400.0  # seconds
_PROGRAM = "agent_sandbox.runtime.wasm.background_compiler"
_LOCK = 3  # descriptor of the lock in the compiling process
_REMEDY = "run: agent-sandbox setup"


def begin(cache: Cache, words: Sequence[str], *, now: float) -> str:
    """Start compiling in the background, and return a message about its state.

    Nothing is started while compiling goes on, shortly after a failure, or without enough available memory. `words` are the arguments of
    `compiler`.
    """
    try:
        lock = compiler.try_lock(cache)
        if lock is None:
            return GOING_ON
        try:
            if why := _obstacle(cache, now):
                return why
            _start(cache, lock, words)
        finally:
            os.close(lock)
    except OSError as error:
        return f"it cannot be compiled: {error.strerror} ({_REMEDY})"
    return GOING_ON


def standing(cache: Cache, *, now: float) -> str:
    """Return a message about the state of compiling. Starts nothing."""
    if compiler.holder(cache) is not None:
        return GOING_ON
    return _obstacle(cache, now) or f"it has not been compiled yet ({_REMEDY})"


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
    os.makedirs(cache.records, mode=0o700, exist_ok=True)
    path = _record_path(cache)
    failures, _, _ = _read_record(path)
    record = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
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
    if os.fork():
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
