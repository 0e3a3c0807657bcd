"""The `process` runtime: a native program or Python code on a copy-on-write view of this machine, as root and rootless.

A guest comes from a zygote, from the pool of waiting guests, or from a fork of the caller if the caller has one thread. `guest_handle` is
the supervisor's side of one guest; `kernel.guest_setup` confines the guest.
"""

from __future__ import annotations

import _thread  # all that is needed here of `threading`, which a program with one thread need not load
import os

from agent_sandbox._fast.values import TYPE_CHECKING
from agent_sandbox.errors import LaunchFailed, RuntimeUnavailable
from agent_sandbox.policy.model import Guarantee
from agent_sandbox.runtime.base import COMMAND, Confined, Demands, JavaScriptCode, Launch, PythonCode, Support, Traits
from agent_sandbox.runtime.process.guest_handle import HelperDeclined, ProcessGuest
from agent_sandbox.runtime.process.zygote import Zygote

if TYPE_CHECKING:
    from collections.abc import Callable

    from agent_sandbox.runtime.process.pool import Pool

# What every launch enforces by construction: on a host that cannot, the launch fails. MEMORY_HARD too, but only where there is a cgroup
# for it.
GUARANTEES = frozenset(
    {
        Guarantee.FILES_CONFINED,
        Guarantee.NO_NETWORK,
        Guarantee.EGRESS_ONLY,
        Guarantee.NO_NEW_PROCESSES,
        Guarantee.PROGRAMS_CONFINED,
        Guarantee.PROCESSES_INVISIBLE,
        Guarantee.SYSCALLS_FILTERED,
        Guarantee.MEMORY_WATCHED,
        Guarantee.MEMORY_HARD,
        Guarantee.CPU_LIMITED,
        Guarantee.DISK_LIMITED,
        Guarantee.NOT_HOST_ROOT,
    }
)

NO_IMAGES = "shows the files of this machine, and an image is named"
TRAITS = Traits("process", 20, frozenset({"python", "javascript", "ruby", "bash", COMMAND}), GUARANTEES)


