"""What can be seen of a sandbox from outside: its processes in the machine's own /proc, and whether real files are as they were."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path


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
