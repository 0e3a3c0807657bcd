"""Answers are bounded, and say what is missing."""

from __future__ import annotations

from agent_sandbox.mcp.answers import LONGEST_ANSWER, LONGEST_FIELD, MOST_ITEMS, bounded, cut, plain, plain_answer


def test_a_long_text_is_cut_in_the_middle_and_says_how_much() -> None:
    text = f"begin{'x' * 50_000}end"
    shown = cut(text)
    assert shown.startswith("begin") and shown.endswith("end") and len(shown) < LONGEST_ANSWER + 100
    assert f"[{len(text) - LONGEST_ANSWER:,} characters left out]" in shown
    assert cut("short") == "short"


def test_documents_are_bounded_at_every_depth() -> None:
    form = bounded({"a": ["x" * 100_000] * 1000, "b": {str(n): n for n in range(1000)}})
    assert len(form["a"]) == MOST_ITEMS + 1 and form["a"][-1] == "800 more left out"
    assert all(len(each) < LONGEST_FIELD + 100 for each in form["a"])
    assert len(form["b"]) == MOST_ITEMS + 1 and form["b"]["…"] == "800 more left out"


def test_output_of_a_program_shows_invisible_characters() -> None:
    assert plain("a\x1b[2Jb\r\nc\u202e") == "a\\x1b[2Jb\nc\\u202e"


def test_a_path_that_is_no_utf8_becomes_valid_json() -> None:
    found = plain_answer("x\udcff", "file", {"path": "a\udcff"})
    assert (found.document["path"], found.text) == ("a�", "x?")
