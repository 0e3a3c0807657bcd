"""Validate code: the one function that the rest of the program calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache

from agent_sandbox.errors import PolicyError
from agent_sandbox.policy.action import LANGUAGES, canonical_language
from agent_sandbox.policy.code.model import Findings, Grant, Matcher, Rule, Validation
from agent_sandbox.policy.code.rules import DEFAULT, PYTHON_REFLECTION
from agent_sandbox.values import replace

BY_HAND = "is on the list of patterns that this sandbox was given"


def validate(
    source: str,
    language: str = "python",
    *,
    grants: Iterable[Grant] = (),
    rules: Iterable[Rule | str] | None = None,
    more: Iterable[str] = (),
) -> Validation:
    """What the code reaches for that the grants do not cover. Pure, bounded in time by the length of the text, and never raises for a text.

    `rules` replace the defaults; a bare string is a pattern by its own name, or a default one with all that it catches. `more`
    are patterns beside them that no grant lifts. Raises `PolicyError` for a language or a pattern that there is none of.
    """
    name = canonical_language(language)
    if name not in LANGUAGES:
        raise PolicyError(f"unknown language {language!r}", hint=f"use one of {', '.join(LANGUAGES)}")
    found = Findings()
    wanted = _wanted(name, frozenset(grants), None if rules is None else tuple(rules), tuple(more))
    _reader(name)(source, wanted, found)
    return found.result()


@lru_cache(maxsize=64)  # most of what a look at a short text would cost, and few sandboxes differ in it
def _wanted(language: str, held: frozenset[Grant], rules: tuple[Rule | str, ...] | None, more: tuple[str, ...]) -> Matcher:
    wanted = tuple(rule for rule in rules_of(language, rules) if not rule.granted_by or not rule.granted_by <= held)
    # `more` comes last: of two rules for one name, the later one counts.
    wanted += tuple(replace(rule, granted_by=frozenset()) for rule in rules_of(language, more))
    return Matcher(wanted, PYTHON_REFLECTION if language == "python" else ())


def _reader(language: str) -> Callable[[str, Matcher, Findings], None]:
    """Each is loaded when it is needed."""
    if language == "python":
        from agent_sandbox.policy.code import python

        return python.look
    if language == "javascript":
        from agent_sandbox.policy.code import javascript

        return javascript.look
    if language == "ruby":
        from agent_sandbox.policy.code import ruby

        return ruby.look
    from agent_sandbox.policy.code import bash

    return bash.look


def rules_of(language: str, rules: Iterable[Rule | str] | None) -> tuple[Rule, ...]:
    """The rules that are meant: the defaults of the language, or those that are given."""
    if rules is None:
        return DEFAULT[language]
    defaults = {rule.pattern: rule for rule in DEFAULT[language]}
    return tuple(rule if isinstance(rule, Rule) else defaults.get(rule) or Rule(rule, BY_HAND) for rule in rules)
