"""`try`: try several approaches at once, compare them, and promote the winner; list, show and promote experiments that were kept."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

from agent_sandbox._fast.values import TYPE_CHECKING, dataclass, replace
from agent_sandbox.assembly import here
from agent_sandbox.cli.caller import guest_environment, unwound_by_signals
from agent_sandbox.cli.commands.promote import (
    PromoteResult,
    agreement,
    nothing_to_promote,
    promotion_facts,
    promotion_result,
    show_proposal,
    wanted_by,
    why_not_agreed,
)
from agent_sandbox.cli.context import Opening, current, gate_for, object_runtime, policy_of, project_of, recover, session_for
from agent_sandbox.cli.execute import TIMED_OUT, directory_of, say_who_has_it, variables_of
from agent_sandbox.cli.experiment_options import TryOptions
from agent_sandbox.cli.parser import UsageError
from agent_sandbox.cli.render.attempts import attempt_line, last_lines
from agent_sandbox.cli.render.messages import Console, counted, remark, reset_terminal, say, shown
from agent_sandbox.cli.render.progress import progress_of
from agent_sandbox.cli.results import OMITTED, InterruptedResult, Omitted, PathName, VerbResult
from agent_sandbox.engine.experiment import admission
from agent_sandbox.engine.experiment.comparison import beside, table
from agent_sandbox.engine.experiment.conduct import NOT_STARTED, CommonBase, Laboratory, Rules, base_for, conduct
from agent_sandbox.engine.experiment.model import AttemptOutcome, AttemptWork, Comparison, PlannedAttempt, StepEnd, check_names
from agent_sandbox.engine.experiment.outcome import carry_attempt, diff_lines, proposed_attempt
from agent_sandbox.engine.experiment.saved import SavedExperiment, read_saved
from agent_sandbox.engine.review import diff_for_approver
from agent_sandbox.engine.work import Command
from agent_sandbox.errors import PolicyError, SandboxError
from agent_sandbox.kernel.memory import available_memory
from agent_sandbox.policy.model import limited
from agent_sandbox.workspace.experiment_store import ExperimentPlace, ExperimentStore
from agent_sandbox.workspace.project import find_project
from agent_sandbox.workspace.store import Store
from agent_sandbox.workspace.stored_sandbox import Stored

if TYPE_CHECKING:
    from agent_sandbox.engine.git_objects import RuntimeOf
    from agent_sandbox.engine.run import Session
    from agent_sandbox.policy.model import Limits, Policy
    from agent_sandbox.runtime.base import Runtime
    from agent_sandbox.workspace.experiment_store import AttemptState
    from agent_sandbox.workspace.project import Project

NO_ATTEMPT_PASSED = 1
_COLUMNS = 160  # where the width of the terminal is not known


@dataclass(frozen=True)
class StepFacts:
    """How an attempt's command or its check ended. `output` and `errors` are the end of what it printed."""

    exit: int
    reason: str
    why: str | None
    output: bytes
    errors: bytes

    @classmethod
    def of(cls, end: StepEnd) -> StepFacts:
        """Return the facts about a step."""
        return cls(end.exit_code, end.reason, end.why or None, end.output, end.errors)


@dataclass(frozen=True)
class TestFacts:
    """How many tests an attempt claims to have run, by the form of its report. Its own output says so, and may lie."""

    __test__ = False  # no test of pytest

    passed: int
    failed: int
    skipped: int
    form: str


@dataclass(frozen=True)
class DiffFacts:
    """The size of an attempt's changes in the project, without caches and git's own files."""

    files: int
    added: int
    removed: int
    bytes: int
    outside: int  # changes outside the project, which are not promoted


@dataclass(frozen=True)
class FileDiff:
    """The diff of one file, in lines for people."""

    path: PathName
    lines: tuple[str, ...]


@dataclass(frozen=True)
class AttemptFacts:
    """One attempt: its place in the comparison, how it ended, and its scores."""

    name: str
    place: int
    state: str
    why: str | None
    run: StepFacts | None
    check: StepFacts | None
    claimed_tests: TestFacts | None
    score: float | None
    diff: DiffFacts
    seconds: float
    cpu_seconds: float
    portable: bool
    notes: tuple[str, ...]
    diffs: tuple[FileDiff, ...] | Omitted  # with --side-by-side

    @classmethod
    def of(cls, result: AttemptOutcome, diffs: tuple[FileDiff, ...] | Omitted) -> AttemptFacts:
        """Return the facts about an attempt."""
        tests, diff = result.tests, result.diff
        return cls(
            result.name,
            result.place,
            result.state,
            result.why or None,
            StepFacts.of(result.run) if result.run is not None else None,
            StepFacts.of(result.check) if result.check is not None else None,
            TestFacts(tests.passed, tests.failed, tests.skipped, tests.form) if tests is not None else None,
            result.score,
            DiffFacts(diff.files, diff.added, diff.removed, diff.size, result.outside),
            round(result.seconds, 3),
            round(result.cpu_seconds, 3),
            result.portable,
            result.notes,
            diffs,
        )


