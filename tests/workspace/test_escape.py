"""What cannot be seen is escaped, whatever it is; what can is left alone."""

from __future__ import annotations

import sys
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_sandbox.workspace.escape import escapes, lookalike, named, visible, width
from tests.workspace.view.hidden import ESCAPED


@pytest.mark.parametrize("character", ESCAPED.values(), ids=ESCAPED)
def test_it_is_escaped(character: str) -> None:
    shown = visible(f"a{character}b")
    assert character not in shown and shown.startswith("a\\") and shown.endswith("b")
    assert shown.isascii()


def test_every_character_there_is_stands_for_itself_only_if_it_can_be_seen() -> None:
    everything = "".join("a" + chr(code) for code in range(sys.maxunicode + 1))
    for character, escape in zip(everything, escapes(everything), strict=True):
        assert escape.isprintable() if escape else unicodedata.category(character)[0] not in "CZ" or character == " "


@given(st.text())
def test_what_is_shown_is_printable_and_stays_as_it_is_when_shown_again(text: str) -> None:
    shown = visible(text)
    assert shown.isprintable()
    assert visible(shown) == shown


def test_marks_heaped_on_a_letter_are_escaped_from_the_fourth_on() -> None:
    assert visible("e" + "\u0301" * 3) == "e" + "\u0301" * 3
    assert visible("e" + "\u0301" * 5) == "e" + "\u0301" * 3 + "\\u0301" * 2


def test_a_mark_without_a_letter_is_escaped_so_that_it_is_not_put_on_a_sign_of_ours() -> None:
    assert visible("\u0301x") == "\\u0301x"
    assert visible("\x1b\u0301x") == "\\x1b\\u0301x"


def test_text_of_any_language_is_left_alone() -> None:
    for text in ("naïve", "日本語", "العربية", "עברית", "हिन्दी", "ภาษาไทย", "Tiếng Việt", "한국어", "a  b", "🙂"):
        assert visible(text) == text


def test_a_tab_is_an_arrow() -> None:
    assert visible("\tx") == "→   x"


def test_a_name_with_blanks_is_quoted_so_that_it_cannot_bring_words_of_ours_along() -> None:
    assert named("plain.py") == "plain.py"
    assert named('x and "3" entries below it') == '"x and \\"3\\" entries below it"'


def test_columns_are_counted_as_a_terminal_does() -> None:
    assert [width(character) for character in ("a", "é", "日", "\u0301")] == [1, 1, 2, 0]


@pytest.mark.parametrize(
    "name", ["\u0430pple.txt", "src/p\u03bfrt.py", "ａdmin", "a\u2215b", "\U0001d41a.py", "\u0455\u0441\u043e\u0440\u0435.py"]
)
def test_a_name_that_may_be_taken_for_another_is_remarked_on(name: str) -> None:
    assert lookalike(f"/project/{name}")


@pytest.mark.parametrize("name", ["apple.txt", "яблоко.txt", "αβγ", "naïve.py", "日本.txt", "файл/file.txt"])
def test_a_name_in_one_script_is_not(name: str) -> None:
    assert not lookalike(f"/project/{name}")
