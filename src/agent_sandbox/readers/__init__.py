"""WHAT DOES IT ASK FOR?  Read programs and command lines as text. Pure: the text is never run or imported.

The early code check, the router and the program rules share these readers, so that all of them see through the same disguises.

A reader refuses text beyond the limits below, so that no text takes long or exhausts the memory.
"""

from __future__ import annotations

LARGEST = 512 << 10  # characters
MOST_MARKS = 50_000  # each syntax node needs at least one mark or blank, and costs some hundred bytes and microseconds
_MARKS = "\n \t;,.:()[]{}=+-*/%<>|&^~@!?`'\"\\#"


def too_much(source: str) -> str:
    """Return the reason why a text is too large to read, or an empty string."""
    if len(source) > LARGEST:
        return f"it has {len(source)} characters; at most {LARGEST} are read"
    if (marks := sum(map(source.count, _MARKS))) > MOST_MARKS:
        return f"it has {marks} words and marks; at most {MOST_MARKS} are read"
    return ""


def shown(text: str, longest: int = 300) -> str:
    """Return a text for a message: at most `longest` characters, with `?` in place of each control character."""
    return "".join(each if each.isprintable() else "?" for each in text[:longest])
