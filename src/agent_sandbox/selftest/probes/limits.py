"""Probes on limits. Each sets a small limit: to reach the user's own limit, a probe would have to load the machine itself."""

from __future__ import annotations

from typing import Any

from agent_sandbox.policy.model import MIB
from agent_sandbox.selftest.bench import DecoyBench
from agent_sandbox.selftest.boxes import Attempt, Bare, Box, Found
from agent_sandbox.selftest.probe import SDK, Probes

SUBJECT = Probes("control groups", "a kept run")

_PROCESSES, _FILES, _OUTPUT = 24, 64, 64 << 10
_MEMORY, _DISK = 96, 8  # MiB
_WALL, _CPU, _WRITING = 0.3, 0.2, 1.0  # seconds
# An attempt lasts this many times as long in a sandbox as without: under load, a late limit must not look like a missing one.
_PATIENT = 4


@SUBJECT.probe(
    "limit-memory", "A program that takes too much memory is stopped, and told why.", f"uses {2 * _MEMORY} MiB where {_MEMORY} are allowed"
)
def memory(bench: DecoyBench, box: Box) -> Found:
    return _ended(box, "take_memory", {"megabytes": 2 * _MEMORY}, {"memory_bytes": _MEMORY * MIB}, "memory")


@SUBJECT.probe(
    "limit-wall-time",
    "A program that goes on for too long is ended.",
    f"goes on for {3 * _PATIENT * _WALL:.1f} s, deaf to signals, where {_WALL} s are allowed",
)
def wall_time(bench: DecoyBench, box: Box) -> Found:
    return _ended(box, "go_on", {"seconds": _duration(box, 3 * _WALL)}, {"wall_seconds": _WALL}, "wall")


@SUBJECT.probe(
    "limit-processor-time",
    "A program that uses too much processor time is ended.",
    f"uses {2 * _PATIENT * _CPU:.1f} s of it where {_CPU} s are allowed",
    boxes=(SDK,),
)
def processor_time(bench: DecoyBench, box: Box) -> Found:
    return _ended(box, "burn", {"seconds": _duration(box, 2 * _CPU)}, {"cpu_seconds": _CPU}, "cpu")


@SUBJECT.probe(
    "limit-processes",
    "A fork bomb stops at its limit.",
    f"starts {3 * _PROCESSES} processes (threads, where processes are not allowed) where {_PROCESSES} are allowed",
)
def processes(bench: DecoyBench, box: Box) -> Found:
    function = "fork_many" if box.processes else "thread_many"
    return box.run(Attempt("processes", function, {"number": 3 * _PROCESSES}, {"processes": _PROCESSES}))


@SUBJECT.probe("limit-open-files", "Open files are bounded.", f"opens {3 * _FILES} where {_FILES} are allowed")
def open_files(bench: DecoyBench, box: Box) -> Found:
    return box.run(Attempt("processes", "open_many", {"number": 3 * _FILES}, {"open_files": _FILES}))


@SUBJECT.probe("limit-output", "A flood of output is cut.", f"prints {16 * _OUTPUT >> 10} KiB where {_OUTPUT >> 10} are kept")
def output(bench: DecoyBench, box: Box) -> Found:
    limits = {"output_bytes": _OUTPUT}
    ran = box.run(Attempt("processes", "say_much", {"size": 16 * _OUTPUT}, limits, may_end=True))
    return Found(
        {"output": f"{ran.kept} bytes were kept"} if ran.kept > _OUTPUT else {}, {"output": "cut"} if "output" in ran.limits_hit else {}
    )


@SUBJECT.probe(
    "limit-disk",
    "A program that fills the disk is stopped.",
    f"writes {3 * _DISK} MiB in small pieces where {_DISK} are allowed: in layers that are kept, or in its scratch directory",
)
def disk(bench: DecoyBench, box: Box) -> Found:
    path = f"{bench.project if box.processes else '/tmp'}/{bench.mark()}"
    arguments = {"path": path, "megabytes": 3 * _DISK, "seconds": _duration(box, _WRITING)}
    return _ended(box, "fill", arguments, {"disk_bytes": _DISK * MIB}, "disk", module="files")


def _duration(box: Box, seconds: float) -> float:
    return seconds if box.name == Bare.name else seconds * _PATIENT


def _ended(box: Box, function: str, arguments: dict[str, Any], limits: dict[str, Any], name: str, *, module: str = "processes") -> Found:
    """Run an attempt that the limit `name` must end. It got through if it succeeded, or if it ended for another reason."""
    ran = box.run(Attempt(module, function, arguments, limits, may_end=True))
    if ran.answered:
        reached, refused = list(ran.reached.values()), list(ran.refused.values())
        return Found({name: reached[0]} if reached else {}, {name: refused[0]} if refused else {})
    if name in ran.limits_hit:
        return Found({}, {name: f"ended: {ran.ended}"})
    return Found({name: f"it ended ({ran.ended or 'nobody knows how'}), and this limit is not given as the reason"})
