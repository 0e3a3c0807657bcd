"""A pool of guests that were made in advance, are confined, and wait for their program. Each is used once. They make runs start faster.

A shelf holds guests for one kind of launch: the same view, limits, permissions and preloaded modules. What differs between runs of a kind
(program, environment, input, working directory, wall time, conversation) reaches a guest only when the guest is used. Threads refill the
shelves that are in use. A run that finds its shelf empty takes the next guest that is being made for it, or makes its own; and the shelf
keeps one guest more than runs were under way then. A shelf that no run has used lately is cleared. When no shelf is left, the threads end.
"""

from __future__ import annotations

import functools
import marshal
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from agent_sandbox._fast.values import dataclass, field, replace
from agent_sandbox.errors import SandboxError
from agent_sandbox.kernel.mount_plan import Copies, ThrowAway
from agent_sandbox.policy.model import Guarantee
from agent_sandbox.runtime.base import DEVNULL, Argv, Hosted, Launch, PythonCode
from agent_sandbox.runtime.process.guest_handle import ProcessGuest
from agent_sandbox.runtime.process.guest_request import request_for

IDLE_SECONDS = 30.0  # a shelf that no run has used for this time is cleared
CALM_SECONDS = 2.0  # a shelf that was not empty for this time wants one guest fewer
HECTIC_SECONDS = 0.2  # for this time after a run found an empty shelf, the next guest is made at once, beside the runs
LOOK_SECONDS = 1.0  # between two checks of waiting guests: something outside may have killed one
MAKERS = 2  # guests made at once: half of the time the kernel waits, to move a process into its cgroup
POLITE_SECONDS = 0.003  # pause after a run before the next guest is made, so that the caller goes on first


@dataclass
class _Shelf:
    """The waiting guests for one kind of launch. `wanted` is how many to keep. `launch` has no code, environment or input in it."""

    launch: Launch
    wanted: int = 0
    guests: deque[ProcessGuest] = field(default_factory=deque)
    making: int = 0  # guests that the pool is making for it
    awaited: int = 0  # runs that wait for one of these
    running: int = 0  # runs that are under way
    used: float = 0.0
    empty_at: float = 0.0  # when a run last found this shelf empty
    eased_at: float = 0.0  # when `wanted` was last reduced


