"""The zygote of the egress: a program of ours that loads once, and is forked for every run with a network."""

from __future__ import annotations

import os
import select
import socket
import sys
import threading
from contextlib import suppress
from weakref import WeakMethod, finalize

from agent_sandbox.engine import trust
from agent_sandbox.engine.provisions import Provisions
from agent_sandbox.kernel import wire
from agent_sandbox.runtime.process.zygote import argv_for, packages

_ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": "/"}
_PROGRAM = "agent_sandbox.egress.process"


class EgressZygote:
    """A loaded egress program, from which the process of each run is forked. Safe to use from many threads, and on both sides of a fork.

    Whoever runs more than once has one process ready in advance: it has made its key, confined itself, and knows nothing of any run.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spare: socket.socket | None = None  # the link to a process that is ready for the next run
        self._start_afresh()
        start_afresh = WeakMethod(self._start_afresh)
        os.register_at_fork(after_in_child=lambda: (method := start_afresh()) and method())  # the one that runs belongs to the parent

    def _start_afresh(self) -> None:
        self._control: socket.socket | None = None
        self._pid = 0
        self._forks = 0
        self._lock = threading.Lock()
        self._drop_spare()  # our copy of the link: the process waits for its parent alone

    def fork(self, provisions: Provisions) -> socket.socket:
        """Return the link to a new egress process, which gets ready meanwhile. Starts the zygote if there is none. Raises OSError."""
        with self._lock:
            self._forks += 1
            spare, self._spare = self._spare, None
            if spare is not None and _is_open(spare):
                return spare
            if spare is not None:
                spare.close()
            return self._new(provisions)

    def keep_ready(self) -> None:
        """Have a process ready for the next run, if there has been more than one run."""
        with self._lock, suppress(OSError):  # it only saves time
            if self._control is not None and self._spare is None and self._forks > 1:
                self._spare = self._new(None)

    def _new(self, provisions: Provisions | None) -> socket.socket:
        """Return the link to a fork of the zygote. Without provisions, of one that runs."""
        ours, theirs = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)  # before the process sends its first byte
        with theirs:
            try:
                if self._control is None and provisions is not None:
                    self._start(provisions)
                try:
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
        return ours

    def _ask(self, link: socket.socket) -> None:
        assert self._control is not None
        socket.send_fds(self._control, [b"+"], [link.fileno()])

    def _start(self, provisions: Provisions) -> None:
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        me, compiled = os.pidfd_open(os.getpid()), provisions.open_compiled()
        with theirs:
            try:
                self._pid = _spawn(theirs.fileno(), me, trust.system_roots(), compiled)
            except BaseException:
                control.close()
                raise
            finally:
                wire.close_all([me] if compiled is None else [me, compiled])
        self._control = control
        self._dropped = finalize(self, _dismiss, control, self._pid)  # the zygote ends with whoever could use it
        self._dropped.atexit = False  # it ends with this process anyway

    def _end(self) -> None:
        self._drop_spare()
        if self._control is not None:
            self._control = None
            self._dropped()

    def _drop_spare(self) -> None:
        if self._spare is not None:
            self._spare.close()
            self._spare = None

    def close(self, *, leaving: bool = False) -> None:
        """End the zygote; with `leaving`, without waiting for it. The processes of runs go on. The next `fork` starts another."""
        with self._lock:
            if leaving and self._control is not None:
                self._dropped.detach()
                self._control.close()
                self._control = None
            self._end()


def _is_open(link: socket.socket) -> bool:
    """Return whether the process at the other end lives."""
    poller = select.poll()
    poller.register(link, select.POLLRDHUP)
    return not poller.poll(0)


def _dismiss(control: socket.socket, pid: int) -> None:
    """End a zygote, and wait for its end."""
    control.close()
    with suppress(ChildProcessError):  # the application may wait for all its children; and in its forks, this is nobody's child
        os.waitpid(pid, 0)


def _spawn(control: int, supervisor: int, roots: bytes, compiled: int | None) -> int:
    """Start our interpreter with the egress program, with these descriptors and a fixed environment. Return its pid."""
    memory = os.memfd_create("roots", os.MFD_CLOEXEC)
    try:
        with open(memory, "wb", closefd=False) as file:
            file.write(roots)
        os.lseek(memory, 0, os.SEEK_SET)
        passed = (control, supervisor, memory, *([] if compiled is None else [compiled]))
        kept = [(os.POSIX_SPAWN_DUP2, fd, fd) for fd in passed]  # each onto itself, so that exec does not close it
        nothing = [(os.POSIX_SPAWN_OPEN, fd, "/dev/null", os.O_RDWR, 0) for fd in range(3)]
        argv = argv_for(_PROGRAM, str(control), str(supervisor), str(memory), "" if compiled is None else str(compiled), packages())
        return os.posix_spawn(sys.executable, argv, _ENVIRONMENT, file_actions=[*kept, *nothing], setsid=True)
    finally:
        os.close(memory)