@dataclass(frozen=True)
class TryResult(VerbResult):
    """An experiment: its attempts, the best first, the winner, and what became of its promotion.

    `experiment` is the id of an experiment that is kept. `ended` says why it ended before all attempts had.
    """

    kind = "try"

    project: PathName
    experiment: str | None
    winner: str | None
    seconds: float
    ended: str | None
    attempts: tuple[AttemptFacts, ...]
    promotion: PromoteResult | Omitted  # with --promote
    frozen: bool  # whether all attempts saw the same copy of the project
    notes: tuple[str, ...]

    @property
    def code(self) -> int:
        """0 if an attempt passed, and was promoted if that was asked for; else why not."""
        if not isinstance(self.promotion, Omitted):
            return self.promotion.code
        if self.winner is not None:
            return 0
        checks = [each.check.exit for each in self.attempts if each.check is not None]
        if checks and all(code in NOT_STARTED for code in checks):
            return checks[0]
        return TIMED_OUT if self.ended is not None and any(each.state == "timed-out" for each in self.attempts) else NO_ATTEMPT_PASSED

    def text(self, console: Console) -> None:
        """Print the rest: the table was printed before the promotion was asked about."""
        if not isinstance(self.promotion, Omitted):
            self.promotion.text(console)
        elif self.winner is not None and not self.attempts[0].diff.files:
            console.note(f"{self.winner} changed nothing in the project")
        elif self.winner is None:
            remark("no attempt passed" + (f": {self.ended}" if self.ended else ""))
        if self.experiment is not None:
            name = f"{self.experiment}{'' if self.winner is not None else '/NAME'}"
            console.note(f"kept for an hour: agent-sandbox try {name} --promote")


@dataclass(frozen=True)
class KeptExperiment:
    """An experiment that is kept."""

    id: str
    project: PathName
    created: float
    winner: str | None
    attempts: tuple[str, ...]


@dataclass(frozen=True)
class ExperimentsResult(VerbResult):
    """The experiments that are kept."""

    kind = "experiments"

    experiments: tuple[KeptExperiment, ...]

    def text(self, console: Console) -> None:
        for kept in self.experiments:
            when = time.strftime("%H:%M:%S", time.localtime(kept.created))
            names = ", ".join(f"{name}*" if name == kept.winner else name for name in kept.attempts)
            print(f"{kept.id}  {when}  {shown(kept.project)}  {names}")
        if not self.experiments:
            remark('there are no experiments; begin one: agent-sandbox try a="COMMAND" b="COMMAND" --check "COMMAND"')


def try_approaches(options: TryOptions, console: Console) -> VerbResult:
    """Run attempts; or show, promote or list experiments that were kept. A signal cancels the attempts and leaves nothing behind."""
    received: list[int] = []
    try:
        with unwound_by_signals(received, once=True):
            if options.attempts:
                return _run(options, console)
            return _list() if options.kept is None else _look_again(options, options.kept, console)
    except KeyboardInterrupt:
        return InterruptedResult((received or [signal.SIGINT])[0])


def _run(options: TryOptions, console: Console) -> TryResult:
    check_names([name for name, _ in options.attempts])
    sandbox = current(options.run.project)
    if sandbox.project.path == "/":
        raise PolicyError("the whole machine is no project to experiment with", hint="name a directory: --project DIR")
    registry = here().command_line_registry(threads=True)
    with ExitStack() as ends:
        ends.callback(registry.close, leaving=True)
        wish = options.run.isolation
        if wish not in registry:
            raise UsageError(f"there is no runtime {wish!r}", hint=f"use one of {', '.join(registry.names)}")
        opening = session_for(options.run, console, here().runtimes(wish, registry, announce=console.note), say_who_has_it)
        ends.callback(opening.session.gate.end)
        policy = opening.session.policy
        admitted = admission.admit(
            admission.processors(),
            available_memory(),
            wanted=options.memory_bytes,
            ceiling=policy.limits.memory_bytes,
            most=options.at_once,
        )
        runtime: Callable[[], Runtime] = lambda: registry.get("process")  # noqa: E731
        store = ExperimentStore(sandbox.state.store)
        place = ends.enter_context(store.making(sandbox.project.path))
        attempts = _attempts(options, opening)
        base = base_for(place, [each.name for each in attempts], policy, live=options.live, sandbox=sandbox.state, on_busy=say_who_has_it)
        laboratory = _laboratory(options, opening, base, runtime)
        with attempt_line(console) as line:
            comparison = conduct(
                attempts,
                _rules(options, opening),
                laboratory,
                place,
                base,
                admitted,
                tell=line.tell if line is not None else lambda progress: None,
                tick=line.tick if line is not None else lambda: None,
            )
        saved = SavedExperiment(sandbox.project.path, sandbox.state.store.clock(), base.frozen.since_ns if base.frozen else 0, comparison)
        return _Finish(options, console, saved, place, policy, runtime).result()


