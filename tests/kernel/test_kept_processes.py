"""The orders about sleeping states, as the init of a run carries them out on real processes."""

from __future__ import annotations

import os
import select
import signal
import socket

from agent_sandbox.kernel import wire
from agent_sandbox.kernel.kept_processes import KeptProcesses
from agent_sandbox.kernel.wire import DROP, KEEP


def test_a_dropped_state_is_reported_when_it_is_gone() -> None:
    """Nobody waits for its end: the order is over at once."""
    ours, theirs = socket.socketpair()
    family = KeptProcesses(main=0)
    with ours, theirs:
        state = os.fork()
        if not state:
            signal.pause()
        family.do(KEEP, state, theirs)
        family.do(DROP, state, theirs)
        assert not select.select([ours], [], [], 0)[0], "it has not been reaped yet, however long it has been dead"
        assert state in family.kept, "so no other process is taken for it"
        os.waitpid(state, 0)
        family.ended(state, signal.SIGKILL)
        assert wire.receive(ours)[0] == {"kind": "dropped"} and family.kept == set()
        family.do(DROP, state, theirs)
        assert wire.receive(ours)[0] == {"kind": "dropped"}, "one that is not there is gone"


def test_short_of_memory_states_are_ended_one_by_one_and_none_that_is_in_use() -> None:
    ours, theirs = socket.socketpair()
    family = KeptProcesses(main=0)
    with ours, theirs:
        states = []
        for _ in range(3):
            if not (state := os.fork()):
                signal.pause()
            states.append(state)
            family.do(KEEP, state, theirs)
        family._waking = states[2]
        assert family.give_up_one() and len(family.kept) == 2, "its memory is free when this returns"
        assert family.give_up_one() and family.kept == {states[2]}
        assert not family.give_up_one(), "a state that is being woken goes on"
        os.kill(states[2], signal.SIGKILL)
        os.waitpid(states[2], 0)
