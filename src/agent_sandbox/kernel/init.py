"""Init, pid 1 of a guest's namespaces, after dropping its privileges: reap, forward signals, watch the limits, end the run.

Init ends when the guest's main program ends, when a limit is reached, and when the supervisor or the keeper dies: it holds a pidfd of the
supervisor and the far end of a pipe of the keeper. The kernel then kills every process of the pid namespace.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # not `signal`: its enums cost each init 50 pages
import os
import resource
import select
import time

from agent_sandbox._fast.contexts import suppress
from agent_sandbox._fast.values import TYPE_CHECKING
from agent_sandbox.kernel import usage, wire
from agent_sandbox.kernel.counters import CounterWatch
from agent_sandbox.kernel.doors import give_sockets
from agent_sandbox.kernel.wire import FAMILY_ORDERS, FAREWELL, GARBLED_HIT, GO, MEMORY_HIT, NOT_COUNTED, ORDER, PROCESSES_HIT, SIGNAL

if TYPE_CHECKING:
    import signal
    import socket
    from collections.abc import Iterable
    from typing import Any, NoReturn
else:
    import _signal as signal  # without the enumerations of `signal`


TICK = 0.05  # seconds between checks of limits that the kernel does not enforce
_NEVER = float(1 << 20)
LINGER, MOMENT = 0.05, 0.002  # seconds that init stays: at most LINGER after its report, MOMENT after the supervisor closed its end
_MOST_SECONDS, _MOST_BYTES = 1e9, 1 << 60  # that a report of the guest can name
FORGOTTEN = 900.0  # seconds after which a guest that never gets GO is ended


class Family:
    """The processes of a run that init tells apart: the main program, and those in `kept`, which only a run with checkpoints has."""

    def __init__(self, main: int) -> None:
        self.main = main
        self.kept: set[int] = set()
        self.poller = select.poll()  # of the watch

    def do(self, order: bytes, pid: int, control: socket.socket) -> None:
        """Carry out an order about a process. See `kept_processes`."""
        raise NotImplementedError

    def ended(self, pid: int, status: int) -> None:
        """Take note of the end of a process."""

    def give_up_one(self) -> bool:
        """End a sleeping checkpoint, because memory is short. Return whether there was one."""
        return False

    def patience(self) -> float:
        """Return the seconds until `serve` has something to do."""
        return _NEVER

    def serve(self) -> None:
        """Do what is to be done for the forks of a run with checkpoints."""


class Watch:
    """Watches the guest's main program, and checks at every tick the limits that the kernel does not enforce here."""

    def __init__(
        self,
        request: dict[str, Any],
        layers: int,
        private: Iterable[str],
        farewell: int | None,
        asked: socket.socket | None = None,
    ) -> None:
        """Prepare the checks. `private` are the view's own tmpfs directories.

        On the pipe `farewell`, a guest that hosts the program inside reports its end. On the socket `asked`, the supervisor asks for
        sockets of the guest's network.
        """
        self.farewell = farewell
        self.asked = asked
        self.read_afterwards = request["readable"]
        self._reported: list[Any] = [0.0, 0, NOT_COUNTED, 0]
        self.reported = False  # whether the guest has reported its own end
        self.agent = request["agent"]  # a program of ours inside an outer program, which signals its guest
        self.layers = layers
        self.cpu = request["cpu_seconds"]
        self.memory = None if "memory" in request["enforced"] else request["memory_bytes"]
        # Init itself is one of the allowed processes.
        self.processes = None if "processes" in request["enforced"] or request["processes"] is None else request["processes"] - 1
        self.crowded = False
        self.sized = request["sized"]  # the layers are a separate filesystem of limited size
        self.interval = _NEVER
        self._watched = False
        self._counters = CounterWatch(memory=request["memory_bytes"], alone=self.memory is not None)
        self._count_at = _NEVER
        self._tmp = request["tmp"]
        self._meter = usage.CpuMeter()
        self._private: list[str | int] = [*private, "/dev/shm", *([layers] if request["in_memory"] else [])]

    def begin(self, since: float) -> None:
        """Start checking limits and counters: the guest has its program since then."""
        self._watched = self.cpu is not None or self.memory is not None or self.processes is not None
        self.interval = TICK if self._watched else self._counters.interval
        if self._count_at == _NEVER:  # turns that follow one another quickly do not put it off
            self._count_at = since + self._counters.interval  # most runs are over by then, and need not be looked at

    def pass_on(self, number: int) -> None:
        """Let the agent signal the guest's program. Ignores an agent that has gone, or that does not read."""
        if self.farewell is not None:
            with suppress(OSError):
                os.set_blocking(self.farewell, False)
                os.write(self.farewell, bytes((number,)))

    def take_farewell(self) -> int | None:
        """Read the guest's report of its end, and close the pipe. Return the program's status, or None if there was no report.

        A guest whose engine or machine was taken over reports what it likes. What cannot be true counts as garbled.
        """
        assert self.farewell is not None
        words = os.read(self.farewell, FAREWELL.size)
        os.close(self.farewell)
        self.farewell = None
        if len(words) < FAREWELL.size:
            return None
        status, *self._reported = FAREWELL.unpack(words)
        self.reported = True
        cpu, memory = self._reported[:2]
        if not 0 <= cpu < _MOST_SECONDS or memory > _MOST_BYTES or os.WIFSTOPPED(status) or os.WIFCONTINUED(status):
            # Infinite times and sizes above all integers of a database would stop whoever records them.
            status, self._reported = signal.SIGKILL, [0.0, 0, NOT_COUNTED, GARBLED_HIT]
        return int(status)

    def look(self) -> tuple[str, str]:
        """Check the limits. Return the reason to end the run and the limit that was reached; "exited" and "" if none was reached."""
        if self.interval == _NEVER:
            return "exited", ""
        if (now := time.monotonic()) >= self._count_at:
            used_up = self._counters.look()
            self._count_at = now + self._counters.interval
            if used_up:
                return ("out-of-memory", "memory") if used_up == "memory" else ("share-limit", "share")
        if not self._watched:
            self.interval = self._counters.interval
            return "exited", ""
        if self.cpu is not None and self._meter.seconds() > self.cpu:
            return "cpu-limit", "cpu"
        if self.memory is not None and usage.memory_bytes(private=self._private) + self._counters.socket_bytes > self.memory:
            return "out-of-memory", "memory"
        self.count_processes()
        return "exited", ""

    def count_processes(self, *, ended: bool = False) -> None:
        """Note whether the process limit is reached. With `ended`, the main program has just ended, and is counted as one more process.

        Without a cgroup the kernel refuses processes above the limit, but does not report it. So the number of tasks is compared with the
        limit.
        """
        if self.processes is not None and not self.crowded:
            self.crowded = usage.task_count() + ended >= self.processes

    def report(self, status: int, reason: str, hit: str, wall: float) -> dict[str, Any]:
        """Return the final report to the supervisor."""
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU:
            reason, hit = "cpu-limit", "cpu"
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu, memory, fuel, inside = self._reported
        if inside & GARBLED_HIT and reason == "exited":
            reason = "garbled"
        elif inside & MEMORY_HIT and reason == "exited" and os.WIFSIGNALED(status):
            reason, hit = "out-of-memory", "memory"
        return {
            "kind": "exit",
            "status": status,
            "reason": reason,
            "hit": [name for name in (hit, *self._met(inside)) if name and name != "supervisor"],
            "wall": wall,
            "cpu": max(cpu, used.ru_utime + used.ru_stime),
            "memory": max(memory, used.ru_maxrss * 1024),
            "fuel": None if fuel == NOT_COUNTED else fuel,
            "reported": self.reported,
        }

    def _met(self, inside: int) -> list[str]:
        """Return the limits that the run reached without being ended: the kernel only refused disk space or a process."""
        crowded = self.crowded or bool(inside & PROCESSES_HIT)
        return [name for name, met in (("disk", self._full()), ("processes", crowded)) if met]

    def _full(self) -> bool:
        """Return whether the run filled its scratch directory or its sized layers."""
        places: list[str | int] = [self._tmp, self.layers] if self.sized else [self._tmp]
        return any(_is_full(place) for place in places)


