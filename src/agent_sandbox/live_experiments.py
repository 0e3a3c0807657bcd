"""Experiments from a live state: try several ways to go on from one state of a session at once, compare them, and keep one.

Each attempt is a fork of the state, so nothing that led to it is run again. See `experiments` for attempts at a project.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import TYPE_CHECKING, Self

from agent_sandbox._calls import check_timeout, check_type, code_of
from agent_sandbox._fast.values import replace
from agent_sandbox.engine.experiment import admission
from agent_sandbox.engine.experiment.model import KEPT_OUTPUT, AttemptOutcome, Comparison, StepEnd, check_names, checked_score, compared
from agent_sandbox.errors import PolicyError, SandboxError
from agent_sandbox.result import SandboxResult, SandboxStatus
from agent_sandbox.session import SandboxSession

if TYPE_CHECKING:
    from agent_sandbox.engine.experiment.model import State
    from agent_sandbox.engine.timeline.tree import Step

__all__ = ["LiveExperiment"]

LiveWork = str | Callable[[SandboxSession], object]


class LiveExperiment:
    """Several ways to go on from the state before a step of a session, by default from its present one, tried at once.

    An attempt is Python code, which runs as one turn of a fork, or a function that is handed the fork. `check` decides whether an attempt
    has passed: code that must run without an error and must not end with the value False, or a function that must not raise nor return
    anything false but None. It runs in the same fork, after the attempt. `score` is a function of an `AttemptOutcome`; the higher number is
    better. `first` ends the experiment when one attempt has passed. `timeout` is for each turn.

    `keep` hands out the fork of an attempt as a session, by default that of the winner, and ends the others. The session itself rests until
    all forks are closed. Leaving the block closes those that were not handed out.

    >>> with Sandbox(validate_code=False).session(timeline=True) as session:
    ...     _ = session.run("numbers = [3, 0, 4]")
    ...     with LiveExperiment(session, check="all(numbers)") as experiment:
    ...         experiment.attempt("drop", "numbers = [each for each in numbers if each]")
    ...         experiment.attempt("sort", "numbers.sort()")
    ...         print(experiment.run().winner)
    ...         with experiment.keep() as fork:
    ...             fork.run("numbers").value
    drop
    [3, 4]
    """

    def __init__(
        self,
        session: SandboxSession,
        step: Step | int | None = None,
        *,
        check: LiveWork | None = None,
        score: Callable[[AttemptOutcome], float] | None = None,
        first: bool = False,
        timeout: float | None = None,
        at_once: int | None = None,
    ) -> None:
        check_type("session", session, SandboxSession, write="LiveExperiment(session)")
        check_timeout(timeout)
        self._session, self._step = session, step
        self._check, self._score, self._first, self._timeout, self._at_once = check, score, first, timeout, at_once
        self._attempts: dict[str, LiveWork] = {}
        self._forks: dict[str, SandboxSession] = {}
        self._lock = threading.Lock()
        self._passed = ""  # the attempt that passed first, where that one wins
        self._comparison: Comparison | None = None

    def attempt(self, name: str, work: LiveWork) -> None:
        """Add an attempt. Raises `PolicyError` for a name that is taken or cannot be used."""
        check_type("name", name, str)
        check_names([*self._attempts, name])
        if not callable(work):
            code_of(work, "python")  # raises
        self._attempts[name] = work

    def run(self) -> Comparison:
        """Fork the state once for each attempt, run all attempts, and compare them. An attempt that fails is a result. Can be called once.

        Raises `SandboxError` if the state cannot be forked, or if memory is short; then nothing has run.
        """
        check_names(self._attempts)
        if self._comparison is not None or self._forks:
            raise SandboxError("this experiment has run", hint="make another")
        began = time.monotonic()
        forks = self._session.fork(self._step, count=len(self._attempts))
        self._forks = dict(zip(self._attempts, forks, strict=True))
        with ThreadPoolExecutor(max(1, min(len(forks), self._at_once or admission.processors()))) as pool:
            results = [*pool.map(self._tried, self._attempts)]
        ended = f"{self._passed} passed first" if self._passed else ""
        self._comparison = compared(results, first=self._passed or None, seconds=time.monotonic() - began, ended=ended)
        return self._comparison

    def keep(self, name: str | None = None) -> SandboxSession:
        """Return the fork of an attempt as a session, by default that of the winner, and end the others. The caller closes it."""
        if self._comparison is None:
            raise SandboxError("this experiment has not run", hint="call run() first")
        name = name if name is not None else self._comparison.winner
        if name is None:
            raise PolicyError("no attempt passed, so there is no winner", hint="name the attempt that you want")
        if name not in self._forks:
            raise PolicyError(f"there is no attempt {name!r} to keep", hint=f"there are: {', '.join(self._forks)}")
        kept = self._forks.pop(name)
        self.close()
        return kept

    def close(self) -> None:
        """End all attempts that were not handed out. Idempotent."""
        forks, self._forks = self._forks, {}
        for fork in forks.values():
            fork.close()

    def _tried(self, name: str) -> AttemptOutcome:
        """Return the result of one attempt and its check."""
        fork, began = self._forks[name], time.monotonic()
        outcome = AttemptOutcome(name, "cancelled", f"{self._passed} passed first")
        if not self._passed:
            run, state, why = self._done(fork, self._attempts[name])
            check = None
            if state == "passed" and self._check is not None:
                check, state, why = self._done(fork, self._check, checks=True)
                why = f"its check: {why}" if why else ""
            if self._passed and state != "passed":
                state, why = "cancelled", f"{self._passed} passed first"
            outcome = AttemptOutcome(name, state, why, run, check, portable=not callable(self._attempts[name]))
        outcome = replace(outcome, seconds=time.monotonic() - began, live=True)
        if outcome.passed and self._score is not None:
            try:
                outcome = replace(outcome, score=checked_score(self._score(outcome)))
            except Exception as error:
                outcome = replace(outcome, state="broken", why=f"its score: {type(error).__name__}: {error}")
        if outcome.passed and self._first:
            self._end_others(name)
        return outcome

    def _done(self, fork: SandboxSession, work: LiveWork, *, checks: bool = False) -> tuple[StepEnd | None, State, str]:
        """Do the work of an attempt or of its check. Return how it ended, the state of the attempt, and why it did not pass."""
        if callable(work):
            try:
                answer = work(fork)
            except Exception as error:
                return None, "failed", f"{type(error).__name__}: {error}"
            refused = checks and answer is not None and not answer
            return None, "failed" if refused else "passed", "it returned something false" if refused else ""
        try:
            result = fork.run(work) if self._timeout is None else fork.run(work, timeout=self._timeout)
        except SandboxError as error:
            return None, "broken", str(error)
        end = _end_of(result)
        if not result.success:
            state: State = "timed-out" if result.status is SandboxStatus.TIMEOUT else "failed"
            return end, state, str(result.error or f"exit code {result.exit_code}")
        if checks and result.value is False:
            return end, "failed", "its value is False"
        return end, "passed", ""

    def _end_others(self, name: str) -> None:
        with self._lock:
            if self._passed:
                return
            self._passed = name
        for other, fork in self._forks.items():
            if other != name:
                fork.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"LiveExperiment({self._session!r}, attempts={[*self._attempts]!r})"


def _end_of(result: SandboxResult) -> StepEnd:
    output, errors = (text.encode(errors="replace")[-KEPT_OUTPUT:] for text in (result.stdout, result.stderr))
    return StepEnd(result.exit_code or 0, result.status.value, output, errors, str(result.error or ""))
