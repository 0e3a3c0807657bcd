"""The zygote of the egress: a program of ours that loads once, and is forked for every run with a network."""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from weakref import WeakMethod, finalize

from agent_sandbox._fast.values import TYPE_CHECKING
from agent_sandbox.egress import frames
from agent_sandbox.engine import trust
from agent_sandbox.engine.egress_program import EgressProgram, start_program
from agent_sandbox.engine.provisions import Provisions
from agent_sandbox.errors import LaunchFailed, install_extra
from agent_sandbox.kernel import wire

if TYPE_CHECKING:
    from typing import Any

READY_SECONDS = 60.0  # a guard against a host that hangs
FRESH_SECONDS = 86400.0  # after which a process that waits is replaced: its authority's certificate is valid for a week
MOST_SPARES = 4  # processes that wait for a next run


class EgressFork:
    """A fork of the zygote: the link to it, its process, and the certificate of its authority.

    It sends the certificate, then gets ready: it loads whatever it still needs, and confines itself.
    """

    def __init__(self, link: socket.socket, made: float) -> None:
        """`made` is the time of the fork."""
        self.link = link
        finalize(self, link.close).atexit = False  # whoever forgets a zygote forgets its forks
        self.pid = 0  # known with the certificate
        self.certificate = b""
        self._made, self._failed, self._ready = made, False, False
        self._process: int | None = None  # its pidfd
        self._dropped: finalize[..., EgressFork] | None = None

    def await_authority(self) -> None:
        """Wait for the certificate. Free once it is there. Raises `LaunchFailed` and OSError."""
        if self.certificate:
            return
        self.link.settimeout(READY_SECONDS)
        self._failed = True  # unless it says otherwise
        try:
            self.pid = wire.credentials(self.link)
        except (EOFError, TimeoutError) as error:
            raise LaunchFailed(f"the egress process did not start: {error}", hint="run: agent-sandbox doctor") from error
        certificate = str(self._receive("authority")["certificate"]).encode("ascii")
        with suppress(ProcessLookupError):
            self._process = os.pidfd_open(self.pid)
        if self._process is None or _hung_up(self.link):  # it has gone, and its number may be another's
            self._forget_process()
            self._receive("ready")  # which it may have failed to reach, and then says why
            raise LaunchFailed("the egress process ended at once", hint="run: agent-sandbox doctor")
        self._dropped = finalize(self, os.close, self._process)  # see above
        self._dropped.atexit = False
        self.certificate, self._failed = certificate, False

    def await_readiness(self) -> None:
        """Wait until the process is confined. Free once it is. Raises `LaunchFailed` and OSError."""
        self.await_authority()
        if not self._ready:
            self._failed = True
            self.link.settimeout(READY_SECONDS)
            self._receive("ready")
            self.link.settimeout(None)
            self._failed, self._ready = False, True

    def _receive(self, kind: str) -> dict[str, Any]:
        try:
            message, extra = frames.receive(self.link)
        except (EOFError, TimeoutError, ValueError) as error:
            raise LaunchFailed(f"the egress process did not start: {error}", hint="run: agent-sandbox doctor") from error
        wire.close_all(extra)
        if message["kind"] != kind:
            why = str(message.get("why", ""))
            lacks = "ModuleNotFoundError" in why
            hint = "install it: " + install_extra("network") if lacks else "run: agent-sandbox doctor"
            raise LaunchFailed(f"the egress process could not get ready: {why}", hint=hint)
        return message

    def serves(self, now: float) -> bool:
        """Return whether a run can still be given to this process, which has no orders: it lives, and its authority is new."""
        if self._failed or self.link.fileno() < 0 or abs(now - self._made) >= FRESH_SECONDS:
            return False
        return not _hung_up(self.link)

    def end(self) -> None:
        """Kill the process, if it has sent its certificate. It runs no further instruction of its own."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._process, signal.SIGKILL)

    def ended(self, milliseconds: int | None = None) -> bool:
        """Return whether the process has gone, after waiting for so long. Without a limit, wait for its end; then free the descriptors."""
        self.link.close()  # a process that is not ready yet ends by that, and is not waited for
        if self._process is not None:
            poller = select.poll()
            poller.register(self._process, select.POLLIN)
            if not poller.poll(milliseconds):
                return False
        self.forget()
        return True

    def drop(self) -> None:
        """End a process without orders, and do not wait for it."""
        self.end()
        self.forget()

    def forget(self) -> None:
        """Close our descriptors. A process without orders ends by that, once it has got ready."""
        self.link.close()
        self._forget_process()

    def _forget_process(self) -> None:
        if self._dropped is not None:
            self._dropped.detach()
        if self._process is not None:
            os.close(self._process)
            self._process = None


class EgressZygote:
    """A loaded egress program, from which the process of each run is forked. Safe to use from many threads, and on both sides of a fork.

    Whoever runs more than once has one process ready in advance: it has made its key, confined itself, and knows nothing of any run. A
    process that got no orders, because its run used no network, waits for the next run with its authority, which has signed nothing.
    """

    def __init__(self, program: EgressProgram | None = None, *, clock: Callable[[], float] = time.time) -> None:
        """`program` is one that was started before. `clock` is the one by which certificates are valid."""
        self._clock = clock
        self._program: EgressProgram | None = None
        self._spares: list[EgressFork] = []  # that wait for the next runs
        self._leaving: list[EgressFork] = []  # that have finished, and were killed
        self._start_afresh()
        self._program = program
        start_afresh = WeakMethod(self._start_afresh)
        os.register_at_fork(after_in_child=lambda: (method := start_afresh()) and method())  # the one that runs belongs to the parent

    def _start_afresh(self) -> None:
        if self._program is not None:
            self._program.control.close()
            self._program = None
        self._control: socket.socket | None = None
        self._pid = 0
        self._forks = 0
        self._lock = threading.Lock()
        for each in (*self._spares, *self._leaving):  # our copies: such a process waits for its parent alone
            each.forget()
        self._spares, self._leaving = [], []

    def fork(self, provisions: Provisions) -> EgressFork:
        """Return a process without orders, which gets ready meanwhile. Starts the zygote if there is none. Raises OSError."""
        with self._lock:
            self._forks += 1
            while self._spares:
                spare = self._spares.pop()
                if spare.serves(self._clock()):
                    return spare
                spare.drop()
            return self._new(provisions)

    def take_back(self, fork: EgressFork) -> None:
        """Keep a process that got no orders for the next run."""
        with self._lock:
            if self._control is not None and len(self._spares) < MOST_SPARES and fork.serves(self._clock()):
                self._spares.append(fork)
            else:
                fork.drop()

    def let_go(self, fork: EgressFork) -> None:
        """Let a process leave that has ended its flows and was killed. `close` waits for its end; after `close`, this does."""
        with self._lock:
            wait = 0 if self._control is not None else None
            self._leaving = [each for each in (*self._leaving, fork) if not each.ended(wait)]

    def keep_ready(self) -> None:
        """Have a process ready for the next run, if there has been more than one run."""
        with self._lock, suppress(OSError):  # it only saves time
            if self._control is not None and not self._spares and self._forks > 1:
                self._spares.append(self._new(None))

    def _new(self, provisions: Provisions | None) -> EgressFork:
        """Return a fork of the zygote. Without provisions, of one that runs."""
        ours, theirs = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)  # before the process sends its first byte
        with theirs:
            try:
                try:
                    if self._control is None and provisions is not None:
                        self._start(provisions)
                    self._ask(theirs)
                except (BrokenPipeError, ConnectionError):  # somebody killed it
                    self._end()
                    if provisions is None:
                        raise
                    self._start(provisions)
                    self._ask(theirs)
            except BaseException:
                ours.close()
                raise
        return EgressFork(ours, self._clock())

    def _ask(self, link: socket.socket) -> None:
        assert self._control is not None
        socket.send_fds(self._control, [frames.FORK], [link.fileno()])

    def _start(self, provisions: Provisions) -> None:
        """Start the program, unless it was started before, and give it what it loads: certificates and the file with compiled rules."""
        roots, compiled = os.memfd_create("roots", os.MFD_CLOEXEC), provisions.open_compiled()
        given = [roots] if compiled is None else [roots, compiled]
        try:
            with open(roots, "wb", closefd=False) as file:
                file.write(trust.system_roots())
            program, self._program = self._program or start_program(), None
            self._control, self._pid = program.control, program.pid
            self._dropped = finalize(self, _dismiss, program.control, program.pid)  # the zygote ends with whoever could use it
            self._dropped.atexit = False  # it ends with this process anyway
            socket.send_fds(program.control, [frames.EQUIP], given)
        finally:
            wire.close_all(given)

    def _end(self) -> None:
        for each in self._spares:
            each.drop()
        self._spares = []
        if self._control is not None:
            self._control = None
            self._dropped()

    def close(self, *, leaving: bool = False) -> None:
        """End the zygote, and wait until it has ended and so have the processes of runs that are over; with `leaving`, without waiting.

        The processes of runs go on. The next `fork` starts another zygote.
        """
        with self._lock:
            if self._program is not None:
                _dismiss(self._program.control, 0 if leaving else self._program.pid)
                self._program = None
            if leaving and self._control is not None:
                self._dropped.detach()
                self._control.close()
                self._control = None
            for each in self._leaving:
                each.ended(0 if leaving else None)
            self._leaving = []
            self._end()


def _hung_up(link: socket.socket) -> bool:
    """Return whether the process at the other end has gone."""
    poller = select.poll()
    poller.register(link, select.POLLRDHUP)
    return bool(poller.poll(0))


def _dismiss(control: socket.socket, pid: int) -> None:
    """End a zygote, and wait for its end; with no pid, do not wait."""
    control.close()
    if not pid:
        return
    with suppress(ChildProcessError):  # the application may wait for all its children; and in its forks, this is nobody's child
        os.waitpid(pid, 0)