class ProcessRuntime:
    """The process runtime: one zygote for each set of preloaded modules. Safe to use from many threads, and on both sides of a fork."""

    def __init__(
        self,
        *,
        single_threaded: bool = False,
        forked: Zygote | None = None,
        warm: int = 0,
        start: Callable[[tuple[str, ...] | None], Zygote] = Zygote,
        traits: Traits = TRAITS,
        inner_root: str = "",
    ) -> None:
        """With `single_threaded` the caller promises that its process has one thread. Native programs then start from a fork of the caller.

        `forked` is such a fork that exists already. It is used for native programs, and `close` closes it with the zygotes. `warm` is how
        many guests may wait ready at once, for the kinds of launches that were used lately. Each guest is used once. `start` starts a
        zygote with these modules preloaded. A runtime that is built on this one passes its own `traits`, and `inner_root`, the directory of
        the view that is the root of its programs. These programs run inside a process of ours.
        """
        self.traits = traits
        self._single_threaded = single_threaded
        self._warm = warm
        self._start = start
        self._inner_root = inner_root
        self._start_afresh()
        if forked is not None:
            self._zygotes[None] = forked
        if not single_threaded:
            from weakref import WeakMethod

            start_afresh = WeakMethod(self._start_afresh)
            os.register_at_fork(after_in_child=lambda: (method := start_afresh()) and method())

    def _start_afresh(self) -> None:
        """Start without zygotes and waiting guests. A fork of the application calls this, too: those it has belong to the parent."""
        self._zygotes: dict[tuple[str, ...] | None, Zygote] = {}
        self._lock = _thread.allocate_lock()
        self._departed: list[int] = []  # pidfds of guests that have departed, and perhaps not ended
        self._awaiting = _thread.allocate_lock()
        self._pool = self._new_pool()

    def _new_pool(self) -> Pool | None:
        if not self._warm:
            return None
        from agent_sandbox.runtime.process.pool import Pool

        return Pool(self._make, most=self._warm)

    def probe(self) -> Support:
        """Return the guarantees that a launch enforces on this host, as shown by a real launch."""
        from agent_sandbox.runtime.process.probe import probe

        return probe(self)

    def absence(self) -> str:
        """Return "": this runtime can always be tried. A launch that this host cannot enforce fails with the reason."""
        return ""

    def prepare(self, announce: Callable[[str], None]) -> str:
        """Return "": always ready."""
        return ""

    def objection(self, demands: Demands) -> str:
        """Return the reason against an image, which another runtime runs; "" for every other kind of launch."""
        return NO_IMAGES if demands.image else ""

    @property
    def identity(self) -> dict[str, str]:
        """Raise `RuntimeUnavailable`: native programs are not deterministic."""
        raise RuntimeUnavailable(
            f"the {self.traits.name} runtime has no deterministic runs", missing=("deterministic",), hint='use runtime="wasm"'
        )

    def launch(self, launch: Launch) -> ProcessGuest:
        """Start a run. Every required guarantee is in force when this returns, or nothing has run."""
        name = self.traits.name
        missing = launch.requires - self.traits.guarantees
        if missing:
            names = tuple(sorted(guarantee.value for guarantee in missing))
            other = 'use runtime "microvm", or "auto"; ' if Guarantee.SEPARATE_KERNEL in missing else ""
            hint = f"{other}see: agent-sandbox doctor"
            raise RuntimeUnavailable(f"the {name} runtime cannot give: {', '.join(names)}", missing=names, hint=hint)
        if launch.system and os.geteuid() != 0:
            raise RuntimeUnavailable(
                "the system profile needs root", missing=("system-profile",), hint="run it as root, or without --system"
            )
        if isinstance(launch.program, JavaScriptCode) and "javascript" not in self.traits.brings:
            why = f"the {name} runtime has no interpreter of JavaScript in its guests"
            raise RuntimeUnavailable(why, missing=("javascript",), hint="launch a Script for Node.js instead")
        guest = self._pool.take(launch) if self._pool is not None else self._make(launch)
        try:
            if launch.on_ready:
                confined = Confined(guest.init, guest.layers, guest.doors, guest.inward)
                guest.doors = guest.inward = None
                for tell in launch.on_ready:
                    tell(confined)
            self._await_departed()
            guest.when_departed = self._departed.append
            guest.begin(launch)
        except BaseException:
            guest.close()
            raise
        return guest

    def _await_departed(self) -> None:
        """Wait until nothing is left of the runs that have departed. The kernel needs about a millisecond for one."""
        if not self._departed:
            return
        from agent_sandbox.runtime.process import departure

        with self._awaiting:
            while self._departed:
                departure.await_end(self._departed.pop())

    def _make(self, launch: Launch) -> ProcessGuest:
        """Make a guest for this launch, confined and waiting for its program."""
        zygote = self._zygote(launch)
        try:
            return self._prepared(launch, zygote)
        except LaunchFailed:
            if zygote.alive or not zygote.came_up:
                raise
            return self._prepared(launch, self._zygote(launch))  # something killed the zygote; nothing has run yet, so try another

    def _prepared(self, launch: Launch, zygote: Zygote) -> ProcessGuest:
        guest = ProcessGuest(launch, zygote, self._inner_root)
        try:
            declined = False
            try:
                guest.prepare()
            except HelperDeclined:
                declined = True
            if declined:  # not in the handler: whoever reads why the reference fails, too, would read of this first
                zygote.note_decline(launch.root)
                guest.close()
                guest = ProcessGuest(launch, zygote, self._inner_root)
                guest.prepare(by_reference=True)
        except BaseException:
            guest.close()
            raise
        return guest

    def close(self, *, leaving: bool = False) -> None:
        """End the waiting guests and the zygotes. Running guests go on, and their zygotes with them.

        `leaving` says that this process ends now. The process that cleans up after a run may then outlive this one by some milliseconds.
        """
        with self._lock:
            pool, self._pool = self._pool, self._new_pool()
        self._await_departed()
        if pool is not None:
            pool.close()  # first: the pool's thread may be making a guest, and would start another zygote
        with self._lock:
            zygotes, self._zygotes = list(self._zygotes.values()), {}
        for zygote in zygotes:
            zygote.close(leaving=leaving)

    def _zygote(self, launch: Launch) -> Zygote:
        """Return the zygote that has the launch's modules; for a native program of a single-threaded caller, a fork of the caller."""
        key = None if self._single_threaded and not isinstance(launch.program, PythonCode) else launch.preload
        with self._lock:
            zygote = self._zygotes.get(key)
            if zygote is not None and not zygote.alive:
                zygote.close()
                zygote = None
            if zygote is None:
                zygote = self._zygotes[key] = self._start(key)
            return zygote
