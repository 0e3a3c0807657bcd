"""The result of a run in the SDK: flat fields, text, and one line for an error.

Output and the error line come from the program, and a hostile program may print anything. `status`, `exit`, `limits_hit` and `verdict` come
from us.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, assert_never

from agent_sandbox.runtime.base import Exit, ExitReason
from agent_sandbox.workspace.changes import ChangeSet

if TYPE_CHECKING:
    from agent_sandbox.egress.orders import FlowRecord
    from agent_sandbox.engine.publish import PublishedRecord
    from agent_sandbox.engine.work import Outcome
    from agent_sandbox.policy.decide import Verdict
    from agent_sandbox.runtime.router.model import Route

NOTHING_CHANGED = ChangeSet()
_TRACEBACK = "Traceback (most recent call last):"
_JAVASCRIPT_ERROR = re.compile(r"^(?:Uncaught )?[\w$.]*(?:Error|Exception)\b.*$", re.MULTILINE)
_SHOWN = 60  # characters of output, and of any other text, in the repr of a result
_LONGEST_ERROR = 2000  # characters; the whole of it is in stderr


class SandboxStatus(Enum):
    """The status of a run, or of a sandbox's latest run."""

    PENDING = "pending"  # nothing has run yet
    RUNNING = "running"
    COMPLETED = "completed"  # the program ended by itself, with exit code 0
    FAILED = "failed"  # the run ended in any other way, or was refused
    TIMEOUT = "timeout"  # a limit on time or fuel ended the run


@dataclass(frozen=True, repr=False)
class SandboxResult:
    """The result of a run. `error` is None if the run completed, else one line. If nothing ran, `exit_code` and `exit` are None.

    `stdout` and `stderr` are decoded as UTF-8 with replacement characters; the exact bytes are in `stdout_bytes` and `stderr_bytes`.
    """

    status: SandboxStatus
    stdout_bytes: bytes
    stderr_bytes: bytes
    exit_code: int | None
    error: str | None
    execution_time: float  # seconds, from the decision to the last of the output
    sandbox_id: str
    language: str | None  # its canonical name; None for a command
    exit: Exit | None = None  # with the reason, the limits that were reached, and what was used
    changes: ChangeSet = NOTHING_CHANGED  # its captured changes; recorded if file writes are allowed
    route: Route | None = None  # the runtime, the reason for it, the other runtimes, and what a first run in another runtime lacked
    verdict: Verdict | None = None  # the verdict of the policy; None if the input was invalid, so that it was not judged
    limits_hit: tuple[str, ...] = ()  # of "wall", "cpu", "memory", "processes", "output", "disk", "share", "fuel", "lifetime"
    notes: tuple[str, ...] = ()  # what is weaker or different than a caller may expect
    network: tuple[FlowRecord, ...] = ()  # its connections and queries for names, with those that were refused
    published: tuple[PublishedRecord, ...] = ()  # how its published ports were used
    value: Any = None  # the value of the last expression of a turn, as data: see `SandboxSession`
    value_repr: str | None = None  # the `repr` of this value if it is not data; then `value` is None
    tool_errors: tuple[Exception, ...] = ()  # the first hundred exceptions of tools; the program sees less of them

    @property
    def stdout(self) -> str:
        """Standard output as text."""
        return self.stdout_bytes.decode("utf-8", "replace")

    @property
    def stderr(self) -> str:
        """Standard error as text."""
        return self.stderr_bytes.decode("utf-8", "replace")

    @property
    def truncated(self) -> bool:
        """Whether output was cut at `max_output_bytes`."""
        return "output" in self.limits_hit

    @property
    def success(self) -> bool:
        """Whether the program ran and ended with exit code 0."""
        return self.status is SandboxStatus.COMPLETED

    def __repr__(self) -> str:
        """Return one short line. Of output and text it shows only the beginning: the whole may be long, or secret."""
        parts = [self.status.name]
        parts += [f"exit_code={self.exit_code}"] if self.exit_code is not None else []
        parts += [f"error={_beginning(self.error)}"] if self.error else []
        parts += [f"{name}={_beginning(text)}" for name, text in (("stdout", self.stdout), ("stderr", self.stderr)) if text]
        parts += [f"value={_beginning(repr(self.value), plain=True)}"] if self.value is not None else []
        parts += [f"value_repr={_beginning(self.value_repr)}"] if self.value_repr is not None else []
        parts += [f"changes={len(self.changes)}"] if self.changes else []
        parts += [f"limits_hit={self.limits_hit}"] if self.limits_hit else []
        return f"{type(self).__name__}({', '.join(parts)}, execution_time={self.execution_time:.3f})"


