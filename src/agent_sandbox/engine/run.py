"""Run one action in a sandbox: through the gate, on a view, and back with its outcome.

This module combines the other parts: a view is planned from the rules, a guest is launched on the view, and changes are read from the
layers. None of these parts knows the others.
"""

from __future__ import annotations

import time

from agent_sandbox._fast.contexts import ExitStack
from agent_sandbox._fast.functions import partial
from agent_sandbox._fast.values import TYPE_CHECKING, dataclass, replace
from agent_sandbox.engine.attachments import Attachment, Attachments, ReadTracking, attachments_of
from agent_sandbox.engine.gate import Gate
from agent_sandbox.engine.plan_launch import LaunchPlanner
from agent_sandbox.engine.provisions import NO_PROVISIONS, Provisions
from agent_sandbox.engine.retry import Launches, question_of
from agent_sandbox.engine.runtimes import Choice, Runtimes
from agent_sandbox.engine.work import Code, Opened, Outcome, Work, action_of, facts, title
from agent_sandbox.errors import Busy, RuntimeUnavailable, WorkspaceError
from agent_sandbox.kernel.mount_plan import Layers, MountPlan, OnDisk, ThrowAway
from agent_sandbox.policy.action import Action, RunCode, UseFile
from agent_sandbox.policy.decide import Allow
from agent_sandbox.policy.model import Policy
from agent_sandbox.runtime.router.model import Route
from agent_sandbox.workspace.changes import ChangeSet
from agent_sandbox.workspace.view.plan import MachineFacts

if TYPE_CHECKING:
    from collections.abc import Callable

    from agent_sandbox.engine.code_check import EarlyLook
    from agent_sandbox.engine.network_control import NetworkControl
    from agent_sandbox.engine.stored_run import StoredRun
    from agent_sandbox.runtime.base import Guest
    from agent_sandbox.workspace.store import SandboxState


def _never(do: Callable[[], None]) -> None:
    pass


