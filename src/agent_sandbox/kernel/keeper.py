"""The keeper: parent of the init of every run, from the fork into new namespaces until the last of it has been cleared away.

What it knows of a run is its number and, where layers are kept on disk, where they lie and how large they may become. Paths, limits, code,
environment and input pass it by in descriptors that it does not read, so nothing of one run can be found in the memory of the next.

Its inits end with it: the kernel sends them the parent-death signal, and each holds the far end of a pipe of the keeper's. It ends itself
when its supervisor has closed the link or died, and then only after its runs have: it dies last. One thread.

The number of an init is not reaped, and so not given to another process, before the supervisor has said that it is done with the run.
"""

from __future__ import annotations

import marshal
import os
import select
import signal
import socket
import time
from contextlib import suppress

from agent_sandbox._fast.values import TYPE_CHECKING, dataclass
from agent_sandbox.kernel import cgroups, guest_setup, ids, namespaces, usage, wire
from agent_sandbox.kernel import syscalls as sc
from agent_sandbox.kernel.guest_setup import Identity, Seat
from agent_sandbox.kernel.wire import START, WATCH

if TYPE_CHECKING:
    from agent_sandbox.kernel.guest_setup import Program

_LARGEST_ORDER = 16384  # bytes: a path and two numbers
_DISK_TICK = 0.1  # seconds between looks at layers that have no size of their own
_CLEARING_TICK, _CLEARING_PATIENCE = 0.005, 2.0  # seconds: a cgroup is busy for a moment after its last process has gone
_NAMESPACES = sc.CLONE_NEWPID | sc.CLONE_NEWNET | sc.CLONE_NEWIPC | sc.CLONE_NEWUTS


@dataclass
class _Run:
    """One run. `pid` is that of its init: 0 once it is reaped, or when it could not be forked."""

    pid: int
    watched: _Watched | None = None
    done: bool = False
    clear_by: float = 0.0


@dataclass
class _Watched:
    """Layers on disk, what they may hold, and where to say that they hold more."""

    layers: str
    limit: int
    tell: int
    look_at: float


def serve(link: socket.socket, supervisor: int, program: Program) -> None:
    """Be the keeper of a supervisor, known by a pidfd: say "ready" over the link, or why not, and serve until there is nothing to keep."""
    try:
        identity = _identify()
    except OSError as error:
        link.send((error.strerror or str(error)).encode(errors="replace")[:4096])
        return
    link.send(b"ready")
    Keeper(link, supervisor, identity, program).serve()


def _identify() -> Identity:
    """Prepare once what all guests of this process share: the id mapping, or rootless the outer user namespace, and where cgroups go."""
    hierarchies = cgroups.here()
    cgroups.sweep(hierarchies)  # what was killed before it could clear away
    if os.geteuid() == 0:
        return Identity(True, hierarchies, ids.FIRST_ID, namespaces.make_id_mapping())
    uid, gid = os.geteuid(), os.getegid()
    namespaces.enter_own_user_namespace()
    return Identity(False, hierarchies, ids=(uid, gid))


