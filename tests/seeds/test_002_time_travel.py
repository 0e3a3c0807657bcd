"""The story of "time travel debugging": an analysis of ten steps fails at the seventh.

Somebody goes to the state just before it, looks at the table and at the file, tries three fixes from there, compares them, and keeps the
one that works. The first six steps are never repeated: each tells a tool of the caller that it was done.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from agent_sandbox import Sandbox, SandboxSession
from agent_sandbox.timelines import Step

ANALYSIS = """\
import pandas as pd
raw = "order,region,quantity,price,amount\\n1,north,2,10.0,20.0\\n2,south,3,5.0,15.0\\n3,north,4,2.5,n/a\\n4,south,1,8.0,8.0\\n"
done(1, open("orders.csv", "w").write(raw))
orders = done(2, pd.read_csv("orders.csv", keep_default_na=False))
orders["region"] = done(3, orders["region"].str.title())
booked = done(4, {"North": 30.0, "South": 23.0})
done(5, pd.Series(booked, name="booked").to_csv("booked.csv"))
orders = done(6, orders.sort_values("order", ascending=False).reset_index(drop=True))
orders["amount"] = done(7, orders["amount"].astype(float))
totals = done(8, orders.groupby("region")["amount"].sum())
done(9, totals.to_csv("totals.csv"))
done(10, "booked" if totals.to_dict() == booked else f"off by {sum(booked.values()) - totals.sum()}")
"""
FIXES = {
    "zero": 'orders["amount"] = orders["amount"].replace("n/a", "0")',
    "drop": 'orders = orders[orders["amount"] != "n/a"].copy()',
    "recompute": 'orders["amount"] = orders["amount"].where(orders["amount"] != "n/a", orders["quantity"] * orders["price"])',
}
REST = "\n".join(ANALYSIS.splitlines()[8:])  # from step 7 on
# The last steps tell no tool: a fork may have none.
QUIET = f"done = lambda number, value: value\n{REST}"


@pytest.fixture
def steps() -> Counter[int]:
    """How often each step was done."""
    return Counter()


@pytest.fixture
def session(steps: Counter[int]) -> Iterator[SandboxSession]:
    """A session in which the analysis has failed."""

    def tell(number: int) -> None:
        steps[number] += 1

    with Sandbox(validate_code=False, runtime="process", max_memory_mb=None).session(timeline=True, tools=[tell]) as session:
        session.run("def done(number, value):\n    tell(number)\n    return value")
        result = session.run(ANALYSIS)
        assert not result.success and "could not convert string to float: 'n/a'" in result.stderr
        yield session


def look(session: SandboxSession) -> Step:
    """Find the step that failed, and what is wrong there: in the table, and in the file that it came from."""
    failed = session.timeline.failed
    assert failed is not None and failed.text.startswith('orders["amount"] = done(7') and failed.kept
    state = session.inspect(failed)
    table = {each.name: each for each in state.variables}["orders"]
    assert table.type.endswith("DataFrame")
    assert table.shape == (4, 5) and table.columns == ("order", "region", "quantity", "price", "amount") and "n/a" in table.repr
    assert state.evaluate("orders[orders['amount'] == 'n/a']['order'].tolist()").repr == "[3]"
    assert state.read("orders.csv").splitlines()[3] == b"3,north,4,2.5,n/a"
    assert state.list("/tmp") == ("booked.csv", "orders.csv"), "step 9 has not been"
    return failed


def test_three_fixes_are_tried_from_the_state_before_the_error_and_the_one_that_works_is_kept(
    session: SandboxSession, steps: Counter[int]
) -> None:
    failed = look(session)
    ends: dict[str, Step] = {}
    verdicts: dict[str, object] = {}
    for name, fix in FIXES.items():
        session.rewind(failed)
        assert session.run("sorted(orders['amount'])[-1]").value == "n/a", "no fix sees another"
        session.run(fix)
        verdicts[name] = session.run(REST).value
        ends[name] = session.timeline.here[-1]
    assert verdicts == {"zero": "off by 10.0", "drop": "off by 10.0", "recompute": "booked"}
    between = session.timeline.diff(ends["zero"], ends["recompute"])
    assert {"orders", "totals"} <= between.variables.keys() and between.files == {"/tmp/totals.csv": "changed"}
    winner = next(name for name, verdict in verdicts.items() if verdict == "booked")
    assert session.rewind(ends[winner]).ran_again == "", "it is there, and is not run again"
    assert session.files.read("totals.csv").split() == ["region,amount", "North,30.0", "South,23.0"]
    assert [steps[number] for number in range(1, 7)] == [1] * 6, "nothing before the error was repeated"
    assert [steps[number] for number in (7, 10)] == [3, 3], "the control: what was repeated is counted"


def test_three_forks_of_the_state_before_the_error_try_a_fix_each(session: SandboxSession, steps: Counter[int]) -> None:
    failed = look(session)
    forks = session.fork(failed, count=len(FIXES))
    verdicts: dict[str, object] = {}
    for fork, (name, fix) in zip(forks, FIXES.items(), strict=True):
        assert fork.run("sorted(orders['amount'])[-1]").value == "n/a", "no fork sees another"
        assert fork.run(fix).success
        verdicts[name] = fork.run(QUIET).value
    assert verdicts == {"zero": "off by 10.0", "drop": "off by 10.0", "recompute": "booked"}
    kept = forks[list(FIXES).index("recompute")]
    assert kept.files.read("totals.csv").split() == ["region,amount", "North,30.0", "South,23.0"]
    for fork in forks:
        fork.close()
    assert session.run("open('booked.csv').read().count('\\n')").value == 3, "the session itself is where it was"
    assert steps == Counter(range(1, 7)), "nothing before the error was repeated"
