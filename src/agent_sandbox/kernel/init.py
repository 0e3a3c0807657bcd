"""Pid 1 of a guest's namespaces, after it has given up every power: reap, forward signals, watch the limits, end the run.

It ends, and with it (the kernel sees to that) every process of the namespace, when the guest's main program ends, when a limit is
reached, and when the supervisor or the keeper goes: it holds a pidfd of the one and the far end of a pipe of the other.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import socket
import time
from collections.abc import Iterable
from contextlib import suppress

from agent_sandbox._fast.values import TYPE_CHECKING
from agent_sandbox.kernel import usage, wire
from agent_sandbox.kernel.wire import FAREWELL, GO, NOT_COUNTED, ORDER, SIGNAL

if TYPE_CHECKING:
    from typing import Any, NoReturn

TICK = 0.05  # seconds between looks at what only can be watched
SLOW_TICK = 1.0  # and to see that the guest has ended, should the signal that says so be lost
LINGER, MOMENT = 0.05, 0.002  # seconds: how long init stays at most once it has reported, and after the supervisor is done with it
FORGOTTEN = 900.0  # a guest that is never told to go ends itself


class Watch:
    """The guest's main program, and the limits that no kernel object enforces here: those are looked at every tick."""

    def __init__(self, guest: int, request: dict[str, Any], layers: int, private: Iterable[str], farewell: int | None) -> None:
        """`private` are the directories of the view that are filesystems in memory of its own, `farewell` where a guest says its end."""
        self.guest = guest
        self.farewell = farewell
        self.read_afterwards = request["readable"]
        self._said: list[Any] = [0.0, 0, NOT_COUNTED]
        self.layers = layers
        self.cpu = request["cpu_seconds"]
        self.memory = None if "memory" in request["enforced"] else request["memory_bytes"]
        # One of those that are allowed is ourselves.
        self.processes = None if "processes" in request["enforced"] or request["processes"] is None else request["processes"] - 1
        self.crowded = False
        self.sized = request["sized"]  # the layers are a filesystem of their own, of limited size
        self.interval = float(1 << 20)
        self._tmp = request["tmp"]
        self._meter = usage.CpuMeter()
        self._private: list[str | int] = [*private, "/dev/shm", *([layers] if request["in_memory"] else [])]

    def begin(self) -> None:
        """The guest has its program: look from now on, if there is anything to look at."""
        watched = self.cpu is not None or self.memory is not None or self.processes is not None
        self.interval = TICK if watched else SLOW_TICK

    def take_farewell(self) -> int | None:
        """The status of a program whose guest has said that it is over; None from one that went without a word."""
        assert self.farewell is not None
        words = os.read(self.farewell, FAREWELL.size)
        os.close(self.farewell)
        self.farewell = None
        if len(words) < FAREWELL.size:
            return None
        status, *self._said = FAREWELL.unpack(words)
        return int(status)

    def look(self) -> tuple[str, str]:
        """The reason to end the run and the limit that was reached, or two empty words."""
        if self.interval != TICK:
            return "exited", ""
        if self.cpu is not None and self._meter.seconds() > self.cpu:
            return "cpu-limit", "cpu"
        if self.memory is not None and usage.memory_bytes(private=self._private) > self.memory:
            return "out-of-memory", "memory"
        self.count_processes()
        return "exited", ""

    def count_processes(self, *, ended: bool = False) -> None:
        """Without a cgroup the kernel refuses one process too many but does not count refusals: that all are there is what can be seen.

        `ended` says that the main program has only just ended: it had one of the places.
        """
        if self.processes is not None and not self.crowded:
            self.crowded = usage.task_count() + ended >= self.processes

    def report(self, status: int, reason: str, hit: str, wall: float) -> dict[str, Any]:
        """What the supervisor is told at the end."""
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU:
            reason, hit = "cpu-limit", "cpu"
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu, memory, fuel = self._said
        return {
            "kind": "exit",
            "status": status,
            "reason": reason,
            "hit": [name for name in (hit, *self._met()) if name and name != "supervisor"],
            "wall": wall,
            "cpu": max(cpu, used.ru_utime + used.ru_stime),
            "memory": max(memory, used.ru_maxrss * 1024),
            "fuel": None if fuel == NOT_COUNTED else fuel,
        }

    def _met(self) -> list[str]:
        """The limits that were met without ending the run: the program was refused something, and the caller should know why."""
        return [name for name, met in (("disk", self._full()), ("processes", self.crowded)) if met]

    def _full(self) -> bool:
        """Whether the run filled its scratch directory or its sized layers."""
        places: list[str | int] = [self._tmp, self.layers] if self.sized else [self._tmp]
        return any(_is_full(place) for place in places)


