"""Attachments: everything that accompanies a run, behind one interface.

An attachment changes the launch before the guest starts, sees the guest start and end, adds to the outcome, and frees its resources. The
session knows no more of an attachment. So a new companion of a run is a new class, and `Work.attachments` names its object.

The interface is enough for a network proxy: `before` starts its helper process and adds to `Launch.on_ready`, which sees the guest's
namespaces while the program waits; `started` receives the guest, so that it can be killed if the helper dies; `release` tells the helper
that the guest is gone. The interface is enough for checkpoints, too: `Launch.on_tick` is called while the guest runs, and `ended` can read
the guest's layers.
"""

from __future__ import annotations

from agent_sandbox._fast.contexts import ExitStack
from agent_sandbox._fast.values import TYPE_CHECKING, replace
from agent_sandbox.errors import PolicyError, SandboxError
from agent_sandbox.policy.model import Guarantee
from agent_sandbox.runtime.base import ExitReason

if TYPE_CHECKING:
    from collections.abc import Callable

    from agent_sandbox.engine.run import Session
    from agent_sandbox.engine.work import Outcome, Work
    from agent_sandbox.policy.publications import Publication
    from agent_sandbox.runtime.base import Completed, Confined, Guest, Launch
    from agent_sandbox.workspace.read_tracking import ReadTracker
    from agent_sandbox.workspace.store import SandboxState

_ENDED_FROM_OUTSIDE = frozenset(
    {
        ExitReason.TIMED_OUT,
        ExitReason.CPU_LIMIT,
        ExitReason.OUT_OF_MEMORY,
        ExitReason.OUTPUT_LIMIT,
        ExitReason.DISK_LIMIT,
        ExitReason.SHARE_LIMIT,
        ExitReason.KILLED,
    }
)


class Attachment:
    """A companion of a run. Every method does nothing unless a subclass overrides it.

    A launch calls `before`, `started`, `ended`, `release`. A launch that fails calls only `before` and `release`. A run may take several
    launches, on a new plan or in another runtime; the last launch counts. A session of turns is one launch, and calls `ended` after each
    turn. An exception of an attachment ends the run.
    """

    def before(self, launch: Launch) -> Launch:
        """Return the launch, changed as this attachment needs it. The guest does not run yet."""
        return launch

    def started(self, guest: Guest) -> None:
        """Receive the guest that has started. The attachment may kill it from any thread, until `release`."""

    def ended(self, guest: Guest, completed: Completed, outcome: Outcome) -> Outcome:
        """Return the outcome with the additions of this attachment. The guest's processes are gone, but its layers can still be read."""
        return outcome

    def release(self) -> None:
        """Free the resources acquired since `before`. Called once for each `before` that returned, however the guest ended."""


class Attachments(Attachment):
    """Several attachments as one. `before` and `started` go in the order given, `ended` and `release` in reverse."""

    def __init__(self, *attachments: Attachment) -> None:
        self._attachments = attachments
        self._attached: list[Attachment] = []

    def before(self, launch: Launch) -> Launch:
        """Call `before` of each attachment in order. If one raises, the caller must still call `release`, for those before it."""
        for each in self._attachments:
            launch = each.before(launch)
            self._attached.append(each)
        return launch

    def started(self, guest: Guest) -> None:
        """Tell each attachment that the guest has started."""
        for each in self._attachments:
            each.started(guest)

    def ended(self, guest: Guest, completed: Completed, outcome: Outcome) -> Outcome:
        """Return the outcome with the additions of each attachment."""
        for each in reversed(self._attachments):
            outcome = each.ended(guest, completed, outcome)
        return outcome

    def release(self) -> None:
        """Release every attachment whose `before` has returned, even if another one raises."""
        with ExitStack() as stack:
            for each in self._attached:
                stack.callback(each.release)
            self._attached = []


