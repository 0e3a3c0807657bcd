"""Keywords, strings, comments and numbers in a line of code, for a handful of languages.

Line by line and without looking around: a string or comment over several lines is not known as one. Every expression is linear in the
length of the line, which is bounded.
"""

from __future__ import annotations

import os
import re

_LONGEST = 2_000  # characters
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
    """The language of a file by its name; empty when it is none of these."""
    name = os.path.basename(path).lower()
    ending = name.rpartition(".")[2]
    return _NAMES.get(name) or next((language for language, endings in _EXTENSIONS.items() if ending in endings and "." in name), "")


def roles(text: str, language: str) -> list[tuple[int, int, str]]:
    """Stretches of a line and what they are."""
    if len(text) > _LONGEST:
        return []
    if language not in _EXPRESSIONS:
        _EXPRESSIONS[language] = _compiled(language)
    found = _EXPRESSIONS[language].finditer(text)
    return [(match.start(), match.end(), match.lastgroup) for match in found if match.lastgroup is not None]
