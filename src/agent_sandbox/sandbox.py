"""The sandbox for Python programs: settings in, work in, results out. A thin layer over `engine`.

Errors follow one rule. A problem of the submitted work is a result with status FAILED or TIMEOUT and an `error`: a failing program, a
refusal, an unknown language, empty or enormous code, invalid text, an invalid environment, a missing interpreter. A problem of the
caller's settings or of this machine is raised: `PolicyError`, `RuntimeUnavailable`, `LaunchFailed`, `LedgerUnavailable`.
"""

from __future__ import annotations

import json  # noqa: F401  for `_fast.encoding`, which uses it if it is loaded
import os
import secrets
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self, Unpack

from agent_sandbox import policy_files, result
from agent_sandbox._calls import (
    ENVIRONMENT,
    Run,
    Runs,
    Shell,
    TextListener,
    check_timeout,
    code_of,
    encoded,
    exchanges_of,
    shell,
    with_arguments,
    with_variables,
    work_of,
)
from agent_sandbox._fast.values import replace
from agent_sandbox.assembly import here
from agent_sandbox.audit import AuditLevel, AuditLog
from agent_sandbox.config import SandboxConfig, check_arguments, check_seed
from agent_sandbox.engine.code_check import EarlyLook
from agent_sandbox.engine.plan_launch import NATIVE, SCRATCH
from agent_sandbox.engine.run import Session
from agent_sandbox.engine.tools import named
from agent_sandbox.engine.work import Code, Command, Work, action_of
from agent_sandbox.errors import Denied, PolicyError, RuntimeUnavailable, SandboxError, SandboxWarning
from agent_sandbox.options import CreateArguments, OnOutput, ResumeOptions, RunOptions, SandboxSettings, SessionOptions, SimulationOptions
from agent_sandbox.policy.model import AskRules, Guarantee, Policy, repeatable, with_network
from agent_sandbox.policy.paths import Glob
from agent_sandbox.result import SandboxResult, SandboxStatus

if TYPE_CHECKING:
    from agent_sandbox.approvals import Asking
    from agent_sandbox.checkpoints import SessionCheckpoint
    from agent_sandbox.engine.file_access import FileAnswer, FileRequest
    from agent_sandbox.engine.gate import Approver
    from agent_sandbox.engine.records import Record
    from agent_sandbox.engine.simulation.plan import EffectPlan
    from agent_sandbox.files import SandboxFiles
    from agent_sandbox.live import LiveSandbox
    from agent_sandbox.network_changes import NetworkChanges
    from agent_sandbox.permissions import PermissionSet
    from agent_sandbox.policy.action import Action
    from agent_sandbox.policy.decide import Ask
    from agent_sandbox.policy.tokens import Token
    from agent_sandbox.replays import Replay
    from agent_sandbox.runtime.base import ScriptFile
    from agent_sandbox.session import SandboxSession

__all__ = ["Sandbox", "Shell", "create_sandbox", "shell"]