def attachments_of(work: Work, session: Session, *, turns: bool = False) -> tuple[Attachment, ...]:
    """Return the attachments that the options of the work require, then `work.attachments`. Set `turns` for a session of turns."""
    needed: list[Attachment] = []
    gate = session.gate
    if Guarantee.DETERMINISTIC in gate.policy.requires:
        needed.append(FixedSeed(work.seed))
    if work.left is not None:
        needed.append(TimeLeft(work.left))
    if work.tools or turns:
        from agent_sandbox.engine.tools import ToolCalls  # few runs have tools

        needed.append(ToolCalls(gate, work.tools, ends=work.ends, turns=turns))
    if work.timeline is not None:
        if work.observe:
            why = "a session with a timeline cannot be observed: its states would be woken while they are watched"
            raise PolicyError(why, hint="use an audit level below DEBUG, or no timeline")
        needed.append(work.timeline)
    if work.observe:
        from agent_sandbox.engine.observation import Observation  # few runs are observed

        needed.append(Observation(gate, log=work.log_observed))
    if work.publish:
        from agent_sandbox.engine.publish import PublishedPorts  # few runs publish anything

        if not gate.policy.network.inbound:
            raise PolicyError("the policy permits no published ports", hint="leave them out")
        if taken := [each.inner for each in work.publish if each.inner in gate.policy.network.listened]:
            why = f"port {taken[0]} of the sandbox is where its connections outward arrive, so no server of it listens there"
            raise PolicyError(why, hint=f"let its server listen elsewhere: --publish {work.publish[0].port}:3000")
        needed.append(PublishedPorts(gate, work.publish, work.on_publish or _say_nothing, turns=turns))
    if gate.policy.network.outbound:
        from agent_sandbox.engine.egress import Network  # few runs have a network
        from agent_sandbox.engine.egress_zygote import EgressZygote

        zygote = session.runtimes.companion(EgressZygote)
        needed.append(
            Network(
                *(gate, zygote, session.project),
                turns=turns,
                provisions=session.provisions,
                control=session.control,
                exchanges=work.exchanges,
                tell=work.observe,
            )
        )
    return (*needed, *work.attachments)


def _say_nothing(opened: Publication) -> None:
    pass


class FixedSeed(Attachment):
    """Sets the random seed of a deterministic run."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def before(self, launch: Launch) -> Launch:
        """Return the launch with the seed."""
        return replace(launch, deterministic=self._seed)

    def ended(self, guest: Guest, completed: Completed, outcome: Outcome) -> Outcome:
        """Add a note if the run was ended from outside, such as by a time limit. Another run may then end at another moment."""
        reason = completed.exit.reason
        if reason not in _ENDED_FROM_OUTSIDE:
            return outcome
        note = f"not deterministic: it was ended from outside ({reason.value}), and another run may be ended at another moment"
        return replace(outcome, notes=(*outcome.notes, note))


class TimeLeft(Attachment):
    """Ends a run when a temporary permission, such as an elevation, ends. `left` returns the seconds until then."""

    def __init__(self, left: Callable[[], float]) -> None:
        self._left = left

    def before(self, launch: Launch) -> Launch:
        """Limit the run's wall time to the time that is left now. Raises `SandboxError` if no time is left."""
        if (left := self._left()) <= 0:
            raise SandboxError("the elevation expired before the run could start", hint="ask again for what it needs")
        limits = launch.limits
        return replace(launch, limits=replace(limits, wall_seconds=min(left, limits.wall_seconds or left)))


class ReadTracking(Attachment):
    """Records the files of the project that a run opens, and stores the list with the sandbox."""

    def __init__(self, state: SandboxState | None, run: int) -> None:
        self._state, self._run = state, run
        self._reading: ReadTracker | None = None

    def before(self, launch: Launch) -> Launch:
        """Return the launch with a watch on opened files, which starts before the program. Raises `PolicyError` for a throw-away run."""
        from agent_sandbox.workspace.read_tracking import ReadTracker  # and with it threads: few runs are tracked

        self._reading = ReadTracker(self._state, self._run)
        return replace(launch, inspect=True, on_ready=(*launch.on_ready, self._begin))

    def _begin(self, guest: Confined) -> None:
        assert self._reading is not None
        assert guest.process is not None  # for `inspect`
        self._reading.begin(guest.process)

    def release(self) -> None:
        """Stop watching and store the list of opened files. Raises `WorkspaceError`."""
        if self._reading is not None:
            self._reading.end()
