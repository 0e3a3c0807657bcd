"""JavaScript is read as tokens: strings are joined, declared names known, and text that cannot be followed says why."""

from __future__ import annotations

import pytest

from agent_sandbox.readers import LARGEST
from agent_sandbox.readers.javascript import JavaScriptSource, read


def of(text: str) -> JavaScriptSource:
    return read(text, unescape=False)


def words(source: JavaScriptSource) -> list[str]:
    return [text for kind, text, _ in source.tokens if kind == "word"]


def test_comments_strings_and_regular_expressions_are_no_words() -> None:
    assert words(of("a // b\n/* c */ 'd' `e ${f} g`; x = /h/i; y / z")) == ["a", "f", "x", "y", "z"]


def test_every_token_has_its_line() -> None:
    assert [(text, line) for kind, text, line in of("a\n`x\ny`\nb").tokens if kind == "word"] == [("a", 1), ("b", 4)]


def test_strings_that_are_added_are_one() -> None:
    assert of("'a' + \"b\" + `c`").string(0) == ("abc", 5)
    assert of("'a' + b").string(0) == (None, 2)
    assert of("`a${b}`").string(0)[0] is None


def test_declared_names_are_known() -> None:
    assert of("const a = 1; let b; var c; function d() {} class E {} f = 2").declared == {"a", "b", "c", "d", "E"}


def test_a_method_with_a_body_is_a_definition_and_a_call_is_none() -> None:
    assert of("x(a, (b)) { }").is_definition(1)
    assert not of("x(a);").is_definition(1) and not of("x").is_definition(1)


def test_escapes_in_names_are_decoded_on_request() -> None:
    assert words(read("\\u0065val", unescape=True)) == words(read("\\u{65}v\\x61l", unescape=True)) == ["eval"]
    assert words(of("\\u0065val")) != ["eval"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("x = 'a", "a string does not end (line 1)"),
        ("`a", "a template does not end, or templates are nested too deep"),
        ("=/\n" * 30, "divisions and regular expressions in it cannot be told apart"),
        ("x" * (LARGEST + 1), f"it has {LARGEST + 1} characters; at most {LARGEST} are read"),
    ],
)
def test_text_that_cannot_be_followed_says_why(text: str, reason: str) -> None:
    assert of(text).unreadable == reason
