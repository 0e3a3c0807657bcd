"""A running attempt: one attempt while it is under way. It runs work in the attempt's sandbox, within the limits of the experiment.

Everything goes through a session of its own, so each run is judged, recorded and confined as any other. It can be cancelled from every
thread: its guests are killed, and it takes no more work.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import contextmanager

from agent_sandbox._fast.values import TYPE_CHECKING, dataclass, replace
from agent_sandbox.engine.experiment.model import KEPT_OUTPUT, AttemptWork, StepEnd
from agent_sandbox.engine.experiment.reports import MOST_BYTES
from agent_sandbox.engine.work import Code, Outcome, Work
from agent_sandbox.errors import SandboxError
from agent_sandbox.runtime.base import ExitReason

if TYPE_CHECKING:
    from collections.abc import Iterator

    from agent_sandbox.engine.file_access import FileAnswer, FileRequest
    from agent_sandbox.engine.run import Session
    from agent_sandbox.policy.model import Limits
    from agent_sandbox.runtime.base import Guest
    from agent_sandbox.workspace.experiment_store import AttemptState

    OpenSession = Callable[[str, AttemptState, Limits], Session]

TIME_IS_UP = "the time limit was reached"
_ENDED = {
    ExitReason.TIMED_OUT: TIME_IS_UP,
    ExitReason.OUT_OF_MEMORY: "its share of the memory was not enough (--memory SIZE)",
    ExitReason.CPU_LIMIT: "its share of the processor time was used up",
    ExitReason.DISK_LIMIT: "the disk limit was reached",
    ExitReason.OUTPUT_LIMIT: "the output limit was reached",
    ExitReason.SHARE_LIMIT: "it held more than a run's share of the machine's open files or connections",
    ExitReason.KILLED: "it was killed",
}


class Cancelled(SandboxError):
    """The trial was cancelled: by the experiment, or by its time limit (`timed_out`). The text says why."""

    def __init__(self, why: str, *, timed_out: bool = False) -> None:
        super().__init__(why)
        self.timed_out = timed_out


class Tail:
    """The last bytes of each stream of a run. A run may print without end, and its last lines have the report."""

    def __init__(self) -> None:
        self._pieces: dict[str, bytearray] = {"stdout": bytearray(), "stderr": bytearray()}

    def __call__(self, stream: str, data: bytes) -> None:
        piece = self._pieces[stream]
        piece += data
        if len(piece) > 2 * MOST_BYTES:
            del piece[:-MOST_BYTES]

    def of(self, stream: str) -> bytes:
        """Return the last bytes of one stream."""
        return bytes(self._pieces[stream][-MOST_BYTES:])


@dataclass(frozen=True)
class AttemptAllowance:
    """The limits of one attempt, from its start on. None means that only the policy limits it."""

    seconds: float | None = None
    cpu_seconds: float | None = None
    memory_bytes: int | None = None


class Lifeline:
    """The running guests of an attempt, and whether it is over. Shared by an attempt and its check."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.over: Cancelled | None = None
        self._guests: set[Guest] = set()
        self._lock = threading.Lock()

    def started(self, guest: Guest) -> None:
        """Remember a running guest, and kill it if the attempt is over already."""
        with self._lock:
            self._guests.add(guest)
            over = self.over is not None
        if over:
            guest.kill()

    def ended(self) -> None:
        """Forget the guests: they have ended."""
        with self._lock:
            self._guests.clear()

    def cut(self, why: str, *, timed_out: bool) -> None:
        """Kill all guests. The first reason counts."""
        with self._lock:
            self.over = self.over or Cancelled(why, timed_out=timed_out)
            guests = tuple(self._guests)
        for guest in guests:
            guest.kill()


