"""The layers of a stored sandbox during one run: lock them, recover them, let their image grow, and put them in order afterwards."""

from __future__ import annotations

from agent_sandbox._fast.contexts import ExitStack
from agent_sandbox._fast.functions import partial
from agent_sandbox._fast.values import TYPE_CHECKING, replace
from agent_sandbox.engine.attachments import Attachment
from agent_sandbox.engine.recover import recovered
from agent_sandbox.errors import Busy, SandboxError, WorkspaceError
from agent_sandbox.kernel.mount_plan import IMAGES, ImageRoot, Overlay
from agent_sandbox.workspace.stored_sandbox import Stored, unseen

if TYPE_CHECKING:
    from collections.abc import Callable

    from agent_sandbox.engine.gate import Gate
    from agent_sandbox.engine.work import Outcome
    from agent_sandbox.kernel.mount_plan import Layers
    from agent_sandbox.runtime.base import Completed, Confined, Guest, Launch
    from agent_sandbox.workspace.store import SandboxState


class StoredRun(Attachment):
    """Provides the layers of a stored sandbox for one run, and cares for them until its end."""

    def __init__(
        self,
        state: SandboxState,
        gate: Gate,
        ends: ExitStack,
        *,
        command: str,
        on_busy: Callable[[Busy], None] | None,
        beside: Callable[[Callable[[], None]], None] | None,
        asked_ns: int | None = None,
        step: bool = False,
    ) -> None:
        """Lock the sandbox and prepare its layers, until the exit stack closes. `command` is shown to others who want the lock.

        If the lock is taken, `on_busy` is called with the `Busy` error and this waits; without `on_busy`, `Busy` is raised. `beside` runs
        work in the background. As a `step`, the run keeps the state before it.
        """
        _lock(state, ends, command, on_busy)
        self._stored = Stored(state)
        self._masks = [mask.path for mask in gate.policy.files.masks]
        recovery = _recover(self._stored, gate)
        disk = gate.policy.limits.disk_bytes
        self._step = self._stored.begin_step(command, disk) if step else 0
        self._prepared = self._stored.for_run(disk, ends, asked_ns)
        self._notes = (*recovery, *self._prepared.notes)
        self._shown: frozenset[str] = frozenset()
        self._in_image = False
        self._open_layers: int | None = None
        if not self._stored.names_are_known:
            (beside or _now)(partial(self._stored.remember_names, self._masks, self._prepared.began_ns))

    @property
    def layers(self) -> Layers:
        """The layers to run on, ready to be mounted."""
        return self._prepared.layers

    @property
    def since_ns(self) -> int:
        """The start time that identifies this run among those of its sandbox."""
        return self._prepared.since_ns

    def before(self, launch: Launch) -> Launch:
        """Return the launch with a periodic check that enlarges the image of the layers, if they are in an image."""
        self._shown = frozenset(step.target for step in launch.root.steps if isinstance(step, Overlay))
        self._in_image = any(isinstance(step, ImageRoot) for step in launch.root.steps)
        if self._prepared.growth is None:
            return launch
        return replace(launch, on_ready=(*launch.on_ready, self._ready), on_tick=(*launch.on_tick, self.grow))

    def _ready(self, guest: Confined) -> None:
        self._open_layers = guest.layers
        try:
            self.grow()
        except WorkspaceError:  # other layers than ours are left alone; `ended` says so
            self._open_layers = None

    @property
    def grows(self) -> bool:
        """Whether the layers are in an image that grows while programs write."""
        return self._prepared.growth is not None

    def grow(self) -> None:
        """Enlarge the image if little space is left in it. Raises `WorkspaceError` if the layers are not in the image."""
        if self._prepared.growth is not None and self._open_layers is not None:
            self._prepared.growth(self._open_layers)

    def ended(self, guest: Guest, completed: Completed, outcome: Outcome) -> Outcome:
        """Put the layers in order, and add what there is to say about them."""
        notes = self.put_in_order(guest.layers)
        if self._step:
            end = completed.exit
            self._stored.end_step(self._step, f"{end.reason.value} {end.code}")
        return replace(outcome, notes=(*outcome.notes, *notes))

    def put_in_order(self, layers: int | None) -> tuple[str, ...]:
        """Store the originals of changed paths, and remove unused layers. A failure becomes a note, and the next run tries again.

        `layers` is the open directory of the layers; None if the guest had none. Call it when nothing writes any more.
        """
        notes, growth = self._notes, self._prepared.growth
        if growth is not None and growth.refused:
            notes += (growth.refused,)
        if layers is not None:
            try:
                notes += self._unseen(layers)
                self._stored.after_run(layers, self._prepared, self._masks)
            except (WorkspaceError, OSError) as error:
                notes += (f"the layers could not be put in order: {error}",)
        return notes

    def _unseen(self, layers: int) -> tuple[str, ...]:
        """Return a note on earlier changes that this run's view did not show. Raises OSError."""
        present = self._prepared.present
        trees = unseen(layers, (present.active, *present.chain), self._shown)
        if self._in_image:  # which image is known at the launch only
            trees = tuple(tree for tree in trees if not tree.startswith(IMAGES))
        why = "this run's view is made of other trees than theirs (files.allowed), and had the real files there"
        return (f"earlier changes in {', '.join(trees)} were not visible: {why}",) if trees else ()


def _now(do: Callable[[], None]) -> None:
    do()


def _lock(state: SandboxState, ends: ExitStack, command: str, on_busy: Callable[[Busy], None] | None) -> None:
    try:
        ends.enter_context(state.lock(command=command))
    except Busy as busy:
        if on_busy is None:
            raise
        on_busy(busy)
        ends.enter_context(state.lock(wait=True, command=command))


def _recover(stored: Stored, gate: Gate) -> tuple[str, ...]:
    """Finish an interrupted promotion before a guest sees the tree, and return notes. A failure becomes a note, and the run goes on."""
    try:
        return recovered(stored, gate, held=True)
    except (SandboxError, OSError) as error:
        return (f"a promotion was cut off, and could not be finished: {error}",)
