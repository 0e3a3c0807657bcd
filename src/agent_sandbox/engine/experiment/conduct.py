"""Conduct an experiment: prepare the frozen project and the attempts, run as many at once as the machine can bear, check and compare them.

Each attempt runs in a thread of the supervisor and in a sandbox of its own. A check runs on a copy of the attempt's sandbox, so that what
is promoted is what the attempt left, without by-products of its check. Whatever ends the experiment (a winner, a limit, an interrupt), the
rest is cancelled: guests are killed, and the threads are waited for. A function of the caller that does not return cannot be killed; its
sandbox is, and it is left behind in its thread.

The base of all attempts is made in `base_for`, in one place: attempts that start from a live checkpoint differ in nothing else.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress

from agent_sandbox._fast.encoding import as_json, sha256
from agent_sandbox._fast.values import TYPE_CHECKING, dataclass, field, replace
from agent_sandbox.engine.experiment import reports
from agent_sandbox.engine.experiment.admission import Admission
from agent_sandbox.engine.experiment.frozen_base import FrozenBase
from agent_sandbox.engine.experiment.model import AttemptOutcome, AttemptWork, Comparison, PlannedAttempt, StepEnd, checked_score, compared
from agent_sandbox.engine.experiment.outcome import measure, seed
from agent_sandbox.engine.experiment.running_attempt import (
    AttemptAllowance,
    Cancelled,
    ReportMissing,
    RunningAttempt,
    read_report,
    run_step,
)
from agent_sandbox.errors import Busy, Denied, LedgerBroken, LedgerUnavailable, SandboxError
from agent_sandbox.kernel.memory import available_memory
from agent_sandbox.policy.paths import Glob
from agent_sandbox.runtime.base import ExitReason
from agent_sandbox.workspace.frozen_tree import FrozenTree, changed_since, freeze
from agent_sandbox.workspace.stored_sandbox import Stored

if TYPE_CHECKING:
    from typing import Any, Literal

    from agent_sandbox.engine.attachments import Attachment
    from agent_sandbox.engine.experiment.running_attempt import OpenSession
    from agent_sandbox.engine.git_objects import RuntimeOf
    from agent_sandbox.ledger.event import Facts
    from agent_sandbox.policy.model import Policy
    from agent_sandbox.workspace.experiment_store import AttemptState, ExperimentPlace
    from agent_sandbox.workspace.store import SandboxState

    Live = Literal["stores", "all", "none"]

LOOK_AGAIN_SECONDS = 0.2  # at memory that may have become free, and at functions that are late
PATIENCE_SECONDS = 30.0  # for threads whose guests were killed, and which only clear away
FUNCTION_SECONDS = 2.0  # for a function of the caller to notice that its sandbox is gone
NOT_STARTED = (126, 127)


@dataclass(frozen=True)
class Rules:
    """The settings that all attempts of an experiment share."""

    check: AttemptWork | Callable[[Any], object] | None = None
    score: Callable[[Any], object] | None = None
    first: bool = False  # the first to pass wins, and the rest is cancelled
    seconds: float | None = None  # of each attempt, its check included
    whole_seconds: float | None = None
    cpu_seconds: float | None = None  # of all attempts together, in equal shares
    cost: float | None = None  # of all attempts together, in a unit of the caller's own: see `RunningAttempt.spend`
    report: str = ""  # a JUnit XML file that the check writes, relative to the project


@dataclass(frozen=True)
class AttemptProgress:
    """One attempt has come to another step: waiting, running, checking, or the state in which it ended."""

    name: str
    step: str
    result: AttemptOutcome | None = None


@dataclass(frozen=True)
class CommonBase:
    """The base of all attempts: the frozen project, or None for the live files."""

    frozen: FrozenTree | None = None

    @property
    def companions(self) -> tuple[Attachment, ...]:
        """The attachments that every run of every attempt has."""
        return () if self.frozen is None else (FrozenBase(self.frozen),)

    def attempt(self, place: ExperimentPlace, name: str) -> AttemptState:
        """Return the state of an attempt on this base."""
        return place.attempt(name, 0 if self.frozen is None else self.frozen.since_ns)


@dataclass(frozen=True)
class Laboratory:
    """Where attempts run: the policy, the environment that every program gets, and how sessions are opened."""

    policy: Policy
    env: Mapping[str, str]
    open_session: OpenSession
    runtime: RuntimeOf  # reads git objects of a sandbox
    note: Callable[[str, Facts], None] = field(default=lambda what, facts: None, hash=False)  # records a fact in the ledger
    stopped: Callable[[], bool] = field(default=lambda: False, hash=False)  # whether the caller has cancelled the experiment
    wrap: Callable[[RunningAttempt], Any] = field(default=lambda trial: trial, hash=False)  # what a function of the caller is given


def base_for(
    place: ExperimentPlace,
    names: Sequence[str],
    policy: Policy,
    *,
    live: Live = "stores",
    sandbox: SandboxState | None = None,
    on_busy: Callable[[Busy], None] = lambda busy: None,
) -> CommonBase:
    """Make what all attempts start from: freeze the project. `live` says what is not frozen: large stores, everything, or nothing.

    Each attempt begins with the unpromoted changes of `sandbox`, if there are any. It is locked meanwhile, so all begin with the same; if
    it is in use, `on_busy` is called, and this waits. Raises `WorkspaceError` if the disk has too little room, or the project is too large.
    """
    hidden = [mask.path for mask in policy.files.masks]
    hidden += [pattern.path for pattern in policy.files.denied if not isinstance(pattern, Glob)]
    with ExitStack() as held:
        if sandbox is not None and sandbox.exists:
            try:
                held.enter_context(sandbox.lock(command="try"))
            except Busy as busy:
                on_busy(busy)
                held.enter_context(sandbox.lock(wait=True, command="try"))
        frozen = None if live == "all" else freeze(place.project, place.frozen, skip=hidden, stores=live == "none")
        base = CommonBase(frozen)
        if sandbox is not None and sandbox.exists:
            for name in names:
                base = CommonBase(seed(base.attempt(place, name), sandbox, policy.limits.disk_bytes, frozen))
    return base


class _Conduct:
    """One experiment under way."""

    def __init__(
        self,
        attempts: Sequence[PlannedAttempt],
        rules: Rules,
        laboratory: Laboratory,
        place: ExperimentPlace,
        base: CommonBase,
        admission: Admission,
    ) -> None:
        self._attempts, self._rules, self._laboratory, self._place, self._base = attempts, rules, laboratory, place, base
        self._admission = admission
        share = None if rules.cpu_seconds is None else rules.cpu_seconds / len(attempts)
        allowance = AttemptAllowance(rules.seconds, share, admission.memory_bytes)
        limits = laboratory.policy.limits
        self._trials = {
            each.name: RunningAttempt(each.name, base.attempt(place, each.name), limits, allowance, laboratory.open_session)
            for each in attempts
        }
        self._changed = threading.Condition()
        self._running: dict[str, bool] = {}  # names, and whether a function of the caller runs there
        self._results: dict[str, AttemptOutcome] = {}
        self._events: list[AttemptProgress] = []
        self._first: str | None = None
        self._fatal: BaseException | None = None

    def conduct(self, tell: Callable[[AttemptProgress], object], tick: Callable[[], object]) -> Comparison:
        began, ended = time.monotonic(), ""
        waiting = [*self._attempts]
        for attempt in waiting:
            tell(AttemptProgress(attempt.name, "waiting"))
        try:
            while not ended and (waiting or self._busy()):
                while waiting and self._has_room():
                    self._start(waiting.pop(0))
                self._wait(began)
                self._cut_late()
                self._tell_all(tell)
                tick()
                ended = self._over(began)
        except BaseException:
            ended = "the experiment was interrupted"
            raise
        finally:
            if ended:
                self._cancel(ended, timed_out=ended == _TIME_IS_UP)
            self._settle()
        self._tell_all(tell)
        results = [self._results.get(each.name) or _never_ran(each, ended) for each in self._attempts]
        for attempt in waiting:
            tell(AttemptProgress(attempt.name, "cancelled"))
        notes = tuple(_notes(self._base.frozen)) if self._base.frozen is not None else ()
        cut = ended if any(result.state in ("cancelled", "timed-out") for result in results) else ""
        return replace(compared(results, first=self._first, seconds=time.monotonic() - began, ended=cut), notes=notes)

    def _busy(self) -> bool:
        with self._changed:
            return bool(self._running)

    def _tell_all(self, tell: Callable[[AttemptProgress], object]) -> None:
        """Tell the steps that attempts have come to. Raises what ends the whole experiment."""
        with self._changed:
            events, self._events = self._events, []
        for event in events:
            tell(event)
        if self._fatal is not None:
            raise self._fatal

    def _over(self, began: float) -> str:
        """Return why the experiment ends now; empty if it goes on."""
        if self._rules.first and self._first is not None:
            return _WON
        if self._laboratory.stopped():
            return "the experiment was cancelled"
        cost, whole = self._rules.cost, self._rules.whole_seconds
        if cost is not None and sum(trial.cost for trial in self._trials.values()) > cost:
            return "the cost limit of the experiment was reached"
        return _TIME_IS_UP if whole is not None and time.monotonic() - began >= whole else ""

    def _wait(self, began: float) -> None:
        times = [LOOK_AGAIN_SECONDS]
        if self._rules.whole_seconds is not None:
            times.append(max(0.0, began + self._rules.whole_seconds - time.monotonic()))
        with self._changed:
            if not self._events and self._fatal is None:
                self._changed.wait(min(times))

    def _cut_late(self) -> None:
        """Cancel functions whose time is over. A run is ended by its own limit, a moment earlier."""
        with self._changed:
            late = [name for name, function in self._running.items() if function and self._trials[name].late]
        for name in late:
            self._trials[name].cancel("the time limit was reached", timed_out=True)
            self._abandon(name)

    def _abandon(self, name: str) -> None:
        """Give up waiting for a function that does not return."""
        with self._changed:
            self._changed.wait_for(lambda: name not in self._running, FUNCTION_SECONDS)
            if name in self._running:
                del self._running[name]
                result = AttemptOutcome(name, "timed-out", "the time limit was reached, and its function goes on", portable=False)
                self._finish(replace(result, seconds=self._trials[name].seconds))

    def _has_room(self) -> bool:
        with self._changed:
            running = len(self._running)
        if not running:
            return True
        if running >= self._admission.at_once:
            return False
        free, need = available_memory(), self._admission.memory_bytes
        return free is None or need is None or free >= need

    def _start(self, attempt: PlannedAttempt) -> None:
        with self._changed:
            self._running[attempt.name] = not attempt.portable
        threading.Thread(target=self._thread, args=(attempt,), name=f"attempt-{attempt.name}", daemon=True).start()

    def _thread(self, attempt: PlannedAttempt) -> None:
        try:
            result = self._attempt(attempt)
            self._trials[attempt.name].cancel("the attempt has ended")  # its function may have kept the sandbox
        except BaseException as error:
            with self._changed:
                self._fatal = self._fatal or error
                self._running.pop(attempt.name, None)
                self._changed.notify_all()
            return
        with self._changed:
            if self._running.pop(attempt.name, None) is not None:
                self._finish(result)

    def _finish(self, result: AttemptOutcome) -> None:
        """Record a result. Call it with the lock held."""
        self._results[result.name] = result
        if result.passed and self._first is None and self._rules.first:
            self._first = result.name
        self._events.append(AttemptProgress(result.name, result.state, result))
        self._changed.notify_all()

    def _step(self, name: str, step: str) -> None:
        with self._changed:
            self._events.append(AttemptProgress(name, step))
            self._changed.notify_all()

    def _cancel(self, why: str, *, timed_out: bool = False) -> None:
        with self._changed:
            running = [*self._running]
        for name in running:
            self._trials[name].cancel(why, timed_out=timed_out)

    def _settle(self) -> None:
        """Wait for the threads. What a function of the caller does without its sandbox is not waited for long."""
        with self._changed:
            self._changed.wait_for(lambda: all(self._running.values()), PATIENCE_SECONDS)
            self._changed.wait_for(lambda: not self._running, FUNCTION_SECONDS)
            left = [*self._running]
            self._running.clear()
        for name in left:
            why = "it was cancelled, and goes on in its thread without its sandbox"
            self._results.setdefault(name, AttemptOutcome(name, "cancelled", why, portable=False))

    def _attempt(self, attempt: PlannedAttempt) -> AttemptOutcome:
        """Run one attempt to its end. Raises only what ends the whole experiment: a ledger that cannot be written."""
        trial = self._trials[attempt.name]
        trial.begin()
        self._step(attempt.name, "running")
        result = AttemptOutcome(attempt.name, "broken", portable=attempt.portable)
        try:
            result = self._tried(attempt, trial, result)
        except Cancelled as over:
            result = replace(result, state="timed-out" if over.timed_out else "cancelled", why=str(over))
        except (LedgerUnavailable, LedgerBroken):
            raise
        except Denied as refusal:
            result = replace(result, state="refused", why=str(refusal))
        except (SandboxError, OSError) as error:  # the disk is full, for one
            result = replace(result, state="broken", why=str(error))
        return replace(result, seconds=trial.seconds, cpu_seconds=trial.cpu_seconds, cost=trial.cost, notes=tuple(trial.notes))

    def _tried(self, attempt: PlannedAttempt, trial: RunningAttempt, result: AttemptOutcome) -> AttemptOutcome:
        if isinstance(attempt.work, AttemptWork):
            end, output = run_step(trial, attempt.work, self._laboratory.env)
            result = replace(result, run=end, tests=reports.read_counts(output))
            failure = _failure(end, "it")
        else:
            failure = self._called(attempt.work, trial)
        if not failure:
            trial.check_alive()
        diff, outside = measure(trial.state, self._laboratory.policy, self._laboratory.runtime)
        result = replace(result, diff=diff, outside=outside)
        if failure:
            return replace(result, state=_state_of(result.run), why=failure)
        if self._rules.check is not None:
            self._step(attempt.name, "checking")
            result = self._checked(trial, result)
        else:
            result = replace(result, state="passed")
        return self._scored(trial, result) if result.passed and self._rules.score is not None else result

    def _called(self, function: Callable[[Any], object], trial: RunningAttempt) -> str:
        """Call a function of the caller with the attempt's sandbox. Return why it failed; empty if it returned."""
        try:
            function(self._laboratory.wrap(trial))
        except (Cancelled, LedgerUnavailable, LedgerBroken, Denied):
            raise
        except Exception as error:  # a mistake in one attempt is the failure of that attempt
            trial.check_alive()
            return f"its function raised {type(error).__name__}: {error}"[:500]
        return ""

    def _checked(self, trial: RunningAttempt, result: AttemptOutcome) -> AttemptOutcome:
        """Check an attempt, on a copy of its sandbox which is removed afterwards."""
        copy = self._base.attempt(self._place, f"{trial.name}.check")
        checking = trial.on(copy)
        try:
            with trial.state.lock(command="check"):
                Stored(trial.state).copy_to(copy, self._laboratory.policy.limits.disk_bytes)
            return self._judged(checking, result)
        finally:
            trial.join(checking)
            self._place.remove(copy.id)

    def _judged(self, checking: RunningAttempt, result: AttemptOutcome) -> AttemptOutcome:
        check = self._rules.check
        assert check is not None
        if not isinstance(check, AttemptWork):
            verdict = self._verdict(check, checking)
            return replace(result, state="failed" if verdict else "passed", why=verdict)
        end, output = run_step(checking, check, self._laboratory.env)
        counts = reports.read_counts(output)
        if self._rules.report:
            try:
                content = read_report(checking, self._rules.report, self._laboratory.env, reports.MOST_XML_BYTES)
                counts = reports.read_junit(content) or counts
            except ReportMissing as missing:
                checking.notes[missing.message] = None
        checking.check_alive()
        result = replace(result, check=end, tests=counts or result.tests)
        failure = _failure(end, "its check")
        return replace(result, state=_state_of(end), why=failure) if failure else replace(result, state="passed")

    def _verdict(self, check: Callable[[Any], object], checking: RunningAttempt) -> str:
        try:
            passed = check(self._laboratory.wrap(checking))
        except (Cancelled, LedgerUnavailable, LedgerBroken, Denied):
            raise
        except Exception as error:  # an assertion, above all
            checking.check_alive()
            return f"its check raised {type(error).__name__}: {error}"[:500]
        return "" if passed is None or passed else f"its check returned {passed!r:.60}"

    def _scored(self, trial: RunningAttempt, result: AttemptOutcome) -> AttemptOutcome:
        assert self._rules.score is not None
        try:
            return replace(result, score=checked_score(self._rules.score(replace(result, seconds=trial.seconds))))
        except (Cancelled, LedgerUnavailable, LedgerBroken, Denied):
            raise
        except Exception as error:
            return replace(result, state="broken", why=f"it could not be scored: {type(error).__name__}: {error}"[:500])