def watch_over(
    watch: Watch, family: Family, control: socket.socket, keeper: int, supervisor: int, *, since: tuple[float, float] | None = None
) -> NoReturn:
    """Watch the guest's main program until the run is over and all its processes have ended, report the outcome, and exit.

    `since` tells when the program began, and until when it may run, if it runs already.
    """
    verdict = _watch(watch, family, control, keeper, supervisor, since)
    with suppress(OSError):  # the supervisor may have gone, or seen the end itself
        wire.send(control, verdict)
    with suppress(OSError):
        _step_aside(control)
    os._exit(0)


def _step_aside(control: socket.socket) -> None:
    """Wait before exiting, until the supervisor has closed its end of the socket, and a moment longer.

    The guest has ended. When init exits, the kernel removes its namespaces, which would compete with the supervisor for the processor.
    """
    poller = select.poll()
    poller.register(control, select.POLLIN)
    if poller.poll(LINGER * 1000):
        time.sleep(MOMENT)


def _watch(
    watch: Watch, family: Family, control: socket.socket, keeper: int, supervisor: int, since: tuple[float, float] | None = None
) -> dict[str, Any]:
    woken, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    _signal.signal(_signal.SIGCHLD, lambda *_: None)
    _signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    poller = family.poller
    farewell_fd = watch.farewell
    for fd in (woken, control.fileno(), keeper, supervisor, *([] if farewell_fd is None else [farewell_fd])):
        poller.register(fd, select.POLLIN)
    asked = watch.asked
    if asked is not None:
        poller.register(asked, select.POLLIN)
    if since is None:
        # Rehearse poll and report once, while nobody waits for the result: the second time is faster, in memory pages of our own.
        poller.poll(0)
        wire.pack(watch.report(0, *watch.look(), 0.0))
        began = time.monotonic()
        deadline = began + FORGOTTEN
    else:
        began, deadline = since
        watch.begin(began)
    reason, hit = "exited", ""
    took_farewell = False
    status: int | None = _reap(family)
    while status is None and not hit:
        ready = dict(poller.poll(max(0.0, min(deadline - time.monotonic(), watch.interval, family.patience()) * 1000)))
        if supervisor in ready or keeper in ready:
            reason, hit = "killed", "supervisor"
        elif control.fileno() in ready:
            try:
                kind, value = ORDER.unpack(wire.exactly(control, ORDER.size))
            except (EOFError, OSError):
                kind, value = b"", 0.0
            if kind == GO:
                began = time.monotonic()
                deadline = began + min(value, float(1 << 32))
                watch.begin(began)
            elif kind == SIGNAL:
                watch.pass_on(int(value)) if watch.agent else _signal_group(family.main, int(value))
            elif kind in FAMILY_ORDERS:
                family.do(kind, int(value), control)
            else:  # end of the orders: the run is no longer wanted
                reason, hit = "killed", "supervisor"
        if woken in ready:
            os.read(woken, 4096)
        if asked is not None and asked.fileno() in ready and not give_sockets(asked):
            poller.unregister(asked)
            asked = None
        if farewell_fd in ready:
            poller.unregister(farewell_fd)
            status = watch.take_farewell()
            took_farewell = status is not None
        status = _reap(family) if status is None else status
        family.serve()
        if status is None and not hit:
            if time.monotonic() >= deadline:
                reason, hit = "timed-out", "wall"
            else:
                reason, hit = watch.look()
                while hit == "memory" and family.give_up_one():  # as the kernel does in a cgroup, by their scores
                    reason, hit = watch.look()
    wall = time.monotonic() - began
    watch.count_processes(ended=status is not None)
    # Background processes end with the main program, and before the supervisor learns that the run is over.
    last = _end_everything(family.main, wait=not took_farewell or watch.read_afterwards)
    if watch.farewell is not None:  # the end of the guest's process was noticed before its farewell was read
        reported = watch.take_farewell()
        if status is not None and reported is not None:
            status = reported
    status = last if status is None else status
    if reason == "killed" and status != signal.SIGKILL:
        reason, hit = "exited", ""  # the program had already ended by itself when the order came
    return watch.report(status, reason, hit, wall)


