"""Colours for rows of a diff. They never change the text: without them, the same characters remain."""

from __future__ import annotations

from agent_sandbox.surfaces.highlight import language_of, roles
from agent_sandbox.values import dataclass, field
from agent_sandbox.workspace.diff.rows import ADDED, FACT, HEADING, HUNK, NOTE, REMOVED, SAME, TITLE, WARNING, Cell, Row
from agent_sandbox.workspace.escape import escapes, visible

_OF_KIND = {TITLE: "1", HEADING: "1", HUNK: "36", NOTE: "2", WARNING: "1;33", FACT: "", SAME: "", ADDED: "32", REMOVED: "31"}
# Red and green say what happens to a line; inside one that changes, words differ in weight only.
_IN_CONTEXT = {"keyword": "35", "string": "33", "comment": "2", "number": "36"}
_IN_CHANGE = {"keyword": "1", "comment": "2"}
_ESCAPE, _DIFFERS = "1;35", "7"
_LONGEST = 10_000  # characters of a line that are looked at one by one


@dataclass(frozen=True)
class Painter:
    """Turns rows into lines for a terminal, or into plain ones."""

    colours: bool
    _languages: dict[str, str] = field(default_factory=dict)

    def line(self, row: Row) -> str:
        """One row."""
        if not self.colours:
            return row.plain
        language = self._language(row.path) if row.path else ""
        return row.between.join(self._cell(cell, language) + " " * cell.pad for cell in row.cells)

    def _language(self, path: str) -> str:
        if path not in self._languages:
            self._languages.clear()  # rows come file by file
            self._languages[path] = language_of(path)
        return self._languages[path]

    def _cell(self, cell: Cell, language: str) -> str:
        base = _OF_KIND[cell.kind]
        if len(cell.text) > _LONGEST:
            return _painted(base, cell.lead + visible(cell.text))
        words = roles(cell.text, language) if language else []
        if not words and not cell.marks and cell.text.isascii() and cell.text.isprintable():
            return _painted(base, cell.lead + cell.text)
        codes = [base] * len(cell.text)
        weights = _IN_CONTEXT if cell.kind == SAME else _IN_CHANGE
        for start, stop, role in words:
            codes[start:stop] = [_joined(base, weights.get(role, ""))] * (stop - start)
        for start, stop in cell.marks:
            codes[start:stop] = [_joined(code, _DIFFERS) for code in codes[start:stop]]
        shown = escapes(cell.text)
        pieces = [(base, cell.lead)] if cell.lead else []
        pieces += [(_ESCAPE if each else code, each or text) for text, each, code in zip(cell.text, shown, codes, strict=True)]
        return _runs(pieces)


def _joined(*codes: str) -> str:
    return ";".join(filter(None, codes))


def _painted(code: str, text: str) -> str:
    return f"\x1b[{code}m{text}\x1b[0m" if code and text else text


def _runs(pieces: list[tuple[str, str]]) -> str:
    """Neighbours of one colour together."""
    lines: list[str] = []
    code, run = "", ""
    for each, text in pieces:
        if each != code:
            lines.append(_painted(code, run))
            code, run = each, ""
        run += text
    return "".join([*lines, _painted(code, run)])
