"""What a benchmark run ends in: tables of rows, as values that are printed and written as JSON alike."""

from __future__ import annotations

from dataclasses import dataclass, field

from bench.samples import Summary


@dataclass(frozen=True)
class Row:
    """One subject of one measure. Without figures, `missing` says why there are none."""

    subject: str
    title: str
    figures: Summary | None = None
    missing: str = ""


@dataclass(frozen=True)
class Table:
    """One measure: its rows, all in one unit, and which of them the others are compared with."""

    measure: str
    title: str
    unit: str
    rows: tuple[Row, ...]
    reference: str
    notes: tuple[str, ...] = ()

    def p50(self, subject: str) -> float | None:
        """The middle figure of a subject, or None when it is missing."""
        return next((row.figures.p50 for row in self.rows if row.subject == subject and row.figures), None)

    def p95(self, subject: str) -> float | None:
        """The bad end of a subject's figures, or None when it is missing."""
        return next((row.figures.p95 for row in self.rows if row.subject == subject and row.figures), None)

    def times_reference(self, row: Row) -> float | None:
        """How many times the reference's middle figure this row's is."""
        reference = self.p50(self.reference)
        return row.figures.p50 / reference if row.figures and reference else None


@dataclass(frozen=True)
class Account:
    """Everything measured as one user."""

    user: str  # "root" or "rootless"
    uid: int
    tables: tuple[Table, ...] = ()
    problems: tuple[str, ...] = field(default=())

    def table(self, measure: str) -> Table | None:
        """The table of a measure, if it was taken."""
        return next((table for table in self.tables if table.measure == measure), None)
