"""Look for patterns in Python that no parser takes: a slip of the pen, or written for another version. Letters are all there is then."""

from __future__ import annotations

import re

from agent_sandbox.policy.code.model import Findings, Rule


def python_words(source: str, rules: tuple[Rule, ...], found: Findings) -> None:
    """For text that no parser takes: every spelling of a pattern counts, wherever it stands."""
    for rule in rules:
        for name in rule.spelt:
            if not name.startswith("!") and (first := re.search(_spelling(name), source)) is not None:
                found.add(rule, source.count("\n", 0, first.start()) + 1)


def _spelling(name: str) -> str:
    """The words of a name with blanks allowed between them: `os . system`, `eval (`."""
    parts = (re.escape(part) for part in name.removesuffix("(").split("."))
    return r"(?<![\w.])" + r"\s*\.\s*".join(parts) + (r"\s*\(" if name.endswith("(") else r"(?!\w)")
