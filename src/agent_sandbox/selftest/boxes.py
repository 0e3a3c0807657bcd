"""Boxes: the places where attempts run, and their results. `Bare` is no sandbox at all: it shows that an attempt can succeed."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from ast import literal_eval
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from agent_sandbox._fast.values import dataclass, field
from agent_sandbox.errors import SandboxError
from agent_sandbox.kernel import forks

ATTEMPTS = Path(__file__).with_name("attempts")
_PATIENCE_SECONDS = 20.0  # far above the time of any attempt on an idle machine
STAY_SECONDS = 10.0  # how long an attempt stays to be watched; normally it is ended first
_ANSWER = b"answer "
# The interpreter itself, not the link in a virtual environment: the packages are not needed, and it starts in half the time.
PYTHON = (os.path.realpath(sys.executable), "-I", "-S")


def patience() -> float:
    """Return the time limit of an attempt, in seconds. It is longer if the machine is busy."""
    return _PATIENCE_SECONDS * max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))


class NoAnswer(SandboxError):
    """An attempt did not finish, so it shows nothing about the attack."""


@dataclass(frozen=True)
class Found:
    """The findings of a probe or an attempt: the ways that got through, with the evidence, and the refused ways, with the error."""

    reached: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class AttemptResult(Found):
    """The findings of one attempt, and how its run ended.

    `answered` is whether the attempt printed its findings; if a limit ended it before, `limits_hit` names the limit.
    """

    answered: bool = True
    ended: str = ""
    limits_hit: tuple[str, ...] = ()
    kept: int = 0  # bytes of its output that were kept


@dataclass(frozen=True)
class Attempt:
    """A function in `attempts/`, its arguments, and the conditions under which it runs.

    `limits` are fields of `policy.model.Limits` that replace the box's own. `watch` is called once, after the attempt has printed its
    findings and while it still runs. With `may_end`, the attempt may end without printing its findings.
    """

    module: str
    function: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    limits: Mapping[str, Any] = field(default_factory=dict)
    throw_away: bool = False  # use throw-away layers in a box that normally keeps its layers
    project: bool = False  # show the project even where nothing else of the machine is shown
    tools: tuple[str, ...] = ()  # allow only these programs where processes are otherwise not allowed
    network: tuple[str, ...] = ()  # allow these hosts where there is otherwise no network
    terminal: bool = False
    session: bool = False  # without a sandbox, stay in the session of the caller
    watch: Callable[[], None] | None = None
    may_end: bool = False

    def call(self) -> str:
        """Return the arguments of `attempts.main` as Python source."""
        return repr((self.function, dict(self.arguments), STAY_SECONDS if self.watch is not None else 0.0))


class Box(Protocol):
    """A place where attempts run: a sandbox, or the bare machine."""

    name: str
    processes: bool  # whether it permits starting processes
    writes: bool  # whether it lets a program write anywhere, and captures the writes

    def run(self, attempt: Attempt) -> AttemptResult:
        """Run an attempt. Raises `NoAnswer` if it ends without printing its findings, unless its `may_end` is set."""
        ...

    def supervisor(self) -> tuple[str, ...]:
        """Return the command line of a program that starts such a box, prints a line once the box runs, and lets it run for a while."""
        ...

    def recorded_as(self, attempt: Attempt) -> str:
        """Return the text that the ledger's entry for this attempt must contain."""
        ...


def program(module: str) -> str:
    """Return the source of one module of attempts, preceded by the source of the frame that runs them.

    It is one text without imports of ours, because a sandbox of the SDK shows none of our files.
    """
    frame, text = ((ATTEMPTS / f"{name}.py").read_text(encoding="utf-8") for name in ("__init__", module))
    own = [line for line in text.splitlines(keepends=True) if not line.startswith(("from __future__ ", "from agent_sandbox."))]
    return frame + "".join(own)


def read_answer(attempt: Attempt, output: bytes, errors: bytes, *, ended: str = "", limits_hit: tuple[str, ...] = ()) -> AttemptResult:
    """Return the findings that an attempt printed. Raises `NoAnswer` if there are none, unless the attempt's `may_end` is set."""
    for line in output.splitlines():
        _, mark, text = line.partition(_ANSWER)  # a terminal may have echoed something before it
        if mark:
            try:
                answer = literal_eval(text.decode())
            except (ValueError, SyntaxError):  # cut off at its end
                break
            return AttemptResult(answer["reached"], answer["refused"], True, ended, limits_hit, len(output))
    if not attempt.may_end:
        last = errors.decode(errors="replace").strip().rpartition("\n")[2]
        raise NoAnswer(f"the attempt {attempt.module}.{attempt.function} gave no answer: {last or ended or 'it said nothing'}")
    return AttemptResult(answered=False, ended=ended, limits_hit=limits_hit, kept=len(output))


class Bare:
    """No sandbox: a child process with our environment, descriptors and rights."""

    name = "bare"
    processes = True
    writes = False

    def __init__(self, project: str, scripts: str, wall: Callable[[], None] | None = None) -> None:
        """With `wall`, attempts run behind this single wall: it is called in their process before their program starts."""
        self._project = project
        self._scripts = scripts
        self._wall = wall

    def run(self, attempt: Attempt) -> AttemptResult:
        """Run an attempt on the machine itself. Attempts are written so that they damage only what was planted for them."""
        terminal, stdin = pty.openpty() if attempt.terminal else (-1, subprocess.DEVNULL)
        mask = forks.hold_signals()

        def prepare() -> None:
            forks.drop_handlers()
            forks.release_signals(mask)
            if self._wall is not None:
                self._wall()

        try:
            process = subprocess.Popen(
                [*PYTHON, f"{self._scripts}/{attempt.module}.py", attempt.call()],
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=self._project,
                close_fds=False,  # like a careless parent: inheritable descriptors are inherited
                start_new_session=not attempt.session,
                preexec_fn=prepare,
            )
        except BaseException:
            forks.release_signals(mask)
            raise
        try:
            forks.release_signals(mask)
            if attempt.watch is not None:
                assert process.stdout is not None
                line = process.stdout.readline()
                attempt.watch()
                process.kill()
                return read_answer(attempt, line, b"")
            output, errors = process.communicate(timeout=patience())
            return read_answer(attempt, output, errors, ended="" if process.returncode == 0 else f"exit code {process.returncode}")
        except subprocess.TimeoutExpired:
            raise NoAnswer(f"the attempt {attempt.module}.{attempt.function} did not end without a sandbox") from None
        finally:
            if process.poll() is None and attempt.session:
                process.kill()
            elif process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # it leads its own group, and its pid is not reused before we wait
            process.communicate()
            for end in (terminal, stdin) if attempt.terminal else ():
                os.close(end)

    def supervisor(self) -> tuple[str, ...]:
        """Return the command line of a program that leaves a child in a session of its own."""
        code = "import subprocess as s, time; s.Popen(['sleep', '10'], start_new_session=True); print('runs', flush=True); time.sleep(10)"
        return (*PYTHON, "-c", code)

    def recorded_as(self, attempt: Attempt) -> str:
        """Return the call of the attempt. No entry of the ledger contains it: without a sandbox, no attempt is recorded."""
        return attempt.call()
