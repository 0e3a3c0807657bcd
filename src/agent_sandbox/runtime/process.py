"""The `process` runtime: a native program or Python code on a copy-on-write view of this machine, as root and rootless.

Here guests are asked for: from a zygote, from the pool of those already waiting, or by forking the caller when it says that it has but one
thread. `running` is the supervisor's side of one run, and what confines the guest is in `kernel.stage`.
"""

from __future__ import annotations

import _thread  # all that is needed here of `threading`, which a program with one thread need not load
import os
import signal
from collections.abc import Sequence

from agent_sandbox.errors import LaunchFailed, RuntimeUnavailable
from agent_sandbox.kernel import stage
from agent_sandbox.kernel import syscalls as sc
from agent_sandbox.policy.guarantees import Guarantee
from agent_sandbox.runtime.base import Launch, PythonCode, Support
from agent_sandbox.runtime.keeper import keep_from_descriptors
from agent_sandbox.runtime.running import ProcessGuest
from agent_sandbox.values import TYPE_CHECKING

if TYPE_CHECKING:
    from agent_sandbox.runtime.pool import Pool
    from agent_sandbox.runtime.zygote import Zygote

# What every launch enforces by construction: on a host that cannot, the launch fails. MEMORY_HARD too, but only where there is a cgroup
# for it.
GUARANTEES = frozenset(
    {
        Guarantee.FILES_CONFINED,
        Guarantee.NO_NETWORK,
        Guarantee.NO_NEW_PROCESSES,
        Guarantee.PROCESSES_INVISIBLE,
        Guarantee.SYSCALLS_FILTERED,
        Guarantee.MEMORY_WATCHED,
        Guarantee.MEMORY_HARD,
        Guarantee.CPU_LIMITED,
        Guarantee.DISK_LIMITED,
        Guarantee.NOT_HOST_ROOT,
    }
)


class ProcessRuntime:
    """Guests forked from zygotes, one zygote per set of preloaded modules. Safe to use from many threads, and on both sides of a fork."""

    name = "process"

    def __init__(self, *, single_threaded: bool = False, warm: int = 0) -> None:
        """`single_threaded` promises that the calling process has one thread: native programs are then forked from it directly.

        `warm` is how many guests may wait ready at once, for what was launched lately. Each is used once.
        """
        self._here = single_threaded
        self._warm = warm
        self._identity: stage.Identity | None = None
        self._start_afresh()
        if not single_threaded:
            from weakref import WeakMethod

            forked = WeakMethod(self._start_afresh)
            os.register_at_fork(after_in_child=lambda: (method := forked()) and method())

    def _start_afresh(self) -> None:
        """Also in a fork of the application: zygotes and waiting guests are its parent's, and another thread may have held the lock."""
        self._zygotes: dict[tuple[str, ...], Zygote] = {}
        self._lock = _thread.allocate_lock()
        self._pool = self._new_pool()

    def _new_pool(self) -> Pool | None:
        if not self._warm:
            return None
        from agent_sandbox.runtime.pool import Pool

        return Pool(self._make, most=self._warm)

    def probe(self) -> Support:
        """What a launch would enforce here, as a live one shows."""
        from agent_sandbox.runtime.probe import probe

        return probe(self)

    def launch(self, launch: Launch) -> ProcessGuest:
        """Start a run. Every required guarantee is in force when this returns, or nothing has run."""
        missing = launch.requires - GUARANTEES
        if missing:
            names = tuple(sorted(guarantee.value for guarantee in missing))
            raise RuntimeUnavailable(
                f"the process runtime cannot give: {', '.join(names)}", missing=names, hint="see: agent-sandbox doctor"
            )
        if launch.system and os.geteuid() != 0:
            raise RuntimeUnavailable(
                "the system profile needs root", missing=("system-profile",), hint="run it as root, or without --system"
            )
        guest = self._pool.take(launch) if self._pool is not None else None
        if guest is None:
            guest = self._make(launch)
        try:
            guest.begin(launch)
        except BaseException:
            guest.close()
            raise
        return guest

    def _make(self, launch: Launch) -> ProcessGuest:
        """A guest for this launch, confined and waiting for its program."""
        try:
            return self._prepared(launch)
        except LaunchFailed:
            # A zygote that was killed from outside takes no guest with it; nothing has run yet, so another one may try.
            zygote = self._zygotes.get(launch.preload)
            if zygote is None or zygote.alive:
                raise
            return self._prepared(launch)

    def _prepared(self, launch: Launch) -> ProcessGuest:
        guest = ProcessGuest(launch)
        try:
            guest.prepare(self._spawn)
        except BaseException:
            guest.close()
            raise
        return guest

    def close(self) -> None:
        """End the waiting guests and the zygotes. Running guests go on."""
        with self._lock:
            zygotes, self._zygotes = list(self._zygotes.values()), {}
            pool, self._pool = self._pool, self._new_pool()
        if pool is not None:
            pool.close()
        for zygote in zygotes:
            zygote.close()

    def _spawn(self, launch: Launch, descriptors: Sequence[int]) -> int | None:
        """Fork a keeper for these descriptors; its pid when it is our own child."""
        if self._here and not isinstance(launch.program, PythonCode):
            if self._identity is None:
                self._identity = _identify()
            pid = os.fork()
            if pid == 0:
                _forget_the_caller(descriptors, self._identity.userns)
                keep_from_descriptors(descriptors, self._identity)
            return pid
        self._zygote(launch.preload).spawn(descriptors)
        return None

    def _zygote(self, preload: tuple[str, ...]) -> Zygote:
        with self._lock:
            zygote = self._zygotes.get(preload)
            if zygote is not None and not zygote.alive:
                zygote.close()
                zygote = None
            if zygote is None:
                from agent_sandbox.runtime.zygote import Zygote

                zygote = self._zygotes[preload] = Zygote(preload)
            return zygote


def _forget_the_caller(descriptors: Sequence[int], userns: int | None) -> None:
    """In a fork of the caller: let go of its signal handlers and of every descriptor but these.

    A copy of the far end of the guest's input would keep that input from ending, one of a lock would hold on to the lock; and a guest can
    signal an init that has handlers.
    """
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGWINCH):
        signal.signal(number, signal.SIG_DFL)
    lowest = 3
    for fd in sorted({*descriptors, *(() if userns is None else (userns,))}):
        if fd > lowest:
            sc.close_range(lowest, fd - 1)
        lowest = fd + 1
    sc.close_range(lowest, 0xFFFFFFFF)


def _identify() -> stage.Identity:
    try:
        return stage.identify()
    except OSError as error:
        raise LaunchFailed(f"the guest's ids cannot be mapped: {error.strerror or error}", hint="run: agent-sandbox doctor") from error
