"""How much of a text is read at all, so that no text takes long or fills the memory; and how little of it is shown."""

from __future__ import annotations

LARGEST = 512 << 10  # characters
MOST_MARKS = 50_000  # every node of a tree needs some mark or blank of its own; some hundred bytes and microseconds each
_MARKS = "\n \t;,.:()[]{}=+-*/%<>|&^~@!?`'\"\\#"


def too_much(source: str) -> str:
    """Why a text is not read, or nothing."""
    if len(source) > LARGEST:
        return f"it has {len(source)} characters; at most {LARGEST} are read"
    if (marks := sum(map(source.count, _MARKS))) > MOST_MARKS:
        return f"it has {marks} words and marks; at most {MOST_MARKS} are read"
    return ""


def shown(text: str, longest: int = 300) -> str:
    """Words for people that quote the text: short, and nothing in them that a terminal would obey."""
    return "".join(each if each.isprintable() else "?" for each in text[:longest])