class Pool:
    """A pool of at most `most` waiting guests, which `make` makes. Safe to use from many threads."""

    def __init__(self, make: Callable[[Launch], ProcessGuest], *, most: int) -> None:
        self._make = make
        self._most = most
        self._shelves: dict[tuple[bytes, bytes], _Shelf] = {}
        self._changed = threading.Condition()
        self._makers: set[threading.Thread] = set()
        self._pause = 0.0
        self._closed = False

    def take(self, launch: Launch) -> ProcessGuest:
        """Return a guest for this launch, and have another made for the next launch of this kind. Raises as making a guest does."""
        key = kind_of(launch)
        if key is None:
            return self._make(launch)
        with self._changed:
            shelf = self._shelves.get(key)
            if shelf is None:
                shelf = self._shelves[key] = _Shelf(_without_secrets(launch))
            shelf.used = time.monotonic()  # so that it is not cleared before its run is counted
        begun = False
        try:  # an interrupt may come anywhere, and a run that is counted for ever would keep a guest waiting for ever
            with self._changed:
                shelf.running += 1
                begun = True
            guest = self._taken(shelf) or self._make(launch)
        except BaseException:
            if begun:
                self._run_has_ended(shelf)
            raise
        guest.when_closed = functools.partial(self._run_has_ended, shelf)
        return guest

    def _taken(self, shelf: _Shelf) -> ProcessGuest | None:
        """Take a waiting guest, or the next one that is being made for this shelf. None if there is none."""
        dead: list[ProcessGuest] = []
        with self._changed:
            guest = _first_alive(shelf, dead)
            if guest is None:
                shelf.empty_at = shelf.used
                shelf.wanted = min(max(shelf.wanted, shelf.running + (shelf.wanted > 0)), self._most)
            calm = guest is not None and shelf.used - shelf.empty_at > HECTIC_SECONDS
            if not calm:  # runs come fast: make the next guest during this run, on another core
                self._tend()
            while guest is None and shelf.making > shelf.awaited and not self._closed:
                shelf.awaited += 1
                try:
                    self._changed.wait()
                finally:
                    shelf.awaited -= 1
                guest = _first_alive(shelf, dead)
        for gone in dead:
            gone.close()
        return guest

    def _run_has_ended(self, shelf: _Shelf) -> None:
        with self._changed:
            shelf.running -= 1
            self._tend(after=POLITE_SECONDS)

    @property
    def waiting(self) -> int:
        """The number of waiting guests."""
        with self._changed:
            return sum(len(shelf.guests) for shelf in self._shelves.values())

    def close(self) -> None:
        """End all waiting guests."""
        with self._changed:
            self._closed = True
            makers = list(self._makers)
            self._changed.notify_all()
        for maker in makers:
            maker.join()

    def _tend(self, *, after: float = 0.0) -> None:
        """Wake the threads that refill the shelves, after `after` seconds. The caller holds the lock."""
        self._pause = after
        lacking = sum(shelf.wanted - len(shelf.guests) - shelf.making for shelf in self._shelves.values())
        if not self._closed and len(self._makers) < min(MAKERS, max(lacking, 1)):
            maker = threading.Thread(target=self._keep_tending, name="agent-sandbox-pool", daemon=True)
            self._makers.add(maker)
            maker.start()
        self._changed.notify_all()

    def _keep_tending(self) -> None:
        while True:
            with self._changed:
                surplus = self._clear()
                shelf = None if self._closed else self._most_wanting()
                idle = shelf is None and not surplus
                if idle:
                    if self._closed or not self._shelves or len(self._makers) > 1:  # the last one stays, to clear
                        self._makers.discard(threading.current_thread())
                        return
                    self._changed.wait(min(LOOK_SECONDS, CALM_SECONDS))
                if shelf is not None:
                    shelf.making += 1
            if idle:
                time.sleep(self._pause)
                continue
            for guest in surplus:
                guest.close()
            if shelf is not None:
                self._fill(shelf)

    def _clear(self) -> list[ProcessGuest]:
        """Remove and return the guests that have ended or are no longer wanted. The caller holds the lock."""
        now = time.monotonic()
        surplus: list[ProcessGuest] = []
        for key, shelf in list(self._shelves.items()):
            gone = [guest for guest in shelf.guests if not guest.waiting]
            for guest in gone:
                shelf.guests.remove(guest)
            surplus += gone
            if self._closed or now - shelf.used > IDLE_SECONDS:
                surplus += shelf.guests
                del self._shelves[key]
                shelf.wanted = 0
            elif shelf.wanted > 1 and now - max(shelf.empty_at, shelf.eased_at) > CALM_SECONDS:
                shelf.wanted -= 1
                shelf.eased_at = now
            while len(shelf.guests) > shelf.wanted > 0:
                surplus.append(shelf.guests.popleft())
        return surplus

    def _most_wanting(self) -> _Shelf | None:
        """Return the shelf to refill next: the one used last of those that lack guests. None if there is none or the pool is full."""
        if sum(len(shelf.guests) + shelf.making for shelf in self._shelves.values()) >= self._most:
            return None
        lacking = [shelf for shelf in self._shelves.values() if len(shelf.guests) + shelf.making < shelf.wanted]
        return max(lacking, key=lambda shelf: shelf.used, default=None)

    def _fill(self, shelf: _Shelf) -> None:
        guest: ProcessGuest | None = None
        try:
            with suppress(SandboxError, OSError):
                guest = self._make(shelf.launch)
        finally:
            with self._changed:
                shelf.making -= 1
                kept = guest is not None and shelf.wanted > 0 and not self._closed
                if guest is None:
                    shelf.wanted = 0  # the next run of this kind makes its own guest, and reports the error
                elif kept:
                    shelf.guests.append(guest)
                self._changed.notify_all()  # runs that wait for it
        if guest is not None and not kept:
            guest.close()


def _first_alive(shelf: _Shelf, dead: list[ProcessGuest]) -> ProcessGuest | None:
    """Take the first guest that still waits; None if there is none. Those that somebody killed are added to `dead`."""
    while shelf.guests:
        guest = shelf.guests.popleft()
        if guest.waiting:
            return guest
        dead.append(guest)
    return None


def kind_of(launch: Launch) -> tuple[bytes, bytes] | None:
    """Return the kind of a launch, as a key; None if its guest cannot be made beforehand.

    These launches have no kind: with a terminal, whose size belongs to the run; with stored layers, which one run at a time locks; with
    copies of files, which are made at the start of the run; and with an observer or checkpoints, which must be there from the beginning.
    Nor has one with an outer program, which its runtime makes beforehand if it can.
    """
    if launch.terminal is not None or launch.observe or launch.checkpoints or not isinstance(launch.root.layers, ThrowAway):
        return None
    if launch.outer is not None or any(type(step) is Copies for step in launch.root.steps):
        return None
    request = request_for(launch)
    plan: bytes = request.pop("plan")  # equal plans give the same object, so it is hashed once
    checked = [guarantee in launch.requires for guarantee in (Guarantee.MEMORY_HARD, Guarantee.PROCESSES_INVISIBLE)]  # when it is made
    return plan, marshal.dumps((request, checked, launch.preload, launch.stdin == DEVNULL))


def _without_secrets(launch: Launch) -> Launch:
    program = PythonCode("") if isinstance(launch.program, Hosted) else Argv(())
    stdin = DEVNULL if launch.stdin == DEVNULL else b""
    return replace(launch, program=program, env={}, cwd="/", stdin=stdin, on_output=None, on_ready=(), on_tick=(), talk=None)
