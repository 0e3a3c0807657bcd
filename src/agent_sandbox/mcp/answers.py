"""Answers of tools: a short text for the model, and the document of the command line's result.

Both are bounded. What is cut is cut in the middle, and the text says how much is missing. Programs in the sandbox choose what they print,
so their output is escaped as on a terminal: invisible characters are shown.
"""

from __future__ import annotations

from typing import Any

from agent_sandbox._fast.values import dataclass
from agent_sandbox.cli.render.json import document, encoded
from agent_sandbox.cli.results import VerbResult
from agent_sandbox.workspace.escape import visible

LONGEST_ANSWER = 16_000  # characters of a text; about 4,000 tokens
LONGEST_FIELD = 16_000  # characters of one text in a document
MOST_ITEMS = 200  # of one list in a document
_HEAD = 0.6  # part of what is kept that is the beginning


@dataclass(frozen=True)
class ToolAnswer:
    """The answer of a tool. `failed` marks it as an error that the model should react to."""

    text: str
    document: dict[str, Any]
    failed: bool = False


def cut(text: str, most: int = LONGEST_ANSWER) -> str:
    """Return the text, without its middle if it is longer than `most`.

    >>> cut("abcdefghij", 4)
    'ab\\n[6 characters left out]\\nij'
    """
    if len(text) <= most:
        return text
    head = int(most * _HEAD)
    tail = most - head
    return f"{text[:head]}\n[{len(text) - most:,} characters left out]\n{text[-tail:]}"


def plain(text: str) -> str:
    """Return output of a program as lines that are safe to show: invisible characters are escaped."""
    return "\n".join(visible(line) for line in text.replace("\r\n", "\n").split("\n"))


def bounded(value: Any) -> Any:
    """Return a JSON value with long texts cut and long lists shortened. A shortened list ends with the number of missing items."""
    if isinstance(value, str):
        return cut(value, LONGEST_FIELD)
    if isinstance(value, list):
        shown = [bounded(each) for each in value[:MOST_ITEMS]]
        return shown if len(value) <= MOST_ITEMS else [*shown, f"{len(value) - MOST_ITEMS:,} more left out"]
    if isinstance(value, dict):
        items = list(value.items())
        shown_items = {name: bounded(each) for name, each in items[:MOST_ITEMS]}
        return shown_items if len(items) <= MOST_ITEMS else {**shown_items, "…": f"{len(items) - MOST_ITEMS:,} more left out"}
    return value


def answer(text: str, result: VerbResult, *, failed: bool = False) -> ToolAnswer:
    """Return an answer with the document of a result of the command line. The exact bytes of output are left out."""
    form = {name: each for name, each in document(result).items() if not name.endswith("_base64")}
    return ToolAnswer(sendable(cut(text)), bounded(form), failed)


def sendable(text: str) -> str:
    """Return a text that every reader of JSON takes: without lone surrogates, which names of files may hold."""
    return text.encode("utf-8", "replace").decode()


def plain_answer(text: str, kind: str, facts: dict[str, Any], *, failed: bool = False) -> ToolAnswer:
    """Return an answer whose document is no result of the command line."""
    form = {name: encoded(each) for name, each in facts.items()}
    return ToolAnswer(sendable(cut(text)), bounded({"schema": f"agent-sandbox/{kind}/1", **form}), failed)
