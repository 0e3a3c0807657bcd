"""The measures: what is asked of each subject, how often, and in what order.

Subjects take turns in short bursts. Whatever else the machine does meanwhile, it does to all of them.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bench.crew import BEFORE, Crew
from bench.network import CONNECTIONS, PROTOCOLS
from bench.samples import summarise
from bench.subjects import SUBJECTS, Subject
from bench.tables import Row, Table
from bench.trees import FEW_FILES, MANY_FILES

ALIVE = 200
ALIVE_INSIDE = 100
QUICK_ROUNDS = 1
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
    when_quick: str = ""  # other subjects, which have less to do


def _burst(calls: int, seconds: float, gap: float = 0.03, skip: int = 1) -> dict[str, Any]:
    return {"burst": {"calls": calls, "seconds": seconds, "gap": gap, "skip": skip}}


BACK_TO_BACK = _burst(1_000, 0.4, gap=0.0, skip=0)
MEASURES = (
    Measure("warm", "print(1), calls 30 ms apart", "print", _burst(6, 0.6), rounds=6),
    Measure("drained", "print(1), back to back", "print", BACK_TO_BACK, rounds=5),
    Measure("javascript", "console.log(1), calls 30 ms apart", "javascript", _burst(6, 0.6), rounds=3, reference="us-wasm"),
    Measure("pandas", "import pandas, calls 30 ms apart", "pandas", _burst(6, 0.6), rounds=3),
    Measure(
        "clone",
        "true on a throw-away clone",
        "clone",
        _burst(8, 0.8),
        rounds=5,
        reference="few",
        notes=(f"project of {FEW_FILES} files against one of {MANY_FILES:,}",),
    ),
    Measure(
        "rate",
        "print(1) from all cores",
        "rate",
        {"rate": {"seconds": 1.0, "threads": THREADS_PER_CORE * len(os.sched_getaffinity(0))}},
        rounds=5,
        unit="/s",
        more_is_better=True,
    ),
    Measure("turns", "print(1) in a session that stays", "turns", BACK_TO_BACK, rounds=8),
    Measure("command", "a program as a shell starts it", "command", _burst(5, 1.0), rounds=5),
    Measure("memory", f"memory of a guest, {ALIVE} alive at once", "asleep", {"asleep": {"alive": ALIVE}}, rounds=1, unit="MB"),
    Measure(
        "memory-wasm",
        f"memory of {ALIVE_INSIDE} guests inside WebAssembly, all of it",
        "asleep inside",
        {"asleep inside": {"alive": ALIVE_INSIDE}},
        rounds=1,
        reference="us-wasm",
        unit="MB",
    ),
    Measure("pool", "memory of a guest between runs", "waiting", {"waiting": {"calls": 20, "gap": 0.03}}, rounds=1, unit="MB"),
    Measure(
        "governance",
        "deciding, recording, checking",
        "governance",
        _burst(20, 1.0, gap=0.0),  # how many a second
        rounds=5,
        reference="ledger",
        notes=("durable against the end of the process; each entry sealed, chained and anchored",),
    ),
    Measure(
        "sim",
        "a plan of what a command would do",
        "sim",
        _burst(5, 1.0),
        rounds=5,
        reference="run",
        notes=("as a shell starts it; watched from outside, compared, judged, and the plan kept on disk",),
    ),
    Measure("network-start", "print(1) with a network permission", "network start", _burst(6, 0.6), rounds=6),
    Measure(
        "dlp",
        "the search of what leaves",
        "dlp",
        {"figures": {"times": 1}},
        rounds=5,
        unit="MB/s",
        more_is_better=True,
        notes=("of processor time; a megabyte of Python's own modules, the same for both",),
    ),
    *(
        Measure(
            f"{key}-{protocol}-{count}",
            f"{title}, {protocol}, {count} connections",
            f"wire {protocol} {count}",
            {"figures": {"what": what, "seconds": 1.0}},
            rounds=3,
            unit=unit,
            more_is_better=what == "rate",
        )
        for protocol in PROTOCOLS
        for count in CONNECTIONS
        for key, title, what, unit in (
            ("wire", "requests through the door", "rate", "/s"),
            ("late", "99 of 100 answered within", "p99", "ms"),
        )
    ),
    Measure(
        "snapshots",
        "a resting sandbox",
        "snapshots",
        _burst(8, 2.0),
        rounds=4,
        reference="snapshot-few",
        notes=("something has run since the last snapshot, each time",),
        when_quick="snapshots, fewer",
    ),
    Measure(
        "changes",
        "what has changed",
        "changes",
        _burst(3, 3.0),
        rounds=5,
        notes=("the same changes everywhere, half of them modified files, a quarter new ones, a quarter removed",),
        when_quick="changes, fewer",
    ),
    Measure(
        "promotion",
        "small files to the real tree",
        "promotion",
        _burst(1, 0.0, skip=0),
        rounds=4,
        reference="cp-new",
        notes=("files of 1 kB in folders that are there; state and project on one filesystem; on the disk at the end",),
        when_quick="promotion, fewer",
    ),
)
_FEWER = "smaller trees and fewer changes than the targets are about, so there is no verdict"


def take(measures: Sequence[Measure], *, quick: bool, say: Callable[[str], None], before: str = "") -> Iterator[Table]:
    """Carry out measures, with every subject that can take part. Neighbours with the same subjects share their workers.

    With `before`, the name of an earlier commit, each subject of ours takes part twice: as it is, and right after that as it was.
    """
    chosen = [_with_less_to_do(measure) if quick and measure.when_quick else measure for measure in measures]
    for who, neighbours in itertools.groupby(chosen, lambda measure: measure.subjects):
        subjects = with_earlier(SUBJECTS[who], before) if before else SUBJECTS[who]
        say(f"getting ready: {', '.join(subject.title for subject in subjects)}")
        with Crew(who, [subject.key for subject in subjects]) as crew:
            for measure in neighbours:
                yield _take(measure, subjects, crew, rounds=QUICK_ROUNDS if quick else measure.rounds, say=say)


def with_earlier(subjects: Sequence[Subject], before: str) -> tuple[Subject, ...]:
    """Put a second row behind each of ours: the same subject at an earlier commit."""
    return tuple(
        each
        for subject in subjects
        for each in ((subject,) if subject.peer else (subject, replace(subject, key=subject.key + BEFORE, title=f"  at {before}")))
    )


def _with_less_to_do(measure: Measure) -> Measure:
    """Under another name: what the targets say does not apply to it."""
    return replace(measure, key=measure.when_quick, subjects=measure.when_quick, notes=(*measure.notes, _FEWER))


def _take(measure: Measure, subjects: Sequence[Subject], crew: Crew, *, rounds: int, say: Callable[[str], None]) -> Table:
    values: dict[str, list[float]] = {subject.key: [] for subject in subjects}
    for turn in range(rounds):
        say(f"{measure.key}: round {turn + 1} of {rounds}")
        for subject in subjects:
            values[subject.key] += crew.ask(subject.key, measure.request)
    rows = []
    for subject in subjects:
        why = crew.missing(subject.key)  # one that broke half-way has no figures: they would be those of its better half
        figures = None if why else summarise(values[subject.key], more_is_better=measure.more_is_better)
        rows.append(Row(subject.key, subject.title, figures, why))
    return Table(measure.key, measure.title, measure.unit, tuple(rows), measure.reference, measure.notes)
