"""From a fork to a keeper: the step that a zygote and a program with one thread have in common."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from agent_sandbox.kernel import stage
from agent_sandbox.runtime import guest


def keep_from_descriptors(descriptors: Sequence[int], identity: stage.Identity) -> None:
    """In a freshly forked process: become the keeper of a run. Never returns."""
    control, payload, supervisor, *stdio = descriptors
    seat = stage.Seat(socket.socket(fileno=control), socket.socket(fileno=payload), supervisor, tuple(stdio))
    stage.keep(seat, identity, guest.run)
