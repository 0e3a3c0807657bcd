"""Code validation: what a program reaches for is named before it runs, and ordinary programs are left alone."""

from __future__ import annotations

import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_sandbox.errors import PolicyError
from agent_sandbox.policy.action import LANGUAGES
from agent_sandbox.policy.code.patterns import DEFAULT, CodeGrant, Rule
from agent_sandbox.policy.code.validate import validate
from tests.policy.code.samples import ORDINARY, REACHES

REACHING = [(language, source, patterns) for language, samples in REACHES.items() for source, patterns in samples]
HARMLESS = [(language, source) for language, samples in ORDINARY.items() for source in samples]
PIECES = [
    "eval(",
    "getattr",
    "__builtins__",
    "'",
    '"',
    "`",
    "${",
    "$(",
    "#{",
    "(",
    ")",
    "[",
    "{",
    "}",
    "\\",
    "\n",
    "<<~X",
    "=begin",
    "os",
    ".",
    "+",
]


def patterns(source: str, language: str = "python", **how: object) -> list[str]:
    return [issue.pattern for issue in validate(source, language, **how).issues]  # type: ignore[arg-type]


def test_what_a_program_reaches_for_is_named() -> None:
    assert [(language, source, patterns(source, language)) for language, source, _ in REACHING] == REACHING


def test_an_ordinary_program_meets_no_pattern() -> None:
    assert [(language, source, issues) for language, source in HARMLESS if (issues := validate(source, language).issues)] == []


def test_every_default_rule_is_met_by_some_program() -> None:
    met = {(language, pattern) for language, _, expected in REACHING for pattern in expected}
    missing = {(language, rule.pattern) for language, rules in DEFAULT.items() for rule in rules} - met
    assert missing - {(language, "unreadable") for language in LANGUAGES} == {("python", "requests"), ("ruby", "fiddle")}
    assert patterns("import requests") == ["requests"]
    assert patterns("require 'fiddle'", "ruby") == ["fiddle"]


def test_the_patterns_of_the_document_are_all_there() -> None:
    listed = ["os.system", "subprocess", "__import__", "eval(", "exec(", "compile(", "open(", "socket", "requests", "urllib"]
    assert [rule.pattern for rule in DEFAULT["python"]][: len(listed)] == listed


def test_an_issue_says_which_pattern_why_and_where() -> None:
    (issue,) = validate("x = 1\ny = eval('x')\nz = eval('y')").issues
    assert (issue.pattern, issue.reason, issue.line) == ("eval(", "evaluates text as code", 2)


@pytest.mark.parametrize(
    ("source", "grants", "left"),
    [
        ("open('x')", [], ["open("]),
        ("open('x')", [CodeGrant.FILES], []),
        ("import socket", [CodeGrant.FILES], ["socket"]),
        ("import socket, requests, urllib.request", [CodeGrant.NETWORK], []),
        ("import subprocess", [CodeGrant.PROCESSES], []),
        ("import os\nos.system('x')", [CodeGrant.PROCESSES], ["os.system"]),
        ("import os\nos.system('x')", [CodeGrant.PROCESSES, CodeGrant.SHELL], []),
        ("eval('x')", list(CodeGrant), ["eval("]),
    ],
)
def test_a_grant_lifts_the_patterns_that_it_covers_and_no_others(source: str, grants: list[CodeGrant], left: list[str]) -> None:
    assert patterns(source, grants=grants) == left


def test_the_rules_can_be_replaced_by_patterns_and_by_rules_of_ones_own() -> None:
    assert patterns("eval('1'); import pickle", rules=[]) == []
    assert validate("().__class__.__subclasses__()", rules=["eval("]).valid
    assert patterns("eval('1'); import pickle", rules=["pickle"]) == ["pickle"]
    assert patterns("from pickle import loads as l\nl(b'')", rules=["pickle.loads"]) == ["pickle.loads"]
    assert patterns("print('x')", rules=["print("]) == ["print("]
    assert patterns("import os\nos.popen('x')", rules=["os.system"]) == ["os.system"], "a default pattern keeps all that it catches"
    own = Rule("deletes", "deletes files", ("os.remove", "os.unlink", "shutil.rmtree"))
    assert validate("import shutil\nshutil.rmtree('x')", rules=[own]).issues[0].reason == "deletes files"
    assert patterns("git push", "bash", rules=["git"]) == ["git"]
    assert patterns("require('os')", "javascript", rules=["os"]) == ["os"]


def test_an_unknown_language_and_an_empty_pattern_are_refused_by_name() -> None:
    with pytest.raises(PolicyError, match="'cobol'"):
        validate("x", "cobol")
    with pytest.raises(PolicyError, match="not a pattern"):
        validate("x", rules=[""])


@pytest.mark.parametrize(
    ("language", "source"),
    [
        ("python", "x = 1\n" * 60_000),
        ("python", "a" * (1 << 20)),
        ("javascript", "'"),
        ("javascript", "a;" * 60_000),
        ("ruby", "a;" * 60_000),
        ("bash", "if true"),
        ("python", "".join(f"a{i} = a{i + 1} if n else a{i + 1}\n" for i in range(40)) + "x = [" + "a0.popen," * 3000 + "]"),
        ("javascript", "x =/\n" * 30),
        ("bash", "$(" * 500),
    ],
)
def test_what_is_too_much_or_cannot_be_followed_is_held_and_not_passed(language: str, source: str) -> None:
    assert patterns(source, language) == ["unreadable"]


@pytest.mark.parametrize(
    "source",
    [
        "(" * 5000,
        "x = " + "-" * 5000 + "1",
        "getattr(__builtins__, " + " + ".join(["'a'"] * 900) + ")",
        "x = 'a' * 10 ** 9\ngetattr(__builtins__, x * 10 ** 9)",
        "x = '%1000000000d' % 1\n__builtins__[x]",
        "x = '{:1000000000}'.format(1)\n__builtins__[x]",
        "x = 1 << 10 ** 9\n__builtins__[chr(x)]",
        "".join(f"a{i} = a{i + 1} + a{i + 1}\n" for i in range(60)) + "a60 = 'x'\n__builtins__[a0]",
        "a = b\nb = a\na.c.d.e\n__builtins__[a + b]",
        "x = ['a'] * 1000\ny = ''.join(x * 1000)\n__builtins__[y]",
        "import zlib\n__builtins__[zlib.decompress(b'" + "\\x00" * 100 + "')]",
        "\0",
        "\ud800",
        "# coding: utf-7\n+AG8-s",
    ],
)
def test_hostile_constants_and_nesting_are_bounded(source: str) -> None:
    validate(source)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(LANGUAGES),
    st.lists(st.one_of(st.sampled_from(PIECES), st.text(string.printable, max_size=8)), max_size=40).map("".join),
)
def test_no_text_makes_it_raise_and_the_same_text_has_the_same_answer(language: str, source: str) -> None:
    assert validate(source, language) == validate(source, language)