def _is_full(place: str | int) -> bool:
    try:
        space = os.statvfs(place)
    except OSError:  # a policy may deny /tmp
        return False
    return space.f_bavail * space.f_frsize < 65536 or space.f_ffree == 0


def _reap(family: Family) -> int | None:
    """Reap all ended children. Return the main program's status if it is among them, else None."""
    main_status = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return main_status
        if pid == 0:
            return main_status
        if pid == family.main or (not family.main and pid not in family.kept):  # or one that was woken, and is not yet the main program
            main_status = status
        family.ended(pid, status)


def _end_everything(guest: int, *, wait: bool) -> int:
    """Kill every other process of the namespace. Return the main program's status; SIGKILL if that is unknown.

    With `wait`, return once all processes are gone. All are descendants of init: when init has no child, no other process exists. A killed
    process executes nothing more, but a reader of the run's files needs the process gone. Without `wait`, return at once: the kernel takes
    longer to free a guest's memory than most programs take to run.
    """
    status = int(signal.SIGKILL)
    if not wait:
        with suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        return status
    while True:
        try:
            pid, pid_status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                with suppress(ProcessLookupError):
                    os.kill(-1, signal.SIGKILL)
                pid, pid_status = os.waitpid(-1, 0)
        except ChildProcessError:
            return status
        if pid == guest:
            status = pid_status


def _signal_group(guest: int, number: int) -> None:
    if not guest:  # nobody, while a checkpoint is being woken
        return
    try:
        os.killpg(guest, number)
    except (ProcessLookupError, PermissionError, OSError):
        return
