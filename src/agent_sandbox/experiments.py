"""Experiments: try several approaches at once, each in a sandbox of its own, compare them, and promote the winner.

All attempts start from the same frozen copy of the project. None sees the changes of another, and none sees what happens to the real
project meanwhile. The real project stays untouched until `promote`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self

from agent_sandbox import result
from agent_sandbox._calls import (
    Run,
    Shell,
    TextListener,
    check_timeout,
    check_type,
    code_of,
    encoded,
    with_arguments,
    with_variables,
    work_of,
)
from agent_sandbox._fast.values import replace
from agent_sandbox.assembly import here
from agent_sandbox.config import environment
from agent_sandbox.engine import promote as engine_promote
from agent_sandbox.engine.experiment import admission
from agent_sandbox.engine.experiment.comparison import beside
from agent_sandbox.engine.experiment.conduct import AttemptProgress, CommonBase, Laboratory, Rules, base_for, conduct
from agent_sandbox.engine.experiment.model import AttemptOutcome, AttemptWork, Comparison, PlannedAttempt, check_names
from agent_sandbox.engine.experiment.outcome import carry_attempt, diff_lines, proposed_attempt
from agent_sandbox.engine.experiment.running_attempt import RunningAttempt
from agent_sandbox.engine.promote import CarriedOver, PromotionProposal, Wanted
from agent_sandbox.engine.recover import recovered
from agent_sandbox.engine.review import diff_for_approver
from agent_sandbox.engine.work import Code, Command, Work
from agent_sandbox.errors import Denied, PolicyError, SandboxError
from agent_sandbox.kernel.memory import available_memory
from agent_sandbox.options import OnOutput, PathLike
from agent_sandbox.result import SandboxResult
from agent_sandbox.workspace.experiment_store import ExperimentPlace, ExperimentStore
from agent_sandbox.workspace.stored_sandbox import Stored
from agent_sandbox.workspaces import Resolve, Workspace

if TYPE_CHECKING:
    from agent_sandbox.config import SandboxConfig
    from agent_sandbox.engine.file_access import FileAnswer, FileRequest
    from agent_sandbox.engine.gate import Approver
    from agent_sandbox.files import SandboxFiles
    from agent_sandbox.policy.action import Action
    from agent_sandbox.policy.decide import Ask
    from agent_sandbox.policy.tokens import Token
    from agent_sandbox.workspace.changes import ChangeSet
    from agent_sandbox.workspace.experiment_store import AttemptState

__all__ = ["AttemptOutcome", "AttemptSandbox", "AttemptWork", "Comparison", "Experiment"]

AttemptFunction = Callable[["AttemptSandbox"], object]
AnyWork = str | Sequence[str] | Shell | AttemptWork | AttemptFunction


class AttemptSandbox:
    """The sandbox of one attempt, or the copy of it in which a check runs. A function of the caller is handed one.

    Its changes wait for `Experiment.promote`. When the experiment cancels the attempt, its runs are killed and everything here raises.
    """

    def __init__(self, trial: RunningAttempt, env: Mapping[str, str]) -> None:
        self._trial, self._env = trial, env

    @property
    def name(self) -> str:
        """The name of the attempt."""
        return self._trial.name

    @property
    def files(self) -> SandboxFiles:
        """The files of this sandbox, to be read, written and listed. Relative paths begin at the project."""
        from agent_sandbox.files import SandboxFiles  # few attempts use files this way

        return SandboxFiles(self._use_file, self._trial.state.project)

    def _use_file(self, run: Run, request: FileRequest) -> FileAnswer:
        return self._trial.use_file(request, self._env)

    def execute(
        self,
        code: str,
        language: str = "python",
        *,
        on_output: OnOutput | None = None,
        stdin: str | bytes = b"",
        env_vars: Mapping[str, str] | None = None,
        args: Sequence[str] = (),
        cwd: PathLike | None = None,
    ) -> SandboxResult:
        """Run code as a script of its own. Options are those of `run`."""
        return self._perform(code_of(code, language), on_output=on_output, stdin=stdin, env_vars=env_vars, args=args, cwd=cwd)

    def run(
        self,
        work: str | Sequence[str] | Shell,
        *,
        on_output: OnOutput | None = None,
        stdin: str | bytes = b"",
        env_vars: Mapping[str, str] | None = None,
        args: Sequence[str] = (),
        cwd: PathLike | None = None,
    ) -> SandboxResult:
        """Run Python code (a string), a program with its arguments (a sequence of words), or a bash command line (`shell("…")`)."""
        return self._perform(work_of(work), on_output=on_output, stdin=stdin, env_vars=env_vars, args=args, cwd=cwd)

    def _perform(
        self,
        what: Code | Command,
        *,
        on_output: OnOutput | None = None,
        stdin: str | bytes = b"",
        env_vars: Mapping[str, str] | None = None,
        args: Sequence[str] = (),
        cwd: PathLike | None = None,
    ) -> SandboxResult:
        listener = TextListener.of(on_output)
        project = self._trial.state.project
        work = Work(
            with_arguments(what, args),
            with_variables(self._env, environment(with_variables({}, env_vars))),
            cwd=project if cwd is None else os.path.join(project, os.fsdecode(cwd)),
            stdin=encoded(stdin),
            on_output=listener,
        )
        language = what.language if isinstance(what, Code) else None
        try:
            outcome = self._trial.perform(work)
        except Denied as error:
            return result.refused(str(error), sandbox_id=self.name, language=language, verdict=error.verdict)
        if listener is not None:
            listener.finish()
        return result.completed(outcome, sandbox_id=self.name, language=language, wall="wall")

    def spend(self, amount: float) -> None:
        """Declare a cost, in the unit of `max_cost`. The experiment ends when all attempts together have spent more than that."""
        check_type("amount", amount, int, float)
        if not 0 <= amount < float("inf"):
            raise ValueError(f"a cost is a number of at least 0, not {amount!r}")
        self._trial.spend(amount)

    def check_alive(self) -> None:
        """Raise if the experiment has cancelled this attempt. A long function should call it now and then."""
        self._trial.check_alive()


class Experiment:
    """Several attempts at one thing in a project, tried at once. As a context manager it drops the attempts when the block is left.

    `check` decides whether an attempt has passed: a command or code that must exit with 0, or a function that is handed the sandbox and
    must not raise, nor return anything false but None. It runs on a copy of the attempt's sandbox, so nothing that it writes is promoted.
    Without a check, an attempt passes that ends well.

    `score` is a function of an `AttemptOutcome`; the higher number is better. `first` ends the experiment when one attempt has passed.
    `timeout` is for each attempt with its check, `total_timeout` for all together; `max_cpu_seconds` is shared equally, and `max_cost` is
    what functions may spend. `at_once` runs fewer attempts at once than the machine could; `max_memory_mb` is for each of them. `report` is
    a JUnit XML file that the check writes. `live` says what attempts see as it changes, instead of a frozen copy: large stores (virtual
    environments, `node_modules`, objects of git), all files, or none.

    `config`, `env_vars`, `approver` and `capabilities` mean the same as for `Workspace.over`. Raises as that does.

    >>> with Experiment(project, check=shell("grep -q two notes.txt")) as experiment:
    ...     experiment.attempt("a", shell("echo two > notes.txt"))
    ...     experiment.attempt("b", shell("echo three > notes.txt"))
    ...     print(experiment.run().winner)
    ...     done = experiment.promote()
    a
    """

    def __init__(
        self,
        project: PathLike,
        *,
        check: AnyWork | None = None,
        score: Callable[[AttemptOutcome], float] | None = None,
        first: bool = False,
        timeout: float | None = None,
        total_timeout: float | None = None,
        max_cpu_seconds: float | None = None,
        max_cost: float | None = None,
        at_once: int | None = None,
        max_memory_mb: float | None = None,
        report: str = "",
        live: Literal["stores", "all", "none"] = "stores",
        config: SandboxConfig | None = None,
        env_vars: Mapping[str, str] | None = None,
        approver: Approver | Callable[[Action, Ask], bool | str] | None = None,
        capabilities: Iterable[Token | str] = (),
    ) -> None:
        for limit in (timeout, total_timeout, max_cpu_seconds, max_cost, max_memory_mb):
            check_timeout(limit)
            if limit is not None and not limit > 0:
                raise PolicyError(f"a limit of an experiment is above 0, not {limit!r}", hint="leave it out for no limit")
        if score is not None and not callable(score):
            raise TypeError(f"score is a function of an AttemptOutcome, not {type(score).__name__}")
        if live not in ("stores", "all", "none"):
            raise PolicyError(f"live is 'stores', 'all' or 'none', not {live!r}", hint="leave it out")
        if report and (os.path.isabs(report) or ".." in report.split("/")):
            raise PolicyError(f"the report {report!r} is not a path in the project", hint="name it relative to the project")
        self._workspace = Workspace.over(project, config=config, env_vars=env_vars, approver=approver, capabilities=capabilities)
        self._rules = Rules(
            None if check is None else _work_of(check), score, first, timeout, total_timeout, max_cpu_seconds, max_cost, report
        )
        self._at_once, self._live = at_once, live
        self._memory = None if max_memory_mb is None else int(max_memory_mb * (1 << 20))
        self._attempts: dict[str, PlannedAttempt] = {}
        self._ends = ExitStack()
        self._lock = threading.Lock()
        self._closed = False
        self._stop = threading.Event()
        self._thread = 0  # the thread that runs the attempts
        self._conducted: tuple[ExperimentPlace, CommonBase, Comparison] | None = None

    def _use(self, workspace: Workspace) -> None:
        """Work under the rules of another workspace of the same project, which this experiment closes. For the MCP server."""
        self._workspace.close()
        self._workspace = workspace

    @property
    def project(self) -> str:
        """The project directory."""
        return self._workspace.project

    @property
    def attempts(self) -> tuple[PlannedAttempt, ...]:
        """The attempts, in the order in which they were added. `portable` says which are data that could run elsewhere unchanged."""
        return tuple(self._attempts.values())

    def attempt(
        self,
        name: str,
        work: AnyWork,
        *,
        env_vars: Mapping[str, str] | None = None,
        cwd: PathLike = ".",
        stdin: str | bytes = b"",
    ) -> PlannedAttempt:
        """Add an attempt: work as for `Workspace.run`, an `AttemptWork`, or a function that is handed an `AttemptSandbox`.

        Raises `PolicyError` for a name that is taken or cannot be used.
        """
        check_type("name", name, str)
        check_names([*self._attempts, name])
        given = _work_of(work)
        if isinstance(given, AttemptWork):
            if not isinstance(work, AttemptWork):
                env = environment(with_variables({}, env_vars))
                given = replace(given, env=env, cwd=os.fsdecode(cwd), stdin=encoded(stdin))
        elif env_vars or stdin or cwd != ".":
            raise PolicyError("a function gives variables, directory and input to its own runs", hint="leave them out here")
        self._attempts[name] = PlannedAttempt(name, given)
        return self._attempts[name]

    def run(self, on_progress: Callable[[AttemptProgress], object] | None = None) -> Comparison:
        """Run all attempts and compare them. `on_progress` is called, in this thread, with each step of an attempt.

        An attempt that fails is a result. Raises `PolicyError` without attempts, `RuntimeUnavailable` if memory is short, `WorkspaceError`
        if the project cannot be frozen, and what the ledger raises. Can be called once.
        """
        check_names(self._attempts)
        with self._lock:
            if self._closed or self._conducted is not None:
                raise SandboxError(
                    "this experiment has run" if not self._closed else "this experiment has been closed", hint="make another"
                )
            self._thread = threading.get_ident()
            workspace = self._workspace
            workspace._search_again()
            policy, sandbox = workspace._policy, workspace._stored.state
            admitted = admission.admit(
                admission.processors(), available_memory(), wanted=self._memory, ceiling=policy.limits.memory_bytes, most=self._at_once
            )
            names = [*self._attempts]
            store = ExperimentStore(sandbox.store)
            place = self._ends.enter_context(store.making(self.project))
            try:
                base = base_for(place, names, policy, live=self._live, sandbox=sandbox)
                comparison = conduct(
                    self.attempts, self._rules, self._laboratory(base), place, base, admitted, tell=on_progress or (lambda progress: None)
                )
            except BaseException:
                self._ends.close()
                raise
            self._conducted = place, base, comparison
            return comparison

    def _laboratory(self, base: CommonBase) -> Laboratory:
        workspace = self._workspace
        return Laboratory(
            workspace._policy,
            workspace._env,
            lambda name, state, limits: workspace._attempt_session(name, state, limits, base.companions),
            here().process,
            workspace._gate.note,
            self._stop.is_set,
            lambda trial: AttemptSandbox(trial, workspace._env),
        )

    def _done(self, name: str | None) -> tuple[ExperimentPlace, CommonBase, str]:
        """Return the place, the base and the name of an attempt; by default the winner."""
        if self._conducted is None or self._closed:
            raise SandboxError("this experiment has not run, or was closed", hint="call run() first, inside the block")
        place, base, comparison = self._conducted
        name = name if name is not None else comparison.winner
        if name is None:
            raise PolicyError("no attempt passed, so there is no winner", hint="name the attempt that you want")
        if name not in self._attempts:
            raise PolicyError(f"there is no attempt {name!r}", hint=f"there are: {', '.join(self._attempts)}")
        return place, base, name

    def changes(self, name: str | None = None) -> ChangeSet:
        """Return all changes of an attempt, by default of the winner."""
        place, base, name = self._done(name)
        return Stored(base.attempt(place, name)).changes(self._workspace._policy)

    def diff(self, name: str | None = None) -> str:
        """Return what `promote` would write, as a unified diff for people. Invisible characters are escaped."""
        place, base, name = self._done(name)
        lines = diff_lines(base.attempt(place, name), self._workspace._policy, here().process)
        return "".join(f"{line}\n" for each in lines.values() for line in each)

    def side_by_side(self, *names: str, columns: int = 160) -> str:
        """Return the diffs of these attempts beside one another, by default of all in the order of the comparison."""
        place, base, _ = self._done(next(iter(self._attempts)))
        assert self._conducted is not None
        chosen = names or tuple(each.name for each in self._conducted[2].results)
        policy = self._workspace._policy
        diffs = {self._done(name)[2]: diff_lines(base.attempt(place, name), policy, here().process) for name in chosen}
        return "".join(f"{line}\n" for line in beside(diffs, columns))

    def promote(
        self,
        name: str | None = None,
        *,
        only: str | Iterable[str] = (),
        system: bool = False,
        drift: Literal["refuse", "merge", "force"] = "refuse",
        resolve: Resolve | None = None,
        approve: str | Iterable[str] = (),
        caches: bool = False,
        review: Callable[[PromotionProposal], bool] | None = None,
    ) -> CarriedOver | None:
        """Promote an attempt to the real project, by default the winner. Options and errors are those of `Workspace.promote`.

        `Workspace.undo` and `agent-sandbox undo` take it back. Raises `PolicyError` if no attempt passed and none is named. An attempt that
        did not pass can be promoted by its name.
        """
        place, base, name = self._done(name)
        workspace = self._workspace
        kinds = frozenset((approve,) if isinstance(approve, str) else approve)
        wanted = Wanted(workspace._chosen(only), system, drift, resolve, kinds, caches, home=here().host.home)
        recovered(workspace._stored, workspace._gate)
        with proposed_attempt(base.attempt(place, name), workspace._stored, workspace._policy, wanted, here().process) as proposal:
            engine_promote.refuse_unexpected(proposal, workspace._gate)
            if review is not None and not review(proposal):
                return None
            return carry_attempt(proposal, workspace._stored, workspace._gate, details=lambda: diff_for_approver(proposal))

    def _state_of(self, name: str | None = None) -> AttemptState:
        """Return the stored state of an attempt, by default of the winner."""
        place, base, name = self._done(name)
        return base.attempt(place, name)

    def drop(self, name: str) -> None:
        """Remove an attempt and its changes now, instead of at the end of the block."""
        place, base, name = self._done(name)
        place.remove(base.attempt(place, name).id)

    def cancel(self) -> None:
        """Cancel what still runs, from any thread. `run` then returns a comparison that says so."""
        self._stop.set()

    def close(self) -> None:
        """Cancel what still runs, and drop all attempts. Idempotent. Promoted changes stay. A callback of `run` uses `cancel` instead."""
        if self._lock.locked() and self._thread == threading.get_ident():
            raise SandboxError("an experiment cannot be closed by a callback of its own run", hint="call cancel()")
        self.cancel()
        with self._lock:
            self._closed = True
            self._ends.close()
            self._workspace.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Experiment(project={self.project!r}, attempts={[*self._attempts]!r})"


def _work_of(work: AnyWork) -> AttemptWork | AttemptFunction:
    """Return work as data, or the function that it is. Raises TypeError for anything else."""
    if isinstance(work, AttemptWork):
        return work
    if callable(work):
        return work
    return AttemptWork(work_of(work))
