"""One subject in a process of its own: prepares it, then measures on request.

Speaks JSON lines: first whether it can take part, then one answer per request. Ends when its input does.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Any, TextIO

from bench import ours
from bench.peers import Call, Gauge, Missing, Staged
from bench.subjects import SUBJECTS

WARM_UP_RUNS, WARM_UP_SECONDS = 3, 0.5  # the first fills caches and may start helpers; a slow one is as warm as it gets after one


def burst(call: Call, *, calls: int, seconds: float, gap: float, skip: int) -> list[float]:
    """The milliseconds of runs one after the other: at most so many, and none begun after so many seconds.

    With a gap, the first `skip` are not counted, unless there is no other. Back to back, the first half is not: by then a pool has been
    emptied.
    """
    taken: list[tuple[float, float]] = []
    began = time.perf_counter()
    while len(taken) < calls + skip and (not taken or time.perf_counter() - began < seconds):
        if gap:
            time.sleep(gap)
        _get_ready(call)
        start = time.perf_counter()
        call()
        taken.append((start - began, (time.perf_counter() - start) * 1000))
    if gap:
        return [milliseconds for _, milliseconds in taken[min(skip, len(taken) - 1) :]]
    half = taken[-1][0] / 2
    return [milliseconds for start, milliseconds in taken if start >= half]


def rate(call: Call, *, seconds: float, threads: int) -> list[float]:
    """Runs a second, from several threads at once."""
    done = [0] * threads
    failures: list[Exception] = []
    began = time.perf_counter()

    def repeat(index: int) -> None:
        try:
            while time.perf_counter() - began < seconds:
                call()
                done[index] += 1
        except Exception as error:  # an exception in a thread would be printed and forgotten
            failures.append(error)

    runners = [threading.Thread(target=repeat, args=(index,)) for index in range(threads)]
    for runner in runners:
        runner.start()
    for runner in runners:
        runner.join()
    if failures:
        raise failures[0]
    return [sum(done) / (time.perf_counter() - began)]


def main(measure: str, key: str) -> None:
    """Serve one subject until the input ends."""
    # What a subject prints by mistake must not be taken for an answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    subject = next(subject for subject in SUBJECTS[measure] if subject.key == key)
    try:
        call = subject.make()
        _warm_up(call)
    except Exception as error:
        _tell(answers, {"missing": _reason(error)})
        return
    _tell(answers, {"ready": True})
    for line in sys.stdin:
        try:
            _tell(answers, {"values": _measured(call, json.loads(line))})
        except Exception as error:
            _tell(answers, {"missing": _reason(error)})


def _measured(call: Call, request: dict[str, Any]) -> list[float]:
    match request:
        case {"burst": how}:
            return burst(call, **how)
        case {"rate": how}:
            return rate(call, **how)
        case {"figures": how} if isinstance(call, Gauge):
            return call.figures(**how)
        case {"asleep": how}:
            return [ours.megabytes_asleep(**how)]
        case {"asleep inside": how}:
            return [ours.megabytes_asleep_inside(**how)]
        case {"waiting": how}:
            return [ours.megabytes_waiting(call, **how)]
        case _:
            raise ValueError(f"no such request: {request}")


def _warm_up(call: Call) -> None:
    began = time.perf_counter()
    for _ in range(WARM_UP_RUNS):
        _get_ready(call)
        call()
        if time.perf_counter() - began > WARM_UP_SECONDS:
            return


def _get_ready(call: Call) -> None:
    if isinstance(call, Staged):
        call.before()


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, Missing) else f"{type(error).__name__}: {error}"


def _tell(answers: TextIO, message: dict[str, Any]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
