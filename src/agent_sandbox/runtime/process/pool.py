"""A pool of guests that were made in advance, are confined, and wait for their program. Each is used once. They make runs start faster.

A shelf holds guests for one kind of launch: the same view, limits, permissions and preloaded modules. What differs between runs of a kind
(program, environment, input, working directory, wall time, conversation) reaches a guest only when the guest is used. A thread refills the
shelves that are in use. If a run finds its shelf empty, the thread keeps more guests there. It clears a shelf that no run has used lately.
When no shelf is left, the thread ends.
"""

from __future__ import annotations

import marshal
import threading
import time
from collections import deque
from collections.abc import Callable

from agent_sandbox._fast.values import dataclass, field, replace
from agent_sandbox.errors import SandboxError
from agent_sandbox.kernel.mount_plan import Copies, ThrowAway
from agent_sandbox.policy.model import Guarantee
from agent_sandbox.runtime.base import DEVNULL, Argv, Hosted, Launch, PythonCode
from agent_sandbox.runtime.process.guest_handle import ProcessGuest, request_for

IDLE_SECONDS = 30.0  # a shelf that no run has used for this time is cleared
CALM_SECONDS = 2.0  # a shelf that was not empty for this time wants one guest fewer
HECTIC_SECONDS = 0.2  # for this time after a run found an empty shelf, the next guest is made at once, beside the runs
LOOK_SECONDS = 1.0  # between two checks of waiting guests: something outside may have killed one
POLITE_SECONDS = 0.003  # pause after a run before the next guest is made, so that the caller goes on first


@dataclass
class _Shelf:
    """The waiting guests for one kind of launch. `wanted` is how many to keep. `launch` has no code, environment or input in it."""

    launch: Launch
    wanted: int = 0
    guests: deque[ProcessGuest] = field(default_factory=deque)
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
        self._thread: threading.Thread | None = None
        self._pause = 0.0
        self._closed = False

    def take(self, launch: Launch) -> ProcessGuest | None:
        """Return a waiting guest for this launch, or None. Also has another guest made for the next launch of this kind."""
        key = kind_of(launch)
        if key is None:
            return None
        dead: list[ProcessGuest] = []
        with self._changed:
            shelf = self._shelves.get(key)
            if shelf is None:
                shelf = self._shelves[key] = _Shelf(_without_secrets(launch))
            shelf.used = time.monotonic()
            guest = shelf.guests.popleft() if shelf.guests else None
            while guest is not None and not guest.waiting:  # somebody killed it
                dead.append(guest)
                guest = shelf.guests.popleft() if shelf.guests else None
            if guest is None:
                shelf.empty_at = shelf.used
                shelf.wanted = min(shelf.wanted + 1, self._most)
            calm = guest is not None and shelf.used - shelf.empty_at > HECTIC_SECONDS
            if not calm:  # runs come fast: make the next guest during this run, on another core
                self._tend()
        for gone in dead:
            gone.close()
        if guest is not None and calm:
            guest.when_closed = self._run_has_ended
        return guest

    def _run_has_ended(self) -> None:
        with self._changed:
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
            thread = self._thread
            self._changed.notify_all()
        if thread is not None:
            thread.join()

    def _tend(self, *, after: float = 0.0) -> None:
        """Wake the thread that refills the shelves, after `after` seconds. The caller holds the lock."""
        self._pause = after
        if self._thread is None and not self._closed:
            self._thread = threading.Thread(target=self._keep_tending, name="agent-sandbox-pool", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _keep_tending(self) -> None:
        while True:
            with self._changed:
                surplus = self._clear()
                shelf = None if self._closed else self._most_wanting()
                idle = shelf is None and not surplus
                if idle:
                    if self._closed or not self._shelves:
                        self._thread = None
                        return
                    self._changed.wait(min(LOOK_SECONDS, CALM_SECONDS))
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
        if sum(len(shelf.guests) for shelf in self._shelves.values()) >= self._most:
            return None
        lacking = [shelf for shelf in self._shelves.values() if len(shelf.guests) < shelf.wanted]
        return max(lacking, key=lambda shelf: shelf.used, default=None)

    def _fill(self, shelf: _Shelf) -> None:
        try:
            guest = self._make(shelf.launch)
        except (SandboxError, OSError):
            with self._changed:
                shelf.wanted = 0  # the next run of this kind makes its own guest, and reports the error
            return
        with self._changed:
            if shelf.wanted and not self._closed:
                shelf.guests.append(guest)
                return
        guest.close()


def kind_of(launch: Launch) -> tuple[bytes, bytes] | None:
    """Return the kind of a launch, as a key; None if its guest cannot be made beforehand.

    These launches have no kind: with a terminal, whose size belongs to the run; with stored layers, which one run at a time locks; with
    copies of files, which are made at the start of the run; and with an observer, which must be attached from the beginning.
    """
    if launch.terminal is not None or launch.observe or not isinstance(launch.root.layers, ThrowAway):
        return None
    if any(type(step) is Copies for step in launch.root.steps):
        return None
    request = request_for(launch)
    plan: bytes = request.pop("plan")  # equal plans give the same object, so it is hashed once
    checked = [guarantee in launch.requires for guarantee in (Guarantee.MEMORY_HARD, Guarantee.PROCESSES_INVISIBLE)]  # when it is made
    return plan, marshal.dumps((request, checked, launch.preload, launch.stdin == DEVNULL))


def _without_secrets(launch: Launch) -> Launch:
    program = PythonCode("") if isinstance(launch.program, Hosted) else Argv(())
    stdin = DEVNULL if launch.stdin == DEVNULL else b""
    return replace(launch, program=program, env={}, cwd="/", stdin=stdin, on_output=None, on_ready=(), on_tick=(), talk=None)
