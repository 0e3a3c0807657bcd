"""Compile the interpreter while nobody waits for it: one process for each cache, at the lowest priority, detached from who began it.

Who begins takes the lock of the cache and hands it on to the compiling process. So there is never a second one, and a lock that is held
means that it goes on. Each try is noted before it begins and forgotten when it has succeeded: what is noted and does not go on has failed,
or was killed, and is tried again after a while, which grows.
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

NEEDED_BYTES = 4 << 30  # available: it takes two and a half, and others are not to be pushed out
GOING_ON = "it is being compiled in the background"
_FIRST_WAIT, _LONGEST_WAIT = 600.0, 86400.0  # seconds
_PROGRAM = "agent_sandbox.runtime.wasm.background_compiler"
_LOCK = 3  # its descriptor in the compiling process
_REMEDY = "run: agent-sandbox setup"


def begin(cache: Cache, words: Sequence[str], *, now: float) -> str:
    """Have it compiled, unless that goes on, failed a short while ago, or would take memory that is not there. Says how it stands.

    `words` are what `building` is told.
    """
    try:
        lock = compiler.try_lock(cache)
        if lock is None:
            return GOING_ON
        try:
            if why := _hindrance(cache, now):
                return why
            _start(cache, lock, words)
        finally:
            os.close(lock)
    except OSError as error:
        return f"it cannot be compiled: {error.strerror} ({_REMEDY})"
    return GOING_ON


def standing(cache: Cache, *, now: float) -> str:
    """How it stands with compiling, in words. Nothing is begun."""
    if compiler.holder(cache) is not None:
        return GOING_ON
    return _hindrance(cache, now) or f"it has not been compiled yet ({_REMEDY})"


def _hindrance(cache: Cache, now: float) -> str:
    failures, last, said = _noted(_note(cache))
    if failures and now < last + min(_FIRST_WAIT * 2 ** min(failures - 1, 10), _LONGEST_WAIT):
        return f"compiling it failed{f': {said}' if said else ', or was ended'} ({_REMEDY})"
    available = available_memory()
    if available is not None and available < NEEDED_BYTES:
        return f"compiling it takes more memory than the {available >> 20} MB that are available ({_REMEDY})"
    return ""


def _note(cache: Cache) -> str:
    return os.path.join(cache.records, f"{cache.key}-attempt")


def _noted(path: str) -> tuple[int, float, str]:
    """How many tries were begun and not finished, when the last was, and the last line it said."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            count, *lines = file.read(1 << 16).splitlines()
            return int(count), os.fstat(file.fileno()).st_mtime, next((line for line in reversed(lines) if line.strip()), "")[:200]
    except (OSError, ValueError):
        return 0, 0.0, ""


def _start(cache: Cache, lock: int, words: Sequence[str]) -> None:
    os.makedirs(cache.records, mode=0o700, exist_ok=True)
    path = _note(cache)
    failures, _, _ = _noted(path)
    note = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.write(note, f"{failures + 1}\n".encode())
        streams = [(os.POSIX_SPAWN_OPEN, fd, "/dev/null", os.O_RDWR, 0) for fd in (0, 1)]
        actions = [*streams, (os.POSIX_SPAWN_DUP2, note, 2), (os.POSIX_SPAWN_DUP2, lock, _LOCK)]
        environment = {"PATH": os.defpath, "LANG": "C.UTF-8", "HOME": "/"}
        first = os.posix_spawn(sys.executable, argv_for(_PROGRAM, path, *words), environment, file_actions=actions, setsid=True)
    finally:
        os.close(note)
    with suppress(ChildProcessError):  # somebody else waits for every child
        os.waitpid(first, 0)  # it forks and ends: what goes on is nobody's child


def main() -> None:
    """The compiling process."""
    if os.fork():
        os._exit(0)
    os.nice(19)
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")  # the first to go where memory runs out
    root, note, *words = sys.argv[1:]
    os.set_inheritable(_LOCK, False)
    compiler.make([root, *words], _LOCK)
    os.unlink(note)
