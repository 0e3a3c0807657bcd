"""Run the attack suite and print what ran: a row for each attack, its case, the runtime, what happened, and what the control arm showed.

A case that was not tried is not a case that passed: it has its own row, and the exit status is pytest's.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
NO_TESTS_COLLECTED = 5
LONGEST = 60  # characters of a column


class Row(NamedTuple):
    """What one attack came to."""

    case: str
    runtime: str
    attack: str
    verdict: str
    happened: str
    control: str


def row_of(test: ElementTree.Element) -> Row:
    """The row of one test. Its id ends in the number of its case and, unless it is about the host alone, begins with the runtime."""
    name, _, parameters = test.get("name", "").removesuffix("]").partition("[")
    words = parameters.split("-")
    case = next((word for word in reversed(words) if re.fullmatch(r"\d+(\+\d+)*", word)), "")
    runtime = words[0] if len(words) > 1 and words[0] != case else "host"
    said = {each.get("name"): each.get("value") or "" for each in test.iter("property")}
    verdict, happened = "holds", said.get("happened", "")
    for tag, word in (("failure", "FAILED"), ("error", "BROKEN"), ("skipped", "NOT TRIED")):
        found = test.find(tag)
        if found is not None:
            verdict, happened = word, (found.get("message") or "").strip().split("\n")[0]
    return Row(case, runtime, name.removeprefix("test_").replace("_", " "), verdict, happened, said.get("control", ""))


def table(rows: list[Row]) -> list[str]:
    """The rows in the order of their cases, in columns that fit what is in them; what is too long is cut."""
    ordered = sorted(rows, key=lambda row: (int(row.case.split("+")[0] or 0), row.attack))
    cells = [[cell if len(cell) <= LONGEST else cell[: LONGEST - 1] + "…" for cell in row] for row in (Row(*Row._fields), *ordered)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(Row._fields))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]


def main(arguments: list[str]) -> int:
    """Run pytest on tests/security with these further arguments, print the table, and return pytest's own status."""
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "security.xml"
        options = ["--quiet", f"--junitxml={report}", "-o", "junit_family=xunit1"]  # the family that keeps properties
        command = [sys.executable, "-m", "pytest", "tests/security", *options, *arguments]
        status = subprocess.run(command, cwd=ROOT, check=False).returncode
        tests = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    if status == NO_TESTS_COLLECTED or not tests:
        print("security: no attack case ran, so nothing has been shown", file=sys.stderr)
        return status or 1
    rows = [row_of(test) for test in tests]
    print("\n" + "\n".join(table(rows)))
    totals = Counter(row.verdict for row in rows)
    print("\n" + ", ".join(f"{count} {verdict}" for verdict, count in sorted(totals.items())))
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
