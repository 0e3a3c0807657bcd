"""Run the attack suite, as root and as a user who owns nothing, on every runtime, and print one table: every case, what was tried, and
how it went.

A case that was not tried is not a case that passed. The status is zero only if every attack held, with a control arm that showed it could
have failed; if no attack of the highest priority was skipped; and if every case of the complete surfaces has a test or a stated reason.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from scripts import apart
from tests.security.cases import CASES, COMPLETE, INAPPLICABLE, UNAVAILABLE, priority
from tests.security.runtimes import HEAVIER, PROCESS

CHECKOUT = Path(__file__).resolve().parent.parent
SUITE = "tests/security"
LONGEST = 110  # characters of a column
HOLDS, NO_CONTROL, NOT_TRIED, LEFT_OPEN = "holds", "NO CONTROL", "NOT TRIED", "LEFT OPEN"
# A stated reason: the attack means nothing on this runtime, or this machine lacks the runtime.
NO_ATTACK, NOT_HERE = "does not apply", "NOT HERE"
OUTCOMES = {"failure": "FAILED", "error": "BROKEN", "skipped": NOT_TRIED}


class Row(NamedTuple):
    """What one attack came to."""

    case: str
    prio: str
    runtime: str
    who: str
    attack: str
    verdict: str
    happened: str
    control: str

    @property
    def numbers(self) -> list[int]:
        """The cases that it tries."""
        return [int(number) for number in self.case.split("+")]

    @property
    def sinks_the_release(self) -> bool:
        """Whether nothing may be shipped with this row in the table."""
        return self.verdict not in (HOLDS, NOT_TRIED, NO_ATTACK, NOT_HERE) or (self.verdict == NOT_TRIED and self.prio == "P0")


def is_case(word: str) -> bool:
    """Whether a word of a test's id is the number of a case, or of several."""
    return re.fullmatch(r"\d+(\+\d+)*", word) is not None and all(int(number) in CASES for number in word.split("+"))


def row_of(test: ElementTree.Element, who: str) -> Row | None:
    """The row of one test, none if it tries no case. Its id holds the case and, unless it is about the host, the runtime; attacks from
    inside WebAssembly are in files of their own, on a box of the other runtime."""
    name, _, parameters = test.get("name", "").removesuffix("]").partition("[")
    case = next((word for word in reversed(parameters.split("-")) if is_case(word)), None)
    if case is None:
        return None
    runtime = next((name for name in (PROCESS, *HEAVIER) if parameters.startswith(f"{name}-")), "host")
    parameters = parameters.removeprefix(f"{runtime}-")
    if ".test_wasm" in test.get("classname", ""):
        runtime = "wasm"
    variant = parameters.removesuffix(f"-{case}").removeprefix(f"{case}-")
    attack = name.removeprefix("test_").replace("_", " ") + (f" ({variant})" if variant != case else "")
    said = {each.get("name"): each.get("value") or "" for each in test.iter("property")}
    happened, control = said.get("happened", ""), said.get("control", "")
    verdict = HOLDS if happened and control else NO_CONTROL
    for tag, word in OUTCOMES.items():
        found = test.find(tag)
        if found is not None:
            verdict, happened, control = word, (found.get("message") or "").strip().split("\n")[0], ""
    for beginning, word in ((INAPPLICABLE, NO_ATTACK), (UNAVAILABLE, NOT_HERE)):
        if verdict == NOT_TRIED and happened.startswith(beginning):
            verdict, happened = word, happened.removeprefix(beginning)
    return Row(case, priority(*map(int, case.split("+"))), runtime, who, attack, verdict, happened, control)


def beside(rows: Iterable[Row]) -> Iterator[Row]:
    """What the tests do not say: the cases of the complete surfaces that none tries, parts left open, and reasons that are out of date."""
    tried = {number for row in rows for number in row.numbers}
    for case in CASES.values():
        notes = [(LEFT_OPEN, case.lacking)]
        if case.number in tried:
            notes.append(("OUTDATED", case.untried and f"a test tries it, and cases.py says: {case.untried}"))
        elif case.surface in COMPLETE:
            # A stated reason is the project's word that there is nothing to attack yet: shown, and no failure.
            notes.append((NOT_TRIED, case.untried) if case.untried else ("MISSING", "no test and no reason"))
        for verdict, why in notes:
            if why:
                yield Row(str(case.number), case.priority, "+".join(case.runtimes), "–", case.title, verdict, why, "")


def table(rows: Iterable[Row]) -> list[str]:
    """The rows in the order of their cases, in columns that fit what is in them; what is too long is cut."""
    ordered = sorted(rows, key=lambda row: (row.numbers, row.attack, row.runtime, row.who))
    cells = [[cell if len(cell) <= LONGEST else cell[: LONGEST - 1] + "…" for cell in row] for row in (Row(*Row._fields), *ordered)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(Row._fields))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]


def run(who: str, scratch: Path) -> tuple[int, list[Row]]:
    """Run the suite as one of the two and return pytest's status and the rows."""
    report = scratch / f"{who}.xml"
    if who == "rootless" and os.geteuid() == 0:
        command = ["scripts/unprivileged.sh", "--report", str(report), SUITE]
    else:
        # What needs the other is no skip here: the other half tries it.
        chosen = "not torture and not " + ("needs_user" if who == "root" else "needs_root")
        kept = ["-o", "junit_family=xunit1"]  # the family of formats that keeps properties
        command = [sys.executable, "-m", "pytest", SUITE, "--quiet", "-m", chosen, f"--junitxml={report}", *kept]
    print(f"security: the attacks, {who}", flush=True)
    status = subprocess.run(apart.command(command), cwd=CHECKOUT, check=False).returncode
    tests = ElementTree.parse(report).iter("testcase") if report.exists() else iter(())
    return status, [row for test in tests if (row := row_of(test, who))]


def red(text: str) -> str:
    """For a line that must be seen."""
    return f"\033[1;31m{text}\033[0m" if sys.stdout.isatty() else text


def main() -> int:
    """Run both halves, print the table, then what sinks it."""
    halves = ("root", "rootless") if os.geteuid() == 0 else ("rootless",)
    with tempfile.TemporaryDirectory() as scratch:
        ran = {who: run(who, Path(scratch)) for who in halves}
    rows = [row for _, found in ran.values() for row in found]
    notes = list(beside(rows))
    print("\n" + "\n".join(table([*rows, *notes])))
    totals = Counter(row.verdict for row in (*rows, *notes))
    print("\n" + ", ".join(f"{count} {verdict}" for verdict, count in sorted(totals.items())))
    wrong = [f"case {row.case}, as {row.who}: {row.verdict}: {row.attack}: {row.happened}" for row in rows if row.sinks_the_release]
    wrong += [f"case {row.case}: {row.verdict}: {row.attack}: {row.happened}" for row in notes if row.verdict not in (NOT_TRIED, LEFT_OPEN)]
    wrong += [f"as {who}: no attack ran, so nothing has been shown" for who, (_, found) in ran.items() if not found]
    wrong += [f"as {who}: pytest ended with status {status}" for who, (status, _) in ran.items() if status]
    for why in dict.fromkeys(row.happened for row in rows if row.verdict == NOT_HERE):
        print(red(f"NOT TESTED: {why}"))
    if "root" not in halves:
        print(red("NOT TESTED: what the sandbox promises to root; that needs: sudo make security"))
    for line in wrong:
        print(red(line))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