def _attempts(options: TryOptions, opening: Opening) -> tuple[PlannedAttempt, ...]:
    cwd = directory_of(options.run, opening.project, opening.session.policy) or "."
    env = _asked(options)
    return tuple(PlannedAttempt(name, _line(text, env, cwd)) for name, text in options.attempts)


def _line(text: str, env: Mapping[str, str], cwd: str) -> AttemptWork:
    return AttemptWork(Command(("bash", "-c", text)), env, cwd)


def _asked(options: TryOptions) -> dict[str, str]:
    """Return the variables that the caller asks for by --env and --env-file."""
    named = {each.partition("=")[0] for each in variables_of(options.run)}
    env = guest_environment(os.environ, variables_of(options.run), home=here().host.home)
    return {name: value for name, value in env.items() if name in named}


def _rules(options: TryOptions, opening: Opening) -> Rules:
    cwd = directory_of(options.run, opening.project, opening.session.policy) or "."
    whole = options.whole_seconds
    if opening.lifted is not None:  # the attempts end with the elevation
        left = opening.lifted.left()
        whole = left if whole is None else min(whole, left)
    return Rules(
        None if options.check is None else _line(options.check, _asked(options), cwd),
        first=options.first,
        seconds=options.seconds,
        whole_seconds=whole,
        cpu_seconds=options.cpu_seconds,
        report=options.report,
    )


def _laboratory(options: TryOptions, opening: Opening, base: CommonBase, runtime: RuntimeOf) -> Laboratory:
    session, project = opening.session, opening.project
    assert opening.sandbox is not None
    sandbox = opening.sandbox.state.id

    def open_session(name: str, state: AttemptState, limits: Limits) -> Session:
        policy = limited(session.policy, limits)
        gate = gate_for(policy, project, f"{sandbox}/try-{name}", capabilities=options.run.capabilities)
        return replace(session.on(state), gate=gate, on_busy=None, asked_ns=None, companions=base.companions)

    env = guest_environment(os.environ, (), home=here().host.home)
    return Laboratory(session.policy, env, open_session, runtime, session.gate.note)


