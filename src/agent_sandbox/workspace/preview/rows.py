"""Rows: what the forms of a diff are made of before they are printed.

A row of a guest's content always begins with a sign (a blank, `-` or `+`), and no row of ours does. So no content, whatever it says, can
be taken for a heading, the start of a hunk or a remark.
"""

from __future__ import annotations

from agent_sandbox.values import dataclass
from agent_sandbox.workspace.visible import visible

TITLE, FACT, HUNK, NOTE, HEADING, WARNING = "title", "fact", "hunk", "note", "heading", "warning"  # ours
SAME, REMOVED, ADDED = "same", "removed", "added"  # the guest's
SIGNS = {SAME: " ", REMOVED: "-", ADDED: "+"}
BETWEEN = " │ "


@dataclass(frozen=True)
class Cell:
    """Some text of one kind. `lead` is ours and stands before it; `marks` are the stretches of `text` that differ from its counterpart."""

    kind: str
    text: str
    lead: str = ""
    marks: tuple[tuple[int, int], ...] = ()
    pad: int = 0  # blanks after it, to the next cell


@dataclass(frozen=True)
class Row:
    """One line of output; `path` is the file whose content it shows."""

    cells: tuple[Cell, ...]
    path: str = ""
    between: str = BETWEEN

    @property
    def plain(self) -> str:
        """As it is printed without colours."""
        return self.between.join(f"{cell.lead}{visible(cell.text)}{' ' * cell.pad}" for cell in self.cells)


def ours(kind: str, text: str) -> Row:
    """A line that we say."""
    return Row((Cell(kind, text),))


def decoded(line: bytes) -> str:
    """A line without its newline, as text; bytes that are not UTF-8 are kept apart."""
    return line.removesuffix(b"\n").decode(errors="surrogateescape")
