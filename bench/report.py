"""Tables for people and a document for machines, from the same values."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bench.tables import Account, Row, Table
from bench.targets import Verdict, judge

SCHEMA = "agent-sandbox-bench/1"
DIGITS = 3  # as many as a benchmark on a shared machine can mean
LONGEST_REASON = 110  # printed of it; the document has it whole


def text(machine: Mapping[str, Any], accounts: Sequence[Account]) -> str:
    """The whole report as it is printed."""
    lines = [*_machine(machine)]
    for account in accounts:
        lines += ["", f"As {account.user} (uid {account.uid})", *(f"  {problem}" for problem in account.problems)]
        for table in account.tables:
            lines += ["", *_table(table)]
    lines += ["", "Targets", *_targets([verdict for account in accounts for verdict in judge(account)])]
    return "\n".join(lines) + "\n"


def document(machine: Mapping[str, Any], accounts: Sequence[Account]) -> dict[str, Any]:
    """The same as a JSON document."""
    return {
        "schema": SCHEMA,
        "machine": dict(machine),
        "accounts": [dataclasses.asdict(account) for account in accounts],
        "targets": [
            {**dataclasses.asdict(verdict.target), "user": verdict.user, "got": verdict.got, "reached": verdict.reached}
            for account in accounts
            for verdict in judge(account)
        ],
    }


def number(value: float) -> str:
    """Three significant digits, and never an exponent."""
    if abs(value) >= 10 ** (DIGITS - 1):
        return f"{value:.0f}"
    return f"{value:.2f}" if abs(value) < 10 else f"{value:.1f}"


def _machine(machine: Mapping[str, Any]) -> Iterator[str]:
    width = max(len(key) for key in machine)
    for key, value in machine.items():
        words = ", ".join(f"{name} {version}" for name, version in value.items()) if isinstance(value, Mapping) else str(value)
        yield f"{key:<{width}}  {words}"


def _table(table: Table) -> Iterator[str]:
    width = max([len(table.title), *(len(row.title) + 2 for row in table.rows)])
    yield f"{table.title:<{width}}  {'p50 ' + table.unit:>10}  {'p95':>8}  {'runs':>5}  {'ratio':>6}"
    for row in table.rows:
        yield f"  {row.title:<{width - 2}}  {_figures(table, row)}"
    yield from (f"  {note}" for note in table.notes)


def _figures(table: Table, row: Row) -> str:
    if row.figures is None:
        return f"missing: {row.missing[:LONGEST_REASON]}"
    ratio = table.times_reference(row)
    told = "" if ratio is None else number(ratio)
    return f"{number(row.figures.p50):>10}  {number(row.figures.p95):>8}  {row.figures.runs:>5}  {told:>6}"


def _targets(verdicts: Sequence[Verdict]) -> Iterator[str]:
    words = {True: "reached", False: "NOT REACHED", None: "not measured"}
    width = max((len(verdict.target.claim) for verdict in verdicts), default=0)
    for verdict in verdicts:
        bound = "at least" if verdict.target.at_least else "at most"
        got = "-" if verdict.got is None else number(verdict.got)
        wanted = f"{bound} {verdict.target.wanted:g}"
        yield f"  {verdict.target.claim:<{width}}  {verdict.user:<8}  {got:>6}  {wanted:<12}  {words[verdict.reached]}"