class Sandbox:
    """Runs code and commands. Each run has a fresh view of the machine, which ends with the run. Safe to use from many threads at once.

    >>> Sandbox().execute("print(6 * 7)").stdout
    '42\\n'

    Nothing is kept between runs. Between runs a sandbox holds no process, file or mount. Closing it ends its runs.
    """

    def __init__(
        self,
        config: SandboxConfig | None = None,
        *,
        permissions: PermissionSet | None = None,
        audit: AuditLog | None = None,
        asks: AskRules | None = None,
        approver: Approver | Callable[[Action, Ask], bool | str] | None = None,
        capabilities: Iterable[Token | str] = (),
        name: str = "",
        **settings: Unpack[SandboxSettings],
    ) -> None:
        """`settings` are fields of `SandboxConfig` that replace those in `config`. Raises `PolicyError` if they cannot be enforced.

        `permissions` replace the permission fields, which must then keep their defaults. `audit` is a log to use instead of a new one.

        `asks` lists actions that need approval; `network` may name hosts that do ("api.example.com+ask"). The `approver` is a function of
        the action and the question that returns True for yes, or "run" to let the run reach a host from now on; without one, people answer
        with `agent-sandbox approve`. Actions covered by `capabilities` need no approval, and the hosts that they name can be reached.
        An answer for the whole run holds until this sandbox is closed, and for a host until the run ends. A capability is granted to a
        sandbox by its `name`, or by its `id` if it has no name.
        """
        check_arguments(config, permissions, audit, asks, name)
        chosen = SandboxConfig(**settings) if config is None else replace(config, **settings) if settings else config
        self.config = chosen if permissions is None else permissions.over(chosen)
        self.id = self._new_id()
        wanted = self.config.policy() if asks is None else replace(self.config.policy(), asks=asks)
        tokens = tuple(capabilities)
        if tokens:
            from agent_sandbox.approvals import opened_hosts  # few sandboxes are given one

            wanted = with_network(wanted, wanted.network.with_capable(opened_hosts(tokens, name or self.id)))
        bound = self._bound(wanted)
        self._early, self._most_seconds = bound.early, bound.most_seconds
        self._warnings = (*self.config.warnings, *bound.warnings)
        self._asking: Asking | None = None
        self._changes: NetworkChanges | None = None
        decides = bound.policy.network.outbound and (approver is not None or bool(tokens))  # on proposals for the network
        if bound.policy.asks_somebody or decides:
            from agent_sandbox.approvals import Asking  # few sandboxes ask

            self._asking = Asking(name or self.id, approver, tokens)
        elif approver is not None or tokens:
            raise PolicyError(
                "an approver or capabilities without approval rules have no effect",
                hint='add asks=AskRules(…), or network=["api.example.com+ask"]',
            )
        if audit is None and self.config.enable_audit:
            audit = AuditLog(level=self.config.audit_level)
        self.audit = audit  # the actions of this sandbox, in memory
        self._ledger = self.audit.over(here().ledger()) if self.audit is not None else here().ledger()
        self._provisions = self.config._provisions(bound.policy)
        self._name = name or self.id
        if bound.policy.network.outbound:
            from agent_sandbox.network_changes import NetworkChanges  # few sandboxes have a network

            self._changes = NetworkChanges(self.id, self._ledger, self._decider)
        self._session = self._lately = self._session_for(bound.policy, self._early)  # `_lately`: the last session for other settings
        self._expires = None if self.config.lifetime_seconds is None else time.monotonic() + self.config.lifetime_seconds
        self._runs = Runs("sandbox", self._check_lifetime)
        self._sessions: weakref.WeakSet[SandboxSession | LiveSandbox] = weakref.WeakSet()  # a session that nobody has any more ends
        self._last = SandboxStatus.PENDING
        self._check_the_view_can_be_built()
        for warning in self._warnings:
            warnings.warn(warning, SandboxWarning, stacklevel=2)

    def __repr__(self) -> str:
        return f"Sandbox(id={self.id!r}, status={self.status.name}, config={self.config!r})"

    @property
    def status(self) -> SandboxStatus:
        """PENDING before the first run, RUNNING during a run, else the status of the latest run."""
        return SandboxStatus.RUNNING if self._runs.any else self._last

    @property
    def files(self) -> SandboxFiles:
        """The files that a run of this sandbox sees, to be read and listed. Nothing can be written, because nothing is kept between runs.

        To write files, use those of a session or of a `Workspace`.

        >>> Sandbox(allow_file_read=True, allowed_paths=[project]).files.read(project / "notes.txt")
        'one\\n'
        """
        from agent_sandbox.files import SandboxFiles  # few sandboxes use files this way

        why = "a sandbox keeps no files between runs"
        return SandboxFiles(
            self._use_file,
            self.config.cwd or SCRATCH,
            unkept=lambda path: why,
            instead="use the files of sandbox.session() or Workspace.over(…)",
        )

    _script: ScriptFile | None = None  # the file that the code of a session is from, if there is one

    def _new_id(self) -> str:
        """Return the id of this sandbox in results and in the ledger."""
        return secrets.token_hex(8)

    def _bound(self, wanted: Policy) -> policy_files.Bound:
        """Return the policy of the settings, narrowed by the policy files that bind this sandbox: by the system's alone."""
        return policy_files.bound(wanted, self.config._early_look())

    @property
    def _observes(self) -> bool:
        """Whether runs are observed: at audit level DEBUG, but not inside WebAssembly, which cannot be observed."""
        return self.config.enable_audit and self.config.audit_level is AuditLevel.DEBUG and self.config.runtime != "wasm"

    def execute(self, code: str, language: str = "python", **options: Unpack[RunOptions]) -> SandboxResult:
        """Run code as a script of its own and wait for its end.

        Languages are python, javascript, ruby and bash, also by their usual aliases. Raises as the module describes, and `SandboxError`
        when the sandbox has been closed or its lifetime is over.
        """
        return self._perform(Run(), code_of(code, language), **options)

    def run(self, work: str | Sequence[str] | Shell, **options: Unpack[RunOptions]) -> SandboxResult:
        """Run Python code (a string), a program with its arguments (a sequence of words), or a bash command line (`shell("…")`)."""
        return self._perform(Run(), work_of(work), **options)

    def simulate(self, work: str | Sequence[str] | Shell, **options: Unpack[SimulationOptions]) -> EffectPlan:
        """Run work as `run` does, and return its effects: files, programs, network requests and secrets, each with a risk.

        The plan cannot be applied, because this sandbox keeps no changes: use `Workspace.simulate` for that. Raises `Denied`, and as the
        module describes.
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
    ) -> EffectPlan:
        from agent_sandbox.engine.simulation.run import plan_apart  # few sandboxes simulate anything

        check_timeout(timeout)
        env = with_variables({**ENVIRONMENT, **self.config.env_vars}, env_vars)
        asked = Work(with_arguments(what, args), env, cwd=self.config.cwd, stdin=encoded(stdin), on_start=run.started)
        status = SandboxStatus.FAILED
        self._runs.begin(run)
        try:
            plan = plan_apart(self._within(timeout, deterministic=self.config.deterministic)[0], asked, self.config.cwd or SCRATCH)
            status = SandboxStatus.COMPLETED
        finally:
            self._end(run, status)
        return plan

    def session(self, **options: Unpack[SessionOptions]) -> SandboxSession:
        """Open a Python interpreter, or with `language="shell"` a bash, that keeps its state from turn to turn. Close it, best by `with`.

        >>> with Sandbox().session() as session:
        ...     session.run("x = 20").success, session.run("x + 1").value
        (True, 21)

        Raises `PolicyError` for a shell without `allow_subprocess=True`, or with tools.
        """
        from agent_sandbox.session import SandboxSession  # which is made of this module

        return self._kept(SandboxSession(self, **options))

    def resume(self, checkpoint: SessionCheckpoint | str, **options: Unpack[ResumeOptions]) -> SandboxSession:
        """Go on from a checkpoint that `session.checkpoint()` saved, given as that, or by its name or id. Needs the wasm runtime.

        The session has the rules, limits and tools of this sandbox, not those it was saved under. Variables, open files and files are as
        they were, over the machine's files as they are now. Raises `CheckpointError` if the checkpoint is damaged, or was saved by another
        version or on another kind of machine, and `Denied` if the policy permits no code.
        """
        from agent_sandbox.checkpoints import resume  # few sandboxes resume anything

        self._runs.check_open()
        return self._kept(resume(self, checkpoint, options.pop("env_vars", None), dict(options)))

    def _kept(self, session: SandboxSession) -> SandboxSession:
        """Remember a session, to close it with this sandbox. If that is closed already, close the session and raise `SandboxError`."""
        try:
            with self._runs.lock():
                self._runs.check_open()
                self._sessions.add(session)
        except SandboxError:
            session.close()
            raise
        return session

    def live(self, *, env_vars: Mapping[str, str] | None = None) -> LiveSandbox:
        """Return a sandbox in which programs run at the same time and go on between commands. Close it, best by `with`.

        >>> with Sandbox(allow_subprocess=True).live() as live:
        ...     live.files.write("note.txt", "hello")
        ...     live.run(["cat", "note.txt"]).stdout
        'hello'
        """
        from agent_sandbox.live import LiveSandbox, native_runtimes  # few sandboxes are used this way

        config = self.config
        work = Work(
            Code("python", ""),
            with_variables({**ENVIRONMENT, **config.env_vars}, env_vars),
            cwd=config.cwd or SCRATCH,
            observe=self._observes,
            log_observed=True,
            publish=config._publications(),
        )
        live = LiveSandbox(
            replace(self._within(None)[0], runtimes=native_runtimes(config.runtime)),
            work,
            sandbox_id=self.id,
            runs=self._runs,
            most_seconds=lambda timeout: self._time_for(timeout)[0],
            lifetime=lambda: self._time_for(None)[2],
        )
        with self._runs.lock():
            self._runs.check_open()
            self._sessions.add(live)
        return live

    def _perform(
        self,
        run: Run,
        what: Code | Command,
        *,
        stdin: str | bytes = b"",
        env_vars: Mapping[str, str] | None = None,
        timeout: float | None = None,
        args: Sequence[str] = (),
        tools: object = (),
        deterministic: bool | None = None,
        seed: int | None = None,
        record: str | os.PathLike[str] | None = None,
        record_network: str | os.PathLike[str] | None = None,
        record_bodies: bool = False,
        replay_network: str | os.PathLike[str] | None = None,
        on_output: OnOutput | None = None,
    ) -> SandboxResult:
        """Run work. `run` is a handle with which another thread can cancel it."""
        check_timeout(timeout)
        handed = named(tools) if tools != () else {}
        listener = TextListener.of(on_output)
        work = Work(
            with_arguments(what, args),
            with_variables({**ENVIRONMENT, **self.config.env_vars}, env_vars),
            cwd=self.config.cwd,
            stdin=encoded(stdin),
            preload=tuple(self.config.preload),
            on_output=listener,
            on_start=run.started,
            tools={**self.config._toolbox, **handed},
            ends=self._expires,
            seed=self.config.seed if seed is None else seed,
            record="" if record is None else os.fspath(record),
            publish=self.config._publications(),
            exchanges=exchanges_of(record_network, record_bodies, replay_network),
        )
        check_seed(work.seed)
        same = self.config.deterministic if deterministic is None else deterministic
        status = SandboxStatus.FAILED  # also when an exception passes through
        self._runs.begin(run)
        try:
            if self._observes and not same:
                work = replace(work, observe=True, log_observed=True)
            outcome = self._result(work, timeout, same)
            status = outcome.status
        finally:
            self._end(run, status)
        if listener is not None:
            listener.finish()
        return outcome

    def replay(
        self,
        record: str | os.PathLike[str] | Record,
        *,
        env_vars: Mapping[str, str] | None = None,
        code: str | None = None,
        stdin: bytes | None = None,
    ) -> Replay:
        """Replay a record in this sandbox, and report differences: see `agent_sandbox.replay`."""
        return self._replayed(Run(), record, env_vars=env_vars, code=code, stdin=stdin)

    def _replayed(
        self,
        run: Run,
        record: str | os.PathLike[str] | Record,
        *,
        env_vars: Mapping[str, str] | None,
        code: str | None,
        stdin: bytes | None,
    ) -> Replay:
        from agent_sandbox import replays  # few sandboxes replay anything
        from agent_sandbox.engine.records import Record, Recorder, read

        recorded = record if isinstance(record, Record) else read(os.fspath(record))
        what, given = replays.what_to_run(recorded, code, stdin)
        policy, identity = repeatable(self._session.policy), self._session.runtimes.identity
        env = with_variables({**ENVIRONMENT, **self.config.env_vars}, env_vars)
        replays.check(recorded, policy, env, self.config.cwd or SCRATCH, identity)
        self._runs.begin(run)
        status = SandboxStatus.FAILED
        try:
            work = Work(what, env, cwd=self.config.cwd, stdin=given, on_start=run.started, seed=recorded.seed)
            recorder = Recorder(work, salt=recorded.salt)
            outcome = self._session_for(policy, None).run(recorder.work)  # recorded code is not checked again
            second = result.completed(outcome, sandbox_id=self.id, language=what.language, wall="wall")
            status = second.status
        finally:
            self._end(run, status)
        return replays.compared(recorded, recorder.record(outcome, policy, identity), second)

    def _result(self, work: Work, timeout: float | None, deterministic: bool) -> SandboxResult:
        language = work.what.language if isinstance(work.what, Code) else None
        try:
            action = action_of(work)  # raises for work that no sandbox could run; later exceptions have other causes
            if work.tools and language != "python":
                work = self._without_tools(work)
            if work.tools and work.record:
                raise PolicyError("a run with tools cannot be recorded: what they answer is not in it", hint="leave out the tools")
            session, wall = self._within(timeout, tools=work.tools, deterministic=deterministic)
            if work.exchanges is not None and not session.policy.network.outbound:
                raise PolicyError("the run has no network, so there are no requests to record or to answer", hint="add network=[…]")
        except PolicyError as error:
            return self._told(result.refused(str(error), sandbox_id=self.id, language=language))
        try:
            outcome = session.run(work, action)
        except Denied as error:
            return self._told(result.refused(str(error), sandbox_id=self.id, language=language, verdict=error.verdict))
        except RuntimeUnavailable as error:
            if "native-programs" in error.missing or (language in NATIVE and NATIVE[language].commands[0] in error.missing):
                return self._told(result.refused(str(error), sandbox_id=self.id, language=language))
            raise
        return self._told(result.completed(outcome, sandbox_id=self.id, language=language, wall=wall))

    def _told(self, outcome: SandboxResult) -> SandboxResult:
        """Return the result with the warnings of this sandbox added to its notes."""
        return replace(outcome, notes=(*outcome.notes, *self._warnings)) if self._warnings else outcome

    def grant(self, *patterns: str, seconds: float, times: int | None = None) -> Token:
        """Pre-approve actions that match patterns such as "call lookup *", for `seconds`, and for at most `times` uses.

        The returned token can be narrowed (`attenuate`), passed on as text (`str`), and revoked. Raises `PolicyError` if this sandbox has
        no approval rules.
        """
        return self._asked().grant(patterns, seconds=seconds, times=times)

    def revoke(self, token: Token | str) -> None:
        """Revoke a token and all tokens derived from it. The next run, turn or tool call needs approval again.

        The next request to a host that it opened is refused, in a run that goes on as well.
        """
        self._asked().revoke(token)

    def intent(self, name: str | None) -> None:
        """Declare what the agent is about to do: an intent that the policy names, in any case, with any blanks. None takes it back.

        Only what this intent opens can be reached from now on, also in runs and sessions that go on, until its time is over. The change is
        recorded. Raises `PolicyError` for an intent that the policy does not name, or without a network; then nothing changes.
        """
        self._changeable().declare(self._session.policy, name)

    def propose_network(self, *hosts: str, requests: Sequence[str] = (), seconds: float = 600.0, reason: str = "") -> tuple[str, ...]:
        """Propose hosts that the agent lacks, written as in `network=`, and wait for the decision. Return what can now be reached.

        The approver decides; without one, a person does, with `agent-sandbox approve`. The question shows what would become reachable.
        `requests` limit what may be sent, as in a policy file. What is approved is open at once, also in runs that go on, for `seconds`;
        a port other than 80 and 443 opens with the next run. Raises `Denied` if it is refused. The policy files are never widened.
        """
        return self._changeable().propose(self._session.policy, hosts, requests, seconds=seconds, reason=reason)

    def _changeable(self) -> NetworkChanges:
        self._runs.check_open()
        if self._changes is None:
            raise PolicyError("this sandbox has no network", hint='make it with network=["api.example.com"]')
        return self._changes

    def _decider(self, policy: Policy) -> Approver:
        """Return whoever decides on proposals for the network."""
        from agent_sandbox.approvals import Asking

        self._asking = self._asking or Asking(self._name, None, ())
        return self._asking.approver(policy)

    def _asked(self) -> Asking:
        if self._asking is None and self._changes is not None:
            self._decider(self._session.policy)
        if self._asking is None:
            raise PolicyError(
                "this sandbox has no approval rules", hint='make it with asks=AskRules(…), or network=["api.example.com+ask"]'
            )
        return self._asking

    def _without_tools(self, work: Work) -> Work:
        """Return work that is not Python code without the configured tools. Raises `PolicyError` if the caller passed tools with it."""
        if work.tools.keys() - {*self.config._toolbox}:
            raise PolicyError("tools are for Python code", hint="hand them over with Python code, or leave them out")
        return replace(work, tools={})

    def _within(self, timeout: float | None, *, tools: Iterable[str] = (), deterministic: bool = False) -> tuple[Session, str]:
        """Return the session for one run, and the name of the limit that sets its wall time: "wall" or "lifetime"."""
        self._search_again()
        policy = self._session.policy
        may = self.config._callable_tools(tools)
        if timeout is None and self._expires is None and may == policy.tools and deterministic == self.config.deterministic:
            return self._session, "wall"
        seconds, wall, _ = self._time_for(timeout)
        policy = replace(policy, limits=replace(policy.limits, wall_seconds=seconds), tools=may)
        policy = repeatable(policy) if deterministic else replace(policy, requires=policy.requires - {Guarantee.DETERMINISTIC})
        if policy == self._session.policy:
            return self._session, wall
        session = self._lately  # another thread may replace it meanwhile
        if policy != session.policy:
            session = self._lately = self._session_for(policy, self._early)
        return session, wall

    def _search_again(self) -> None:
        """Hide the secrets that have appeared since the last run, if files are shown at all."""
        policy = self._session.policy
        if policy.files.read or policy.files.write:
            masks = self.config.policy().files.masks
            if masks != policy.files.masks:
                policy = replace(policy, files=replace(policy.files, masks=masks))
                self._session = self._lately = self._session_for(policy, self._early)

    def _time_for(self, timeout: float | None) -> tuple[float | None, str, float | None]:
        """Return the wall time of a run, the limit that sets it ("wall" or "lifetime"), and the seconds left of the sandbox's lifetime."""
        own = self._session.policy.limits
        seconds = own.wall_seconds if timeout is None else self.config.limits(timeout_seconds=timeout).wall_seconds
        if self._most_seconds is not None and (seconds is None or seconds > self._most_seconds):
            seconds = self._most_seconds
        left = None if self._expires is None else max(self._expires - time.monotonic(), 0.001)
        if left is not None and (seconds is None or left < seconds):
            return left, "lifetime", left
        return seconds, "wall", left

    def _session_for(self, policy: Policy, early: EarlyLook | None) -> Session:
        approver = self._asking.approver(policy) if self._asking is not None else None
        gate = here().gate(policy, sandbox=self.id, approver=approver, ledger=self._ledger)
        control = self._changes.control if self._changes is not None else None
        return here().session(gate, here().runtimes(self.config.runtime), early=early, provisions=self._provisions, control=control)

    def _check_the_view_can_be_built(self) -> None:
        """Raise `PolicyError` if the file rules would copy too much: that is a problem of the settings, not of a run."""
        files = self._session.policy.files
        if not files.allow_hidden or any(isinstance(pattern, Glob) for pattern in (*files.allowed, *files.denied)):
            self._session.explain(Work(Code("python", "pass"), ENVIRONMENT))

    def _use_file(self, run: Run, request: FileRequest) -> FileAnswer:
        """Do an operation on a file in a run of its own, which does not count for `status`."""
        from agent_sandbox.engine.file_access import access_by_run  # few sandboxes use files this way

        env = {**ENVIRONMENT, **self.config.env_vars}
        self._runs.begin(run)
        try:
            session, _ = self._within(None, deterministic=self.config.deterministic)
            return access_by_run(session, request, env=env, on_start=run.started, ends=self._expires)
        finally:
            self._runs.end(run)

    def _check_lifetime(self) -> None:
        """Raise `SandboxError` if the lifetime of this sandbox is over."""
        if self._expires is not None and time.monotonic() >= self._expires:
            lifetime = self.config.lifetime_seconds
            raise SandboxError(f"this sandbox has outlived its lifetime of {lifetime} s", hint="make another, or allow it more")

    def _end(self, run: Run, status: SandboxStatus) -> None:
        """Unregister a run that has ended, and remember its status."""
        self._last = status
        self._runs.end(run)

    def kill(self) -> None:
        """Kill all runs of this sandbox, from any thread. Their results report it. The sandbox can be used again."""
        self._runs.kill()
        for session in self._open_sessions():
            session.kill()

    def _open_sessions(self) -> list[SandboxSession | LiveSandbox]:
        with self._runs.lock():
            return list(self._sessions)

    def close(self) -> None:
        """Kill all runs and accept no more work. Returns when runs in other threads are over. Idempotent.

        A forked child of the application that closes its copy of a sandbox does not end the runs of its parent.
        """
        self._runs.close()
        self.kill()
        self._runs.wait()
        for session in self._open_sessions():
            session.close()
        if self._asking is not None:
            self._asking.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def create_sandbox(timeout: float | None = 30.0, **settings: Unpack[CreateArguments]) -> Sandbox:
    """Create a sandbox. `timeout` sets `timeout_seconds`; other arguments are those of `Sandbox`.

    >>> create_sandbox(timeout=5).execute("print(1)").stdout
    '1\\n'
    """
    return Sandbox(timeout_seconds=timeout, **settings)
