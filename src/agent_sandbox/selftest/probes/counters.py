"""Probes on counters that the whole machine shares: no cgroup and no rlimit divides them."""

from __future__ import annotations

from agent_sandbox.policy.model import MIB
from agent_sandbox.selftest.bench import DecoyBench
from agent_sandbox.selftest.boxes import Attempt, Bare, Box, Found
from agent_sandbox.selftest.probe import Probes, system_calls

SUBJECT = Probes("control groups", "seccomp", "a run")

_MEMORY = 96  # MiB
_PAIRS = 100
_NOTICED = 20.0  # seconds that a run goes on above the limit, for whoever watches to notice


@SUBJECT.probe(
    "limit-socket-buffers",
    "Data that waits in sockets counts as memory.",
    f"leaves {2 * _MEMORY} MiB unread in connections to itself where {_MEMORY} MiB of memory are allowed",
    excuse="this machine gives a connection too little room to try it",
)
def socket_buffers(bench: DecoyBench, box: Box) -> Found:
    arguments = {"megabytes": 2 * _MEMORY, "pairs": _PAIRS, "seconds": 0.0 if box.name == Bare.name else _NOTICED}
    ran = box.run(Attempt("counters", "fill_sockets", arguments, {"memory_bytes": _MEMORY * MIB}, may_end=True))
    if ran.answered:
        return Found(ran.reached, ran.refused)
    if "memory" in ran.limits_hit:
        return Found({}, {"loopback": f"ended: {ran.ended}"})
    return Found({"loopback": f"it ended ({ran.ended or 'nobody knows how'}), and memory is not given as the reason"})


@SUBJECT.probe(
    "shared-counters",
    "What only the whole machine bounds is not handed out.",
    "asks for asynchronous requests, filters of calls and of packets, and huge pages, so that no kernel grants them, to see who answers",
)
def shared_counters(bench: DecoyBench, box: Box) -> Found:
    return box.run(Attempt("counters", "take_shared", {"numbers": system_calls("io_setup", "seccomp", "setsockopt", "mmap")}))