class RunningAttempt:
    """One attempt under way. Its methods raise `Cancelled` once it is over."""

    def __init__(self, name: str, state: AttemptState, limits: Limits, allowance: AttemptAllowance, open_session: OpenSession) -> None:
        self.name, self.state = name, state
        self.cpu_seconds = self.cost = 0.0
        self.notes: dict[str, None] = {}
        self._policy_limits, self._allowance, self._open = limits, allowance, open_session
        self._life = Lifeline()

    def begin(self) -> None:
        """Start the clock of the attempt."""
        self._life.began = time.monotonic()

    @property
    def seconds(self) -> float:
        """The seconds since the attempt began."""
        return time.monotonic() - self._life.began

    @property
    def late(self) -> bool:
        """Whether the time of the attempt is over."""
        return self._allowance.seconds is not None and self.seconds >= self._allowance.seconds

    def cancel(self, why: str, *, timed_out: bool = False) -> None:
        """End the attempt: kill what runs, and take no more work. The first reason counts."""
        self._life.cut(why, timed_out=timed_out)

    def check_alive(self) -> None:
        """Raise `Cancelled` if the attempt is over."""
        if (over := self._life.over) is not None:
            raise Cancelled(str(over), timed_out=over.timed_out)
        if self.late:
            raise Cancelled(TIME_IS_UP, timed_out=True)

    def limits(self) -> Limits:
        """Return the limits of the next run: those of the policy, or what is left to the attempt. Raises `Cancelled` if nothing is left."""
        self.check_alive()
        limits, allowed = self._policy_limits, self._allowance
        if allowed.seconds is not None:
            limits = replace(limits, wall_seconds=_least(limits.wall_seconds, max(0.001, allowed.seconds - self.seconds)))
        if allowed.cpu_seconds is not None:
            left = allowed.cpu_seconds - self.cpu_seconds
            if left <= 0:
                raise Cancelled("its share of the processor time was used up")
            limits = replace(limits, cpu_seconds=_least(limits.cpu_seconds, left))
        if allowed.memory_bytes is not None:
            limits = replace(limits, memory_bytes=int(_least(limits.memory_bytes, allowed.memory_bytes)))
        return limits

    def spend(self, amount: float) -> None:
        """Add to the cost of the attempt, for the cost limit of the experiment. Raises `Cancelled` if the attempt is over."""
        self.cost += amount
        self.check_alive()

    def perform(self, work: Work) -> Outcome:
        """Run work in the attempt's sandbox. Raises `Cancelled`, and as `Session.run` does."""
        with self.session() as session:
            outcome = session.run(replace(work, on_start=self.started))
        return self.count(outcome)

    def use_file(self, request: FileRequest, env: Mapping[str, str]) -> FileAnswer:
        """Do an operation on a file of the attempt's sandbox. Raises as `perform` does."""
        from agent_sandbox.engine.file_access import access_by_run  # few attempts use files this way

        with self.session() as session:
            return access_by_run(session, request, env=env, on_start=self.started)

    @contextmanager
    def session(self) -> Iterator[Session]:
        """Provide a session for one run, within what is left to the attempt. Approvals of the run end with the block."""
        session = self._open(self.name, self.state, self.limits())
        try:
            yield session
        finally:
            session.gate.end()
            self._life.ended()

    def started(self, guest: Guest) -> None:
        """Receive a guest that has started."""
        self._life.started(guest)

    def count(self, outcome: Outcome) -> Outcome:
        """Add what a run has used. Raises `Cancelled` if the run was ended because the attempt is over."""
        self.cpu_seconds += outcome.exit.usage.cpu_seconds
        self.notes.update(dict.fromkeys(outcome.notes))
        if self._life.over is not None:
            self.check_alive()
        return outcome

    def on(self, state: AttemptState) -> RunningAttempt:
        """Return this trial on another sandbox, for its check. Both share clock and end; `join` adds what the other has used."""
        other = RunningAttempt(self.name, state, self._policy_limits, self._allowance, self._open)
        other._life, other.cpu_seconds, other.cost = self._life, self.cpu_seconds, self.cost
        return other

    def join(self, other: RunningAttempt) -> None:
        """Add what the attempt on another sandbox has used."""
        self.cpu_seconds, self.cost = other.cpu_seconds, other.cost
        self.notes.update(other.notes)


def _least(one: float | None, other: float) -> float:
    return other if one is None else min(one, other)


def run_step(trial: RunningAttempt, work: AttemptWork, env: Mapping[str, str]) -> tuple[StepEnd, bytes]:
    """Run the work of an attempt or of its check. Return how it ended, and more of its output than that holds, to be read for reports."""
    tail = Tail()
    cwd = os.path.normpath(os.path.join(trial.state.project, work.cwd))
    outcome = trial.perform(Work(work.what, {**env, **work.env}, cwd=cwd, stdin=work.stdin, on_output=tail, collect=False))
    end = outcome.exit
    why = ""
    if outcome.refused:
        name = f"the {work.what.language} interpreter" if isinstance(work.what, Code) else work.what.argv[0]
        why = f"{name}: {outcome.refused}"
    elif end.reason in _ENDED:
        why = _ENDED[end.reason]
    output, errors = tail.of("stdout"), tail.of("stderr")
    return StepEnd(end.code, end.reason.value, output[-KEPT_OUTPUT:], errors[-KEPT_OUTPUT:], why), output + b"\n" + errors


class ReportMissing(SandboxError):
    """The file with the report of a check is not there, or cannot be read."""


def read_report(trial: RunningAttempt, path: str, env: Mapping[str, str], most: int) -> bytes:
    """Return the content of a file of the sandbox that a check has written. Raises `ReportMissing`."""
    from agent_sandbox.engine.file_access import FileRequest  # few checks write a file

    place = os.path.normpath(os.path.join(trial.state.project, path))
    answer = trial.use_file(FileRequest("read", place, limit=most), env)
    if answer.status != "done":
        raise ReportMissing(f"the report {path!r} cannot be read: {answer.status} {answer.detail}".rstrip())
    return answer.content
