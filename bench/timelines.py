"""A session with a timeline: what a state costs, the way back to it, and forks of it; and experiments, whose attempts run at once."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from agent_sandbox import Experiment, Sandbox, SandboxSession, shell
from agent_sandbox.assembly import here
from bench import ours
from bench.peers import Call, Missing, Staged

STATEMENTS = 20  # of a turn whose states are counted
FORKS = 8
ATTEMPTS = 3
_SECONDS = 300.0
_MIB = 1 << 20
_FILL = "block = bytearray({0})"  # every page of it is resident
_AGAIN = "block[::4096] = b'x' * len(range(0, {0}, 4096))"  # every page of it is written to after a state: no huge page is left whole
_TABLE = "import numpy, pandas; table = pandas.DataFrame(numpy.random.default_rng(1).random(({0} // 80, 10)))"
# An analysis as people write them: generated orders, cleaned, joined, grouped, reshaped, written and read again.
ROWS, MANY_ROWS = 200_000, 2_000_000  # of the analysis: a third of a second, and three seconds
ANALYSIS = """
import io, os
import numpy as np
import pandas as pd
chance = np.random.default_rng(7)
orders = pd.DataFrame({"customer": chance.integers(0, 5_000, rows), "amount": chance.gamma(2.0, 30.0, rows)})
orders["day"] = chance.integers(0, 365, rows)
orders["date"] = pd.Timestamp("2023-01-01") + pd.to_timedelta(orders["day"], unit="D")
orders.loc[chance.integers(0, rows, 2_000), "amount"] = np.nan
customers = pd.DataFrame({"customer": range(5_000), "region": chance.choice(["north", "south", "east", "west"], 5_000)})
orders.head(50_000).to_csv("orders.csv", index=False)
part = pd.read_csv("orders.csv", parse_dates=["date"])
missing = orders["amount"].isna().sum()
orders["amount"] = orders["amount"].fillna(orders["amount"].median())
joined = orders.merge(customers, on="customer", how="left")
by_region = joined.groupby("region")["amount"].agg(["count", "mean", "sum"])
joined["month"] = joined["date"].dt.to_period("M").astype(str)
monthly = joined.pivot_table(index="month", columns="region", values="amount", aggfunc="sum")
growth = monthly.pct_change().round(4)
daily = joined.groupby("date")["amount"].sum().sort_index()
rolling = daily.rolling(7).mean()
best = joined.groupby("customer")["amount"].sum().nlargest(100)
joined["rank"] = joined.groupby("region")["amount"].rank(ascending=False)
top = joined[joined["rank"] <= 10].sort_values(["region", "rank"])
bins = pd.cut(joined["amount"], [0, 20, 50, 100, np.inf], labels=["s", "m", "l", "xl"])
shares = bins.value_counts(normalize=True)
correlation = np.corrcoef(daily.to_numpy()[:-1], daily.to_numpy()[1:])[0, 1]
monthly.to_csv("monthly.csv")
again = pd.read_csv("monthly.csv", index_col=0)
assert np.allclose(again.to_numpy(), monthly.to_numpy())
report = {"missing": int(missing), "regions": len(by_region), "months": len(monthly), "best": len(best), "top": len(top)}
print(report["months"])
"""


@dataclass(frozen=True)
class States:
    """A session that holds so much memory. Measured, it gives the milliseconds of a state, as a turn of many statements pays for it."""

    session: SandboxSession

    def __call__(self) -> None:
        """Keep the states of a turn."""
        _done(self.session, "\n".join(["step = 0"] * STATEMENTS))

    def figures(self, *, times: int) -> list[float]:
        """Return milliseconds: of so many turns, each by the number of its states. The end of a turn is one, too."""
        return [_milliseconds(self) / (STATEMENTS + 1) for _ in range(times)]


def keeping(megabytes: int, *, again: bool = False) -> States:
    """States of a session whose program holds so much memory, made by one statement; with `again`, written to once more by the next."""
    return States(_holding(megabytes, again=again))


def going_back(megabytes: int, *, again: bool = False) -> Call:
    """A rewind, from a state in which something was written since."""
    session = _holding(megabytes, again=again)
    step = 0

    def before() -> None:
        nonlocal step
        _done(session, "here = 1\nhere = 2")
        step = session.timeline.steps[-2].number  # a new one each time: an old one would be given up among so many
        _done(session, "here = 3; open('note', 'w').write('x')")

    def call() -> None:
        if session.rewind(step).ran_again:
            raise Missing("the state was given up")

    return Staged(before, call)


@dataclass(frozen=True)
class Forks:
    """Forks of a session that holds a table of a gigabyte. Measured, they give how much more memory they take, in per cent."""

    session: SandboxSession
    fork: Callable[..., tuple[SandboxSession, ...]]

    def __call__(self) -> None:
        """Make all forks, and end them. What they cost to end is counted, too."""
        for each in self.fork(count=FORKS):
            each.close()

    def figures(self, *, times: int) -> list[float]:
        """Return the per cent of memory that all forks take together, before they write."""
        found = []
        for _ in range(times):
            alone = ours.megabytes_of_all()
            forks = self.fork(count=FORKS)
            try:
                found.append((ours.megabytes_of_all() / alone - 1) * 100)
            finally:
                for each in forks:
                    each.close()
        return found


def forking(megabytes: int) -> Call:
    """Eight live forks of one session. Only how long they take to be there is counted."""
    forks = forks_of(megabytes)
    made: list[SandboxSession] = []

    def before() -> None:
        while made:
            made.pop().close()

    def call() -> None:
        made.extend(forks.fork(count=FORKS))

    return Staged(before, call)


def forks_of(megabytes: int) -> Forks:
    """Return a session with a table of this size, to be forked."""
    session = Sandbox(validate_code=False, runtime="process", max_memory_mb=None, timeout_seconds=_SECONDS).session(timeline=True)
    fork: Any = getattr(session, "fork", None)
    if fork is None:
        raise Missing("a session cannot be forked at this commit")  # an earlier one
    _done(session, _TABLE.format(megabytes * _MIB))
    return Forks(session, fork)


def analysing(steps: Literal["", "statement", "line"], rows: int = ROWS) -> Call:
    """An analysis with pandas, in a session that stays; with a state before each statement, each line, or without."""
    sandbox = Sandbox(validate_code=False, runtime="process", preload=("pandas",), max_memory_mb=None, timeout_seconds=_SECONDS)
    session = sandbox.session(timeline=True, steps=steps) if steps else sandbox.session()

    def call() -> None:
        if _done(session, f"rows = {rows}\n{ANALYSIS}").strip() != "12":
            raise Missing("the analysis found something else")

    return call


def trying(at_once: int | None) -> Call:
    """An experiment of three attempts, each of which computes for a while and writes a file, with a check."""
    project = Path(here().host.state).parent / "tried"
    shutil.rmtree(project, ignore_errors=True)
    project.mkdir(parents=True)
    for number in range(10):
        (project / f"file{number}").write_text("x\n" * 100)
    work = "for i in $(seq 6); do seq 1000000 | sha256sum; done > made; echo done >> made"

    def call() -> None:
        with Experiment(project, check=shell("grep -q done made"), at_once=at_once) as experiment:
            for name in "abc"[:ATTEMPTS]:
                experiment.attempt(name, shell(work))
            if experiment.run().winner != "a":
                raise Missing("the attempts did not pass")

    return call


def _holding(megabytes: int, *, again: bool) -> SandboxSession:
    session = Sandbox(validate_code=False, runtime="process", max_memory_mb=None, timeout_seconds=_SECONDS).session(timeline=True)
    _done(session, "\n".join([_FILL, *([_AGAIN] if again else [])]).format(megabytes * _MIB))
    return session


def _done(session: SandboxSession, code: str) -> str:
    result = session.run(code)
    if not result.success:
        raise Missing(result.error or result.stderr)
    return result.stdout


def _milliseconds(call: Call) -> float:
    began = time.perf_counter()
    call()
    return (time.perf_counter() - began) * 1000
