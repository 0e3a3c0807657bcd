"""Workspaces: sandboxes that keep the changes of their runs until these are promoted or rolled back.

The command line uses the same stored sandbox for a project. So a `Workspace` and the command line show and promote the same changes. Runs
see the whole machine except secrets, and do not change the real files.
"""

from __future__ import annotations

import json  # noqa: F401  for `_fast.encoding`, which uses it if it is loaded
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self, Unpack

from agent_sandbox import policy_files, result
from agent_sandbox._calls import (
    ENVIRONMENT,
    Run,
    Runs,
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
from agent_sandbox.config import SandboxConfig, environment
from agent_sandbox.engine import promote as engine_promote
from agent_sandbox.engine.gate import Gate
from agent_sandbox.engine.promote import CarriedOver, PromotionProposal, Wanted
from agent_sandbox.engine.recover import recovered
from agent_sandbox.engine.review import diff_for_approver, reviewed, unified_rows
from agent_sandbox.engine.run import Session
from agent_sandbox.engine.work import Code, Command, Work
from agent_sandbox.errors import Busy, Denied, PolicyError, SandboxWarning
from agent_sandbox.options import OnOutput, PathLike, WorkspaceOptions, WorkspaceSimulationOptions
from agent_sandbox.policy.model import SCRATCH, Policy, cloned, limited, with_network
from agent_sandbox.policy.paths import ancestors, contains, covering
from agent_sandbox.result import SandboxResult
from agent_sandbox.workspace.changes import Change, ChangeSet
from agent_sandbox.workspace.diff.compare import DEFAULT, EVERYTHING
from agent_sandbox.workspace.diff.formats import HEADING, ours
from agent_sandbox.workspace.drift import DriftReport
from agent_sandbox.workspace.durable import explained
from agent_sandbox.workspace.layers.history import Snapshot
from agent_sandbox.workspace.merge.tree import Conflict
from agent_sandbox.workspace.project import find_project
from agent_sandbox.workspace.store import Store
from agent_sandbox.workspace.stored_sandbox import Rollback, Stored

if TYPE_CHECKING:
    from agent_sandbox.approvals import Asking
    from agent_sandbox.engine.attachments import Attachment
    from agent_sandbox.engine.file_access import FileAnswer, FileRequest
    from agent_sandbox.engine.gate import Approver
    from agent_sandbox.engine.simulation.plan import EffectPlan
    from agent_sandbox.files import SandboxFiles
    from agent_sandbox.live import LiveSandbox
    from agent_sandbox.network_changes import NetworkChanges
    from agent_sandbox.policy.action import Action
    from agent_sandbox.policy.decide import Ask
    from agent_sandbox.policy.model import Limits
    from agent_sandbox.policy.secrets import Mask
    from agent_sandbox.policy.tokens import Token
    from agent_sandbox.workspace.store import SandboxState

__all__ = ["Workspace", "WorkspaceDiff"]

LOOK_AGAIN_SECONDS = 0.02  # while another run uses the sandbox
Resolve = Literal["ours", "theirs", "markers"] | Callable[[Conflict], Literal["ours", "theirs", "markers"] | bytes | None]


class WorkspaceDiff(str):
    """A diff. `digest` identifies the changes exactly, for `Workspace.promote`. It is empty if a run used the sandbox meanwhile."""

    digest: str

    def __new__(cls, text: str, digest: str) -> Self:
        """Return the text with its digest."""
        diff = super().__new__(cls, text)
        diff.digest = digest
        return diff


class Workspace:
    """The stored sandbox of a project directory. It runs one piece of work at a time; others wait. Safe to use from many threads.

    As a context manager it ends its runs when the block is left, and takes no more work. Changes and snapshots are kept in either case, for
    the next `Workspace` and for the command line: `promote` writes them to the project, `reset` drops them.

    >>> with Workspace.over(project) as work:
    ...     done = work.run(shell("sed -i s/one/two/ notes.txt"))
    ...     print(work.diff())
    ...     done = work.promote()
    diff --git a/notes.txt b/notes.txt
    @@ -1 +1 @@
    -one
    +two
    <BLANKLINE>
    """

    def __init__(
        self,
        stored: Stored,
        policy: Policy,
        *,
        env_vars: Mapping[str, str] | None = None,
        config: SandboxConfig | None = None,
        approver: Approver | Callable[[Action, Ask], bool | str] | None = None,
        capabilities: Iterable[Token | str] = (),
    ) -> None:
        """Use `over` to make a workspace. The policy files of the machine, the user and the project narrow the policy."""
        self._runtime = config.runtime if config else "process"
        self.project = stored.state.project
        self._kept = stored
        self._runs = Runs("workspace")
        self._lives: weakref.WeakSet[LiveSandbox] = weakref.WeakSet()  # one that nobody has any more ends
        tokens = tuple(capabilities)
        if tokens:
            from agent_sandbox.approvals import opened_hosts  # few workspaces are given one

            policy = with_network(policy, policy.network.with_capable(opened_hosts(tokens, stored.state.id)))
        bound = self._bounded(policy, config)
        self._policy, self._early, self._most_seconds = bound.policy, bound.early, bound.most_seconds
        self._warnings = (*(config.warnings if config else ()), *bound.warnings)
        self._asking: Asking | None = None
        self._changes: NetworkChanges | None = None
        if self._policy.network.outbound:
            from agent_sandbox.network_changes import NetworkChanges  # few workspaces have a network

            self._changes = NetworkChanges(stored.state.id, here().ledger(), self._decider, self.project)
        if self._policy.asks_somebody or (self._changes is not None and (approver is not None or tokens)):
            from agent_sandbox.approvals import Asking  # few policies ask

            self._asking = Asking(stored.state.id, approver, tokens)
        self._env = {**ENVIRONMENT, **environment(env_vars or {})}
        self._provisions = config._provisions(self._policy, self.project) if config else None
        self._publish = config._publications() if config else ()
        self._gate = self._gate_of(self._policy)
        self._search: Callable[[], tuple[Mask, ...]] | None = None  # finds the masks of the next run

    def _bounded(self, policy: Policy, config: SandboxConfig | None) -> policy_files.Bound:
        """Return the policy, narrowed by the policy files. The MCP server has done that already."""
        return policy_files.bound(policy, config._early_look() if config else None, self.project)

    @classmethod
    def over(
        cls,
        project: PathLike,
        *,
        config: SandboxConfig | None = None,
        env_vars: Mapping[str, str] | None = None,
        approver: Approver | Callable[[Action, Ask], bool | str] | None = None,
        capabilities: Iterable[Token | str] = (),
    ) -> Self:
        """Return the workspace of this directory, not of a project around it. Nothing is created before the first run.

        Without a configuration, its runs have the view and limits of `agent-sandbox run`, and code is not checked first. The policy files
        apply, too. `approver` and `capabilities` approve actions as for a `Sandbox`. Raises `PolicyError` for a missing directory, and for
        a configuration that allows no writing.
        """
        check_type("project", project, str, bytes, os.PathLike)
        if config is not None:
            check_type("config", config, SandboxConfig, write="config=SandboxConfig(…)")
        place = find_project(os.fsdecode(project), home=here().host.home, explicit=True)

        def search() -> tuple[Mask, ...]:
            return config.policy().files.masks if config is not None else here().masks_for(place.path)

        policy = config.policy() if config is not None else cloned(masks=search())
        if not policy.files.write:
            raise PolicyError("a workspace needs file writes, and this configuration allows none", hint="set allow_file_write=True")
        given = {**(config.env_vars if config else {}), **(env_vars or {})}
        stored = Stored(Store.open(here().host.state).sandbox_for(place.path))
        workspace = cls(stored, policy, env_vars=given, config=config, approver=approver, capabilities=capabilities)
        workspace._search = search
        for warning in workspace._warnings:
            warnings.warn(warning, SandboxWarning, stacklevel=2)
        return workspace

    def __repr__(self) -> str:
        return f"Workspace(project={self.project!r})"

    @property
    def _stored(self) -> Stored:
        """The stored sandbox. Raises `SandboxError` if this workspace has been closed."""
        self._runs.check_open()
        return self._kept

    @property
    def id(self) -> str:
        """The id of the stored sandbox, in results and in the ledger."""
        return self._kept.state.id

    @property
    def files(self) -> SandboxFiles:
        """The files of the sandbox, to be read, written and listed. Relative paths begin at the project; changes wait for `promote`.

        >>> with Workspace.over(project) as work:
        ...     work.files.write("notes.txt", "three\\n")
        ...     work.files.read("notes.txt"), (project / "notes.txt").read_text()
        ('three\\n', 'one\\n')
        """
        from agent_sandbox.files import SandboxFiles  # few workspaces use files this way

        return SandboxFiles(self._use_file, self.project, unkept=self._unkept, instead="use a path in the project")

    def _unkept(self, path: str) -> str:
        """Return why nothing that is written at this path would be kept; empty if it is. A project may lie in a scratch directory."""
        scratch = next((above for above in ancestors(path) if above in SCRATCH), "")
        return f"{scratch} is made anew for each run, so {path!r} would not be kept" if scratch and not contains(self.project, path) else ""

    def execute(self, code: str, language: str = "python", **options: Unpack[WorkspaceOptions]) -> SandboxResult:
        """Run code as a script of its own. Options are those of `run`."""
        return self._perform(Run(), code_of(code, language), **options)

    def run(self, work: str | Sequence[str] | Shell, **options: Unpack[WorkspaceOptions]) -> SandboxResult:
        """Run Python code (a string), a program with its arguments (a sequence of words), or a bash command line (`shell("…")`).

        The work starts in the project directory. `WorkspaceOptions` lists the options.
        """
        return self._perform(Run(), work_of(work), **options)

    def _perform(
        self,
        run: Run,
        what: Code | Command,
        *,
        timeout: float | None = None,
        on_output: OnOutput | None = None,
        stdin: str | bytes = b"",
        env_vars: Mapping[str, str] | None = None,
        args: Sequence[str] = (),
        cwd: PathLike | None = None,
        watch_reads: bool = False,
    ) -> SandboxResult:
        listener = TextListener.of(on_output)
        asked = self._work(run, what, stdin=stdin, env_vars=env_vars, args=args, cwd=cwd)
        work = replace(asked, on_output=listener, watch_reads=watch_reads, publish=self._publish)
        language = what.language if isinstance(what, Code) else None
        with self._session(run, timeout) as session:
            try:
                outcome = session.run(work)
            except Denied as error:
                return result.refused(str(error), sandbox_id=self.id, language=language, verdict=error.verdict)
        if listener is not None:
            listener.finish()
        finished = result.completed(outcome, sandbox_id=self.id, language=language, wall="wall")
        return replace(finished, notes=(*finished.notes, *self._warnings)) if self._warnings else finished

    def _work(
        self,
        run: Run,
        what: Code | Command,
        *,
        stdin: str | bytes,
        env_vars: Mapping[str, str] | None,
        args: Sequence[str],
        cwd: PathLike | None,
    ) -> Work:
        if cwd is not None:
            check_type("cwd", cwd, str, bytes, os.PathLike)
        return Work(
            with_arguments(what, args),
            with_variables(self._env, environment(with_variables({}, env_vars))),
            cwd=self.project if cwd is None else os.path.join(self.project, os.fsdecode(cwd)),
            stdin=encoded(stdin),
            on_start=run.started,
        )

    def _use_file(self, run: Run, request: FileRequest) -> FileAnswer:
        from agent_sandbox.engine.file_access import access_by_run  # few workspaces use files this way

        with self._session(run, None) as session:
            return access_by_run(session, request, env=self._env, on_start=run.started)

    def live(self, *, kept: bool = True, env_vars: Mapping[str, str] | None = None) -> LiveSandbox:
        """Return a sandbox of this project in which programs go on between commands. Close it, best by `with`.

        It has the workspace for itself until it is closed; the changes are then the workspace's. If `kept` is false, it starts from the
        real files on throw-away layers, and several can be used at once.
        """
        from agent_sandbox.live import LiveSandbox, native_runtimes  # few workspaces are used this way

        self._runs.check_open()
        self._search_again()
        env = with_variables(self._env, environment(with_variables({}, env_vars)))
        gate = self._gate_of(self._policy)
        session = self._new_session(gate, Run(), self._kept.state if kept else None)
        session = replace(session, runtimes=native_runtimes(self._runtime))
        work = Work(Code("python", ""), env, cwd=self.project, publish=self._publish)
        live = LiveSandbox(session, work, sandbox_id=self.id, runs=self._runs, most_seconds=self._seconds, on_end=gate.end)
        self._lives.add(live)
        return live

    def _seconds(self, timeout: float | None) -> float | None:
        """Return the time limit of a command of a live sandbox: what was asked for, but not more than the policy files allow."""
        seconds = self._policy.limits.wall_seconds if timeout is None else replace(self._policy.limits, wall_seconds=timeout).wall_seconds
        most = self._most_seconds
        return seconds if most is None else most if seconds is None else min(seconds, most)

    def simulate(self, work: str | Sequence[str] | Shell, **options: Unpack[WorkspaceSimulationOptions]) -> EffectPlan:
        """Run work on a throw-away clone of this sandbox, and return its effects. Neither the machine nor this sandbox is changed.

        The plan is kept for an hour, for `carry_out`. Raises `Denied` when the policy refuses the work, and what `run` raises.
        """
        return self._simulated(Run(), work_of(work), **options)

    def _simulated(
        self,
        run: Run,
        what: Code | Command,
        *,
        stdin: str | bytes = b"",
        env_vars: Mapping[str, str] | None = None,
        timeout: float | None = None,
        args: Sequence[str] = (),
        cwd: PathLike | None = None,
    ) -> EffectPlan:
        from agent_sandbox.engine.simulation.run import simulated  # few workspaces simulate
        from agent_sandbox.workspace.saved_plans import Plans

        asked = self._work(run, what, stdin=stdin, env_vars=env_vars, args=args, cwd=cwd)
        recovered(self._stored, self._gate)
        plans, governed = Plans(self._stored.state.store), self._policy.digest()
        with (
            self._session(run, timeout) as session,
            simulated(session, asked, plans, self.project, waiting=self._stored, governed=governed, on_busy=session.on_busy) as simulation,
        ):
            return simulation.plan

    def carry_out(
        self,
        plan: EffectPlan | str,
        *,
        approve: str | Iterable[str] = (),
        system: bool = False,
        caches: bool = False,
        files_only: bool = False,
    ) -> CarriedOver:
        """Apply a plan of this project exactly. `plan` is the plan, its digest, or the beginning of its digest. `undo` takes it back.

        `approve`, `system` and `caches` mean the same as for `promote`. `files_only` permits a plan with other effects; only its files are
        changed. Raises `PolicyError` for a missing or outdated plan, `Denied` for an unapproved protected kind, `Drift` if the real files
        have changed. After each of these, nothing was changed.
        """
        from agent_sandbox.engine.simulation.apply import carry, opened  # few workspaces carry out a plan
        from agent_sandbox.workspace.saved_plans import Plans

        digest = plan if isinstance(plan, str) else plan.digest
        recovered(self._stored, self._gate)
        plans, agreed = Plans(self._stored.state.store), frozenset(_each(approve))

        def own(project: str) -> Stored:
            if project != self.project:
                raise PolicyError(f"this is a plan of {project!r}", hint=f"use Workspace.over({project!r})")
            return self._stored

        with opened(
            plans,
            digest,
            own,
            lambda project: self._policy,
            here().process,
            approved=agreed,
            system=system,
            caches=caches,
            files_only=files_only,
            home=here().host.home,
        ) as ready:
            return carry(ready, ready.proposal, plans, self._gate)

    def intent(self, name: str | None) -> None:
        """Declare what the agent is about to do, as `Sandbox.intent` does."""
        self._changeable().declare(self._policy, name)

    def propose_network(self, *hosts: str, requests: Sequence[str] = (), seconds: float = 600.0, reason: str = "") -> tuple[str, ...]:
        """Propose hosts that the agent lacks, and wait for the decision, as `Sandbox.propose_network` does."""
        return self._changeable().propose(self._policy, hosts, requests, seconds=seconds, reason=reason)

    def _changeable(self) -> NetworkChanges:
        self._runs.check_open()
        if self._changes is None:
            raise PolicyError("this workspace has no network", hint='make it with config=SandboxConfig(network=["api.example.com"], …)')
        return self._changes

    def _decider(self, policy: Policy) -> Approver:
        """Return whoever decides on proposals for the network."""
        from agent_sandbox.approvals import Asking  # few policies ask

        self._asking = self._asking or Asking(self.id, None, ())
        return self._asking.approver(policy)

    def _gate_of(self, policy: Policy, sandbox: str = "") -> Gate:
        approver = self._asking.approver(policy) if self._asking is not None else None
        return here().gate(policy, approver=approver, sandbox=sandbox or self.id)

    def _attempt_session(self, name: str, state: SandboxState, limits: Limits, companions: tuple[Attachment, ...]) -> Session:
        """Return a session for one run of an attempt: under this workspace's policy, with the limits of the attempt. See `experiments`."""
        policy = limited(self._policy, limits)
        session = here().session(
            self._gate_of(policy, f"{self.id}/try-{name}"),
            here().runtimes(self._runtime),
            project=self.project,
            early=self._early,
            provisions=self._provisions,
            control=self._changes.control if self._changes is not None else None,
        )
        return replace(session.on(state), companions=companions)

    def _search_again(self) -> None:
        """Hide the secrets that have appeared since the last run."""
        masks = self._search() if self._search is not None else self._policy.files.masks
        if masks != self._policy.files.masks:
            self._policy = replace(self._policy, files=replace(self._policy.files, masks=masks))
            self._gate = self._gate_of(self._policy)

    @contextmanager
    def _session(self, run: Run, timeout: float | None) -> Iterator[Session]:
        """Register a run, and provide the session for it. Raises `SandboxError` if this workspace has been closed."""
        check_timeout(timeout)
        self._runs.begin(run)
        try:
            self._search_again()
            if timeout is not None and self._most_seconds is not None:
                timeout = min(timeout, self._most_seconds)
            limits = self._policy.limits
            policy = self._policy if timeout is None else replace(self._policy, limits=replace(limits, wall_seconds=timeout))
            gate = self._gate if policy is self._policy else self._gate_of(policy)
            try:
                yield self._new_session(gate, run, self._kept.state)
            finally:
                gate.end()
        finally:
            self._runs.end(run)

    def _new_session(self, gate: Gate, run: Run, state: SandboxState | None) -> Session:
        """Return a session on the stored sandbox, or on throw-away layers if `state` is None."""
        return here().session(
            gate,
            here().runtimes(self._runtime),
            project=self.project,
            state=state,
            on_busy=lambda busy: self._await_turn(run, busy),
            beside=in_a_thread,
            early=self._early,
            provisions=self._provisions,
            control=self._changes.control if self._changes is not None else None,
        )

    def _await_turn(self, run: Run, busy: Busy) -> None:
        """Wait until nobody uses the stored sandbox. Raises `Busy` if the run is cancelled meanwhile: the lock itself could not be left."""
        while not run.cancelled:
            try:
                with self._kept.state.lock(command="wait"):
                    return
            except Busy as still:
                busy = still
            time.sleep(LOOK_AGAIN_SECONDS)
        raise busy

    def changes(self) -> ChangeSet:
        """Return all changes in the sandbox: of the project, outside it, and in caches. `promote` chooses among them."""
        return self._stored.changes(self._policy)

    def diff(self, only: str | Iterable[str] = (), *, everything: bool = False) -> WorkspaceDiff:
        """Return the changes that `promote` writes, as a unified diff for people. Invisible characters are escaped.

        With `only`, return the changes whose paths it covers. With `everything`, return also changes of caches and outside the project, as
        `promote(system=True, caches=True)` writes them. Pass the `digest` of the result to `promote` to promote exactly these changes.
        Programs should use `agent-sandbox diff --patch`.
        """
        wanted = Wanted(self._chosen(only), system=everything, caches=everything)
        limits = EVERYTHING if everything else DEFAULT
        with reviewed(self._stored, self._policy, wanted, here().process) as review:
            contents, former = review.contents, review.former
            rows = unified_rows(review.selection, contents, former, relative_to=self.project, limits=limits, digests=review.digests)
            text = "".join(f"{row.plain}\n" for row in (*rows, *(ours(HEADING, f"# {each}") for each in review.words)))
            return WorkspaceDiff(text, review.digest()[0])

    def _chosen(self, only: str | Iterable[str]) -> Callable[[Change], bool]:
        patterns = _each(only)
        covered = covering(patterns, project=self.project, home=here().host.home)
        return lambda change: not patterns or covered(change.path)

    def drift(self) -> DriftReport:
        """Return the changes of the real project since the clone was made, and mark paths that the sandbox changed as well."""
        with explained(f"look for what has moved on in {self.project!r}"):
            return self._stored.drift(self.changes(), [mask.path for mask in self._policy.files.masks])

    def snapshot(self, label: str = "") -> Snapshot:
        """Take a snapshot of the present state."""
        return self._stored.snapshot(label)

    def rollback(self, to: str | int | Snapshot | None = None) -> Rollback:
        """Go back to a snapshot, by label or id; by default the last. The present state is kept in a new snapshot."""
        return self._stored.rollback(self._own(to) if isinstance(to, Snapshot) else to)

    def snapshots(self) -> tuple[Snapshot, ...]:
        """Return all snapshots, oldest first; `parent` makes them a tree."""
        return self._stored.snapshots().snapshots

    def forget(self, which: str | int | Snapshot) -> Snapshot:
        """Remove a snapshot, and the stored layers that nothing else uses."""
        return self._stored.forget(self._own(which) if isinstance(which, Snapshot) else which)

    def _own(self, snapshot: Snapshot) -> int:
        """Return the id of one of this sandbox's snapshots. Raises `PolicyError` if it belongs to another sandbox."""
        if not any((each.id, each.created) == (snapshot.id, snapshot.created) for each in self.snapshots()):
            raise PolicyError(f"the snapshot {snapshot.label or snapshot.id!r} is not one of this sandbox", hint="see snapshots()")
        return snapshot.id

    def promote(
        self,
        only: str | Iterable[str] = (),
        *,
        system: bool = False,
        drift: Literal["refuse", "merge", "force"] = "refuse",
        resolve: Resolve | None = None,
        approve: str | Iterable[str] = (),
        caches: bool = False,
        review: Callable[[PromotionProposal], bool] | None = None,
        expect: str | None = None,
    ) -> CarriedOver | None:
        """Promote changes to the real project: all changes, or those whose paths `only` covers. Either all of these are written, or none.

        Changes of caches such as `__pycache__` stay in the sandbox, unless `caches` is set. `system` also promotes changes outside the
        project. `approve` names the protected kinds of changes that may be promoted. `review` receives the proposal first; if it returns
        false, nothing is promoted and None is returned. `resolve` answers the conflicts of a merge. `expect` is the digest of the changes,
        as `diff` returns it for the same selection, or its first 12 digits.

        Raises `Denied` for a protected kind that is not in `approve`, and for changes with another digest than `expect`. Raises `Drift` if
        the real files have changed since the sandbox first saw them, `Conflicted` if a merge needs an answer, `Busy` while a run uses the
        sandbox. After each of these, nothing was changed.
        """
        wanted = Wanted(self._chosen(only), system, drift, resolve, frozenset(_each(approve)), caches, expect=expect, home=here().host.home)
        recovered(self._stored, self._gate)
        with engine_promote.proposed(self._stored, self._policy, wanted, here().process) as proposal:
            engine_promote.refuse_unexpected(proposal, self._gate)
            if review is not None and not review(proposal):
                return None
            return engine_promote.carry_out(proposal, self._stored, self._gate, details=lambda: diff_for_approver(proposal))

    def undo(self) -> CarriedOver:
        """Undo the last promotion. Raises `Drift` if a promoted file has changed since the promotion."""
        recovered(self._stored, self._gate)
        return engine_promote.take_back(self._stored, self._gate)

    def reset(self) -> None:
        """Drop all changes and snapshots. Promoted changes stay, and can still be undone."""
        self._stored.state.reset()

    def kill(self) -> None:
        """Kill all runs of this workspace, from any thread. Their results report it; those that wait for the sandbox raise `Busy`."""
        self._runs.kill()
        for live in tuple(self._lives):
            live.kill()

    def close(self) -> None:
        """Kill all runs and accept no more work. Returns when they are over. Changes and snapshots are kept. Idempotent."""
        self._runs.close()
        self.kill()
        self._runs.wait()
        for live in tuple(self._lives):
            live.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _each(words: str | Iterable[str]) -> tuple[str, ...]:
    """Return the words as a tuple. A single string is one word."""
    return (words,) if isinstance(words, str) else tuple(words)


def in_a_thread(do: Callable[[], None]) -> None:
    """Do something in another thread, and return at once."""
    threading.Thread(target=do, name="agent-sandbox-names", daemon=True).start()
