"""Names as filesystems, git and people confuse them: one spelling for all that may be taken for the same name.

Some filesystems do not tell upper from lower case, or a letter and its accent from an accented letter. HFS+ ignores characters that nobody
sees, NTFS drops dots and spaces at the end, has streams behind a colon and short names such as GIT~1. A name that only looks like `.git`
here can be `.git` on the next machine that the tree is checked out on.
"""

from __future__ import annotations

import unicodedata

_SHORT = {"git": ".git", "gitmod": ".gitmodules", "gitatt": ".gitattributes", "gitign": ".gitignore"}


def folded(name: str) -> str:
    """The spelling that stands for all names that may be confused with this one."""
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
    """The names of a relative path, each in that spelling. A backslash separates too: it does on Windows."""
    return tuple(folded(name) for part in path.split("/") for name in part.split("\\"))


def _invisible(character: str) -> bool:
    """Format characters, and those that only change how the one before is drawn."""
    return unicodedata.category(character) == "Cf" or "\ufe00" <= character <= "\ufe0f" or "\U000e0100" <= character <= "\U000e01ef"