@dataclass
class Session:
    """Runs work through one gate, on throw-away layers or on those of a stored sandbox. Safe to use from many threads.

    If another process uses the stored sandbox, `on_busy` is called with the `Busy` error and `run` waits. Without `on_busy`, `run` raises
    `Busy`. `beside` does slow work in the background; without `beside`, the slow work is done before the run. `early` checks code before it
    runs. `asked_ns` is when a single run was asked for: see `Stored.for_run`. `provisions` are for the egress, if there is a network,
    and `control` changes what it lets through while runs go on. `companions` are attachments of every run. `on_layers` is told the layers
    of a run before the rest of its view is planned.
    """

    gate: Gate
    runtimes: Runtimes
    project: str | None = None
    state: SandboxState | None = None
    look: Callable[[], MachineFacts] = MachineFacts.look
    on_busy: Callable[[Busy], None] | None = None
    beside: Callable[[Callable[[], None]], None] | None = None
    early: EarlyLook | None = None
    asked_ns: int | None = None
    provisions: Provisions = NO_PROVISIONS
    control: NetworkControl | None = None
    companions: tuple[Attachment, ...] = ()
    on_layers: Callable[[Layers], None] | None = None

    def __post_init__(self) -> None:
        self._planner = LaunchPlanner(self.gate.policy, self.project, self.look)

    def on(self, state: SandboxState) -> Session:
        """Return this session on another stored sandbox, for a single run. No inventory of the project is made."""
        return replace(self, state=state, beside=_never)

    @property
    def policy(self) -> Policy:
        """The policy of the gate."""
        return self.gate.policy

    def run(self, work: Work, action: Action | None = None) -> Outcome:
        """Run a piece of work. `action` is the work's action, if the caller has computed it already.

        Raises `Denied` and other `SandboxError`s if the work could not run at all; a program that fails is an `Outcome`.
        """
        if work.record:
            from agent_sandbox.engine.records import recorded  # few runs are recorded

            work = recorded(work, self.policy, lambda: self.runtimes.identity)
        attachments = (*attachments_of(work, self), *self.companions)
        deed = partial(self._run, work, attachments)
        return self.gate.perform(self.judged(work, action), deed, describe=facts, details=work.text)

    def _run(self, work: Work, attachments: tuple[Attachment, ...], allow: Allow) -> Outcome:
        began = time.monotonic()
        with ExitStack() as ends:
            layers, attached = self._layers(work, attachments, ends)
            ends.callback(attached.release)
            launches = Launches(work, self.runtimes, self._planner, self.policy, attached, stored=self.state is not None)
            guest, outcome = None, None
            for choice in launches:
                with launches:
                    launch = attached.before(self._planner.launch(work, choice.runtime.traits, layers, launches.limits))
                    guest = launches.started(choice.runtime.launch(launches.held(launch)))
                    ends.callback(guest.close)
                    if work.on_start is not None:
                        work.on_start(guest)
                    attached.started(guest)
                    completed = guest.wait()
                    outcome = Outcome.of(completed, guest, choice.route, allow, (*launch.root.notes, *guest.notes))
                    if not launches.go_on_after(completed):
                        outcome = self._with_changes(outcome, guest, work)
                    outcome = attached.ended(guest, completed, outcome)
            assert guest is not None and outcome is not None  # if no launch succeeds, `Launches` raises
            if launches.notes:  # the second launch failed
                route = replace(outcome.route, notes=(*outcome.route.notes, *launches.notes))
                outcome = self._with_changes(replace(outcome, route=route), guest, work)
            return replace(outcome, seconds=time.monotonic() - began)

    def _layers(self, work: Work, attachments: tuple[Attachment, ...], ends: ExitStack) -> tuple[Layers, Attachments]:
        """Return the layers to run on, and all attachments of the run. The exit stack `ends` frees their resources."""
        layers: Layers = ThrowAway(self._planner.disk_bytes)
        run = 0
        if (stored := self._stored_run(work, ends)) is not None:
            layers, run, attachments = stored.layers, stored.since_ns, (*attachments, stored)
        if self.on_layers is not None:
            self.on_layers(layers)
        if work.watch_reads:
            attachments = (*attachments, ReadTracking(self.state, run))
        return layers, Attachments(*attachments)

    def _stored_run(self, work: Work, ends: ExitStack) -> StoredRun | None:
        """Lock and prepare the layers of the stored sandbox, until the exit stack closes. None if this session has throw-away layers."""
        if self.state is None:
            return None
        from agent_sandbox.engine.stored_run import StoredRun  # throw-away runs do without

        beside = self.beside
        return StoredRun(
            self.state,
            self.gate,
            ends,
            command=title(work),
            on_busy=self.on_busy,
            beside=beside,
            asked_ns=self.asked_ns,
            step=work.step,
        )

    def judged(self, work: Work, action: Action | None = None) -> Action:
        """Return the action that the gate judges. Raises `Denied` for code that the early check refuses.

        If the policy names programs, the action of bash code lists the programs in its text, so that the gate can refuse the code before it
        runs. If the policy asks for approvals, the action lists the parts that need approval. The shell itself is not in the list.
        """
        action, programs, asks = action or action_of(work), self.policy.programs, self.policy.asks
        if isinstance(action, UseFile):  # the code is ours: see `engine.file_access`
            return action
        if self.early is not None:
            policy = self.policy
            if self.control is not None:  # a host that was opened meanwhile is no reason to warn
                policy = replace(policy, network=self.control.in_force(policy.network))
            self.early.check(self.gate, work.what, action, policy)
        if not (isinstance(work.what, Code) and isinstance(action, RunCode) and action.language == "bash"):
            return action
        if not (programs.restricts or asks.asks):
            return action
        from agent_sandbox.policy.approval_rules import touched
        from agent_sandbox.readers.shell.analyze import understand  # few policies name programs

        line = understand(work.what.source, effects=asks.asks, goes_on=work.shell)
        return replace(action, programs=line.tools if programs.restricts else (), touches=touched(asks, line) if asks.asks else None)

    def open(self, work: Work, attached: Attachment, ends: ExitStack) -> Opened:
        """Start an interpreter for several turns, on throw-away layers or on those of the stored sandbox.

        The caller closes it, puts stored layers in order (`Opened.stored`), and then closes the exit stack `ends`. Call this after the gate
        has allowed the first turn.
        """
        stored = self._stored_run(work, ends)
        launches = Launches(work, self.runtimes, self._planner, self.policy, attached, stored=stored is not None, turns=True)
        for choice in launches:
            with launches:
                if choice.runtime.traits.images:
                    why = "a session needs our interpreter, and an image brings its own"
                    raise RuntimeUnavailable(why, missing=("interpreter",), hint="leave the image out, or run each command by itself")
                layers = ThrowAway(self._planner.disk_bytes) if stored is None else stored.layers
                launch = attached.before(self._planner.launch(work, choice.runtime.traits, layers, launches.limits))
                guest = launches.started(choice.runtime.launch(launch if stored is None else stored.before(launch)))
                # A runtime without sessions has refused by now.
                return Opened(guest, choice.route, (*launch.root.notes, *guest.notes), stored)  # type: ignore[arg-type]
        raise AssertionError("there is always a choice, or an exception")

    def route(self, work: Work) -> Route:
        """Return the runtime that the work would use, and the reason. Nothing is run or prepared."""
        return self._choice(work).route

    def _choice(self, work: Work) -> Choice:
        return self.runtimes.choose(self.policy, lambda: question_of(work, self.policy, stored=self.state is not None), acting=False)

    def explain(self, work: Work) -> MountPlan:
        """Return the mount plan of the view that the guest would have. Nothing is run, made or attached."""
        layers = ThrowAway(self._planner.disk_bytes) if self.state is None else OnDisk(self.state.path)
        return self._planner.launch(work, self._choice(work).runtime.traits, layers, self.policy.limits).root

    def _with_changes(self, outcome: Outcome, guest: Guest, work: Work) -> Outcome:
        if self.state is not None or not self.policy.files.write:
            return outcome
        changes, unlisted = self.changes(guest, work)
        return replace(outcome, changes=changes, listed=not unlisted, notes=(*outcome.notes, *unlisted))

    def changes(self, guest: Guest, work: Work) -> tuple[ChangeSet, tuple[str, ...]]:
        """Return the changes of a throw-away run, and notes. If the changes cannot be listed, there are none, and a note says why."""
        from agent_sandbox.workspace.stored_sandbox import changes_of, stack_in

        assert guest.layers is not None
        try:
            with stack_in(guest.layers, () if work.timeline is None else work.timeline.tree.chain) as stack:
                changes = ChangeSet() if stack.blank else changes_of(stack, self.policy)
                if work.on_changes is not None:
                    work.on_changes(changes, stack)
            return changes, ()
        except WorkspaceError as error:
            return ChangeSet(), (f"its changes cannot be listed: {error.message}",)