@dataclass(frozen=True)
class _Finish:
    """The end of an experiment: it shows the comparison, promotes the winner, and keeps or drops the attempts."""

    options: TryOptions
    console: Console
    saved: SavedExperiment
    place: ExperimentPlace
    policy: Policy
    runtime: RuntimeOf
    again: bool = False  # whether the experiment was kept already

    def result(self) -> TryResult:
        options, comparison = self.options, self.saved.comparison
        diffs = self._diffs() if options.side_by_side else None
        if self.console.shows:
            _show(comparison, diffs, replace(self.console, quiet=self.console.quiet or self.again))
        name = options.name or comparison.winner
        promotion: PromoteResult | Omitted = OMITTED
        if options.promote and name is not None:
            try:
                promotion = self._promote(name)
            except SandboxError:
                if not self.again:
                    self._keep(promoted=False)
                remark(f"the attempts are kept for an hour: agent-sandbox try {self.place.id}/{name} --promote")
                raise
        promoted = not isinstance(promotion, Omitted) and promotion.outcome == "promoted"
        kept = self._keep(promoted=promoted)
        facts = tuple(AttemptFacts.of(each, _of_files(diffs, each.name)) for each in comparison.results)
        return TryResult(
            PathName(self.saved.project),
            self.place.id if kept else None,
            comparison.winner,
            round(comparison.seconds, 3),
            comparison.ended or None,
            facts,
            promotion,
            bool(self.saved.frozen_ns),
            comparison.notes,
        )

    def _state(self, name: str) -> AttemptState:
        return self.place.attempt(name, self.saved.frozen_ns)

    def _diffs(self) -> dict[str, dict[str, tuple[str, ...]]]:
        results = self.saved.comparison.results
        return {each.name: diff_lines(self._state(each.name), self.policy, self.runtime) for each in results}

    def _promote(self, name: str) -> PromoteResult:
        options, console = self.options.promotion, self.console
        project = find_project(self.saved.project, home=here().host.home, explicit=True)
        stored = Stored(self.place.store.sandbox_for(project.path))
        gate = gate_for(self.policy, project, stored.state.id, capabilities=options.capabilities, prompt=True)
        try:
            recover(stored, gate)
            with progress_of(console) as progress:
                wanted = replace(wanted_by(options, project.path), progress=progress)
                with proposed_attempt(self._state(name), stored, self.policy, wanted, self.runtime) as proposal:
                    progress.end()
                    if console.shows:
                        show_proposal(proposal, proposal.plan(), project.path, console)
                    if not proposal.changes and not proposal.settled:
                        return promotion_result(proposal, proposal.plan(), "", "nothing-to-do", nothing_to_promote(proposal))
                    agreed = agreement(proposal, console, yes=options.yes, project=project.path)
                    if agreed is None:
                        return promotion_result(proposal, proposal.plan(), "", "not-approved", f"not promoted: {why_not_agreed(console)}")
                    done = carry_attempt(agreed, stored, gate, details=lambda: diff_for_approver(agreed))
                    progress.end()
            if done.note:
                remark(done.note)
            return replace(promotion_result(agreed, agreed.plan(), "", "promoted", None), done=promotion_facts(done))
        finally:
            gate.end()

    def _keep(self, *, promoted: bool) -> bool:
        """Keep the attempts that shall be kept. Return whether any is."""
        comparison = self.saved.comparison
        which = self.options.keep or ("none" if promoted else "all")
        names = {each.name for each in comparison.results} if which == "all" else {comparison.winner} if which == "winner" else set()
        kept = tuple(each for each in comparison.results if each.name in names and self._state(each.name).exists)
        if self.again:
            if not kept:
                ExperimentStore(self.place.store).drop(self.place)
            return bool(kept)
        if not kept:
            return False
        for each in comparison.results:
            if each not in kept:
                self.place.remove(each.name)
        self.place.remove(os.path.basename(self.place.frozen))  # only runs need it
        winner = comparison.winner if any(each.name == comparison.winner for each in kept) else None
        self.place.keep(replace(self.saved, comparison=replace(comparison, results=kept, winner=winner)).text())
        return True


def _of_files(diffs: Mapping[str, Mapping[str, Sequence[str]]] | None, name: str) -> tuple[FileDiff, ...] | Omitted:
    return OMITTED if diffs is None else tuple(FileDiff(PathName(path), tuple(lines)) for path, lines in diffs.get(name, {}).items())


def _show(comparison: Comparison, diffs: Mapping[str, Mapping[str, Sequence[str]]] | None, console: Console) -> None:
    reset_terminal()
    for line in table(comparison):
        print(line)
    if diffs is not None:
        print()
        for line in beside(diffs, shutil.get_terminal_size((_COLUMNS, 24)).columns):
            print(line)
    for note in comparison.notes:
        console.note(note)
    for result in comparison.results:
        if not console.quiet and (lines := last_lines(result)):
            remark(f"{result.name}: {result.why}")
            for line in lines:
                say(f"  | {line}")
        if result.outside:
            console.note(f"{result.name}: {counted(result.outside, 'change')} outside the project would not be promoted")
        for note in result.notes:
            console.note(f"{result.name}: {note}")


def _list() -> ExperimentsResult:
    store = ExperimentStore(Store.open(here().host.state))
    kept = [(name, read_saved(text)) for name, text in store.kept()]
    return ExperimentsResult(
        tuple(
            KeptExperiment(
                name,
                PathName(saved.project),
                saved.created,
                saved.comparison.winner,
                tuple(each.name for each in saved.comparison.results),
            )
            for name, saved in kept
        )
    )


def _look_again(options: TryOptions, prefix: str, console: Console) -> TryResult:
    """Show an experiment that was kept, and promote its winner or the named attempt if that is asked for."""
    store = Store.open(here().host.state)
    with ExperimentStore(store).opened(prefix) as (place, text), object_runtime() as runtime:
        saved = read_saved(text)
        if options.run.project is not None and project_of(options.run.project).path != saved.project:
            raise PolicyError(f"this is an experiment in {saved.project!r}", hint="leave out --project")
        names = [each.name for each in saved.comparison.results]
        if options.name is not None and options.name not in names:
            raise PolicyError(f"there is no attempt {options.name!r} in this experiment", hint=f"there are: {', '.join(names)}")
        if options.promote and options.name is None and saved.comparison.winner is None:
            raise PolicyError("no attempt passed, so there is no winner", hint=f"name the attempt: {place.id}/NAME")
        project: Project = find_project(saved.project, home=here().host.home, explicit=True)
        policy = policy_of(options.promotion.policy, project)
        return _Finish(options, console, saved, replace(place, project=saved.project), policy, runtime, again=True).result()
