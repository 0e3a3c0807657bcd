"""Colours on a diff: they say something, and they change nothing."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_sandbox.cli.render.colours import Painter, language_of, roles
from agent_sandbox.workspace.diff.formats import side_by_side, unified
from tests.workspace.diff.previews import preview_of

COLOUR = re.compile("\x1b\\[[0-9;]*m")
CODE = st.lists(st.sampled_from(['x = "a" # b', "if True:", "'open", "/* c */", "\x1b[31m", "\u202e", "日本", "\t\\", ""]), max_size=6)


@given(CODE, CODE, st.sampled_from(["f.py", "f.js", "f.sh", "f.c", "f.yaml", "f.sql", "f.rb", "f.txt"]), st.booleans())
def test_without_its_colours_a_line_is_what_it_is_without_colours(old: list[str], new: list[str], name: str, two_columns: bool) -> None:
    preview = preview_of("\n".join(old).encode(), "\n".join(new).encode(), path=f"/{name}")
    for row in side_by_side(preview, 60, words=True) if two_columns else unified(preview, words=True):
        assert COLOUR.sub("", Painter(colours=True).line(row)) == row.plain == Painter(colours=False).line(row)


def test_a_change_is_red_or_green_and_what_differs_in_it_stands_out() -> None:
    lines = [Painter(colours=True).line(row) for row in unified(preview_of(b"x = 1\n", b"x = 2\n", path="/f.py"), words=True)]
    assert lines[-2:] == ["\x1b[31m-x = \x1b[0m\x1b[31;7m1\x1b[0m", "\x1b[32m+x = \x1b[0m\x1b[32;7m2\x1b[0m"]


def test_an_escape_of_ours_is_told_from_the_same_characters_by_its_colour() -> None:
    ours, theirs = [Painter(colours=True).line(row) for row in unified(preview_of(None, b"\x1b\n\\x1b\n"))][-2:]
    assert ours == "\x1b[32m+\x1b[0m\x1b[1;35m\\x1b\x1b[0m" and theirs == "\x1b[32m+\\x1b\x1b[0m"


@pytest.mark.parametrize(
    ("path", "text", "expected"),
    [
        ("a.py", 'return "if" # for', {"return": "keyword", '"if"': "string", "# for": "comment"}),
        ("a.ts", "const n = 12 // x", {"const": "keyword", "12": "number", "// x": "comment"}),
        ("run.sh", "if echo $#; then", {"if": "keyword", "then": "keyword"}),
        ("Dockerfile", "# base", {"# base": "comment"}),
        ("a.sql", "SELECT 'x' -- y", {"SELECT": "keyword", "'x'": "string", "-- y": "comment"}),
        ("a.go", 'return "a\\"b"', {"return": "keyword", '"a\\"b"': "string"}),
    ],
)
def test_words_of_a_language_are_known(path: str, text: str, expected: dict[str, str]) -> None:
    assert {text[start:stop]: role for start, stop, role in roles(text, language_of(path))} == expected


def test_a_file_of_no_known_language_has_none() -> None:
    assert language_of("notes.txt") == "" and language_of("py") == ""
