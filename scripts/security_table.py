"""Run the attack suite and print what ran: one row for each case, refused, broken or not tried, with the reason.

A case that was not tried is not a case that passed: it has its own row, and the exit status is pytest's.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NO_TESTS_COLLECTED = 5


def outcome_of(case: ElementTree.Element) -> tuple[str, str]:
    """The verdict of one test, and the first line of why."""
    for tag, verdict in (("failure", "FAILED"), ("error", "BROKEN"), ("skipped", "NOT TRIED")):
        found = case.find(tag)
        if found is not None:
            return verdict, (found.get("message") or "").strip().split("\n")[0]
    return "holds", ""


def main(arguments: list[str]) -> int:
    """Run pytest on tests/security with these further arguments, print the table, and return pytest's own status."""
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "security.xml"
        command = [sys.executable, "-m", "pytest", "tests/security", "--quiet", f"--junitxml={report}", *arguments]
        status = subprocess.run(command, cwd=ROOT, check=False).returncode
        cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    if status == NO_TESTS_COLLECTED or not cases:
        print("security: no attack case ran, so nothing has been shown", file=sys.stderr)
        return status or 1
    rows = [(case.get("name", "").removeprefix("test_").replace("_", " "), *outcome_of(case)) for case in cases]
    width = max(len(name) for name, _, _ in rows)
    print()
    for name, verdict, why in rows:
        print(f"{name:<{width}}  {verdict:<9}  {why}".rstrip())
    totals = Counter(verdict for _, verdict, _ in rows)
    print("\n" + ", ".join(f"{count} {verdict}" for verdict, count in sorted(totals.items())))
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
