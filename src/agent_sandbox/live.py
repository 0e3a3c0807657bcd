"""Live sandboxes: commands at the same time, programs that go on between commands, and files, all in one sandbox that stays.

A run of a `Sandbox` or a `Workspace` ends with all its processes, and has a /tmp of its own. A live sandbox is for agents that start a
server and then ask it, or whose framework expects one machine for all of its calls. The real files stay as they are.
"""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self, Unpack

from agent_sandbox import result
from agent_sandbox._calls import (
    Run,
    Runs,
    Shell,
    TextListener,
    check_timeout,
    check_type,
    encoded,
    with_arguments,
    with_variables,
    work_of,
)
from agent_sandbox.assembly import here
from agent_sandbox.config import environment
from agent_sandbox.engine.live_commands import LiveCommands
from agent_sandbox.engine.work import Code, Command, Work
from agent_sandbox.errors import Denied, PolicyError
from agent_sandbox.options import LiveOptions, OnOutput, PathLike
from agent_sandbox.result import SandboxResult
from agent_sandbox.workspace.changes import ChangeSet

if TYPE_CHECKING:
    from agent_sandbox.engine.file_access import FileAnswer, FileRequest
    from agent_sandbox.engine.run import Session
    from agent_sandbox.engine.runtimes import Runtimes
    from agent_sandbox.files import SandboxFiles

__all__ = ["LiveSandbox"]


class LiveSandbox:
    """A running sandbox, made by `Sandbox.live` or `Workspace.live`. It starts with the first command. Safe to use from many threads.

    Commands run at the same time. Each ends when its own process does; what it left in the background goes on, until the live sandbox is
    closed. /tmp and all other files stay as commands leave them. Wall time and output are limited for each command; memory, processor time,
    processes and disk for all together. Tools are for sessions.

    Close it, best by `with`: this ends all programs. The changes of a live sandbox of a `Workspace` are then the workspace's, to be
    reviewed and promoted; until then nobody else can use the workspace. A program inside can end the whole sandbox, and can forge what
    others print.

    >>> with Workspace.over(project).live() as live:
    ...     _ = live.run(shell("(sleep 0.2; echo two > late) & echo one > early"))
    ...     live.run(shell("while [ ! -s late ]; do sleep 0.1; done; cat early late")).stdout
    'one\\ntwo\\n'
    """

    def __init__(
        self,
        session: Session,
        work: Work,
        *,
        sandbox_id: str,
        runs: Runs,
        most_seconds: Callable[[float | None], float | None],
        lifetime: Callable[[], float | None] = lambda: None,
        on_end: Callable[[], object] = lambda: None,
    ) -> None:
        """Use `Sandbox.live` or `Workspace.live`. `work` has what all commands share: variables, directory, published ports.

        `most_seconds` returns the time limit of a command for the one that was asked for, `lifetime` the seconds that the owner still has.
        `on_end` is called when it is closed.
        """
        self.id = sandbox_id
        assert work.cwd is not None
        self.working_dir = work.cwd
        self._env = work.env
        self._commands = LiveCommands(session, work, lifetime)
        self._owner = runs
        self._runs = Runs("live sandbox", runs.check_open)
        self._most_seconds, self._on_end = most_seconds, on_end
        self._unclosed = weakref.finalize(self, _abandon, self._commands, repr(self))
        self._unclosed.atexit = False  # the interpreter ends with this process

    def __repr__(self) -> str:
        return f"<live sandbox {self._commands.turns.id} of {self.id}{f', ended: {self.ended}' if self.ended else ''}>"

    @property
    def ended(self) -> str:
        """Why the live sandbox has ended; empty before that."""
        return self._commands.turns.ended

    @property
    def changes(self) -> ChangeSet:
        """The changes on throw-away layers, once the live sandbox has ended. Those of a workspace are in `Workspace.changes`."""
        return self._commands.turns.changes

    @property
    def files(self) -> SandboxFiles:
        """The files of the sandbox, to be read, written and listed. Relative paths begin at `working_dir`."""
        from agent_sandbox.files import SandboxFiles  # few live sandboxes use files this way

        return SandboxFiles(self._use_file, self.working_dir)

    def run(self, work: str | Sequence[str] | Shell, **options: Unpack[LiveOptions]) -> SandboxResult:
        """Run a program with its arguments (a sequence of words), a bash command line (`shell("…")`), or Python code, a script of its own.

        Returns when the program has ended. Raises `SandboxError` if the live sandbox has ended or was closed.
        """
        return self._perform(Run(), work_of(work), **options)

    def _perform(
        self,
        run: Run,
        what: Code | Command,
        *,
        stdin: str | bytes = b"",
        env_vars: Mapping[str, str] | None = None,
        timeout: float | None = None,
        args: Sequence[str] = (),
        cwd: PathLike | None = None,
        on_output: OnOutput | None = None,
    ) -> SandboxResult:
        check_timeout(timeout)
        listener = TextListener.of(on_output)
        if cwd is not None:
            check_type("cwd", cwd, str, bytes, os.PathLike)
        work = Work(
            with_arguments(what, args),
            with_variables(self._env, environment(with_variables({}, env_vars))),
            cwd=self.working_dir if cwd is None else os.path.normpath(os.path.join(self.working_dir, os.fsdecode(cwd))),
            stdin=encoded(stdin),
            on_output=listener,
            on_start=run.started,
        )
        language = what.language if isinstance(what, Code) else None
        self._runs.begin(run)
        try:
            outcome = self._commands.run(work, self._most_seconds(timeout))
        except Denied as error:
            return result.refused(str(error), sandbox_id=self.id, language=language, verdict=error.verdict)
        except PolicyError as error:
            return result.refused(str(error), sandbox_id=self.id, language=language)
        finally:
            self._runs.end(run)
        if listener is not None:
            listener.finish()
        return result.completed(outcome, sandbox_id=self.id, language=language, wall="wall")

    def _use_file(self, run: Run, request: FileRequest) -> FileAnswer:
        self._runs.begin(run)
        try:
            return self._commands.use_file(request)
        finally:
            self._runs.end(run)

    def kill(self) -> None:
        """Kill everything in the sandbox, from any thread. Commands that wait raise `SandboxError`; so do later ones."""
        self._commands.turns.kill()

    def close(self) -> None:
        """End all programs, and keep the changes. Commands in other threads are killed first. Idempotent."""
        self._runs.close()
        self._runs.kill()
        self._runs.wait()
        self._unclosed.detach()
        self._commands.close()
        self._on_end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def native_runtimes(name: str) -> Runtimes:
    """Return the runtimes of a live sandbox: a native one, also if the choice is free. Raises `PolicyError` for any other."""
    if name not in ("process", "auto"):
        lacks = "no interpreter of ours" if name == "container" else "no processes"
        raise PolicyError(f"a live sandbox is refused with runtime={name!r}: it has {lacks}", hint='use runtime="process"')
    return here().runtimes("process")


def _abandon(commands: LiveCommands, what: str) -> None:
    """End a live sandbox that was dropped without being closed."""
    if commands.turns.running:
        commands.turns.abandon()
        warnings.warn(f"unclosed {what}", ResourceWarning, stacklevel=2)
