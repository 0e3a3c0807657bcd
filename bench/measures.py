"""The measures: what is asked of each subject, how often, and in what order.

Subjects take turns in short bursts. Whatever else the machine does meanwhile, it does to all of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bench.crew import Crew
from bench.samples import summarise
from bench.subjects import FEW_FILES, MANY_FILES, SUBJECTS
from bench.tables import Row, Table

ALIVE = 200
THREADS_PER_CORE = 2  # a run spends part of its time waiting for the kernel


@dataclass(frozen=True)
class Measure:
    """One table. `request` is what each worker is told in each of `rounds` turns."""

    key: str
    title: str
    subjects: str  # a key of SUBJECTS
    request: dict[str, Any]
    rounds: int
    reference: str = "us"
    unit: str = "ms"
    more_is_better: bool = False
    notes: tuple[str, ...] = ()


def _burst(calls: int, seconds: float, gap: float = 0.03, skip: int = 1) -> dict[str, Any]:
    return {"calls": calls, "seconds": seconds, "gap": gap, "skip": skip}


BACK_TO_BACK = {"calls": 1_000, "seconds": 0.6, "gap": 0.0, "skip": 0}
MEASURES = (
    Measure("warm", "print(1), calls 30 ms apart", "print", _burst(8, 0.8), rounds=6),
    Measure("drained", "print(1), back to back", "print", BACK_TO_BACK, rounds=5),
    Measure("pandas", "import pandas, calls 30 ms apart", "pandas", _burst(6, 1.0), rounds=4),
    Measure(
        "clone",
        "true on a throw-away clone",
        "clone",
        _burst(10, 0.8),
        rounds=8,
        reference="few",
        notes=(f"project of {FEW_FILES} files against one of {MANY_FILES:,}",),
    ),
    Measure(
        "rate",
        "print(1) from all cores",
        "rate",
        {"seconds": 1.0, "threads": THREADS_PER_CORE * len(os.sched_getaffinity(0))},
        rounds=5,
        unit="/s",
        more_is_better=True,
    ),
    Measure("command", "a program as a shell starts it", "command", _burst(6, 1.0), rounds=6),
)


def take(measure: Measure, *, rounds: int, say: Callable[[str], None]) -> Table:
    """Carry out one measure with every subject that can take part."""
    subjects = SUBJECTS[measure.subjects]
    with Crew(measure.subjects, [subject.key for subject in subjects]) as crew:
        for turn in range(rounds):
            say(f"{measure.key}: round {turn + 1} of {rounds}")
            for subject in subjects:
                crew.ask(subject.key, measure.request)
    rows = [
        Row(subject.key, subject.title, summarise(values, more_is_better=measure.more_is_better) if values else None, crew.missing(subject.key))
        for subject in subjects
        for values in [crew.values(subject.key)]
    ]
    return Table(measure.key, measure.title, measure.unit, tuple(rows), measure.reference, measure.notes)


def take_memory(*, alive: int, say: Callable[[str], None]) -> Table:
    """Memory of our own guests. Nobody else keeps any waiting, so there is nobody to compare with."""
    say(f"memory: {alive} guests alive at once")
    with Crew("memory", ["us"]) as crew:
        crew.ask("us", {"alive": alive})
    values = crew.values("us")
    row = Row("us", f"us, {alive} asleep at once", summarise(values) if values else None, crew.missing("us"))
    return Table("memory", "proportional memory of guest, init and keeper", "MB", (row,), "us")
