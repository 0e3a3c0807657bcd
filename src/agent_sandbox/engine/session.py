"""Run one action for one holder of a sandbox: through the gate, on a view, and back with what came of it.

This is where the siblings meet: rules become a view, the view becomes a launch, the layers become a change set. Each of them knows
nothing of the others.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack

from agent_sandbox.engine import languages
from agent_sandbox.engine.gate import Gate
from agent_sandbox.engine.recovering import recovered
from agent_sandbox.engine.stored import ForRun, Stored, changes_of, stack_in
from agent_sandbox.errors import Busy, PolicyError, SandboxError, WorkspaceError
from agent_sandbox.kernel.mounts import Layers, MountPlan, OnDisk, ThrowAway
from agent_sandbox.policy.action import Action, RunCode, RunCommand
from agent_sandbox.policy.decide import Allow
from agent_sandbox.policy.model import Policy
from agent_sandbox.policy.paths import normalise
from agent_sandbox.runtime.base import Argv, Exit, Launch, PythonCode, Script, Terminal
from agent_sandbox.runtime.process import ProcessRuntime
from agent_sandbox.runtime.running import ProcessGuest
from agent_sandbox.values import TYPE_CHECKING, dataclass, field, replace
from agent_sandbox.workspace.changes import ChangeSet, Contents
from agent_sandbox.workspace.draft import Host, Needs
from agent_sandbox.workspace.store import SandboxState
from agent_sandbox.workspace.view import plan_view

if TYPE_CHECKING:
    from agent_sandbox.engine.programs import Gating
    from agent_sandbox.runtime.wasm.runtime import WasmRuntime

SCRATCH = "/tmp"  # where work without a directory of its own begins
_WHY = {"process": "the only runtime that runs native programs here", "wasm": "it was asked for"}
DISK_BYTES = 1 << 30  # of the tmpfs of a throw-away sandbox without a limit: a filesystem in memory must have some size


@dataclass(frozen=True)
class Code:
    """Source in a language, by its canonical name."""

    language: str
    source: str
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class Command:
    """A program and its arguments."""

    argv: tuple[str, ...]


@dataclass(frozen=True)
class Work:
    """One thing to do, with all it is given.

    `env` is complete. `on_start` receives the running guest, to signal or kill it from elsewhere. `on_changes` receives what a throw-away
    run changed, while the contents can still be read; it is not called when that cannot be told. With `watch_reads` the files of the
    project that it opens are kept with the sandbox.
    """

    what: Code | Command
    env: Mapping[str, str]
    cwd: str | None = None
    stdin: bytes | int = b""
    terminal: Terminal | None = None
    preload: tuple[str, ...] = ()
    on_output: Callable[[str, bytes], None] | None = None
    on_start: Callable[[ProcessGuest], None] | None = None
    on_changes: Callable[[ChangeSet, Contents], None] | None = None
    collect: bool = True
    watch_reads: bool = False


@dataclass(frozen=True)
class Route:
    """Which runtime did it, and why that one."""

    runtime: str
    why: str


@dataclass(frozen=True)
class Outcome:
    """What came of it. `refused` says why the program could not be started inside (not found, not executable), or is empty."""

    exit: Exit
    stdout: bytes
    stderr: bytes
    changes: ChangeSet
    route: Route
    verdict: Allow
    seconds: float
    refused: str = ""
    notes: tuple[str, ...] = field(default=())


@dataclass(frozen=True)
class _Known:
    """A plan made lately, and what it was made from."""

    needs: Needs
    gating: Gating | None
    plan: MountPlan
    until: float


class Session:
    """A gate, a runtime, and the layers to run on: throw-away ones, or those of a stored sandbox. Safe to use from many threads."""

    def __init__(
        self,
        gate: Gate,
        runtime: ProcessRuntime | WasmRuntime,
        *,
        project: str | None = None,
        state: SandboxState | None = None,
        look: Callable[[], Host] = Host.look,
        on_busy: Callable[[Busy], None] | None = None,
        beside: Callable[[Callable[[], None]], None] = lambda do: do(),
    ) -> None:
        """`on_busy` is told who holds a stored sandbox that is in use, and then it is waited for; without it, `run` raises `Busy`.

        `beside` does what takes a while and nobody waits for, beside the run.
        """
        self._gate = gate
        self._runtime = runtime
        self._project = project
        self._state = state
        self._look = look
        self._on_busy = on_busy
        self._beside = beside
        self._known: _Known | None = None  # replaced whole, so threads may share it

    @property
    def policy(self) -> Policy:
        """What decides here."""
        return self._gate.policy

    def run(self, work: Work, action: Action | None = None) -> Outcome:
        """Do it; `action` is that of the work, from who has asked for it already.

        Raises `Denied` and other `SandboxError`s when it could not be done at all; a program that fails is an `Outcome`.
        """
        return self._gate.perform(action or action_of(work), lambda allow: self._deed(work, allow), describe=_facts)

    def explain(self, work: Work) -> MountPlan:
        """The plan of what the guest would see. Nothing is run, and nothing made or attached."""
        return self._plan(work, ThrowAway(self._disk_bytes) if self._state is None else OnDisk(self._state.path))[2]

    @property
    def _disk_bytes(self) -> int:
        return self.policy.limits.disk_bytes or DISK_BYTES

    def _plan(self, work: Work, layers: Layers) -> tuple[Argv | PythonCode | Script, tuple[str, ...], MountPlan]:
        policy = self.policy
        if isinstance(work.what, Code) and work.what.language in self._runtime.brings:
            return PythonCode(work.what.source, work.what.arguments), (), self._view(Needs(), layers)
        if isinstance(work.what, Code):
            prepared = languages.prepare(
                work.what.language,
                work.what.source,
                arguments=work.what.arguments,
                search_path=work.env.get("PATH", os.defpath),
                processes=policy.processes,
            )
            program: Argv | PythonCode | Script = prepared.program
            needs, executables = prepared.needs, prepared.executables
        else:
            program, needs, executables = Argv(work.what.argv), languages.tools(), ()
        return program, executables, self._view(needs, layers, self._gating(work, program, executables))

    def _gating(self, work: Work, program: Argv | PythonCode | Script, executables: tuple[str, ...]) -> Gating | None:
        """Which files of the machine can be executed in the run; None where any can, or nothing is started at all."""
        if not (self.policy.processes and self.policy.programs.restricts):
            return None
        from agent_sandbox.engine.programs import gating_of  # few runs say which programs they may start

        return gating_of(
            self.policy,
            search_path=work.env.get("PATH", os.defpath),
            interpreter=executables,
            python=isinstance(program, PythonCode),
            project=self._project,
        )

    def _view(self, needs: Needs, layers: Layers, gating: Gating | None = None) -> MountPlan:
        """The plan of the view. Where nothing of the machine is shown but interpreters, it is not made anew for each run of a row."""
        policy, known = self.policy, self._known
        if known is not None and known.needs == needs and known.gating == gating and time.monotonic() < known.until:
            return known.plan if known.plan.layers == layers else replace(known.plan, layers=layers)
        files, executables = (policy.files, None) if gating is None else (gating.files, gating.executables)
        host, scratch = self._look(), self._disk_bytes
        plan = plan_view(files, needs, layers, host=host, project=self._project, scratch_bytes=scratch, executables=executables)
        if gating is not None and gating.notes:
            plan = replace(plan, notes=(*plan.notes, *gating.notes))
        if not (policy.files.read or policy.files.write):
            self._known = _Known(needs, gating, plan, time.monotonic() + languages.KNOWN_SECONDS)
        return plan

    def _deed(self, work: Work, allow: Allow) -> Outcome:
        began = time.monotonic()
        with ExitStack() as stack:
            kept = self._kept(self._state, work, stack) if self._state is not None else None
            program, executables, plan = self._plan(work, kept.layers if kept else ThrowAway(self._disk_bytes))
            launch = self._launch(work, program, executables, plan)
            if work.watch_reads:
                from agent_sandbox.engine.reading import Reading  # and with it threads: few runs are watched

                reading = Reading(self._state, kept.since_ns if kept else 0)
                stack.callback(reading.end)
                launch = replace(launch, on_ready=reading.begin)
            guest = self._runtime.launch(replace(launch, on_tick=kept.growth) if kept and kept.growth else launch)
            stack.callback(guest.close)
            if work.on_start is not None:
                work.on_start(guest)
            completed = guest.wait()
            said = self._after(self._state, kept, guest) if self._state is not None and kept is not None else ()
            changes, unlisted = self._changes(guest, work) if self._state is None and self.policy.files.write else (ChangeSet(), ())
            return Outcome(
                exit=completed.exit,
                stdout=completed.stdout,
                stderr=completed.stderr,
                changes=changes,
                route=Route(self._runtime.name, _WHY[self._runtime.name]),
                verdict=allow,
                seconds=time.monotonic() - began,
                refused=guest.refused,
                notes=(*plan.notes, *guest.notes, *said, *unlisted),
            )

    def _kept(self, state: SandboxState, work: Work, stack: ExitStack) -> ForRun:
        """The layers of the stored sandbox, held for this run."""
        self._hold(state, work, stack)
        stored = Stored(state)
        said = _recovered(stored, self._gate)
        ready = stored.for_run(self.policy.limits.disk_bytes, stack)
        if not stored.names_are_known:
            masks = [mask.path for mask in self.policy.files.masks]
            self._beside(lambda: stored.remember_names(masks))
        return replace(ready, notes=(*said, *ready.notes)) if said else ready

    def _after(self, state: SandboxState, kept: ForRun, guest: ProcessGuest) -> tuple[str, ...]:
        """What is done with the layers of a stored sandbox when nothing writes to them any more, while they are still open."""
        refused = (kept.growth.refused,) if kept.growth and kept.growth.refused else ()
        if guest.layers is not None:
            try:
                Stored(state).after_run(guest.layers, kept, [mask.path for mask in self.policy.files.masks])
            except (WorkspaceError, OSError) as error:  # the next one tries again; what the guest did counts
                return (*kept.notes, *refused, f"the layers could not be put in order: {error}")
        return (*kept.notes, *refused)

    def _hold(self, state: SandboxState, work: Work, stack: ExitStack) -> None:
        try:
            stack.enter_context(state.lock(command=_title(work)))
        except Busy as busy:
            if self._on_busy is None:
                raise
            self._on_busy(busy)
            stack.enter_context(state.lock(wait=True, command=_title(work)))

    def _launch(self, work: Work, program: Argv | PythonCode | Script, executables: tuple[str, ...], plan: MountPlan) -> Launch:
        policy = self.policy
        return Launch(
            program=program,
            root=plan,
            cwd=work.cwd or SCRATCH,
            env=work.env,
            limits=policy.limits,
            requires=policy.requires,
            stdin=work.stdin,
            processes=policy.processes,
            writable=policy.files.write,
            system=policy.system,
            terminal=work.terminal,
            executables=executables,
            preload=work.preload,
            on_output=work.on_output,
            collect=work.collect,
        )

    def _changes(self, guest: ProcessGuest, work: Work) -> tuple[ChangeSet, tuple[str, ...]]:
        """What a throw-away run wrote; or nothing and why, when a guest made more than can be listed. What it said still counts."""
        assert guest.layers is not None
        try:
            with stack_in(guest.layers) as stack:
                changes = changes_of(stack, self.policy)
                if work.on_changes is not None:
                    work.on_changes(changes, stack)
            return changes, ()
        except WorkspaceError as error:
            return ChangeSet(), (f"what it changed cannot be listed: {error.message}",)


def action_of(work: Work) -> Action:
    """What is judged and recorded of a piece of work. Raises PolicyError for what cannot be run in any sandbox."""
    for name, value in work.env.items():
        if "\0" in value:
            raise PolicyError(f"the environment variable {name!r} holds a NUL character", hint="remove it")
    if work.cwd is not None:
        normalise(work.cwd)
    if isinstance(work.what, Code):
        if "\0" in work.what.source:
            raise PolicyError("the code holds a NUL character", hint="remove it, or spell it as an escape")
        try:
            source = work.what.source.encode()
        except UnicodeEncodeError as error:
            raise PolicyError("the code holds a lone surrogate, which is not text", hint="spell it as an escape") from error
        return RunCode.of(work.what.language, source, cwd=work.cwd, environment=work.env)
    return RunCommand.of(work.what.argv, cwd=work.cwd, environment=work.env)


def _recovered(stored: Stored, gate: Gate) -> tuple[str, ...]:
    """Bring to an end what was cut off in the tree before a guest looks at it. What cannot be is said, and is no reason not to run."""
    try:
        return recovered(stored, gate, held=True)
    except (SandboxError, OSError) as error:
        return (f"a promotion was cut off and could not be brought to its end: {error}",)


def _title(work: Work) -> str:
    return " ".join(work.what.argv)[:200] if isinstance(work.what, Command) else f"{work.what.language} code"


def _facts(outcome: Outcome) -> dict[str, str | int | float]:
    """What the ledger keeps of an outcome: no output, which may hold anything."""
    return {
        "exit_code": outcome.exit.code,
        "reason": outcome.exit.reason.value,
        "limits_hit": ",".join(outcome.exit.limits_hit),
        "seconds": round(outcome.seconds, 6),
        "changes": len(outcome.changes),
    }