def watch_over(watch: Watch, control: socket.socket, keeper: int, supervisor: int) -> NoReturn:
    """Watch over the guest's main program until the run is over and nothing of it lives, say how it ended, and exit."""
    verdict = _watch(watch, control, keeper, supervisor)
    with suppress(OSError):  # perhaps nobody is left to be told
        wire.send(control, verdict)
        _step_aside(control)
    os._exit(0)


def _step_aside(control: socket.socket) -> None:
    """Stay until the supervisor has closed its end, and a moment longer: nothing of the guest lives, and when we go the kernel takes all of
    its namespaces apart, on the very cores that somebody needs now to hear of the outcome."""
    poller = select.poll()
    poller.register(control, select.POLLIN)
    if poller.poll(LINGER * 1000):
        time.sleep(MOMENT)


def _watch(watch: Watch, control: socket.socket, keeper: int, supervisor: int) -> dict[str, Any]:
    guest = watch.guest
    woken, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    poller = select.poll()
    said = watch.farewell
    for fd in (woken, control.fileno(), keeper, supervisor, *([] if said is None else [said])):
        poller.register(fd, select.POLLIN)
    # A rehearsal: what has been done once, before anybody waits for it, is done faster the second time, its memory being our own by then.
    poller.poll(0)
    wire.pack(watch.report(0, *watch.look(), 0.0))
    began = time.monotonic()
    deadline = began + FORGOTTEN
    reason, hit = "exited", ""
    heard = False
    status: int | None = _reap(guest)
    while status is None and not hit:
        ready = dict(poller.poll(max(0.0, min(deadline - time.monotonic(), watch.interval) * 1000)))
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
                watch.begin()
            elif kind == SIGNAL:
                _signal_group(guest, int(value))
            else:  # the end of orders: it is not wanted any more
                reason, hit = "killed", "supervisor"
        if woken in ready:
            os.read(woken, 4096)
        if said in ready:
            poller.unregister(said)
            status = watch.take_farewell()
            heard = status is not None
        status = _reap(guest) if status is None else status
        if status is None and not hit:
            if time.monotonic() >= deadline:
                reason, hit = "timed-out", "wall"
            else:
                reason, hit = watch.look()
    wall = time.monotonic() - began
    watch.count_processes(ended=status is not None)
    # What it left in the background ends with it, and before anybody is told that the run is over.
    last = _end_everything(guest, wait=not heard or watch.read_afterwards)
    if watch.farewell is not None:  # its end was seen before its words
        watch.take_farewell()
    status = last if status is None else status
    if reason == "killed" and status != signal.SIGKILL:
        reason, hit = "exited", ""  # it had ended by itself when the order came
    return watch.report(status, reason, hit, wall)


def _is_full(place: str | int) -> bool:
    try:
        space = os.statvfs(place)
    except OSError:  # a policy may deny /tmp itself
        return False
    return space.f_bavail * space.f_frsize < 65536 or space.f_ffree == 0


def _reap(guest: int) -> int | None:
    """Collect whatever has ended; the main program's status when it is among them."""
    found = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if pid == 0:
            return found
        if pid == guest:
            found = status


def _end_everything(guest: int, *, wait: bool) -> int:
    """Kill every process of the namespace but ourselves and wait until they are gone: all descend from us, so no child means none.

    What is killed runs no further; that it is gone matters to who looks at what it wrote. A guest of ours that has said its farewell is not
    waited for: taking its memory apart takes the kernel longer than most programs take.
    """
    status = int(signal.SIGKILL)
    if not wait:
        with suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        return status
    while True:
        try:
            pid, ended = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                with suppress(ProcessLookupError):
                    os.kill(-1, signal.SIGKILL)
                pid, ended = os.waitpid(-1, 0)
        except ChildProcessError:
            return status
        if pid == guest:
            status = ended


def _signal_group(guest: int, number: int) -> None:
    try:
        os.killpg(guest, number)
    except (ProcessLookupError, PermissionError, OSError):
        return
