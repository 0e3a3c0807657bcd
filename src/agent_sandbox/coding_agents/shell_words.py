"""Words of a shell command: quoting a text as one word, and the command that sends another into the sandbox."""

from __future__ import annotations

import os
import sys

# The letters of words that no shell changes or splits. "~" and "=" are missing: both may change the meaning of a word.
PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_@%+:,./-")
VERB = "shell-prefix"  # it takes a command and a project, and no option that widens what the command may do
_APOSTROPHE = "'\"'\"'"


def quote(text: str) -> str:
    """Quote a text as one word. Between single quotes no letter but the single quote has a meaning.

    A plain word stays as it is, and a single quote is written between double quotes: so Codex, which matches its rules with the words of a
    command, can read all of it. It cannot read a program's name in quotes, nor an escaped quote.

    >>> quote("make"), quote("it's"), quote("")
    ('make', '\\'it\\'"\\'"\\'s\\'', "''")
    """
    if text and PLAIN.issuperset(text):
        return text
    return f"'{text.replace(chr(39), _APOSTROPHE)}'"


def unquote(word: str) -> str | None:
    """Return the text that `quote` turned into this word; None if it never returns such a word."""
    text = word[1:-1].replace(_APOSTROPHE, "'") if word.startswith("'") else word
    return text if quote(text) == word else None


def our_program() -> tuple[str, ...]:
    """Return the words that start this program, by its absolute path: the search path of a coding agent may be another."""
    started = os.path.abspath(sys.argv[0])
    if os.path.basename(started) in ("agent-sandbox", "agentbox"):
        return (started,)
    beside = os.path.join(os.path.dirname(started if started.endswith("/agent-sandbox-shell") else sys.executable), "agent-sandbox")
    return (beside,) if os.path.exists(beside) else (sys.executable, "-m", "agent_sandbox")


def contained(command: str, project: str) -> str:
    """Return the shell command that runs this command in the sandbox of a project."""
    return f"{' '.join(map(quote, our_program()))} {VERB} --project {quote(project)} -- {quote(command)}"