_WON = "another attempt passed first"
_TIME_IS_UP = "the time limit of the experiment was reached"


def _notes(frozen: FrozenTree) -> Iterator[str]:
    """Yield what may make attempts differ, or differ from reality."""
    yield from frozen.left_out
    for tree in frozen.live:
        yield f"{tree} is large and was shown live, not frozen; it could be changed, but not removed as a whole (--live none copies it)"
    for tree in changed_since(frozen):
        yield f"{tree} changed meanwhile: attempts may have seen different files there"


def _never_ran(attempt: PlannedAttempt, why: str) -> AttemptOutcome:
    return AttemptOutcome(attempt.name, "cancelled", why or "it never ran", portable=attempt.portable)


def _failure(end: StepEnd, what: str) -> str:
    """Return why a step did not end well, in words; empty if it did."""
    if end.why:
        could = "could not be started" if end.exit_code in NOT_STARTED and end.reason == ExitReason.EXITED.value else "ended"
        return f"{what} {could}: {end.why}"
    if end.exit_code in NOT_STARTED and end.reason == ExitReason.EXITED.value:
        return f"{what} could not be started, or did not find a program (exit code {end.exit_code})"
    if end.reason == ExitReason.SIGNALLED.value:
        return f"{what} was ended by a signal (exit code {end.exit_code})"
    return f"{what} exited with {end.exit_code}" if end.exit_code else ""


