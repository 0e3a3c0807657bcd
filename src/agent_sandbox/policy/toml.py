"""TOML that somebody else may have written, read in bounded time.

The standard library's reader copies a dotted key for each of its parts, so one key of a megabyte takes it half an hour, and it converts
whole numbers of any length. What is made for that is no TOML here: ValueError, as for any other text that is none.
"""

from __future__ import annotations

from agent_sandbox.values import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any

_MOST_DOTS = 256  # of one line, where a key has to end; a list of versions on one line has some dozens


def loads(text: str) -> dict[str, Any]:
    """The tables of a text. Raises `ValueError` with a message that quotes no more than one character of it."""
    import tomllib  # slow to load, and most runs read none

    for number, line in enumerate(text.split("\n"), start=1):
        if line.count(".") > _MOST_DOTS:
            raise ValueError(f"more than {_MOST_DOTS} dots on one line (at line {number})")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("too many brackets within one another") from None
