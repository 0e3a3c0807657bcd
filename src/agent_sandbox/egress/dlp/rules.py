"""The rules of the search: read from tables in TOML, checked, and compiled into one matcher.

A table is data: `rules.toml` beside this file, then the tables that a user adds. Patterns are in the syntax of RE2, so no text can make a
match take more than linear time. Hyperscan, where it is installed, tells in one pass which rules can match at all.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cache
from hashlib import sha256
from typing import Any

from agent_sandbox.egress.dlp.checks import CHECKS, holds
from agent_sandbox.egress.dlp.prefilter import (
    Prefilter,
    Sought,
    keep_result,
    kept_result,
    parts_of,
    regions,
    reversed_needle,
    rotated_needle,
)
from agent_sandbox.errors import PolicyError

ACTIONS = ("block", "redact", "ask", "alert")
KINDS = ("secret", "personal")
LONGEST = 4096  # bytes that a match may have
REVERSED, ROTATED = "reversed", "rot13"
_ROT13 = bytes.maketrans(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz", b"NOPQRSTUVWXYZABCDEFGHIJKLMnopqrstuvwxyzabcdefghijklm")
_REPEATED = re.compile(r"\{(\d+)(?:,\d*)?\}")
_FEW = 8  # repetitions that the prefilter tells apart: counting further takes it seconds to compile
_FIELDS = {
    "id": str,
    "what": str,
    "kind": str,
    "pattern": str,
    "check": list,
    "action": str,
    "token": bool,
    "needle": str,
    "reach": int,
    "unless": str,
}
_APART = ("card", "email", "phone", "ip-address")  # which Hyperscan is quicker to seek by themselves
_HEADING = re.compile(r"\s*\[\[\s*rule\s*\]\]")
_ANYTHING = "(?s)."


@dataclass(frozen=True)
class SearchRule:
    """One kind of secret or personal data, how it is recognised, and what is done about it."""

    id: str
    what: str
    pattern: str
    kind: str = "secret"
    check: tuple[str, ...] = ()
    action: str = "block"
    token: bool = False  # its form alone tells, so that it is also sought backwards and in ROT13
    needle: str = ""  # what every match holds; short, so that the prefilter is quick
    reach: int = 0  # how far a match extends from the end of its needle, at most; 0: as far as the window
    unless: str = ""  # what no match holds


@dataclass(frozen=True)
class Match:
    """A place in a text that a rule describes."""

    rule: SearchRule
    start: int
    end: int
    way: str = ""  # how the text was turned round before it matched


def default_rules() -> tuple[SearchRule, ...]:
    """Return the rules of the product."""
    return _shipped()


@cache
def _shipped() -> tuple[SearchRule, ...]:
    with open(os.path.join(os.path.dirname(__file__), "rules.toml"), encoding="utf-8") as file:
        text = file.read()
    key = sha256(repr((text, sorted(_FIELDS))).encode()).digest()
    if (kept := kept_result(key)) is not None:  # it was checked before it was kept
        return tuple(SearchRule(**{**each, "check": tuple(each["check"])}) for each in json.loads(kept))
    rules = read_rules(text, "rules.toml")
    keep_result(key, json.dumps([vars(each) for each in rules]).encode())
    return rules


def read_rules(text: str, origin: str, known: Iterable[SearchRule] = ()) -> tuple[SearchRule, ...]:
    """Return the known rules as a table extends them: it adds rules, changes the fields it names, and turns rules off.

    Raises `PolicyError` that names the origin, the line and the rule at fault.
    """
    import tomllib  # only for a table that is not kept

    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise PolicyError(f"{origin} is no table of rules: {error}", hint="compare it with the table of the product") from None
    if not isinstance(listed := table.pop("rule", []), list) or table:
        names = ", ".join(sorted(table)) or "rule"
        raise PolicyError(f"{origin} holds more than rules: {names}", hint="write each rule below a line [[rule]]")
    lines = [number for number, line in enumerate(text.splitlines(), 1) if _HEADING.match(line)]
    rules = {rule.id: rule for rule in known}
    for place, entry in enumerate(listed):
        where = f"{origin}, line {lines[place]}" if place < len(lines) else origin
        if not isinstance(entry, dict):
            raise PolicyError(f"{where}: this is no table", hint="write each rule below a line [[rule]]")
        if entry.pop("off", None) is True:
            if rules.pop(str(entry.get("id")), None) is None:
                raise PolicyError(f"{where}: there is no rule {entry.get('id')!r} to turn off", hint="name a rule by its id")
            continue
        rule = _rule(entry, where, rules)
        rules[rule.id] = rule
    return tuple(rules.values())


def _rule(entry: dict[str, Any], where: str, known: dict[str, SearchRule]) -> SearchRule:
    """Return the rule that an entry describes, or the known one with the fields that the entry changes."""
    where = f"{where} ({entry['id']})" if isinstance(entry.get("id"), str) else where
    for key, value in entry.items():
        if key not in _FIELDS or type(value) is not _FIELDS[key]:
            raise PolicyError(f"{where}: {key} = {value!r} is not understood", hint=f"a rule has {', '.join(_FIELDS)}, off")
    given = {**entry, **({"check": tuple(entry["check"])} if "check" in entry else {})}
    if (earlier := known.get(entry.get("id", ""))) is not None:
        if {"pattern", "check", "unless"} & given.keys():  # the needle was that of the earlier rule
            given = {"needle": "", "reach": 0, **given}
        rule = replace(earlier, **given)
    elif missing := [key for key in ("id", "what", "pattern") if not entry.get(key)]:
        raise PolicyError(f"{where}: it has no {' and no '.join(missing)}", hint="a new rule has id, what and pattern")
    else:
        rule = SearchRule(**given)
    _check(rule, where)
    return rule


def _check(rule: SearchRule, where: str) -> None:
    for value, known, name in (
        (rule.action, ACTIONS, "action"),
        (rule.kind, KINDS, "kind"),
        *((each, CHECKS, "check") for each in rule.check),
    ):
        if value not in known:
            raise PolicyError(f"{where}: there is no {name} {value!r}", hint=f"use one of {', '.join(known)}")
    if _compiled(rule.pattern, where).search(b"") is not None:
        raise PolicyError(f"{where}: its pattern matches nothing at all, so it would match everywhere", hint="make it match a character")
    if rule.reach < 0 or (rule.reach and not rule.needle):
        raise PolicyError(f"{where}: reach = {rule.reach} is not understood", hint="reach is a number of bytes, for a rule with a needle")
    if rule.unless:
        _compiled(rule.unless, where)
    if rule.needle:
        _compiled(rule.needle, where)
        try:
            _ = rule.token and parts_of(rule.needle)
        except ValueError as error:
            raise PolicyError(f"{where}: its needle cannot be turned round: {error}", hint="leave the needle out") from None


def _compiled(pattern: str, where: str) -> Any:
    try:
        import re2  # of the extra `network`
    except ImportError:  # no other engine is certain to take linear time, so there is no second best
        raise PolicyError("the search for secrets needs RE2", hint="install google-re2, which the extra `network` brings") from None
    options = re2.Options()
    options.log_errors = False
    options.encoding = re2.Options.Encoding.LATIN1
    try:
        return re2.compile(pattern.encode(), options)
    except (re2.error, UnicodeError) as error:
        raise PolicyError(
            f"{where}: its pattern cannot be read: {error}", hint="patterns have the syntax of RE2, without look-around"
        ) from None


@dataclass(eq=False)
class RuleMatcher:
    """The rules of one search, compiled. It keeps nothing of the texts it reads, and one thread uses it at a time."""

    rules: tuple[SearchRule, ...]
    _patterns: dict[int, tuple[Any, int, Any]] = field(
        init=False
    )  # that were used, each with the group of the value, and what no match holds
    _filter: Prefilter = field(init=False)
    _tries: list[tuple[int, str]] = field(init=False)  # for each expression of the prefilter: the rule, and how its text is turned round

    _in_force: list[SearchRule | None] = field(init=False)  # for each rule that was compiled: as it is now, or nothing if it is off
    _others: RuleMatcher | None = field(init=False, default=None)  # of rules that were added

    def __post_init__(self) -> None:
        self._in_force = list(self.rules)
        self._patterns = {}
        sought: list[Sought] = []
        self._tries = []
        for number, rule in enumerate(self.rules):
            for way, expression in _expressions(rule):
                located = bool(rule.reach)
                sought.append(Sought(len(sought), expression.encode(), places=located, apart=located and rule.id in _APART))
                self._tries.append((number, way))
        self._filter = Prefilter(sought)

    def with_rules(self, rules: tuple[SearchRule, ...]) -> RuleMatcher:
        """Return the matcher of other rules. What seeks the same is not compiled again, whatever else it says, such as its action."""
        wanted = {rule.id: rule for rule in rules}
        kept = [_as_wanted(rule, wanted) for rule in self.rules]
        taken = {rule.id for rule in kept if rule is not None}
        others = tuple(rule for rule in rules if rule.id not in taken)
        other = copy(self)
        other._in_force = kept
        other._others = RuleMatcher(others) if others else None
        return other

    def matches(self, text: bytes, *, turned: bool = True) -> Iterator[Match]:
        """Yield the places in a text that the rules describe, those of one rule after those of another.

        With `turned`, tokens are also sought in the text read backwards and in ROT13.
        """
        ends = self._filter.ends(text)
        texts: dict[str, bytes] = {"": text}
        for place in range(len(self._tries)) if ends is None else sorted(ends):
            number, way = self._tries[place]
            rule = self._in_force[number]
            if rule is None or (way and not turned):
                continue
            if way not in texts:
                texts[way] = text[::-1] if way == REVERSED else text.translate(_ROT13)
            parts = [(0, len(text))]
            if ends is not None and rule.reach:
                near = [len(text) - end for end in ends[place]] if way == REVERSED else ends[place]
                parts = list(regions(near, rule.reach, len(text)))
            for low, high in parts:
                for start, end in self._exactly(number, texts[way], low, high):
                    yield Match(rule, len(text) - end, len(text) - start, way) if way == REVERSED else Match(rule, start, end, way)
        if self._others is not None:
            yield from self._others.matches(text, turned=turned)

    def compile(self, most: int | None = None) -> None:
        """Compile the patterns now, or so many of them, and not when the prefilter first finds that they can match."""
        for number in range(len(self.rules))[:most]:
            self._pattern(number)

    def _pattern(self, number: int) -> tuple[Any, int, Any]:
        if (known := self._patterns.get(number)) is None:
            rule = self.rules[number]
            pattern = _compiled(rule.pattern, rule.id)
            known = pattern, min(1, pattern.groups), _compiled(rule.unless, rule.id) if rule.unless else None
            self._patterns[number] = known
        return known

    def _exactly(self, number: int, text: bytes, low: int, high: int) -> Iterator[tuple[int, int]]:
        pattern, group, unless = self._pattern(number)
        for found in pattern.finditer(text, low, high):
            start, end = found.span(group)
            if start == end or not holds(self.rules[number].check, text[start:end].decode("latin-1")):
                continue
            if unless is None or unless.search(found.group()) is None:
                yield start, end


def _as_wanted(rule: SearchRule, wanted: dict[str, SearchRule]) -> SearchRule | None:
    """Return the wanted rule of the same name, if it seeks what this one does."""
    other = wanted.get(rule.id)
    return other if other is not None and replace(other, what=rule.what, kind=rule.kind, action=rule.action) == rule else None


def _expressions(rule: SearchRule) -> Iterator[tuple[str, str]]:
    """Yield the expressions by which the prefilter knows a rule, each with the way in which the text is then turned round."""
    yield "", rule.needle or _REPEATED.sub(_fewer, rule.pattern)
    if rule.token:
        yield ROTATED, rotated_needle(rule.needle) if rule.needle else _ANYTHING
        yield REVERSED, reversed_needle(rule.needle) if rule.needle else _ANYTHING


def _fewer(repeated: re.Match[str]) -> str:
    """Return a repetition that matches at least what this one matches, and is quick to compile."""
    return f"{{{min(int(repeated[1]), _FEW)},}}"
