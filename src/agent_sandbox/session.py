"""A Python interpreter that keeps its state between turns. A thin layer over `engine.turns`.

Errors are as in `sandbox`: a problem of the code is a result; a problem of the settings or of this machine is raised.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

from agent_sandbox import result
from agent_sandbox._fast.values import replace
from agent_sandbox.config import check_type
from agent_sandbox.engine.tools import named
from agent_sandbox.engine.turns import InterpreterTurns, Turn
from agent_sandbox.engine.work import Code, Work
from agent_sandbox.errors import Denied, PolicyError, SandboxError
from agent_sandbox.result import SandboxResult, SandboxStatus
from agent_sandbox.sandbox import CLOSING_SECONDS, ENVIRONMENT, OnOutput, Run, Sandbox, TextListener, TurnOptions, code_of, encoded
from agent_sandbox.workspace.changes import ChangeSet


class SandboxSession:
    """A Python interpreter in a sandbox, made by `Sandbox.session`. It runs one turn at a time; others wait.

    Variables, imports, functions, the working directory and files stay from turn to turn. `result.value` is the value of the turn's last
    expression, as data. If the value is not data, `result.value` is None and `result.value_repr` is its repr. An exception, or
    `sys.exit()`, ends only its turn; the session goes on. A turn that exceeds its time, or that ends the interpreter, ends the session. Its
    result says why, and from then on `run` raises `SandboxError`.

    Wall time and output are limited for each turn; processor time, memory, processes and disk for the session. Between turns nothing is
    read from the interpreter: output and tool calls of its threads wait for the next turn.
    """

    def __init__(
        self,
        sandbox: Sandbox,
        *,
        env_vars: Mapping[str, str] | None = None,
        timeout: float | None = None,
        args: Sequence[str] = (),
        tools: object = (),
        on_output: OnOutput | None = None,
    ) -> None:
        check_type("sandbox", sandbox, Sandbox, "Sandbox().session()")
        config = sandbox.config
        handed = {**config.toolbox, **named(tools)}
        self._sandbox = sandbox
        self._timeout = timeout
        self._on_output = on_output
        self._turns = InterpreterTurns(
            sandbox.within(timeout, tools=handed, deterministic=sandbox.config.deterministic)[0],
            Work(
                Code("python", "", tuple(args)),
                {**ENVIRONMENT, **config.env_vars, **(env_vars or {})},
                cwd=config.cwd,
                preload=tuple(config.preload),
                tools=handed,
                ends=sandbox.expires,
                seed=config.seed,
                observe=sandbox.observes and not config.deterministic,
                log_observed=True,
            ),
        )
        self._lock = threading.Lock()
        self._taking = 0  # the thread that takes a turn
        self._closing = False

    def __repr__(self) -> str:
        return f"<session {self.id} of sandbox {self._sandbox.id}{f', ended: {self._turns.ended}' if self._turns.ended else ''}>"

    @property
    def id(self) -> str:
        """The id of the session in the ledger."""
        return self._turns.id

    @property
    def ended(self) -> str:
        """Why the session has ended; empty before that."""
        return self._turns.ended

    @property
    def changes(self) -> ChangeSet:
        """The changes of all turns together, once the session has ended. Only known if file writes are allowed."""
        return self._turns.changes

    def run(self, code: str, **options: Unpack[TurnOptions]) -> SandboxResult:
        """Run one turn and wait for its end. `input()` reads `stdin`; programs that the turn starts have empty input."""
        return self.perform(Run(), code, **options)

    def perform(
        self, run: Run, code: str, *, stdin: str | bytes = b"", timeout: float | None = None, on_output: OnOutput | None = None
    ) -> SandboxResult:
        """Run one turn. `run` is a handle with which another thread can cancel it."""
        source, call = code_of(code, "python").source, on_output or self._on_output
        if self._taking == threading.get_ident():
            raise SandboxError("this session is in a turn, which waits for this call", hint="use another session in it")
        with self._lock:
            self._sandbox.begin(run)  # raises if the sandbox is closed now, or its lifetime is over
            self._taking = threading.get_ident()
            status = SandboxStatus.FAILED  # also when an exception passes through
            try:
                listener = TextListener(call) if call is not None else None
                outcome = self._result(source, run, encoded(stdin), timeout, listener)
                status = outcome.status
            finally:
                self._taking = 0
                if self._closing:
                    self._close()
                self._sandbox.end(run, status)
            if listener is not None:
                listener.finish()
            return outcome

    def _result(self, source: str, run: Run, stdin: bytes, timeout: float | None, listener: TextListener | None) -> SandboxResult:
        about: dict[str, Any] = {"sandbox_id": self._sandbox.id, "language": "python"}
        try:
            seconds, wall, left = self._sandbox.time_for(self._timeout if timeout is None else timeout)
            turned = self._turns.run(Turn(source, stdin, seconds, left, listener, run.started))
        except PolicyError as error:
            return self._sandbox.told(result.refused(str(error), **about))
        except Denied as error:
            return self._sandbox.told(result.refused(str(error), verdict=error.verdict, **about))
        outcome = self._sandbox.told(result.completed(turned.outcome, wall=wall, **about))
        return replace(outcome, value=turned.value, value_repr=turned.described)

    def kill(self) -> None:
        """Kill the interpreter, from any thread. A running turn reports it."""
        self._turns.kill()

    def close(self) -> None:
        """End the session; a turn in another thread is killed first. The interpreter runs its exit functions. Idempotent."""
        self._closing = True
        if self._taking == threading.get_ident():  # called by a tool or callback of a turn: the turn closes the session at its end
            self._turns.kill()
            return
        if not self._lock.acquire(blocking=False):
            self._turns.kill()
            if not self._lock.acquire(timeout=CLOSING_SECONDS):  # a tool takes long: the turn that waits for it closes the session
                return
        try:
            self._close()
        finally:
            self._lock.release()

    def _close(self) -> None:
        try:
            self._turns.close()
        finally:
            self._sandbox.forget(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
