"""The keeper: parent of every run's init, from the fork into new namespaces until the run's cgroup is removed.

The keeper knows the number of a run and, for layers kept on disk, their path and size limit or the path of their image. All other paths,
limits, code, environment and input pass through descriptors that the keeper does not read. So no data of one run can be in the memory of
the next.

The inits end with the keeper: the kernel sends them the parent-death signal, and each init holds the far end of a pipe of the keeper. The
keeper ends when its supervisor closes the link or dies, and only after all runs have ended. It has one thread.

The keeper reaps an init, and so frees its pid for reuse, only after the supervisor has said that it is done with the run.
"""

from __future__ import annotations

import marshal
import os
import select
import time

from agent_sandbox._fast.contexts import suppress
from agent_sandbox._fast.values import TYPE_CHECKING, dataclass
from agent_sandbox.kernel import cgroups, guest_setup, ids, namespaces, usage, wire
from agent_sandbox.kernel import syscalls as sc
from agent_sandbox.kernel.guest_setup import Identity, Seat
from agent_sandbox.kernel.wire import FIRST_RUN, LARGEST_ORDER, MOUNT, REST, STAGE, START, WATCH

if TYPE_CHECKING:
    import signal
    import socket
    from typing import NoReturn

    from agent_sandbox.kernel.guest_setup import Program
    from agent_sandbox.kernel.setup_helper import Handover, Helper
else:
    import _signal as signal  # without the enumerations of `signal`

    from agent_sandbox._fast import sockets as socket

_DISK_TICK = 0.1  # seconds between measurements of layers without a size limit of their own
_CLEARING_TICK, _CLEARING_PATIENCE = 0.005, 2.0  # seconds: a cgroup stays busy for a moment after its last process
_LEAVING_PATIENCE = 60.0  # seconds more if the supervisor has gone: on a busy machine such a moment is long
_NAMESPACES = sc.CLONE_NEWPID | sc.CLONE_NEWNET | sc.CLONE_NEWIPC | sc.CLONE_NEWUTS


@dataclass
class _Run:
    """One run. `pid` is the pid of its init; 0 once init was reaped, or if the fork failed."""

    pid: int
    watched: _Watched | None = None
    image: _Image | None = None
    done: bool = False
    clear_by: float = 0.0
    stagehand: int = 0  # the pid of its stagehand; 0 if there is none, or it was reaped


@dataclass
class _Watched:
    """Layers on disk to measure, their size limit, and a pipe (`tell`) that gets a byte when they exceed the limit."""

    layers: str
    limit: int
    tell: int
    look_at: float


