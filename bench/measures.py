"""The measures: what is asked of each subject, how often, and in what order.

Subjects take turns in short bursts. Whatever else the machine does meanwhile, it does to all of them.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from bench.control import TASKS
from bench.crew import BEFORE, PATIENCE, Crew
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
    spent: Literal["", "processes", "all"] = ""  # not how long the burst takes, but the processor time: of whom
    patience: float = PATIENCE  # seconds for one answer


def _burst(calls: int, seconds: float, gap: float = 0.03, skip: int = 1) -> dict[str, Any]:
    return {"burst": {"calls": calls, "seconds": seconds, "gap": gap, "skip": skip}}


LONG = 1800.0  # with trees and sandboxes of many files
SPENT = "calls 30 ms apart; the caller, the pool that fills up again and all that a run starts are counted"
WAITED = "from the pool: each call finds a guest that waits, however long that takes to make"
EMULATED = "the processor is emulated, ours and the other's"
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
    # Those subjects since an earlier commit has them, too.
    Measure("processor", "processor time of print(1)", "rate", _burst(40, 60.0), rounds=5, spent="processes", notes=(SPENT,)),
    Measure(
        "processor-all",
        "the same with the kernel's workers",
        "rate",
        _burst(40, 60.0),
        rounds=5,
        spent="all",
        notes=("threads of the kernel that take apart what a run leaves behind; told only while nobody else uses the machine",),
    ),
    Measure("turns", "print(1) in a session that stays", "turns", BACK_TO_BACK, rounds=8),
    Measure(
        "durable",
        "a session with pandas, saved and resumed",
        "durable",
        _burst(4, 4.0),
        rounds=3,
        reference="save",
        notes=("inside WebAssembly; on the disk when it is saved; resumed up to the answer of its first turn, in a process with a pool",),
    ),
    Measure(
        "durable-size",
        "a session with pandas on the disk",
        "durable size",
        {"figures": {"times": 1}},
        rounds=1,
        reference="size",
        unit="MB",
    ),
    Measure("command", "a program as a shell starts it", "command", _burst(5, 1.0), rounds=5),
    Measure("hook", "a tool call of a coding agent, answered", "hook", _burst(20, 1.0), rounds=5),
    Measure("hook-processor", "the same, processor time", "hook", _burst(20, 1.0), rounds=5, spent="processes"),
    Measure("tasks", f"{TASKS} tasks, each in a sandbox of its own", "tasks", {"figures": {"times": 1}}, rounds=5),
    Measure(
        "requests",
        "requests to the HTTP interface of the daemon",
        "requests",
        {"rate": {"seconds": 1.0, "threads": THREADS_PER_CORE * len(os.sched_getaffinity(0))}},
        rounds=5,
        reference="health",
        unit="/s",
        more_is_better=True,
    ),
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
        "states",
        "a state of a session with a timeline",
        "states",
        {"figures": {"times": 10}},
        rounds=4,
        reference="50",
        notes=("turns of 20 statements, by the number of their states; a hundred are kept, so that each one ends another",),
    ),
    Measure(
        "rewinds",
        "the way back to a state",
        "rewinds",
        _burst(10, 5.0),
        rounds=4,
        reference="50",
        notes=("something was written since, each time",),
    ),
    Measure("forks", "live forks of a session", "forks", _burst(3, 10.0), rounds=3, notes=("until all of them can take a turn",)),
    Measure("fork-memory", "memory that live forks add", "forks' memory", {"figures": {"times": 2}}, rounds=1, unit="%"),
    Measure(
        "recording",
        "an analysis of 30 statements with pandas",
        "recording",
        _burst(3, 20.0),
        rounds=4,
        reference="plain",
    ),
    Measure(
        "recording-longer",
        "an analysis of 30 statements with pandas, ten times the rows",
        "recording, longer",
        _burst(2, 40.0),
        rounds=2,
        reference="plain",
    ),
    Measure("container", "true in a container image", "container", _burst(6, 6.0), rounds=4, notes=(WAITED,)),
    Measure("gvisor", "true on a kernel in user space", "gvisor", _burst(4, 12.0), rounds=4, notes=(WAITED,)),
    Measure("microvm", "print(1) in a virtual machine", "microvm", _burst(4, 12.0), rounds=3, notes=(EMULATED, WAITED)),
    Measure(
        "heavier-memory",
        "memory of one of those, with Python asleep",
        "heavier memory",
        {"figures": {}},
        rounds=1,
        reference="container",
        unit="MB",
        notes=("everything that they need, divided by their number",),
    ),
    Measure("attempts", "an experiment", "attempts", _burst(2, 20.0, skip=0), rounds=3, reference="apart"),
    Measure(
        "snapshots",
        "a resting sandbox",
        "snapshots",
        _burst(8, 2.0),
        rounds=4,
        reference="snapshot-few",
        notes=("something has run since the last snapshot, each time",),
        when_quick="snapshots, fewer",
        patience=LONG,
    ),
    Measure(
        "changes",
        "what has changed",
        "changes",
        _burst(3, 3.0),
        rounds=5,
        notes=("the same changes everywhere, half of them modified files, a quarter new ones, a quarter removed",),
        when_quick="changes, fewer",
        patience=LONG,
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
        patience=LONG,
    ),
    Measure(
        "new-files",
        "many new files, as a shell starts it",
        "new files",
        _burst(1, 0.0, skip=0),
        rounds=3,
        reference="cp",
        notes=("files of 1 kB in folders that are there, in a new sandbox of a new project each time",),
        when_quick="new files, fewer",
        patience=LONG,
    ),
)
_FEWER = "smaller trees and fewer changes than the targets are about, so there is no verdict"


def take(
    measures: Sequence[Measure], *, quick: bool, say: Callable[[str], None], failed: Callable[[str], None], before: str = ""
) -> Iterator[Table]:
    """Carry out measures, with every subject that can take part. Neighbours with the same subjects share their workers.

    A measure that breaks is told to `failed`, and the next one has its turn. With `before`, the name of an earlier commit, each subject of
    ours takes part twice: as it is, and right after that as it was.
    """
    chosen = [_with_less_to_do(measure) if quick and measure.when_quick else measure for measure in measures]
    for (who, metered, patience), group in itertools.groupby(chosen, lambda each: (each.subjects, bool(each.spent), each.patience)):
        neighbours = list(group)
        subjects = with_earlier(SUBJECTS[who], before) if before else SUBJECTS[who]
        say(f"getting ready: {', '.join(subject.title.strip() for subject in subjects)}")
        try:
            with Crew(who, [subject.key for subject in subjects], metered=metered, patience=patience) as crew:
                while neighbours:
                    yield _take(neighbours[0], subjects, crew, rounds=QUICK_ROUNDS if quick else neighbours[0].rounds, say=say)
                    neighbours.pop(0)
        except Exception as error:
            names = ", ".join(measure.key for measure in neighbours) or who
            failed(f"NOT MEASURED: {names}: {type(error).__name__}: {error}")


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
            if measure.spent:
                values[subject.key] += crew.spend(subject.key, measure.request, kernel=measure.spent == "all")
            else:
                values[subject.key] += crew.ask(subject.key, measure.request)
    rows = []
    for subject in subjects:
        why = crew.missing(subject.key)  # one that broke half-way has no figures: they would be those of its better half
        if not values[subject.key]:
            why = why or crew.doubt(subject.key)
        figures = None if why else summarise(values[subject.key], more_is_better=measure.more_is_better)
        rows.append(Row(subject.key, subject.title, figures, why))
    notes = (*measure.notes, *(f"counted by {means}" for means in crew.means if measure.spent))
    return Table(measure.key, measure.title, measure.unit, tuple(rows), measure.reference, notes)
