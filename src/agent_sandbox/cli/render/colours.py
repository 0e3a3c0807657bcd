"""Colours of diffs. They only add escape sequences: without these, the text is the same."""

from __future__ import annotations

import os
import re

from agent_sandbox._fast.values import dataclass, field
from agent_sandbox.workspace.diff.formats import ADDED, FACT, HEADING, HUNK, NOTE, REMOVED, SAME, TITLE, WARNING, Cell, Row
from agent_sandbox.workspace.escape import escapes, visible

_LONGEST_CODE = 2_000  # characters
_STRING = r""""(?:[^"\\]|\\.)*"?|'(?:[^'\\]|\\.)*'?"""
_NUMBER = r"\b\d[\w.]*"
_EXTENSIONS = {
    "python": ("py", "pyi"),
    "javascript": ("js", "mjs", "cjs", "jsx", "ts", "tsx"),
    "ruby": ("rb",),
    "shell": ("sh", "bash", "zsh"),
    "c": ("c", "h", "cc", "cpp", "hpp", "java", "go", "rs", "kt", "swift", "cs"),
    "data": ("json", "yaml", "yml", "toml", "ini", "cfg"),
    "sql": ("sql",),
}
_NAMES = {"makefile": "shell", "dockerfile": "shell", "gemfile": "ruby", ".bashrc": "shell", ".profile": "shell"}
_COMMENTS = {"python": "#.*", "ruby": "#.*", "shell": r"(?:^|(?<=\s))#.*", "data": r"(?:^|(?<=\s))[#;].*", "sql": "--.*"}
_KEYWORDS = {
    "python": """and as assert async await break case class continue def del elif else except False finally for from global if import in is
        lambda match None nonlocal not or pass raise return True try while with yield""",
    "javascript": """async await break case catch class const continue default delete do else export extends false finally for from function
        if import in instanceof interface let new null of return static super switch this throw true try type typeof undefined var void
        while yield""",
    "ruby": """alias and begin break case class def do else elsif end ensure false for if in module next nil not or redo rescue retry
        return self super then true unless until when while yield""",
    "shell": "case do done elif else esac exec exit export fi for function if in local return set source then trap until while",
    "c": """async auto bool break case catch char class const continue default defer do double else enum extern false final float fn for
        func go if impl import int interface let long loop match mut namespace new nil null nullptr package private protected pub public
        return self short signed static struct super switch template this throw trait true try type typedef union unsafe unsigned use
        using var virtual void volatile while""",
    "data": "true false null yes no on off",
    "sql": """select from where and or not insert into values update set delete create drop alter table index join left right inner outer
        on group by order having limit as null primary key references grant revoke""",
}


def _compiled(language: str) -> re.Pattern[str]:
    comment = _COMMENTS.get(language, r"//.*|/\*.*?(?:\*/|$)")
    words = "|".join(_KEYWORDS[language].split())
    expression = rf"(?P<comment>{comment})|(?P<string>{_STRING})|(?P<keyword>\b(?:{words})\b)|(?P<number>{_NUMBER})|\w+"
    return re.compile(expression, re.IGNORECASE if language == "sql" else 0)


_EXPRESSIONS: dict[str, re.Pattern[str]] = {}


def language_of(path: str) -> str:
    """Return the language of a file by its name; empty if it is unknown."""
    name = os.path.basename(path).lower()
    ending = name.rpartition(".")[2]
    return _NAMES.get(name) or next((language for language, endings in _EXTENSIONS.items() if ending in endings and "." in name), "")


def roles(text: str, language: str) -> list[tuple[int, int, str]]:
    """Return the keywords, strings, comments and numbers of a line, each as start, end and kind."""
    if len(text) > _LONGEST_CODE:
        return []
    if language not in _EXPRESSIONS:
        _EXPRESSIONS[language] = _compiled(language)
    matches = _EXPRESSIONS[language].finditer(text)
    return [(match.start(), match.end(), match.lastgroup) for match in matches if match.lastgroup is not None]


_OF_KIND = {TITLE: "1", HEADING: "1", HUNK: "36", NOTE: "2", WARNING: "1;33", FACT: "", SAME: "", ADDED: "32", REMOVED: "31"}
# Red and green say what happens to a line; inside one that changes, words differ in weight only.
_IN_CONTEXT = {"keyword": "35", "string": "33", "comment": "2", "number": "36"}
_IN_CHANGE = {"keyword": "1", "comment": "2"}
_ESCAPE, _DIFFERS = "1;35", "7"
_LONGEST = 10_000  # characters of a line that are looked at one by one


@dataclass(frozen=True)
class Painter:
    """Turns the rows of a diff into lines of text, with or without colours."""

    colours: bool
    _languages: dict[str, str] = field(default_factory=dict)

    def line(self, row: Row) -> str:
        """Return a row as a line of text."""
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
    """Return pieces of (colour, text) as one text. Neighbours of the same colour share one escape sequence."""
    lines: list[str] = []
    code, run = "", ""
    for each, text in pieces:
        if each != code:
            lines.append(_painted(code, run))
            code, run = each, ""
        run += text
    return "".join([*lines, _painted(code, run)])