@dataclass(frozen=True)
class _Image:
    """The image that holds the layers of a run: its path, device and inode."""

    path: str
    device: int
    inode: int

    def rest(self) -> bool:
        """Return its unused disk blocks to the disk, once nobody uses it. Return False if it is still in use."""
        from agent_sandbox.kernel import image_space  # imported after the run

        try:
            file = os.open(self.path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                status = os.fstat(file)
                return (status.st_dev, status.st_ino) != (self.device, self.inode) or image_space.rest(file)
            finally:
                os.close(file)
        except OSError:  # removed meanwhile; or the blocks stay reserved until the image is used next
            return True


def serve(link: socket.socket, supervisor: int, program: Program, *, ahead: bool = False, helper: Helper | None = None) -> None:
    """Run the keeper for a supervisor, given as a pidfd, until the end.

    First send "ready" over the link, and the ABI of Landlock if inits are started with the setup helper; if preparations fail, send the
    reason instead and return. With `ahead`, make the first init at once.
    """
    try:
        identity = _identify()
    except OSError as error:
        link.send((error.strerror or str(error)).encode(errors="replace")[:4096])
        return
    link.send(wire.RISEN if helper is None else b"%b %d" % (wire.RISEN, helper.abi))
    Keeper(link, supervisor, identity, program, helper).serve(ahead=ahead)


def _identify() -> Identity:
    """Prepare what all guests share: the cgroup hierarchies, and the id mapping or, without root, the outer user namespace."""
    hierarchies = cgroups.here()
    cgroups.sweep(hierarchies)  # left by keepers that were killed before they could clean up
    if os.geteuid() == 0:
        return Identity(True, hierarchies, ids.FIRST_ID, namespaces.make_id_mapping())
    uid, gid = os.geteuid(), os.getegid()
    namespaces.enter_own_user_namespace()
    return Identity(False, hierarchies, ids=(uid, gid))


class Keeper:
    """Receives the supervisor's orders as packets on the link, and carries them out: start, watch and release runs."""

    def __init__(self, link: socket.socket, supervisor: int, identity: Identity, program: Program, helper: Helper | None = None) -> None:
        self._link = link
        self._supervisor = supervisor
        self._identity = identity
        self._program = program
        self._helper = helper
        self._runs: dict[int, _Run] = {}
        self._leaving = False
        self._ahead: socket.socket | None = None  # to the init that was made before its run was ordered
        self._group = cgroups.group_name(os.getpid(), "")
        self._alive, self._breath = os.pipe2(os.O_CLOEXEC)  # a holder of `alive` sees it close when the keeper ends

    def serve(self, *, ahead: bool) -> None:
        """Serve until the supervisor has gone and every run has ended. With `ahead`, make the init of the first run before its order."""
        woken, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        guest_setup.note_signals()
        poller = select.poll()
        for fd in (woken, self._link.fileno(), self._supervisor):
            poller.register(fd, select.POLLIN)
        if ahead:
            self._make_ahead(poller)
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
            message, descriptors = wire.receive_descriptors(self._link, LARGEST_ORDER)
        except OSError:  # the order is lost, perhaps one to clean up: so end all runs and clean up
            message, descriptors = b"", []
        if not message:
            self._leaving = True
            return
        order, number, *rest = marshal.loads(message)
        run = self._runs.get(number)
        if order == START:
            self._start(number, *descriptors)
        elif order == MOUNT:
            if self._ahead is not None:
                with suppress(OSError):  # something has killed it
                    self._ahead.send(message)
        elif order == WATCH and run and not run.watched:
            layers, limit = rest
            run.watched = _Watched(layers, limit, descriptors[0], time.monotonic() + _DISK_TICK)
        elif order == REST and run:
            run.image = _Image(*rest)
        elif order == STAGE and run and run.pid and not run.stagehand:
            run.stagehand = self._stage(run.pid, descriptors[0])
        else:
            wire.close_all(descriptors)
            if run:
                run.done, run.clear_by = True, time.monotonic() + _CLEARING_PATIENCE

    def _make_ahead(self, poller: select.poll) -> None:
        """Make the init of the first run and move it into its cgroup, while the supervisor finds out what to run.

        The kernel can take 15 ms to move a process, and meanwhile starts no other, not even a thread of its own for a filesystem. Once the
        order is there, the supervisor moves init while init builds its view, which is quicker then.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            child = sc.clone(_NAMESPACES)
        except OSError:  # the order tries it again, and reports the reason
            wire.close_all((ours.detach(), theirs.detach()))
            return
        if child == 0:
            guest_setup.await_seat(theirs, self._supervisor, self._alive, self._identity, self._program)
        theirs.close()
        self._ahead = ours
        self._runs[FIRST_RUN] = _Run(child)
        if _polled(poller, 0):
            return
        with suppress(OSError):  # the supervisor makes and joins what is missing
            cgroups.create(unique=str(FIRST_RUN), hierarchies=self._identity.hierarchies, ahead=True).join(child)

    def _seated(self, number: int, descriptors: tuple[int, ...]) -> bool:
        """Give the init that was made ahead its descriptors, if this is the first run. Return False if there is no such init."""
        if number != FIRST_RUN or self._ahead is None:
            return False
        with suppress(OSError):  # something has killed it: the supervisor sees that, as with any init
            socket.send_fds(self._ahead, [START.encode()], list(descriptors))
        self._ahead.close()
        self._ahead = None
        return True

    def _start(self, number: int, control: int, payload: int, *stdio: int) -> None:
        if self._seated(number, (control, payload, *stdio)):
            wire.close_all((control, payload, *stdio))
            return
        try:
            if self._helper is None:
                child, handover = sc.clone(_NAMESPACES), None
            else:
                descriptors = (control, payload, self._supervisor, self._alive)
                child, handover = self._helper.begin(_NAMESPACES, descriptors, self._identity.userns, stdio, guest_setup.handled_signals())
        except OSError as error:
            with socket.socket(fileno=os.dup(control)) as told:
                guest_setup.report_failure(told, error)
            child = 0
        else:
            if child == 0:
                self._go_on_in_child(handover, control, payload, stdio)
        wire.close_all((control, payload, *stdio))
        # Even without an init: the supervisor may have made a cgroup for the run.
        self._runs[number] = _Run(child)

    def _go_on_in_child(self, handover: Handover | None, control: int, payload: int, stdio: tuple[int, ...]) -> NoReturn:
        if handover is not None and handover.in_guest:
            guest_setup.become_guest_of_helper(handover, self._program)
        sockets = [socket.socket(fileno=control)]  # the helper has closed the other one, if there is a guest already
        if handover is None or not handover.in_run:
            sockets.append(socket.socket(fileno=payload))
        seat = Seat(sockets[0], sockets[-1], self._supervisor, self._alive, stdio)
        if handover is None:
            guest_setup.become_init(seat, self._identity, self._program)
        guest_setup.become_init_of_helper(handover, seat, self._identity, self._program)

    def _stage(self, init: int, link: int) -> int:
        """Fork the stagehand of a run with checkpoints, which takes orders on this socket. Return its pid."""
        from agent_sandbox.kernel import stagehand  # few runs have checkpoints

        child = os.fork()
        if child == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            wire.close_others((link,))
            stagehand.serve(socket.socket(fileno=link), init, userxattr=not self._identity.root)
        os.close(link)
        return child

    def _end_all(self) -> None:
        for run in self._runs.values():
            run.done = True
            for pid in (run.pid, run.stagehand):
                if pid:
                    os.kill(pid, signal.SIGKILL)

    def _patience(self) -> float | None:
        """Return the milliseconds until the next timed work; None if there is none. Short while leaving, in case a signal is lost."""
        if self._leaving:
            return _CLEARING_TICK * 1000
        now = time.monotonic()
        due = [run.watched.look_at - now for run in self._runs.values() if run.watched and not run.done]
        due += [_CLEARING_TICK for run in self._runs.values() if run.done]  # independent of SIGCHLD
        return max(0.0, min(due)) * 1000 if due else None

    def _look_at_disks(self) -> None:
        """Kill the runs whose kept layers exceed their limit. Done here because only the host side can read all layers."""
        for run in self._runs.values():
            began, watched = time.monotonic(), run.watched
            if watched is None or run.done or not run.pid or began < watched.look_at:
                continue
            if _disk_bytes(watched.layers) > watched.limit:
                with suppress(OSError):
                    os.write(watched.tell, b"f")  # before the kill: after the end of the run the reason is read from here
                os.kill(run.pid, signal.SIGKILL)
            # Measuring a large layer takes long: spend at most a tenth of the time on it.
            watched.look_at = began + max(_DISK_TICK, 10 * (time.monotonic() - began))

    def _clear_away(self) -> None:
        now = time.monotonic()
        for number, run in list(self._runs.items()):
            if not run.done:
                continue
            if run.watched:
                os.close(run.watched.tell)
                run.watched = None
            if run.stagehand and os.waitpid(run.stagehand, os.WNOHANG)[0]:
                run.stagehand = 0
            if run.pid and os.waitpid(run.pid, os.WNOHANG)[0]:
                run.pid, run.clear_by = 0, now + _CLEARING_PATIENCE
            if not run.pid and run.image and run.image.rest():
                run.image = None
            if not run.pid and not run.stagehand:
                cleared = self._forget_cgroup(number)
                # Without a supervisor nobody waits for this, and nobody else removes the cgroup before the next keeper begins.
                late = 0.0 if cleared or not self._leaving else _LEAVING_PATIENCE
                if (cleared and not run.image) or now > run.clear_by + late:
                    del self._runs[number]

    def _forget_cgroup(self, number: int) -> bool:
        name = f"{self._group}{number}"
        left = [place for hierarchy in self._identity.hierarchies for place in hierarchy.places if not cgroups.gone(f"{place}/{name}")]
        return not left


def _polled(poller: select.poll, patience: float | None) -> dict[int, int]:
    """Return the ready descriptors. A brief shortage of kernel memory is no error: if the keeper died, its cgroups would remain."""
    try:
        return dict(poller.poll(patience))
    except OSError:
        time.sleep(_CLEARING_TICK)
        return {}


def _disk_bytes(path: str) -> int:
    """Return the bytes that a directory tree uses on disk.

    If the tree cannot be measured, for example because it is gone, return more than any limit, which ends only its own run.
    """
    try:
        directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            return usage.disk_bytes(directory)
        finally:
            os.close(directory)
    except OSError:
        return usage.UNCOUNTABLE
