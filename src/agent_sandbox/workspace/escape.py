r"""Make guest text safe to show: escape every character that cannot plainly be seen.

Escaped are: control characters and escape sequences, carriage returns and other line ends, direction marks, zero-width and blank
characters, private and unassigned ones, bytes that are not UTF-8, and combining marks stacked on one letter until they cover the lines
above. Text of any language is left as it is. An escape such as \x1b looks the same as those four characters in the text itself: both are
harmless to show, and on a terminal our escapes have a colour of their own.

`lookalike` remarks on confusable names. `folded` and `components` map confusable names to one spelling.
"""

from __future__ import annotations

import unicodedata
from functools import lru_cache
from unicodedata import category, east_asian_width, name

# Printable to Unicode, yet shown as nothing or as a blank.
_BLANK = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u180b\u180c\u180d\u180f\u2800\u3164\uffa0\U00016fe4\U0001d159") | frozenset(
    map(chr, (*range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0)))
)
_STACKED = 3  # marks on one letter; no language writes more
_SCRIPTS = ("LATIN", "CYRILLIC", "GREEK", "ARMENIAN", "CHEROKEE", "COPTIC", "LISU")  # scripts with letters that look alike
_TWINS = ("FULLWIDTH ", "MATHEMATICAL ", "SMALL ", "MODIFIER LETTER ")  # Latin letters and signs in another shape
# Cyrillic and Greek letters that look like Latin ones. A word made only of these may pass for a Latin word.
_LIKE_LATIN = frozenset("асеорхуѕіјһԛԝАВЕКМНОРСТХУЅІЈοανρΑΒΕΖΗΙΚΜΝΟΡΤΥΧ0123456789")
_SIGNS = frozenset("\u01c3\u2010\u2011\u2024\u2044\u2215\u29f8\ua789")  # that look like ! - . / :

_SHORT = {"git": ".git", "gitmod": ".gitmodules", "gitatt": ".gitattributes", "gitign": ".gitignore"}  # short names on Windows: git~1


def visible(text: str) -> str:
    """Escape every character that cannot be seen, so that the result is printable. A tab becomes an arrow and three blanks."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(each or character for character, each in zip(text, escapes(text), strict=True))


def named(path: str) -> str:
    """Return a path that is safe inside a message of ours. A path with blanks or quotation marks is quoted, so it cannot fake our words."""
    shown = visible(path)
    return '"' + shown.replace('"', '\\"') + '"' if " " in shown or '"' in shown else shown


def escapes(text: str) -> list[str]:
    """Return the escape of each character, or "" where the character stands for itself."""
    replacements: list[str] = []
    marks = _STACKED  # at the start: a mark without a letter would be drawn on a character of ours
    for character in text:
        if character.isascii() and character.isprintable():
            replacements.append("")
            marks = 0
            continue
        marks = marks + 1 if category(character).startswith("M") else 0 if character.isprintable() else _STACKED
        shown = character.isprintable() and character not in _BLANK and marks <= _STACKED
        replacements.append("" if shown else _escape(character))
    return replacements


def _escape(character: str) -> str:
    code = ord(character)
    if character == "\t":
        return "→   "
    if 0xDC80 <= code <= 0xDCFF:  # a byte that is not UTF-8
        return f"\\x{code - 0xDC00:02x}"
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def width(character: str) -> int:
    """Return the number of terminal columns of a printable character."""
    if character.isascii():
        return 1
    return 0 if category(character) in ("Mn", "Me") else 2 if east_asian_width(character) in "WF" else 1


def lookalike(path: str) -> str:
    """Return a remark on a name that may be mistaken for another, else "". The remark may be wrong; no decision depends on it."""
    if path.isascii():
        return ""
    word = ""
    for character in path + "/":
        if character.isalnum():
            word += character
            continue
        if remark := _of_word(word):
            return remark
        word = ""
        if character in _SIGNS or name(character, "").startswith(_TWINS):
            return "the name has signs that look like others"
    return ""


def _of_word(word: str) -> str:
    if word.isascii():
        return ""
    names = {name(character, "") for character in word}
    scripts = sorted({script.capitalize() for script in _SCRIPTS for each in names if each.startswith(script + " ")})
    if len(scripts) > 1:
        return f"the name mixes {' and '.join(scripts)} letters, which look alike"
    if any(each.startswith(_TWINS) for each in names) or _LIKE_LATIN.issuperset(word):
        return "the name has letters that look like others"
    return ""


@lru_cache(maxsize=1 << 16)  # a change is judged by its name in several places, and directories hold many
def folded(name: str) -> str:
    """Return one spelling for all names that may be confused with this one."""
    if not name.isascii():
        name = unicodedata.normalize("NFKC", name)
        name = "".join(character for character in name if not _invisible(character))
        name = unicodedata.normalize("NFKC", name.casefold())
    name = name.lower().split(":", 1)[0].rstrip(". ") or name
    if "~" in name:
        start, _, number = name.partition("~")
        if number.isdecimal() and start in _SHORT:
            return _SHORT[start]
    return name


def components(path: str) -> tuple[str, ...]:
    """Split a relative path into names, each folded. A backslash separates too, as on Windows."""
    return tuple(folded(name) for part in path.split("/") for name in part.split("\\"))


def _invisible(character: str) -> bool:
    """Return whether a character is a format character or a variation selector, which cannot be seen by themselves."""
    return unicodedata.category(character) == "Cf" or "\ufe00" <= character <= "\ufe0f" or "\U000e0100" <= character <= "\U000e01ef"
