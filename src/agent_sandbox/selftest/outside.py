"""What can be seen of a sandbox from outside: its processes in the machine's own /proc, and whether real files are as they were."""

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
    """The processes of the machine, those in sandboxes too, that have taken a name."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            if Path("/proc", pid, "comm").read_text().rstrip("\n") == mark:
                found.append(int(pid))
    return found


def status_of(pid: int) -> dict[str, str]:
    """What the machine's own /proc says of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def descendants(pid: int) -> dict[int, str]:
    """The processes below one, each with when it began, so that a number that is used again is not taken for it."""
    parents, began = {}, {}
    for other in map(int, filter(str.isdigit, os.listdir("/proc"))):
        if fields := _stat(other):
            parents[other], began[other] = int(fields[1]), fields[19]
    found: dict[int, str] = {}
    below = [pid]
    while below:
        children = [child for child, parent in parents.items() if parent in below]
        found |= {child: began[child] for child in children}
        below = children
    return found


def still_there(processes: dict[int, str]) -> dict[int, str]:
    """Those of them that live."""
    return {pid: began for pid, began in processes.items() if (fields := _stat(pid)) and fields[19] == began and fields[0] != "Z"}


def _stat(pid: int) -> list[str]:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()  # the name in parentheses may itself hold spaces and parentheses


def environment_address(pid: int) -> int:
    """Where in its memory a process has its environment."""
    return int(_stat(pid)[47])


def end(pids: Iterable[int]) -> None:
    """End what an attempt left outside a sandbox."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def until(condition: Callable[[], object], seconds: float) -> bool:
    """Whether it comes true within this time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def snapshot(top: str) -> dict[str, tuple[int, int, str]]:
    """Mode, links and content of each file below a directory."""
    found = {}
    for directory, names, files in os.walk(top):
        for name in (*names, *files):
            path = Path(directory, name)
            status = path.lstat()
            found[str(path.relative_to(top))] = (status.st_mode, status.st_nlink, path.read_text() if path.is_file() else "")
    return found


T = TypeVar("T")


@contextmanager
def aside(work: Callable[[], T]) -> Iterator[Callable[[], T]]:
    """Begin the work; what is given to the block waits for its result. When the block ends early the work is unwound, and waited for.

    Asking raises `SandboxError` where the work did, and when it ended without a result.
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
    """In the fork. Never returns: what its parent has open is not for it to close."""
    code = 1
    try:
        sc.prctl(sc.PR_SET_PDEATHSIG, signal.SIGTERM)  # to be unwound too when nobody is left who would ask
        try:
            answer: tuple[bool, Any] = True, work()
        except SandboxError as error:
            answer = False, (error.message, error.hint)
        with os.fdopen(writing, "wb") as pipe:
            pickle.dump(answer, pipe)
        code = 0
    except BaseException:  # an interrupt, or a reader that is gone: it has been unwound, and the parent sees that nothing came
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
