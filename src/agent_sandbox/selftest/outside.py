"""Observe a sandbox from outside: its processes in the machine's /proc, and changes to real files. Also run work in a fork (`aside`)."""

from __future__ import annotations

import os
import pickle
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from agent_sandbox.errors import SandboxError
from agent_sandbox.kernel import syscalls as sc


def named(mark: str) -> list[int]:
    """Return the processes of the machine with this name, including those in sandboxes."""
    pids = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            if Path("/proc", pid, "comm").read_text().rstrip("\n") == mark:
                pids.append(int(pid))
    return pids


def status_of(pid: int) -> dict[str, str]:
    """Return the status of a process from the machine's own /proc."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def descendants(pid: int) -> dict[int, str]:
    """Return the descendants of a process, each with its start time, so that a reused pid is not mistaken for it."""
    parents, began = {}, {}
    for other in map(int, filter(str.isdigit, os.listdir("/proc"))):
        if fields := _stat(other):
            parents[other], began[other] = int(fields[1]), fields[19]
    processes: dict[int, str] = {}
    below = [pid]
    while below:
        children = [child for child, parent in parents.items() if parent in below]
        processes |= {child: began[child] for child in children}
        below = children
    return processes


def still_there(processes: dict[int, str]) -> dict[int, str]:
    """Return those of the processes that still live."""
    return {pid: began for pid, began in processes.items() if (fields := _stat(pid)) and fields[19] == began and fields[0] != "Z"}


def _stat(pid: int) -> list[str]:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()  # the name in parentheses may itself contain spaces and parentheses


def environment_address(pid: int) -> int:
    """Return the address of the environment in the memory of a process."""
    return int(_stat(pid)[47])


def end(pids: Iterable[int]) -> None:
    """Kill processes that an attempt left outside a sandbox."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def until(condition: Callable[[], object], seconds: float) -> bool:
    """Wait for a condition. Returns whether it came true within this time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def snapshot(top: str) -> dict[str, tuple[int, int, str]]:
    """Return mode, link count and content of each file below a directory."""
    entries = {}
    for directory, names, files in os.walk(top):
        for name in (*names, *files):
            path = Path(directory, name)
            status = path.lstat()
            entries[str(path.relative_to(top))] = (status.st_mode, status.st_nlink, path.read_text() if path.is_file() else "")
    return entries


T = TypeVar("T")


@contextmanager
def aside(work: Callable[[], T]) -> Iterator[Callable[[], T]]:
    """Run the work in a fork, and yield a function that waits for its result. If the block ends early, the work is unwound and waited for.

    That function raises `SandboxError` if the work did, or if it ended without a result.
    """
    reading, writing = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        _work(work, writing)
    os.close(writing)
    try:
        with os.fdopen(reading, "rb") as pipe:

            def result() -> T:
                value: T = _received(pipe.read())
                return value

            yield result
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
        os.waitpid(pid, 0)


def _work(work: Callable[[], Any], writing: int) -> None:
    """Do the work in the fork. Never returns, so that it does not close what its parent has open."""
    code = 1
    try:
        sc.prctl(sc.PR_SET_PDEATHSIG, signal.SIGTERM)  # unwind, too, if the parent dies
        try:
            answer: tuple[bool, Any] = True, work()
        except SandboxError as error:
            answer = False, (error.message, error.hint)
        with os.fdopen(writing, "wb") as pipe:
            pickle.dump(answer, pipe)
        code = 0
    except BaseException:  # an interrupt, or a closed pipe: the work is unwound, and the parent sees an empty answer
        code = 130
    finally:
        os._exit(code)


def _received(data: bytes) -> Any:
    if not data:
        raise SandboxError("a part of the self-test ended without a result", hint="run it again; if it stays, please report it")
    worked, value = pickle.loads(data)  # our own fork wrote it
    if not worked:
        message, hint = value
        raise SandboxError(message, hint=hint)
    return value