def _beginning(text: str, *, plain: bool = False) -> str:
    """Return the beginning of a text on one line, in quotes unless it is `plain` source, and with its length if it is cut."""
    shown = text[:_SHOWN].encode("ascii", "backslashreplace").decode() if plain else ascii(text[:_SHOWN])
    return shown if len(text) <= _SHOWN else f"{shown}… ({len(text):,} characters)"


def completed(outcome: Outcome, *, sandbox_id: str, language: str | None, wall: str) -> SandboxResult:
    """Return the result of a finished run. `wall` names the limit that set its wall time: "wall" or "lifetime"."""
    end = outcome.exit
    hit = tuple(wall if name == "wall" else name for name in end.limits_hit)
    status = _status(end, outcome.refused)
    return SandboxResult(
        status=status,
        stdout_bytes=outcome.stdout,
        stderr_bytes=outcome.stderr,
        exit_code=end.code,
        error=None if status is SandboxStatus.COMPLETED else _error(outcome, language, wall)[:_LONGEST_ERROR],
        execution_time=outcome.seconds,
        sandbox_id=sandbox_id,
        language=language,
        exit=end,
        changes=outcome.changes,
        route=outcome.route,
        verdict=outcome.verdict,
        limits_hit=hit,
        notes=outcome.notes,
        network=outcome.network,
        published=outcome.published,
        tool_errors=outcome.tool_errors,
    )


def refused(error: str, *, sandbox_id: str, language: str | None, verdict: Verdict | None = None) -> SandboxResult:
    """Return the result of a refused run."""
    return SandboxResult(SandboxStatus.FAILED, b"", b"", None, error, 0.0, sandbox_id, language, verdict=verdict)


def _status(end: Exit, could_not_start: str) -> SandboxStatus:
    if end.reason in (ExitReason.TIMED_OUT, ExitReason.CPU_LIMIT, ExitReason.FUEL_LIMIT):
        return SandboxStatus.TIMEOUT
    done = end.reason is ExitReason.EXITED and end.code == 0 and not could_not_start
    return SandboxStatus.COMPLETED if done else SandboxStatus.FAILED


def _error(outcome: Outcome, language: str | None, wall: str) -> str:
    end = outcome.exit
    match end.reason:
        case ExitReason.TIMED_OUT:
            what = "the lifetime of the sandbox ended" if wall == "lifetime" else "timed out: the wall-time limit was reached"
            return f"{what} after {end.usage.wall_seconds:.1f} s"
        case ExitReason.CPU_LIMIT:
            return f"timed out: the processor-time limit was reached after {end.usage.cpu_seconds:.1f} s of processor time"
        case ExitReason.FUEL_LIMIT:
            return f"timed out: the limit on fuel was reached after {end.usage.fuel} units"
        case ExitReason.OUT_OF_MEMORY:
            return "out of memory: the memory limit was reached"
        case ExitReason.OUTPUT_LIMIT:
            return "too much output: it went on far beyond the output limit and was ended"
        case ExitReason.DISK_LIMIT:
            return "too much written: the disk limit was reached"
        case ExitReason.SHARE_LIMIT:
            return "too much of the machine: it held more than a run's share of the open files or closing connections of the machine"
        case ExitReason.GARBLED:
            return f"ended for a malformed message to its host: {outcome.refused}"
        case ExitReason.KILLED:
            return "killed: the sandbox was closed or the run was cancelled"
        case ExitReason.SIGNALLED:
            return f"ended by signal {_signal_name(end.signal)}"
        case ExitReason.EXITED:
            if outcome.refused:
                return f"could not be started: {outcome.refused}"
            text = outcome.stderr.decode("utf-8", "replace")
            return _last_words(text, language) or f"exit code {end.code}"
        case _:
            assert_never(end.reason)


def _last_words(stderr: str, language: str | None) -> str:
    """Return the line of a program's error output that tells what went wrong."""
    lines = [line for line in stderr.splitlines() if line.strip()]
    if language == "python" and _TRACEBACK in lines:
        # Frames are indented; the first line that is not names the exception. Notes and further lines of its message follow.
        after = lines[len(lines) - lines[::-1].index(_TRACEBACK) :]
        return next((line for line in after if not line.startswith(" ")), "")
    if language == "javascript" and (found := _JAVASCRIPT_ERROR.search(stderr)):
        return found[0]
    flush = [line for line in lines if not line[0].isspace()]
    return (flush or lines or [""])[-1].strip()


def _signal_name(number: int | None) -> str:
    try:
        return signal.Signals(number or 0).name
    except ValueError:  # a real-time signal has no name
        return str(number)
