"""Tables of rules: a table that is wrong says where; a user's own adds, changes and turns off rules; needles lose no match."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib import import_module
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent_sandbox.egress.dlp.own_secrets import OwnSecrets
from agent_sandbox.egress.dlp.prefilter import regions, reversed_needle, rotated_needle
from agent_sandbox.egress.dlp.rules import RuleMatcher, SearchRule, default_rules, read_rules
from agent_sandbox.egress.dlp.scanner import Search
from agent_sandbox.errors import PolicyError
from tests.egress.dlp.samples import KEY, TOKENS, find, rules_found

GOOD = '[[rule]]\nid = "ticket"\nwhat = "a ticket"\npattern = \'\\b(TICK-[0-9]{6})\\b\'\n'
NEEDLED = [rule for rule in default_rules() if rule.needle]


@pytest.mark.parametrize(
    ("table", "told"),
    [
        (GOOD + "x = = 1", r"mine\.toml is no table of rules: .*line 5"),
        (GOOD + "[[rule]]\nid = 'other'\nwhat = 'it'\npattern = '(unclosed'", r"mine\.toml, line 5 \(other\): its pattern cannot be read"),
        (GOOD + "[[rule]]\nid = 'other'\nwhat = 'it'\npattern = '(?=ahead)'", r"line 5 \(other\): its pattern cannot be read"),
        (GOOD + "[[rule]]\nid = 'other'\nwhat = 'it'\npattern = 'a*'", r"line 5 \(other\): its pattern matches nothing at all"),
        (GOOD + "[[rule]]\nid = 'other'\nwhat = 'it'", r"line 5 \(other\): it has no pattern"),
        (GOOD + "[[rule]]\nwhat = 'it'\npattern = 'abc'", r"line 5: it has no id"),
        (GOOD + "action = 'shout'", r"line 1 \(ticket\): there is no action 'shout'"),
        (GOOD + "kind = 'thing'", r"line 1 \(ticket\): there is no kind 'thing'"),
        (GOOD + "check = ['moon']", r"line 1 \(ticket\): there is no check 'moon'"),
        (GOOD + "colour = 'red'", r"line 1 \(ticket\): colour = 'red' is not understood"),
        (GOOD + "token = 1", r"line 1 \(ticket\): token = 1 is not understood"),
        (GOOD + "reach = 9", r"line 1 \(ticket\): reach = 9 is not understood"),
        (GOOD + "token = true\nneedle = 'T(?:I|J)CK'", r"line 1 \(ticket\): its needle cannot be turned round"),
        (GOOD + "[[rule]]\nid = 'nobody'\noff = true", r"line 5: there is no rule 'nobody' to turn off"),
        ("rules = 1", r"mine\.toml holds more than rules: rules"),
        ("rule = [1]", r"mine\.toml: this is no table"),
    ],
)
def test_a_table_that_is_wrong_says_where_and_why(table: str, told: str) -> None:
    with pytest.raises(PolicyError, match=told):
        read_rules(table, "mine.toml")
    assert [rule.id for rule in read_rules(GOOD, "mine.toml")] == ["ticket"]


def _search_with(path: Path, table: str) -> Search:
    return Search.of(read_rules(table, str(path), default_rules()), OwnSecrets(), KEY)


def test_a_users_table_adds_a_rule(tmp_path: Path) -> None:
    search = _search_with(tmp_path / "mine.toml", GOOD + "token = true")
    for text in (b"see TICK-123456.", b"see 654321-KCIT.", b"see GVPX-123456."):
        assert rules_found(text, search=search) == {"ticket"}
        assert rules_found(text) == set()
    assert "github-token" in rules_found(TOKENS["github-token"]().encode(), search=search)


def test_a_users_table_changes_the_action_of_a_rule_and_keeps_the_rest(tmp_path: Path) -> None:
    search = _search_with(tmp_path / "mine.toml", '[[rule]]\nid = "email"\naction = "block"\n')
    text = b"write to ada@example.org today"
    assert [(each.rule, each.action) for each in find(text, search=search)] == [("email", "block")]
    assert [(each.rule, each.action) for each in find(text)] == [("email", "alert")]


def test_a_users_table_changes_a_pattern_without_its_old_needle(tmp_path: Path) -> None:
    search = _search_with(tmp_path / "mine.toml", '[[rule]]\nid = "npm-token"\npattern = "our-npm-[0-9]{9}"\n')
    assert rules_found(b"our-npm-123456789", search=search) == {"npm-token"}


def test_a_users_table_turns_a_rule_off(tmp_path: Path) -> None:
    search = _search_with(tmp_path / "mine.toml", '[[rule]]\nid = "npm-token"\noff = true\n')
    token = TOKENS["npm-token"]().encode()
    assert rules_found(token, search=search) == set()
    assert rules_found(token) == {"npm-token"}


def test_of_other_rules_only_those_that_seek_something_new_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = RuleMatcher(default_rules())
    made: list[str] = []
    original = RuleMatcher.__post_init__

    def remember(self: RuleMatcher) -> None:
        made.extend(rule.id for rule in self.rules)
        original(self)

    monkeypatch.setattr(RuleMatcher, "__post_init__", remember)
    table = """
        [[rule]]
        id = "ticket"
        what = "a number of our ticket system"
        pattern = '(TICK-[0-9]{6})'

        [[rule]]
        id = "email"
        action = "block"

        [[rule]]
        id = "npm-token"
        off = true

        [[rule]]
        id = "vault-token"
        pattern = 'OURS-[0-9]{6}'
    """
    matcher = compiled.with_rules(read_rules(table, "mine.toml", default_rules()))
    assert sorted(made) == ["ticket", "vault-token"]
    text = b"TICK-123456 and OURS-123456 to ada@example.org " + TOKENS["npm-token"]().encode() + b" " + TOKENS["vault-token"]().encode()
    assert {(match.rule.id, match.rule.action) for match in matcher.matches(text)} == {
        ("ticket", "block"),
        ("vault-token", "block"),
        ("email", "block"),
    }
    assert {match.rule.id for match in compiled.matches(text)} == {"email", "npm-token", "vault-token"}


def _for_re(pattern: str) -> str:
    return pattern.replace(r"\z", r"\Z")


@pytest.mark.parametrize("rule", [rule for rule in NEEDLED if rule.reach], ids=lambda rule: rule.id)
def test_no_match_extends_further_than_the_reach_of_its_rule(rule: SearchRule) -> None:
    longest = import_module("re._parser").parse(_for_re(rule.pattern)).getwidth()[1]
    assert longest <= rule.reach


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
@pytest.mark.parametrize("rule", NEEDLED, ids=lambda rule: rule.id)
def test_every_match_is_found_through_its_needle(rule: SearchRule, data: st.DataObject) -> None:
    """Matches are drawn from the pattern itself: with its needle and without it, the rule finds the same."""
    drawn = data.draw(st.from_regex(re.compile(_for_re(rule.pattern).encode("latin-1", "ignore")), fullmatch=True))
    text = b"before it " + drawn + b" and after"
    with_needle, without = _MATCHERS[rule.id]
    assert _places(with_needle, text) == _places(without, text)


def _places(matcher: RuleMatcher, text: bytes) -> list[tuple[int, int, str]]:
    return sorted((match.start, match.end, match.way) for match in matcher.matches(text))


def _without_needle(rule: SearchRule) -> SearchRule:
    return replace(rule, needle="", reach=0)


class _Matchers(dict[str, tuple[RuleMatcher, RuleMatcher]]):
    def __missing__(self, name: str) -> tuple[RuleMatcher, RuleMatcher]:
        (rule,) = (rule for rule in NEEDLED if rule.id == name)
        self[name] = RuleMatcher((rule,)), RuleMatcher((_without_needle(rule),))
        return self[name]


_MATCHERS = _Matchers()


def test_a_needle_that_a_match_does_not_hold_would_be_noticed() -> None:
    """The control of the test above."""
    wrong = SearchRule("x", "x", "AB[0-9]{4}", needle="ABC", reach=10)
    text = b"see AB1234 here"
    assert len(list(RuleMatcher((_without_needle(wrong),)).matches(text))) == 1
    assert list(RuleMatcher((wrong,)).matches(text)) == []


def test_a_needle_is_turned_round_part_by_part() -> None:
    assert reversed_needle(r"ab[0-9]{4}\.|x-") == r"\.[0-9]{4}ba|-x"
    assert re.fullmatch(rotated_needle(r"ab[a-f0-9]{4}\.|x-"), "nos9n1.") is not None
    assert re.fullmatch(rotated_needle(r"ab[a-f0-9]{4}\.|x-"), "k-") is not None


@given(st.lists(st.integers(0, 200), max_size=8), st.integers(1, 40))
def test_regions_cover_the_reach_of_every_place_once(ends: list[int], reach: int) -> None:
    parts = list(regions(ends, reach, 200))
    covered = {place for low, high in parts for place in range(low, high)}
    assert covered == {place for end in ends for place in range(max(0, end - reach), min(200, end + reach))}
    assert all(before[1] < after[0] for before, after in pairwise(parts))
