"""Waiting in a deterministic run: time passes at once, and whatever can be read or written is always ready.

Whether input has arrived is a matter of moments, so it is taken to be there; who then reads waits for it, or for its end.
"""

from __future__ import annotations

from collections.abc import Callable

from agent_sandbox.runtime.wasm.wasi.abi import (
    ABSOLUTE,
    BAD_FD,
    CLOCK,
    EVENT,
    INVALID,
    OK,
    SUBSCRIBED_TO,
    SUBSCRIPTION,
    TO_CLOCK,
    TO_FD,
)
from agent_sandbox.runtime.wasm.wasi.clock import Clock


def poll(subscriptions: bytes, clock: Clock, is_open: Callable[[int], bool]) -> list[bytes]:
    """The events, which may be none only when nothing was subscribed to. Passes the time on the clock."""
    ready: list[bytes] = []
    sleeps: list[tuple[int, int]] = []
    for start in range(0, len(subscriptions), SUBSCRIPTION):
        word, kind = SUBSCRIBED_TO.unpack_from(subscriptions, start)
        if kind == CLOCK:
            which, when, _, flags = TO_CLOCK.unpack_from(subscriptions, start + SUBSCRIBED_TO.size)
            left = clock.sleep(which, when, absolute=bool(flags & ABSOLUTE))
            if left is None:
                ready.append(EVENT.pack(word, INVALID, kind, 0, 0))
            else:
                sleeps.append((left, word))
        else:
            (fd,) = TO_FD.unpack_from(subscriptions, start + SUBSCRIBED_TO.size)
            ready.append(EVENT.pack(word, OK if is_open(fd) else BAD_FD, kind, 1, 0))
    if ready or not sleeps:
        return ready
    soonest = min(left for left, _ in sleeps)
    clock.pass_by(soonest)
    return [EVENT.pack(word, OK, CLOCK, 0, 0) for left, word in sleeps if left == soonest]
