"""Run one action for one holder of a sandbox: through the gate, on a view, and back with what came of it.

This is where the siblings meet: rules become a view, the view becomes a launch, the layers become a change set. Each of them knows
nothing of the others.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import ExitStack

from agent_sandbox._fast.values import TYPE_CHECKING, dataclass, replace
from agent_sandbox.engine import languages
from agent_sandbox.engine.gate import Gate
from agent_sandbox.engine.retry import lack_of, on_a_plan_that_holds, question_of, rest
from agent_sandbox.engine.runtimes import Choice, Question, Runtimes
from agent_sandbox.engine.work import Code, Opened, Outcome, Work, action_of, facts, title
from agent_sandbox.errors import Busy, LaunchFailed, Overtaken, RuntimeUnavailable, SandboxError, WorkspaceError
from agent_sandbox.kernel.mount_plan import Layers, MountPlan, OnDisk, Overlay, ThrowAway
from agent_sandbox.policy.action import Action, RunCode
from agent_sandbox.policy.decide import Allow
from agent_sandbox.policy.guarantees import Guarantee
from agent_sandbox.policy.model import Policy
from agent_sandbox.runtime.base import Argv, Completed, Exit, Hosted, Launch, PythonCode, Reason, Script, Usage
from agent_sandbox.runtime.router.model import Route
from agent_sandbox.workspace.changes import ChangeSet
from agent_sandbox.workspace.view.draft import MachineFacts, Needs
from agent_sandbox.workspace.view.plan import plan_view

if TYPE_CHECKING:
    from agent_sandbox.engine.code_check import EarlyLook
    from agent_sandbox.engine.programs import Gating
    from agent_sandbox.runtime.base import Guest
    from agent_sandbox.runtime.observe.events import Observed
    from agent_sandbox.workspace.store import SandboxState
    from agent_sandbox.workspace.stored_sandbox import ForRun, Stored

SCRATCH = "/tmp"  # where work without a directory of its own begins
_NOTHING_SPENT = Usage()
_AT_A_REAL_MOMENT = frozenset(
    {Reason.TIMED_OUT, Reason.CPU_LIMIT, Reason.OUT_OF_MEMORY, Reason.OUTPUT_LIMIT, Reason.DISK_LIMIT, Reason.KILLED}
)
DISK_BYTES = 1 << 30  # of the tmpfs of a throw-away sandbox without a limit: a filesystem in memory must have some size


@dataclass(frozen=True)
class _Known:
    """A plan made lately, and what it was made from."""

    needs: Needs
    gating: Gating | None
    plan: MountPlan
    until: float


@dataclass(frozen=True)
class _Ran:
    """A run that has ended, and is still open to be read."""

    choice: Choice
    plan: MountPlan
    guest: Guest
    completed: Completed


class Session:
    """A gate, runtimes, and the layers to run on: throw-away ones, or those of a stored sandbox. Safe to use from many threads."""

    def __init__(
        self,
        gate: Gate,
        runtimes: Runtimes,
        *,
        project: str | None = None,
        state: SandboxState | None = None,
        look: Callable[[], MachineFacts] = MachineFacts.look,
        on_busy: Callable[[Busy], None] | None = None,
        beside: Callable[[Callable[[], None]], None] = lambda do: do(),
        early: EarlyLook | None = None,
    ) -> None:
        """`on_busy` is told who holds a stored sandbox that is in use, and then it is waited for; without it, `run` raises `Busy`.

        `beside` does what takes a while and nobody waits for, beside the run. `early` looks at code before it runs.
        """
        self._gate = gate
        self._runtimes = runtimes
        self._project = project
        self._state = state
        self._look = look
        self._on_busy = on_busy
        self._beside = beside
        self._early = early
        self._known: dict[str, _Known] = {}  # by runtime; each is replaced whole, so threads may share it

    def on(self, state: SandboxState) -> Session:
        """The same on the layers of another sandbox, for a run that nobody comes back to: what is in the project is not noted beside it."""
        return Session(
            self._gate,
            self._runtimes,
            project=self._project,
            state=state,
            look=self._look,
            on_busy=self._on_busy,
            beside=lambda do: None,
            early=self._early,
        )

    @property
    def gate(self) -> Gate:
        """The door of all that is done here."""
        return self._gate

    @property
    def policy(self) -> Policy:
        """What decides here."""
        return self._gate.policy

    def run(self, work: Work, action: Action | None = None) -> Outcome:
        """Do it; `action` is that of the work, from who has asked for it already.

        Raises `Denied` and other `SandboxError`s when it could not be done at all; a program that fails is an `Outcome`.
        """
        if work.record:
            from agent_sandbox.engine.records.recorder import run_recorded  # few runs are

            return run_recorded(self, work, action)
        if not work.tools:
            return self._gate.perform(self.judged(work, action), lambda allow: self._deed(work, allow), describe=facts, details=work.text)
        from agent_sandbox.engine.tools import Hearing  # few runs have them

        hearing = Hearing(self._gate, work.tools, ends=work.ends)
        talking = replace(work, talk=hearing.talk())
        outcome = self._gate.perform(self.judged(work, action), lambda allow: self._deed(talking, allow), describe=facts, details=work.text)
        return replace(outcome, tool_errors=tuple(hearing.errors))

    def judged(self, work: Work, action: Action | None = None) -> Action:
        """What is asked for. Of a command line also the programs in it, where the policy names some: it is then refused early and in words;
        and what in it somebody is to be asked about.

        The shell that reads the line is ours to start, and not among them. Raises `Denied` for code that the early look is against.
        """
        action, programs, asks = action or action_of(work), self.policy.programs, self.policy.asks
        if self._early is not None:
            self._early.check(self._gate, work.what, action)
        if not (isinstance(work.what, Code) and isinstance(action, RunCode) and action.language == "bash"):
            return action
        if not (programs.restricts or asks.asks):
            return action
        from agent_sandbox.policy.approval_rules import touched
        from agent_sandbox.readers.shell.analyze import understand  # few policies name programs

        found = understand(work.what.source, effects=asks.asks)
        return replace(action, programs=found.tools if programs.restricts else (), touches=touched(asks, found) if asks.asks else None)

    def open(self, work: Work) -> Opened:
        """Start what goes on for several turns, on layers that are thrown away; the first of them has passed the gate. To be closed."""
        choice = self._runtimes.choose(self.policy, lambda: self._question(work))
        with ExitStack() as stack:  # for what is watched or kept, which a session is not
            choice, plan, guest = self._started(work, choice, None, stack, _NOTHING_SPENT)
        # A runtime without sessions has refused by now.
        return Opened(guest, choice.route, (*plan.notes, *guest.notes))  # type: ignore[arg-type]

    @property
    def identity(self) -> dict[str, str]:
        """What deterministic runs here rest on: engine, interpreter, machine. Raises `RuntimeUnavailable` where there are none."""
        return self._runtimes.identity

    def route(self, work: Work) -> Route:
        """Where it would run, and why there. Nothing is run or set going."""
        return self._runtimes.choose(self.policy, lambda: self._question(work), acting=False).route

    def explain(self, work: Work) -> MountPlan:
        """The plan of what the guest would see. Nothing is run, and nothing made or attached."""
        choice = self._runtimes.choose(self.policy, lambda: self._question(work), acting=False)
        return self._plan(work, choice, ThrowAway(self._disk_bytes) if self._state is None else OnDisk(self._state.path))[2]

    @property
    def _disk_bytes(self) -> int:
        return self.policy.limits.disk_bytes or DISK_BYTES

    def _plan(self, work: Work, choice: Choice, layers: Layers) -> tuple[Argv | Hosted | Script, tuple[str, ...], MountPlan]:
        policy, where = self.policy, choice.runtime.traits.name
        if not choice.runtime.traits.views and (policy.files.read or policy.files.write):
            why = f"the runtime {where!r} shows no files of the machine, and the policy is about some"
            raise RuntimeUnavailable(why, missing=("view",), hint="run it without file permissions, or on Linux")
        if not choice.runtime.traits.views:
            if not (isinstance(work.what, Code) and work.what.language in choice.runtime.traits.brings):
                raise RuntimeUnavailable(
                    f"the runtime {where!r} runs Python code only", missing=("native-programs",), hint="run it on Linux"
                )
            return PythonCode(work.what.source, work.what.arguments), (), MountPlan(layers, ())
        if isinstance(work.what, Code) and work.what.language in choice.runtime.traits.brings:
            hosted = languages.hosted(work.what.language, work.what.source, work.what.arguments)
            return hosted, (), self._view(where, Needs(), layers)
        if isinstance(work.what, Code):
            prepared = languages.prepare(
                work.what.language,
                work.what.source,
                arguments=work.what.arguments,
                search_path=work.env.get("PATH", os.defpath),
                processes=policy.processes,
            )
            program: Argv | Hosted | Script = prepared.program
            needs, executables = prepared.needs, prepared.executables
        else:
            program, needs, executables = Argv(work.what.argv), languages.tools(), ()
        return program, executables, self._view(where, needs, layers, self._gating(work, program, executables))

    def _gating(self, work: Work, program: Argv | Hosted | Script, executables: tuple[str, ...]) -> Gating | None:
        """Which files of the machine can be executed in the run; None where any can, or nothing is started at all."""
        if not (self.policy.processes and self.policy.programs.restricts):
            return None
        from agent_sandbox.engine.programs import gating_of  # few runs say which programs they may start
        from agent_sandbox.policy.programs import reads_a_line

        return gating_of(
            self.policy,
            search_path=work.env.get("PATH", os.defpath),
            interpreter=executables,
            python=isinstance(program, PythonCode),
            line=isinstance(program, Argv) and reads_a_line(program.words),
            project=self._project,
        )

    def _view(self, where: str, needs: Needs, layers: Layers, gating: Gating | None = None) -> MountPlan:
        """The plan of the view. Where nothing of the machine is shown but interpreters, it is not made anew for each run of a row."""
        policy, known = self.policy, self._known.get(where)
        if known is not None and known.needs == needs and known.gating == gating and time.monotonic() < known.until:
            return known.plan if known.plan.layers == layers else replace(known.plan, layers=layers)
        files, code = (policy.files, None) if gating is None else (gating.files, gating.executables)
        host, scratch = self._look(), self._disk_bytes
        plan = plan_view(files, needs, layers, host=host, project=self._project, scratch_bytes=scratch, executables=code)
        if gating is not None and gating.notes:
            plan = replace(plan, notes=(*plan.notes, *gating.notes))
        if not (policy.files.read or policy.files.write):
            self._known[where] = _Known(needs, gating, plan, time.monotonic() + languages.KNOWN_SECONDS)
        return plan

    def _deed(self, work: Work, allow: Allow) -> Outcome:
        began = time.monotonic()
        with ExitStack() as stack:
            kept = self._kept(self._state, work, stack) if self._state is not None else None
            ran = self._ran(work, kept, stack)
            said = self._after(self._state, kept, ran) if self._state is not None and kept is not None else ()
            changes, unlisted = self.changes(ran.guest, work) if self._state is None and self.policy.files.write else (ChangeSet(), ())
            return Outcome(
                exit=ran.completed.exit,
                stdout=ran.completed.stdout,
                stderr=ran.completed.stderr,
                changes=changes,
                route=ran.choice.route,
                verdict=allow,
                seconds=time.monotonic() - began,
                refused=ran.guest.refused,
                notes=(*ran.plan.notes, *ran.guest.notes, *said, *unlisted, *self._not_the_same(ran.completed.exit)),
                inputs=ran.completed.inputs,
                observed=self.observed(work, ran.guest.launch, ran.completed) if work.observe else (),
            )

    def observed(self, work: Work, launch: Launch, completed: Completed) -> tuple[Observed, ...]:
        """What was seen of a run, judged; and in the ledger where that is wanted, before how the run ended is."""
        from agent_sandbox.engine.observation import judged, noted  # few runs are observed

        found = judged(completed.observed, self.policy, launch)
        if work.log_observed:
            for what, seen in map(noted, found):
                self._gate.note(what, seen)
        return found

    def _not_the_same(self, end: Exit) -> tuple[str, ...]:
        """What is to be said of a deterministic run that was ended from outside."""
        if Guarantee.DETERMINISTIC not in self.policy.requires or end.reason not in _AT_A_REAL_MOMENT:
            return ()
        return (
            f"it was ended from outside ({end.reason.value}), at a moment that another run need not share: so this is not deterministic",
        )

    def _ran(self, work: Work, kept: ForRun | None, stack: ExitStack) -> _Ran:
        """Run it where it is to run; and once more elsewhere if it lacked something there and nothing of it can have been noticed."""
        choice = self._runtimes.choose(self.policy, lambda: self._question(work))
        held = self._runtimes.held(choice, work.on_output)
        first = work if held is None else replace(work, on_output=held)
        ran = self._awaited(first, *self._started(first, choice, kept, stack, _NOTHING_SPENT), stack)
        lack = lack_of(work, ran.choice, ran.guest, ran.completed, held, stored=self._state is not None)
        again = None if lack is None else self._runtimes.after_lack(ran.choice, lack, self.policy, lambda: self._question(work))
        if again is not None:
            try:
                started = self._started(work, again, kept, stack, ran.completed.exit.usage)
            except SandboxError as error:  # it has not what it takes either: how the first one ended is how it ended
                note = f"it could not start again on {again.runtime.traits.name}: {error.message}"
                ran = replace(ran, choice=replace(ran.choice, route=replace(ran.choice.route, notes=(*ran.choice.route.notes, note))))
            else:
                ran.guest.close()
                return self._awaited(work, *started, stack)
        if held is not None:
            held.release()
        return ran

    def _awaited(self, work: Work, choice: Choice, plan: MountPlan, guest: Guest, stack: ExitStack) -> _Ran:
        stack.callback(guest.close)
        if work.on_start is not None:
            work.on_start(guest)
        return _Ran(choice, plan, guest, guest.wait())

    def _started(self, work: Work, choice: Choice, kept: ForRun | None, stack: ExitStack, spent: Usage) -> tuple[Choice, MountPlan, Guest]:
        """Start it, wherever of the machine's runtimes that succeeds."""
        failed: dict[str, str] = {}
        while True:
            try:
                return choice, *self._launched(work, choice, kept, stack, spent)
            except (RuntimeUnavailable, LaunchFailed) as error:  # nothing has run
                if spent is not _NOTHING_SPENT:  # a second try goes nowhere else
                    raise
                failed[choice.runtime.traits.name] = error.message
                choice = self._runtimes.after_failure(failed, error, self.policy, lambda: self._question(work))

    def _launched(self, work: Work, choice: Choice, kept: ForRun | None, stack: ExitStack, spent: Usage) -> tuple[MountPlan, Guest]:
        def attempt() -> tuple[MountPlan, Guest]:
            program, executables, plan = self._plan(work, choice, kept.layers if kept else ThrowAway(self._disk_bytes))
            launch = self._launch(work, program, executables, plan, spent)
            if work.watch_reads:
                from agent_sandbox.workspace.read_tracking import ReadTracker  # and with it threads: few runs are watched

                reading = ReadTracker(self._state, kept.since_ns if kept else 0)
                stack.callback(reading.end)
                launch = replace(launch, on_ready=reading.begin)
            try:
                return plan, choice.runtime.launch(replace(launch, on_tick=kept.growth) if kept and kept.growth else launch)
            except Overtaken:
                self._known.clear()
                raise

        return on_a_plan_that_holds(attempt)

    def _question(self, work: Work) -> Question:
        return question_of(work, self.policy, stored=self._state is not None)

    def _kept(self, state: SandboxState, work: Work, stack: ExitStack) -> ForRun:
        """The layers of the stored sandbox, held for this run."""
        from agent_sandbox.workspace.stored_sandbox import Stored

        self._hold(state, work, stack)
        stored = Stored(state)
        said = _recovered(stored, self._gate)
        ready = stored.for_run(self.policy.limits.disk_bytes, stack)
        if not stored.names_are_known:
            masks = [mask.path for mask in self.policy.files.masks]
            self._beside(lambda: stored.remember_names(masks))
        return replace(ready, notes=(*said, *ready.notes)) if said else ready

    def _after(self, state: SandboxState, kept: ForRun, ran: _Ran) -> tuple[str, ...]:
        """What is done with the layers of a stored sandbox when nothing writes to them any more, while they are still open."""
        from agent_sandbox.workspace.stored_sandbox import Stored

        refused: tuple[str, ...] = (kept.growth.refused,) if kept.growth and kept.growth.refused else ()
        if ran.guest.layers is not None:
            try:
                refused += self._unseen(ran, kept)
                Stored(state).after_run(ran.guest.layers, kept, [mask.path for mask in self.policy.files.masks])
            except (WorkspaceError, OSError) as error:  # the next one tries again; what the guest did counts
                return (*kept.notes, *refused, f"the layers could not be put in order: {error}")
        return (*kept.notes, *refused)

    def _unseen(self, ran: _Ran, kept: ForRun) -> tuple[str, ...]:
        from agent_sandbox.workspace.stored_sandbox import unseen

        assert ran.guest.layers is not None
        shown = {step.target for step in ran.plan.steps if isinstance(step, Overlay)}
        missed = unseen(ran.guest.layers, (kept.present.active, *kept.present.chain), shown)
        why = "this run's view is made of other trees than theirs (files.allowed), and had the real files there"
        return (f"what earlier runs changed in {', '.join(missed)} was not seen: {why}",) if missed else ()

    def _hold(self, state: SandboxState, work: Work, stack: ExitStack) -> None:
        try:
            stack.enter_context(state.lock(command=title(work)))
        except Busy as busy:
            if self._on_busy is None:
                raise
            self._on_busy(busy)
            stack.enter_context(state.lock(wait=True, command=title(work)))

    def _launch(self, work: Work, program: Argv | Hosted | Script, executables: tuple[str, ...], plan: MountPlan, spent: Usage) -> Launch:
        policy = self.policy
        limits = policy.limits if spent is _NOTHING_SPENT else rest(policy.limits, spent)
        if work.left is not None:  # asked now, when all waiting is over
            if (left := work.left()) <= 0:
                raise SandboxError("what it was permitted for has ended before it could start", hint="ask again for what it needs")
            limits = replace(limits, wall_seconds=min(left, limits.wall_seconds or left))
        return Launch(
            program=program,
            root=plan,
            cwd=work.cwd or SCRATCH,
            env=work.env,
            limits=limits,
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
            talk=work.talk if isinstance(program, PythonCode) else None,
            deterministic=work.seed if Guarantee.DETERMINISTIC in policy.requires else None,
            watch_inputs=work.watch_inputs,
            observe=work.observe,
        )

    def changes(self, guest: Guest, work: Work) -> tuple[ChangeSet, tuple[str, ...]]:
        """What a throw-away run wrote; or nothing and why, when a guest made more than can be listed. What it said still counts."""
        from agent_sandbox.workspace.stored_sandbox import changes_of, stack_in

        assert guest.layers is not None
        try:
            with stack_in(guest.layers) as stack:
                changes = changes_of(stack, self.policy)
                if work.on_changes is not None:
                    work.on_changes(changes, stack)
            return changes, ()
        except WorkspaceError as error:
            return ChangeSet(), (f"what it changed cannot be listed: {error.message}",)


def _recovered(stored: Stored, gate: Gate) -> tuple[str, ...]:
    """Bring to an end what was cut off in the tree before a guest looks at it. What cannot be is said, and is no reason not to run."""
    from agent_sandbox.engine.recover import recovered

    try:
        return recovered(stored, gate, held=True)
    except (SandboxError, OSError) as error:
        return (f"a promotion was cut off and could not be brought to its end: {error}",)
