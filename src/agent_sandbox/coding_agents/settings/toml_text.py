"""Change single keys and tables of a TOML text, line by line, and leave every other line as it is.

It knows the usual forms only: `key = value` on a line of its own, and tables with a header. The caller compares what the new text means
with what it should mean, so a form that it does not know is refused and never damaged.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from typing import Any

_HEADER = re.compile(r"^\s*\[")


def read(text: str) -> dict[str, Any]:
    """Return what a text means. Raises `ValueError`."""
    return tomllib.loads(text)


def with_key(text: str, key: str, value: str) -> str:
    """Return the text with this value of a key outside of all tables."""
    lines = text.splitlines(keepends=True)
    first = next((number for number, line in enumerate(lines) if _HEADER.match(line)), len(lines))
    for number in range(first):
        if re.match(rf"^\s*{re.escape(key)}\s*=", lines[number]):
            lines[number] = f"{key} = {_value(value)}\n"
            return "".join(lines)
    while first and not lines[first - 1].strip():  # before the blank lines above the first table
        first -= 1
    if first and not lines[first - 1].endswith("\n"):
        lines[first - 1] += "\n"
    lines.insert(first, f"{key} = {_value(value)}\n")
    return "".join(lines)


def without_key(text: str, key: str) -> str:
    """Return the text without a key outside of all tables."""
    lines = text.splitlines(keepends=True)
    first = next((number for number, line in enumerate(lines) if _HEADER.match(line)), len(lines))
    return "".join(line for number, line in enumerate(lines) if number >= first or not re.match(rf"^\s*{re.escape(key)}\s*=", line))


def with_table(text: str, path: tuple[str, ...], table: Mapping[str, Any]) -> str:
    """Return the text with a table at its end."""
    ended = text if not text or text.endswith("\n") else f"{text}\n"
    lines = "".join(f"{key} = {_value(value)}\n" for key, value in table.items())
    return f"{ended}{ended and chr(10)}[{'.'.join(path)}]\n{lines}"


def without_table(text: str, path: tuple[str, ...]) -> str:
    """Return the text without a table: from its header to the next one, with the blank line above it."""
    lines = text.splitlines(keepends=True)
    start = next((n for n, line in enumerate(lines) if line.split("#")[0].strip() == f"[{'.'.join(path)}]"), None)
    if start is None:
        return text
    end = next((n for n in range(start + 1, len(lines)) if _HEADER.match(lines[n])), len(lines))
    if start and not lines[start - 1].strip():
        start -= 1
    return "".join((*lines[:start], *lines[end:]))


def _value(value: Any) -> str:
    """Write a text or a list of texts. Strings of JSON are basic strings of TOML."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