def _state_of(end: StepEnd | None) -> Literal["timed-out", "failed"]:
    return "timed-out" if end is not None and end.reason == ExitReason.TIMED_OUT.value else "failed"


def conduct(
    attempts: Sequence[PlannedAttempt],
    rules: Rules,
    laboratory: Laboratory,
    place: ExperimentPlace,
    base: CommonBase,
    admission: Admission,
    *,
    tell: Callable[[AttemptProgress], object] = lambda progress: None,
    tick: Callable[[], object] = lambda: None,
) -> Comparison:
    """Conduct an experiment in its place and compare the attempts. `tell` is called, in this thread, with each step of an attempt, and
    `tick` a few times a second.

    Raises what the ledger raises, and any exception of `tell`. Afterwards no guest of the experiment runs, however it ended. Beside the
    runs themselves, the ledger has the beginning and the end of the experiment.
    """
    facts: dict[str, Any] = {"target": place.id, "attempts": [each.name for each in attempts]}
    laboratory.note("experiment.begun", {**facts, **_digests(attempts, rules)})
    try:
        comparison = _Conduct(attempts, rules, laboratory, place, base, admission).conduct(tell, tick)
    except BaseException as error:
        with suppress(LedgerUnavailable, LedgerBroken):
            laboratory.note("experiment.ended", {**facts, "error": type(error).__name__})
        raise
    states = {result.name: result.state for result in comparison.results}
    laboratory.note("experiment.ended", {**facts, "winner": comparison.winner or "", "states": states, "why": comparison.ended})
    return comparison


def _digests(attempts: Sequence[PlannedAttempt], rules: Rules) -> dict[str, Any]:
    """Return digests of the attempts that are data and of their check, for the ledger. A function has none."""
    works = {each.name: each.work for each in attempts} | ({"check": rules.check} if rules.check is not None else {})
    digests = {
        name: sha256(as_json(work.to_data(), sort_keys=True).encode()).hexdigest() if isinstance(work, AttemptWork) else ""
        for name, work in works.items()
    }
    return {"work_sha256": digests}
