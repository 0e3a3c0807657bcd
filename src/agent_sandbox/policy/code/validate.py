"""Validate code before it runs. `validate` is the entry point for the rest of the program.

The Bash matcher is here too (`look`), and the search by words for text that the Python parser rejects (`python_words`). The other languages
have modules of their own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import lru_cache

from agent_sandbox._fast.values import replace
from agent_sandbox.errors import PolicyError
from agent_sandbox.policy.action import LANGUAGES, canonical_language
from agent_sandbox.policy.code.patterns import DEFAULT, INTRICATE, PYTHON_REFLECTION, Findings, Grant, Matcher, Rule, Validation
from agent_sandbox.readers.shell.analyze import understand
from agent_sandbox.readers.shell.effects import Effect, Kind, Use
from agent_sandbox.readers.shell.parser import parse
from agent_sandbox.readers.shell.syntax import Function, Pipeline, Program, Simple, Text
from agent_sandbox.readers.shell.wrappers import SHELLS

BY_HAND = "is on the list of patterns that this sandbox was given"
_WHOLE_MACHINE = frozenset(
    {"/", "/*", "/.", "~", "~/*", "/bin", "/boot", "/dev", "/etc", "/home", "/lib", "/root", "/sbin", "/usr", "/var"}
)
# Words in the reasons of `readers.shell` why a command is not understood, and the default pattern that each belongs to.
_UNKNOWN = (
    *(("whose name it computes", "$command"), ("runs a command line", "| sh"), ("runs a text", "| sh"), ("runs what it is fed", "| sh")),
    *(("with the commands in it", "eval"), ("has a command in it", "eval")),
    ("gives a variable another name", ""),  # matters to an approver of a command; scripts do it all the time
)


def validate(
    source: str,
    language: str = "python",
    *,
    grants: Iterable[Grant] = (),
    rules: Iterable[Rule | str] | None = None,
    more: Iterable[str] = (),
) -> Validation:
    """Return the issues in the code that the grants do not lift. Pure, and never raises for any text.

    Time is bounded by the length of the text. `rules` replace the defaults; a bare string is a pattern by its own name, or a default
    pattern with all its names. `more` are additional patterns that no grant lifts. Raises `PolicyError` for an unknown language or an
    invalid pattern.
    """
    name = canonical_language(language)
    if name not in LANGUAGES:
        raise PolicyError(f"unknown language {language!r}", hint=f"use one of {', '.join(LANGUAGES)}")
    found = Findings()
    wanted = _wanted(name, frozenset(grants), None if rules is None else tuple(rules), tuple(more))
    _reader(name)(source, wanted, found)
    return found.result()


@lru_cache(maxsize=64)  # otherwise most of the cost for a short text, and few sandboxes differ in it
def _wanted(language: str, held: frozenset[Grant], rules: tuple[Rule | str, ...] | None, more: tuple[str, ...]) -> Matcher:
    wanted = tuple(rule for rule in rules_of(language, rules) if not rule.granted_by or not rule.granted_by <= held)
    # `more` comes last: of two rules for one name, the later wins.
    wanted += tuple(replace(rule, granted_by=frozenset()) for rule in rules_of(language, more))
    return Matcher(wanted, PYTHON_REFLECTION if language == "python" else ())


def _reader(language: str) -> Callable[[str, Matcher, Findings], None]:
    """Return the matcher of a language, loaded when needed."""
    if language == "python":
        from agent_sandbox.policy.code import python

        return python.look
    if language == "javascript":
        from agent_sandbox.policy.code import javascript

        return javascript.look
    if language == "ruby":
        from agent_sandbox.policy.code import ruby

        return ruby.look

    return look


def rules_of(language: str, rules: Iterable[Rule | str] | None) -> tuple[Rule, ...]:
    """Return the default rules of the language, or the given ones."""
    if rules is None:
        return DEFAULT[language]
    defaults = {rule.pattern: rule for rule in DEFAULT[language]}
    return tuple(rule if isinstance(rule, Rule) else defaults.get(rule) or Rule(rule, BY_HAND) for rule in rules)


def look(source: str, wanted: Matcher, found: Findings) -> None:
    """Add a finding for each pattern in the Bash source. Never raises, whatever the text."""
    known = understand(source)
    if known.unreadable:
        found.add(INTRICATE, 1)
        return
    patterns = {_pattern(use, each): use.tool for use in known.uses for each in use.effects}
    for use in known.uses:
        patterns.setdefault(use.tool, use.tool)  # a rule may name the tool itself
    for unknown in known.unknown:
        patterns.setdefault(next((pattern for words, pattern in _UNKNOWN if words in unknown), INTRICATE.pattern), "$")
    if _calls_itself_twice(parse(source)):
        patterns[":(){ :|:& };:"] = ""
    for rule in wanted.rules:
        for name in rule.spelt:
            if name in patterns:
                at = source.find(patterns[name]) if patterns[name] else 0
                found.add(rule, source.count("\n", 0, max(at, 0)) + 1)


def _pattern(use: Use, effect: Effect) -> str:
    """Return the default pattern of an effect; empty if the effect is no issue."""
    kind, what = effect.kind, effect.what
    if use.tool == "eval":
        return "eval"
    if kind is Kind.NETWORK:
        return "network"
    if kind is Kind.RUNS_CODE and use.tool in SHELLS and what == "standard input":
        return "| sh"
    if kind is Kind.DESTROYS and what and ((what.rstrip("/") or "/") in _WHOLE_MACHINE or what.startswith("/dev/")):
        return "rm -rf /"
    return ""


def _calls_itself_twice(program: Program) -> bool:
    waiting, defined = list(program), list[tuple[str, Pipeline]]()
    for pipeline in waiting:
        for command in pipeline.commands:
            if isinstance(command, Function):
                defined += [(command.name, inner) for inner in _pipelines(command.body)]
    return any(sum(_named(command, name) for command in inner.commands) > 1 for name, inner in defined)


def _pipelines(program: Program) -> list[Pipeline]:
    pipelines, waiting = list[Pipeline](), list(program)
    while waiting:
        pipeline = waiting.pop()
        pipelines.append(pipeline)
        for command in pipeline.commands:
            waiting += [inner for body in getattr(command, "bodies", ()) for inner in body]
    return pipelines


def _named(command: object, name: str) -> bool:
    return isinstance(command, Simple) and command.words[:1] == ((Text(name),),)


def python_words(source: str, rules: tuple[Rule, ...], found: Findings) -> None:
    """Match text that the Python parser rejects: every occurrence of a pattern counts, wherever it is."""
    for rule in rules:
        for name in rule.spelt:
            if not name.startswith("!") and (first := re.search(_spelling(name), source)) is not None:
                found.add(rule, source.count("\n", 0, first.start()) + 1)


def _spelling(name: str) -> str:
    """Return a regular expression for a name, with spaces allowed between its parts: `os . system`, `eval (`."""
    parts = (re.escape(part) for part in name.removesuffix("(").split("."))
    return r"(?<![\w.])" + r"\s*\.\s*".join(parts) + (r"\s*\(" if name.endswith("(") else r"(?!\w)")
