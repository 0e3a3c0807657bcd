"""The workers of one measure, asked one at a time."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any

from bench.peers import Missing
from bench.processor import KernelWorkers, Meter, meter, settled
from bench.trees import HOME

ROOT = Path(__file__).resolve().parent.parent
LEAVING_SECONDS = 20.0
PATIENCE = 300.0  # seconds for one answer: a peer that hangs must not take the others with it
BEFORE = "@before"  # behind the key of a subject: the same at an earlier commit
EARLIER = HOME / "before"  # that commit: its checkout, and a virtual environment of its own
_START = 'read -r go && exec "$@"'  # not before it is being metered


class Crew:
    """A worker process for each subject. A worker that cannot, breaks or hangs is missing from then on, with its reason."""

    def __init__(self, measure: str, keys: Sequence[str], *, metered: bool = False, patience: float = PATIENCE) -> None:
        self._measure = measure
        self._keys = tuple(keys)
        self._metered = metered
        self._patience = patience
        self._stack = ExitStack()
        self._workers: dict[str, subprocess.Popen[str]] = {}
        self._meters: dict[str, Meter] = {}
        self._missing: dict[str, str] = {}
        self._doubts: dict[str, str] = {}

    def __enter__(self) -> Crew:
        with ExitStack() as stack:
            stack.push(self._dismiss)
            for key in self._keys:
                try:
                    self._begin(key)
                except (OSError, Missing) as error:
                    self._missing[key] = str(error)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.__exit__(kind, error, trace)

    def ask(self, key: str, request: dict[str, Any]) -> list[float]:
        """Have one subject measured now, if it takes part."""
        if key in self._missing:
            return []
        stdin = self._workers[key].stdin
        assert stdin is not None
        try:
            stdin.write(json.dumps(request) + "\n")
            stdin.flush()
        except BrokenPipeError:
            self._missing[key] = "its process has ended"
            return []
        return self._receive(key)

    def spend(self, key: str, request: dict[str, Any], *, kernel: bool) -> list[float]:
        """Have a burst run, and return the milliseconds of processor time of one run; nothing where that cannot be told.

        With `kernel`, the time of the kernel's own workers meanwhile is counted with it.
        """
        if key in self._missing:
            return []
        metered = self._meters[key]
        began = settled(metered.seconds)
        workers = KernelWorkers() if kernel else None
        answered = self.ask(key, request)
        if not answered:
            return []
        spent = settled(metered.seconds) - began
        if workers is not None:
            more, self._doubts[key] = workers.seconds(spent)
            if self._doubts[key]:
                return []
            spent += more
        return [1000 * spent / (len(answered) + request["burst"]["skip"])]

    @property
    def means(self) -> tuple[str, ...]:
        """The meter that counts the processor time of the subjects that take part."""
        return tuple(sorted({counting.means for counting in self._meters.values()}))

    def missing(self, key: str) -> str:
        """Why a subject did not take part, or an empty string."""
        return self._missing.get(key, "")

    def doubt(self, key: str) -> str:
        """Why the last figure of a subject that takes part was not given."""
        return self._doubts.get(key, "it gave no figure")

    def _begin(self, key: str) -> None:
        worker = self._workers[key] = _start(self._measure, key)
        assert worker.stdin is not None
        if self._metered:
            self._meters[key] = meter(worker.pid)
        with suppress(BrokenPipeError):
            worker.stdin.write("go\n")
            worker.stdin.flush()
        self._receive(key)  # one after the other: two that warm up at once would only be slower

    def _receive(self, key: str) -> list[float]:
        worker = self._workers[key]
        assert worker.stdout is not None
        if not select.select([worker.stdout], [], [], self._patience)[0]:
            self._missing[key] = f"it hung: no answer within {self._patience:.0f} s"
            _end(worker)
            return []
        answer = _read(worker.stdout.readline(), earlier=key.endswith(BEFORE))
        if "missing" in answer:
            self._missing[key] = " ".join(str(answer["missing"]).split())
        values: list[float] = answer.get("values", [])
        return values

    def _dismiss(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        """Send everybody home; at once, if something went wrong."""
        for worker in self._workers.values():
            assert worker.stdin is not None
            assert worker.stdout is not None
            with suppress(BrokenPipeError):  # it has left already
                worker.stdin.close()  # the end of its input is the order to leave
            try:
                worker.wait(LEAVING_SECONDS if kind is None else 0)
            except subprocess.TimeoutExpired:
                _end(worker)
            worker.stdout.close()
        for counting in self._meters.values():
            counting.close()


def _start(measure: str, key: str) -> subprocess.Popen[str]:
    """Start the worker of a subject. That of an earlier commit has the earlier program, on a store of its own.

    It has a session of its own: whoever interrupts the benchmark does not interrupt it, and what it leaves behind can be found.
    """
    command = [sys.executable, "-m", "bench.worker", measure, key]
    place, environment = None, dict(os.environ)
    if key.endswith(BEFORE):
        command = [str(EARLIER / "venv/bin/python"), "-m", "bench.worker", measure, key.removesuffix(BEFORE)]
        place = ROOT if _measured_by_this(EARLIER / "venv/bin/python") else EARLIER / "checkout"
        for name in ("AGENT_SANDBOX_STATE", "XDG_STATE_HOME", "XDG_DATA_HOME"):
            if name in environment:
                environment[name] += "-before"
    return subprocess.Popen(
        ["sh", "-c", _START, "sh", *command],
        cwd=place,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@cache
def _measured_by_this(python: Path) -> bool:
    """Whether this benchmark can measure the earlier program, so that both do the same; otherwise the earlier benchmark does."""
    try:
        tried = subprocess.run(
            [python, "-c", "import bench.worker"], cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=PATIENCE
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return tried.returncode == 0


def _read(line: str, *, earlier: bool) -> dict[str, Any]:
    if not line:
        return {"missing": "that commit does not measure this, or cannot" if earlier else "its process has ended"}
    try:
        answer = json.loads(line)
    except ValueError:
        answer = None
    return answer if isinstance(answer, dict) else {"missing": f"it answered {line[:80]!r}"}


def _end(worker: subprocess.Popen[str]) -> None:
    """Kill a worker with all that it has started, and wait until they are gone. They are stopped first, so that none starts another."""
    handles: dict[int, int] = {}
    while new := {worker.pid, *_started_by(worker.pid)} - handles.keys():
        for pid in new:
            handles[pid] = -1
            with suppress(ProcessLookupError, PermissionError):
                handles[pid] = os.pidfd_open(pid)
                signal.pidfd_send_signal(handles[pid], signal.SIGSTOP)
    opened = [handle for handle in handles.values() if handle >= 0]
    for handle in opened:
        with suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
    for handle in opened:
        select.select([handle], [], [], LEAVING_SECONDS)
        os.close(handle)
    worker.wait()


def _started_by(leader: int) -> list[int]:
    """The descendants of a process, and whoever is in its session."""
    parents: dict[int, int] = {}
    found = []
    for entry in os.scandir("/proc"):
        with suppress(OSError, ValueError):  # not a process, or one that has ended
            fields = Path(entry.path, "stat").read_text().rpartition(")")[2].split()
            parents[int(entry.name)] = int(fields[1])
            if int(fields[3]) == leader and fields[0] != "Z":  # a zombie waits only for the machine's init to take note
                found.append(int(entry.name))
    below = {leader}
    while more := {pid for pid, parent in parents.items() if parent in below} - below:
        below |= more
    return sorted({*found, *below} - {leader})
