"""Where an attempt runs and what came of it; and the box that is none: the bare machine, which shows that the attempt can succeed."""

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

ATTEMPTS = Path(__file__).with_name("attempts")
PATIENCE_SECONDS = 20.0  # far above what any attempt takes; a machine under heavy load must not fail them
STAY_SECONDS = 10.0  # how long an attempt stays to be looked at, unless it is ended first, as it is
_ANSWER = b"answer "
# The interpreter itself, not a link to it in a virtual environment: its packages are not needed, and it starts in half the time.
PYTHON = (os.path.realpath(sys.executable), "-I", "-S")


class NoAnswer(SandboxError):
    """An attempt did not come to its end, so it says nothing of what it attempted."""


@dataclass(frozen=True)
class Ran:
    """What came of one attempt: the ways that got through, with their evidence; those that were refused, and how; how the run ended.

    An attempt that was ended by a limit has `answered` nothing; `ended` then says by which.
    """

    reached: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    answered: bool = True
    ended: str = ""
    limits_hit: tuple[str, ...] = ()
    kept: int = 0  # bytes of its output that we hold


@dataclass(frozen=True)
class Attempt:
    """A function in `attempts/`, what it is called with, and the surroundings it asks for.

    `limits` are fields of `policy.limits.Limits` to be used in place of the box's own. `watch` is called once, while it runs, after it
    has answered. `may_end` says that being ended is an answer too.
    """

    module: str
    function: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    limits: Mapping[str, Any] = field(default_factory=dict)
    throw_away: bool = False  # where layers would be kept, in those that are not
    project: bool = False  # show the project, where nothing of the machine is shown otherwise
    tools: tuple[str, ...] = ()  # where processes are not allowed otherwise, let these programs be started, and no others
    terminal: bool = False
    watch: Callable[[], None] | None = None
    may_end: bool = False

    def call(self) -> str:
        """What `attempts.frame.main` is called with, as Python."""
        return repr((self.function, dict(self.arguments), STAY_SECONDS if self.watch is not None else 0.0))


class Box(Protocol):
    """A place where attempts run."""

    name: str
    processes: bool  # whether starting processes is permitted in it
    writes: bool  # whether it lets a program write anywhere and captures that

    def run(self, attempt: Attempt) -> Ran:
        """Carry it out. Raises `NoAnswer` when it did not come to its end and may not."""
        ...

    def supervisor(self) -> tuple[str, ...]:
        """The command line of a program that runs something of this kind for a while and prints a line once it runs."""
        ...

    def recorded_as(self, attempt: Attempt) -> str:
        """What the ledger's entry for this attempt must hold."""
        ...


def program(module: str) -> str:
    """The text of the attempts of one module, in one piece: a locked sandbox shows no other file of ours."""
    frame, text = ((ATTEMPTS / f"{name}.py").read_text(encoding="utf-8") for name in ("frame", module))
    own = [line for line in text.splitlines(keepends=True) if not line.startswith(("from __future__ ", "from agent_sandbox."))]
    return frame + "".join(own)


def read_answer(attempt: Attempt, output: bytes, errors: bytes, *, ended: str = "", limits_hit: tuple[str, ...] = ()) -> Ran:
    """What an attempt said in its output. Raises `NoAnswer` when it said nothing and may not."""
    for line in output.splitlines():
        if line.startswith(_ANSWER):
            try:
                said = literal_eval(line.removeprefix(_ANSWER).decode())
            except (ValueError, SyntaxError):  # its end was cut
                break
            return Ran(said["reached"], said["refused"], True, ended, limits_hit, len(output))
    if not attempt.may_end:
        last = errors.decode(errors="replace").strip().rpartition("\n")[2]
        raise NoAnswer(f"the attempt {attempt.module}.{attempt.function} gave no answer: {last or ended or 'it said nothing'}")
    return Ran(answered=False, ended=ended, limits_hit=limits_hit, kept=len(output))


class Bare:
    """No sandbox: a child of ours with our environment, our descriptors and our rights."""

    name = "bare"
    processes = True
    writes = False

    def __init__(self, project: str, scripts: str) -> None:
        self._project = project
        self._scripts = scripts

    def run(self, attempt: Attempt) -> Ran:
        """Carry it out on the machine itself. Attempts are made so that this harms nothing but what was planted for them."""
        terminal, stdin = pty.openpty() if attempt.terminal else (-1, subprocess.DEVNULL)
        # Like a careless parent: what is inheritable is inherited.
        process = subprocess.Popen(
            [*PYTHON, f"{self._scripts}/{attempt.module}.py", attempt.call()],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=self._project,
            close_fds=False,
            start_new_session=True,
        )
        try:
            if attempt.watch is not None:
                assert process.stdout is not None
                said = process.stdout.readline()
                attempt.watch()
                process.kill()
                return read_answer(attempt, said, b"")
            output, errors = process.communicate(timeout=PATIENCE_SECONDS)
            return read_answer(attempt, output, errors, ended="" if process.returncode == 0 else f"exit code {process.returncode}")
        except subprocess.TimeoutExpired:
            raise NoAnswer(f"the attempt {attempt.module}.{attempt.function} did not end without a sandbox") from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # it leads a group of its own, and its number is not free before we have waited
            process.communicate()
            for end in (terminal, stdin) if attempt.terminal else ():
                os.close(end)

    def supervisor(self) -> tuple[str, ...]:
        """One that leaves a child in a session of its own."""
        code = "import subprocess as s, time; s.Popen(['sleep', '10'], start_new_session=True); print('runs', flush=True); time.sleep(10)"
        return (*PYTHON, "-c", code)

    def recorded_as(self, attempt: Attempt) -> str:
        """Nothing records it; what an entry would hold is the same as for a command."""
        return attempt.call()