class Keeper:
    """Serves the orders that come over a link of packets."""

    def __init__(self, link: socket.socket, supervisor: int, identity: Identity, program: Program) -> None:
        self._link = link
        self._supervisor = supervisor
        self._identity = identity
        self._program = program
        self._runs: dict[int, _Run] = {}
        self._leaving = False
        self._alive, self._breath = os.pipe2(os.O_CLOEXEC)  # whoever holds `alive` sees it end with us

    def serve(self) -> None:
        """Until the supervisor has gone, and every run with it."""
        woken, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        guest_setup.note_signals()
        poller = select.poll()
        for fd in (woken, self._link.fileno(), self._supervisor):
            poller.register(fd, select.POLLIN)
        while self._runs or not self._leaving:
            ready = _polled(poller, self._patience())
            if woken in ready:
                os.read(woken, 4096)
            if self._link.fileno() in ready and not self._leaving:
                self._take_order()
            elif self._supervisor in ready:
                self._leaving = True
            if self._leaving:
                for fd in (self._link.fileno(), self._supervisor):
                    with suppress(KeyError):
                        poller.unregister(fd)
                self._end_all()
            self._look_at_disks()
            self._clear_away()

    def _take_order(self) -> None:
        try:
            message, descriptors = wire.receive_descriptors(self._link, _LARGEST_ORDER)
        except OSError:  # which order it was is lost, perhaps that to clear away: so everything is ended and cleared away
            message, descriptors = b"", []
        if not message:
            self._leaving = True
            return
        order, number, *rest = marshal.loads(message)
        run = self._runs.get(number)
        if order == START:
            self._start(number, *descriptors)
        elif order == WATCH and run and not run.watched:
            layers, limit = rest
            run.watched = _Watched(layers, limit, descriptors[0], time.monotonic() + _DISK_TICK)
        else:
            wire.close_all(descriptors)
            if run:
                run.done, run.clear_by = True, time.monotonic() + _CLEARING_PATIENCE

    def _start(self, number: int, control: int, payload: int, *stdio: int) -> None:
        seat = Seat(socket.socket(fileno=control), socket.socket(fileno=payload), self._supervisor, self._alive, stdio)
        try:
            child = sc.clone(_NAMESPACES)
        except OSError as error:
            guest_setup.report_failure(seat.control, error)
            child = 0
        else:
            if child == 0:
                guest_setup.become_init(seat, self._identity, self._program)
        wire.close_all((seat.control.detach(), seat.payload.detach(), *stdio))
        # Also when there is no init: the supervisor may have made a cgroup for it.
        self._runs[number] = _Run(child)

    def _end_all(self) -> None:
        for run in self._runs.values():
            run.done = True
            if run.pid:
                os.kill(run.pid, signal.SIGKILL)

    def _patience(self) -> float | None:
        """Milliseconds until something is due by itself. On leaving no signal is relied on: if one were lost, nobody would notice us."""
        if self._leaving:
            return _CLEARING_TICK * 1000
        now = time.monotonic()
        due = [run.watched.look_at - now for run in self._runs.values() if run.watched and not run.done]
        due += [_CLEARING_TICK for run in self._runs.values() if run.done]  # whether or not the signal of its end reaches us
        return max(0.0, min(due)) * 1000 if due else None

    def _look_at_disks(self) -> None:
        """End the runs whose kept layers have outgrown their limit. Here, because only the host side can read all of them."""
        for run in self._runs.values():
            began, watched = time.monotonic(), run.watched
            if watched is None or run.done or not run.pid or began < watched.look_at:
                continue
            if _disk_bytes(watched.layers) > watched.limit:
                with suppress(OSError):
                    os.write(watched.tell, b"f")  # first: whoever sees the end of the run looks here for its reason
                os.kill(run.pid, signal.SIGKILL)
            # A large layer takes long to measure: never spend more than a tenth of the time on it.
            watched.look_at = began + max(_DISK_TICK, 10 * (time.monotonic() - began))

    def _clear_away(self) -> None:
        now = time.monotonic()
        for number, run in list(self._runs.items()):
            if not run.done:
                continue
            if run.watched:
                os.close(run.watched.tell)
                run.watched = None
            if run.pid and os.waitpid(run.pid, os.WNOHANG)[0]:
                run.pid, run.clear_by = 0, now + _CLEARING_PATIENCE
            if not run.pid and (self._forget_cgroup(number) or now > run.clear_by):
                del self._runs[number]

    def _forget_cgroup(self, number: int) -> bool:
        if not self._identity.hierarchies:
            return True
        name = cgroups.group_name(os.getpid(), str(number))
        left = [place for hierarchy in self._identity.hierarchies for place in hierarchy.places if not cgroups.gone(f"{place}/{name}")]
        return not left


def _polled(poller: select.poll, patience: float | None) -> dict[int, int]:
    """What is ready. A kernel that is short of memory for a moment is asked again: if we went, what we keep would be left behind."""
    try:
        return dict(poller.poll(patience))
    except OSError:
        time.sleep(_CLEARING_TICK)
        return {}


def _disk_bytes(path: str) -> int:
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return usage.disk_bytes(directory)
    finally:
        os.close(directory)
