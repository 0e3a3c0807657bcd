"""What was found out about a machine: one row for each thing, for people and as a document."""

from __future__ import annotations

from typing import Literal

from agent_sandbox._fast.values import dataclass
from agent_sandbox.cli.render.colours import Style
from agent_sandbox.cli.render.messages import shown

Status = Literal["ok", "weaker", "missing"]


@dataclass(frozen=True)
class Row:
    """One capability. `gives` is what it is for, `found` what the try showed, `remedy` what to do unless it is ok."""

    name: str
    status: Status
    gives: str
    found: str
    remedy: str = ""
    required: bool = True

    @property
    def fatal(self) -> bool:
        """Whether nothing can run without it."""
        return self.required and self.status == "missing"


def report(rows: list[Row], host: str, works: str = "Sandboxes work on this machine.") -> None:
    """Print the rows for people."""
    style = Style.of_stdout()
    width = max(len(row.name) for row in rows)
    print(shown(host))
    for row in rows:
        optional = "" if row.required or row.status != "missing" else " (optional)"
        print(f"{style.status(row.status, 8)}{row.name:<{width}}  {row.gives}: {shown(row.found)}{optional}")
        if row.remedy and row.status != "ok":
            print(f"{'':8}{'':{width}}  -> {shown(row.remedy)}")
    missing = [row.name for row in rows if row.fatal]
    verdict = f"Nothing can run here: {', '.join(missing)}." if missing else works
    print(style.heading(verdict))


def document(rows: list[Row], host: str) -> None:
    """Print the rows as a document."""
    from agent_sandbox.cli.render.json import print_document

    print_document("doctor", {"host": host, "usable": not any(row.fatal for row in rows), "rows": [vars(row) for row in rows]})
